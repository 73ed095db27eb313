// Changing the text of a recipe at the locations that the parser reports. Everything else stays as it was
// written: comments, order, quotes, byte order mark and line ends.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "config/core/diagnostics.hpp"
#include "config/core/tree.hpp"
#include "config/resolve/resolve.hpp"

namespace capstan::config {

struct TextEdit {
  // Range of bytes that is replaced.
  size_t begin = 0, end = 0;
  std::string replacement;
};
// The byte at which a line and column (in characters) of a file's text begins; text.size() when it has no
// such location.
size_t offset_of(std::string_view text, int line, int column);
// Applies the edits to the text. An edit that overlaps an earlier one of the list is left out.
std::string apply_edits(std::string_view text, std::vector<TextEdit> edits);

// One `key: value` at the top of a recipe, or inside a section.
struct Entry {
  // Name of the section. Empty at the top of the recipe.
  std::string section;
  // The key as written, including a `+` after it.
  std::string key;
  // Location of the key.
  SourceLocation location;
  const Node* value = nullptr;
  // The mapping that holds it.
  const Node* parent = nullptr;
  // Index of the entry in `parent`.
  size_t index = 0;
  // Location of the section's key.
  SourceLocation section_location;
};
// Returns the entries of a parsed recipe in the order written. A section whose value is a mapping stands
// before its own entries.
std::vector<Entry> entries_of(const Node& recipe);

// Returns the edits that remove an entry from the text: its lines, or its share of a mapping in braces.
// Removing the last entry of a section removes the section. Returns no edits if the layout is too unusual to
// remove the entry safely.
enum class CommentsOfEntry : unsigned char {
  stay,
  // Remove those after the value, inside of it, and on the lines directly above it, except the head of the
  // file.
  go,
};
std::vector<TextEdit> removal(std::string_view text, const Entry& entry, CommentsOfEntry comments);
// Returns the value as written, if it is on one line; otherwise an empty text.
std::string_view value_text(std::string_view text, const Entry& entry);

struct FixResult {
  std::string text;
  struct Step {
    // Position in the text as it was before this step.
    int line = 0, column = 0;
    // Description of the step, such as "`num_layer` is now `num_layers`".
    std::string what;
  };
  std::vector<Step> steps;
  // Resolution of the fixed text.
  Resolved resolved;
};
using ResolveText = std::function<Resolved(const std::string& text)>;

// Applies the fixes that diagnostics offer as certain: renamed and misspelled keys, values in the wrong
// spelling, and keys that belong to another section. A fix is kept only if its diagnostic is then gone and no
// key is given twice.
FixResult fix_recipe(const Schema& schema, std::string text, const ResolveText& resolve);

// Removes every entry whose removal does not change the resolved recipe, because `extends`, presets or
// defaults give the same value. An entry whose value would then be derived stays, because a derived value
// changes with its inputs. The text must resolve without errors. file: the path to which its relative names
// are relative.
FixResult trim_recipe(const std::string& file, std::string text);

}  // namespace capstan::config
