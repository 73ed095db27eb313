// Changing the text of a recipe at the places that the parser reports. Everything else stays as it was written: comments,
// order, quotes, byte order mark and line ends.
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

// As resolve_into(), with the text of the recipe file instead of what the file holds; its relative names are relative to the
// file all the same.
Resolved resolve_text_into(const Schema& schema, const Library& library, void* root, const Request& request,
                           const std::string& text);

struct TextEdit {
  size_t begin = 0, end = 0;  // bytes
  std::string replacement;
};
// The byte at which a line and column (in characters) of a file's text begins; text.size() when it has no such place.
size_t offset_of(std::string_view text, int line, int column);
// An edit that overlaps an earlier one of the list is left out.
std::string apply_edits(std::string_view text, std::vector<TextEdit> edits);

// One `key: value` at the top of a recipe, or inside a section.
struct Entry {
  std::string section;  // empty at the top
  std::string key;      // as written, a `+` behind it included
  Place place;          // of the key
  const Node* value = nullptr;
  const Node* parent = nullptr;  // the mapping that holds it
  size_t index = 0;              // in the parent
  Place section_place;           // of the section's key
};
// Those of a parsed recipe, in the order written; a section whose value is a mapping stands before its own entries.
std::vector<Entry> entries_of(const Node& recipe);

// What takes an entry out of the text: its lines, or its part of a mapping in braces; with the last one of a section goes
// the section. Empty where the layout is too unusual to cut safely.
enum class CommentsOfEntry : unsigned char {
  stay,
  go,  // those behind the value, inside of it, and on the lines directly above it (but not the head of the file)
};
std::vector<TextEdit> removal(std::string_view text, const Entry& entry, CommentsOfEntry comments);
// The value as written, on one line; empty where it takes several.
std::string_view value_text(std::string_view text, const Entry& entry);

struct Mended {
  std::string text;
  struct Step {
    int line = 0, column = 0;  // of the text as it was at that moment
    std::string what;          // "`num_layer` is now `num_layers`"
  };
  std::vector<Step> steps;
  Resolved resolved;  // the text as it is now
};
using ResolveText = std::function<Resolved(const std::string& text)>;

// Applies what diagnostics offer as certain: renamed and misspelt keys, values in the wrong spelling, keys that belong to
// another section. Each one only when its diagnostic then is gone and no key is given twice.
Mended fix_recipe(const Schema& schema, std::string text, const ResolveText& resolve);

// Drops every entry without which the recipe resolves to the same, leaf by leaf: what `extends`, presets or defaults already
// say. A value that would then be derived stays, for a derived one moves with what it depends on. The text must resolve
// without errors; file: what its relative names are relative to.
Mended trim_recipe(const std::string& file, std::string text);

}  // namespace capstan::config
