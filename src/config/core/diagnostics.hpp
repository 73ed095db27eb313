// What is wrong with a recipe, where, why, and what would be right. Text conventions follow rustc: the
// message says what is wrong (lower case, no full stop, names in backquotes), only the help says how to mend
// it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace capstan::config {

// The text of a recipe: a file, an embedded one, or the command line (`<cli>`, one override on
// each line).
struct Source {
  enum class Kind : unsigned char { file, embedded, cli };
  Kind kind = Kind::file;
  // As printed: "my/recipe.yaml", "recipes/quickstart.yaml", "<cli>"
  std::string name;
  // Without byte order mark, line ends as \n.
  std::string text;
  // Absolute; what paths written here are relative to.
  std::string directory;
  // From 1; empty when out of range.
  std::string_view line(int number) const;
};

// A stretch of one line. Columns and lengths count characters (code points), from 1; line 0: no place.
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
  std::string code;  // "C0102"
  // Lints and rules: "unused_override"
  std::string name;
  std::string message;
  SourceLocation location;
  // Under the caret.
  std::string label;
  // The field it is about, where there is one.
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

// "file:line:col"; for the command line "<cli>:n" and, with `column`, "<cli>:n:col".
std::string location_text(const SourceLocation& location, const std::vector<Source>& sources,
                          bool column = true);

enum class DiagnosticFormat : unsigned char {
  human,
  compact,
  json
};  // compact: file:line:col: level[code]: message
struct RenderOptions {
  DiagnosticFormat format = DiagnosticFormat::human;
  bool color = false;
};
std::string render(const Diagnostic& diagnostic, const std::vector<Source>& sources,
                   const RenderOptions& options = {});
// All of them. human ends with a count line; json is one array of objects with LSP ranges (zero-based,
// UTF-16) and suggestions.
std::string render(const std::vector<Diagnostic>& diagnostics, const std::vector<Source>& sources,
                   const RenderOptions& options = {});

size_t count(const std::vector<Diagnostic>& diagnostics, Level level);
// Errors before warnings before notes, each by place.
void sort_diagnostics(std::vector<Diagnostic>& diagnostics);

}  // namespace capstan::config
