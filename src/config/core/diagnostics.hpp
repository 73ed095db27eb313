// Diagnostics of a recipe: the problem, its location, its reason and a correction. Text conventions follow
// rustc: the message says what is wrong (lower case, no full stop, names in backquotes), only the help says
// how to fix it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace capstan::config {

// The text of a recipe: a file, an embedded one, or the command line (`<cli>`, one override on each line).
struct Source {
  enum class Kind : unsigned char { file, embedded, cli };
  Kind kind = Kind::file;
  // Name in messages: "my/recipe.yaml", "recipes/quickstart.yaml" or "<cli>".
  std::string name;
  // The text without byte order mark, with \n as line end.
  std::string text;
  // Absolute directory to which paths in the text are relative.
  std::string directory;
  // Returns a line, counted from 1. Empty if there is no such line.
  std::string_view line(int number) const;
};

// A stretch of one line. Columns and lengths count characters (code points), from 1; line 0: not known.
struct SourceLocation {
  // Index into the sources of the resolution.
  int source = -1;
  int line = 0;
  int column = 0;
  int length = 1;
  bool known() const { return source >= 0 && line > 0; }
};

enum class Level : unsigned char { error, warning, note };
std::string_view level_name(Level level);

struct Diagnostic {
  struct Label {
    SourceLocation location;
    std::string text;
  };
  struct Suggestion {
    SourceLocation location;
    std::string replacement;
    bool machine_applicable = false;
  };
  Level level = Level::error;
  // Code such as "C0102".
  std::string code;
  // Name of a warning or rule, such as "unused_override".
  std::string name;
  std::string message;
  SourceLocation location;
  // Text printed under the caret.
  std::string label;
  // Path of the field that the diagnostic is about, if there is one.
  std::string path;
  std::vector<Label> also;
  std::vector<std::string> notes;
  std::vector<std::string> helps;
  std::vector<Suggestion> suggestions;

  Diagnostic& help(std::string text) {
    if (!text.empty()) helps.push_back(std::move(text));
    return *this;
  }
  Diagnostic& note(std::string text) {
    notes.push_back(std::move(text));
    return *this;
  }
  Diagnostic& related(SourceLocation where, std::string text) {
    also.push_back({where, std::move(text)});
    return *this;
  }
  Diagnostic& replace(SourceLocation where, std::string replacement) {
    suggestions.push_back({where, std::move(replacement), true});
    return *this;
  }
};

// Shortens a text to at most 80 bytes on one line, for messages.
std::string shortened(std::string_view text);

// "file:line:col"; for the command line "<cli>:n" and, with `column`, "<cli>:n:col".
std::string location_text(const SourceLocation& location, const std::vector<Source>& sources,
                          bool column = true);

// compact: one line "file:line:col: level[code]: message" for each diagnostic.
enum class DiagnosticFormat : unsigned char { human, compact, json };
struct RenderOptions {
  DiagnosticFormat format = DiagnosticFormat::human;
  bool color = false;
};
std::string render(const Diagnostic& diagnostic, const std::vector<Source>& sources,
                   const RenderOptions& options = {});
// Formats all diagnostics. The human format ends with a line of counts. The JSON format is one array of
// objects with LSP ranges (zero-based, UTF-16) and suggestions.
std::string render(const std::vector<Diagnostic>& diagnostics, const std::vector<Source>& sources,
                   const RenderOptions& options = {});

size_t count(const std::vector<Diagnostic>& diagnostics, Level level);
// Sorts errors before warnings before notes, each by location.
void sort_diagnostics(std::vector<Diagnostic>& diagnostics);

}  // namespace capstan::config
