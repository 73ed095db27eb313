// Changing the text of a recipe at the places that the parser reports. Everything else stays as it was
// written: comments, order, quotes, byte order mark and line ends.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "config/core/diagnostics.hpp"
#include "config/core/resolve.hpp"
#include "config/core/tree.hpp"

namespace capstan::config {

struct TextEdit {
  size_t begin = 0, end = 0;  // bytes
  std::string replacement;
};
// The byte at which a line and column (in characters) of a file's text begins; text.size() when it has no
// such place.
size_t offset_of(std::string_view text, int line, int column);
// An edit that overlaps an earlier one of the list is left out.
std::string apply_edits(std::string_view text, std::vector<TextEdit> edits);

// One `key: value` at the top of a recipe, or inside a section.
struct Entry {
  // Empty at the top.
  std::string section;
  // As written, a `+` behind it included.
  std::string key;
  // Of the key.
  SourceLocation location;
  const Node* value = nullptr;
  // The mapping that holds it.
  const Node* parent = nullptr;
  // In the parent.
  size_t index = 0;
  // Of the section's key.
  SourceLocation section_location;
};
// Those of a parsed recipe, in the order written; a section whose value is a mapping stands before its own
// entries.
std::vector<Entry> entries_of(const Node& recipe);

// What takes an entry out of the text: its lines, or its part of a mapping in braces; with the last one of a
// section goes the section. Empty where the layout is too unusual to remove it safely.
enum class CommentsOfEntry : unsigned char {
  stay,
  // Remove those behind the value, inside of it, and on the lines directly above it, except the head of the
  // file.
  go,
};
std::vector<TextEdit> removal(std::string_view text, const Entry& entry, CommentsOfEntry comments);
// The value as written, on one line; empty where it takes several.
std::string_view value_text(std::string_view text, const Entry& entry);

struct FixResult {
  std::string text;
  struct Step {
    // Of the text as it was at that moment.
    int line = 0, column = 0;
    // "`num_layer` is now `num_layers`"
    std::string what;
  };
  std::vector<Step> steps;
  // The text as it is now.
  Resolved resolved;
};
using ResolveText = std::function<Resolved(const std::string& text)>;

// Applies what diagnostics offer as certain: renamed and misspelled keys, values in the wrong spelling, keys
// that belong to another section. Each one only when its diagnostic then is gone and no key is given twice.
FixResult fix_recipe(const Schema& schema, std::string text, const ResolveText& resolve);

// Drops every entry without which the recipe resolves to the same, field by field: what `extends`, presets or
// defaults already say. A value that would then be derived stays, for a derived one moves with what it
// depends on. The text must resolve without errors; file: what its relative names are relative to.
FixResult trim_recipe(const std::string& file, std::string text);

}  // namespace capstan::config
