// The recipe in the making: what is taken from the file, what is assumed, what is left out and why.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "config/core/field.hpp"
#include "config/core/tree.hpp"
#include "importers/import.hpp"

namespace capstan::importers {

// A key of the file, for comments and lists.
struct From {
  std::string key;
  config::SourceLocation location;
};

class Draft {
 public:
  explicit Draft(const std::vector<config::Source>& sources) : sources_(sources) {}

  // A field from a key of theirs; given twice the later one wins. A value that the field does not take is
  // listed, and false returned. `note` follows the key in the comment.
  bool set(std::string_view path, const config::Node& value, const From& from, const std::string& note = {});
  bool set(std::string_view path, const std::string& text, const From& from, const std::string& note = {});
  // The same, unless the field has this value anyway.
  bool set_if_other(std::string_view path, const config::Node& value, const From& from);
  // A field that the file does not name; nothing where it is set.
  void assume(std::string_view path, const std::string& text, const std::string& reason);
  void assume(std::string_view path, const config::Node& value, const std::string& reason);
  // The same value as another field, `${other}`; nothing where it is set.
  void refer(std::string_view path, std::string_view other, const std::string& reason);

  void choose(std::string_view section, const std::string& preset, const From& from,
              const std::string& note = {});
  void assume_preset(std::string_view section, const std::string& preset, const std::string& reason);
  void extend(const std::string& recipe, const std::string& reason);

  void leave(const From& from, const config::Node& value, Why why, std::string reason,
             std::vector<std::string> near = {});
  void leave(const From& from, std::string value, Why why, std::string reason,
             std::vector<std::string> near = {});
  // A branch or loop of a script that is not decided.
  void leave_branch(const From& from, std::string reason);
  // Takes a field out again.
  void withdraw(const std::string& path, Why why, const std::string& reason);

  bool has(std::string_view path) const { return entries_.contains(std::string(path)); }
  bool has_preset(std::string_view section) const { return presets_.contains(std::string(section)); }
  std::string preset(std::string_view section) const;  // empty: none
  // Some list has the key.
  bool mentions(std::string_view key) const;
  bool extends() const { return !base_.empty(); }
  // The value as YAML, empty where it is not set.
  std::string text(std::string_view path) const;
  std::vector<std::string> paths_of(std::string_view section) const;

  // `title` becomes the first comment line.
  std::string recipe(const std::string& title, const std::string& name, const std::string& description) const;
  std::vector<Taken> taken() const;
  std::vector<Assumed> assumed() const;
  std::vector<Left> left() const;  // by place

 private:
  struct Entry {
    // Key empty: assumed.
    From from;
    // Or the reason of the assumption.
    std::string note;
    std::string value;
  };
  // see(path, entry) in the recipe's order; "section (preset)" for presets.
  template <class See>
  void each_entry(See see) const;
  std::string comment(const Entry& entry) const;
  const config::FieldInfo& field(std::string_view path) const;

  const std::vector<config::Source>& sources_;
  // By canonical path; by section.
  std::map<std::string, Entry, std::less<>> entries_, presets_;
  std::string base_, base_reason_;
  std::vector<Left> left_;
};

std::string lower_case(std::string_view text);  // of ASCII
// With `-` for all but letters, digits, `-`, `_` and `.`: a part of a file's name.
std::string with_plain_characters(std::string_view text);

// One line, no more than `most` characters.
std::string shown(const config::Node& node, size_t most = 60);

}  // namespace capstan::importers
