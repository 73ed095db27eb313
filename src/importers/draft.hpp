// A recipe that is being built by an import: the values taken from the file, the assumed values, and the
// omitted keys with reasons.
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
struct SourceKey {
  std::string key;
  config::SourceLocation location;
};

class Draft {
 public:
  explicit Draft(const std::vector<config::Source>& sources) : sources_(sources) {}

  // Sets a field from a key of the source file; a later call replaces an earlier one. A value that the field
  // does not take is listed as omitted, and the result is false. `note` follows the key in the comment.
  bool set(std::string_view path, const config::Node& value, const SourceKey& from,
           const std::string& note = {});
  bool set(std::string_view path, const std::string& text, const SourceKey& from,
           const std::string& note = {});
  // Sets the field unless this value is its default.
  bool set_if_other(std::string_view path, const config::Node& value, const SourceKey& from);
  // Sets a field that the file does not name, unless it is set already.
  void assume(std::string_view path, const std::string& text, const std::string& reason);
  void assume(std::string_view path, const config::Node& value, const std::string& reason);
  // Sets the fields to torch.optim.SGD, which adds the weight decay to the gradient and has no momentum by
  // default.
  void set_torch_sgd(const SourceKey& from);
  // Lists a value that a key gives as assumed too, because it holds only as far as `reason` says.
  void list_as_assumed(std::string_view path, const std::string& reason);
  // Sets the field to the value of another one, `${other}`, unless it is set already.
  void refer(std::string_view path, std::string_view other, const std::string& reason);

  void choose(std::string_view section, const std::string& preset, const SourceKey& from,
              const std::string& note = {});
  void assume_preset(std::string_view section, const std::string& preset, const std::string& reason);
  // recipe: the text of `extends`. named: the recipe as it is named from the current directory; empty: alike.
  void extend(const std::string& recipe, const std::string& reason, const std::string& named = {});

  void omit(const SourceKey& from, const config::Node& value, OmissionReason why, std::string reason,
            std::vector<std::string> near = {});
  void omit(const SourceKey& from, std::string value, OmissionReason why, std::string reason,
            std::vector<std::string> near = {});
  // Lists a branch or loop of a script whose condition is not known.
  void omit_branch(const SourceKey& from, std::string reason);
  // Removes a field, and lists its key as omitted.
  void withdraw(const std::string& path, OmissionReason why, const std::string& reason);

  bool has(std::string_view path) const { return entries_.contains(std::string(path)); }
  bool has_preset(std::string_view section) const { return presets_.contains(std::string(section)); }
  // The chosen preset of a section; empty: none.
  std::string preset(std::string_view section) const;
  // Whether a field, a preset or an omission comes from the key.
  bool mentions(std::string_view key) const;
  bool extends() const { return !base_.empty(); }
  // The recipe that it extends, as it is named from the current directory; empty: none.
  const std::string& base() const { return base_; }
  // The value as YAML; empty if it is not set.
  std::string text(std::string_view path) const;
  std::vector<std::string> paths_of(std::string_view section) const;

  // `title` becomes the first comment line.
  std::string recipe(const std::string& title, const std::string& name, const std::string& description) const;
  std::vector<ImportedKey> taken() const;
  std::vector<AssumedValue> assumed() const;
  // The omitted keys, ordered by location.
  std::vector<OmittedKey> omitted() const;

 private:
  struct Entry {
    // An empty key marks an assumption.
    SourceKey from;
    // The note on the key, or the reason of the assumption.
    std::string note;
    std::string value;
    // Why a value that a key gives is listed as assumed too; empty: it is not.
    std::string assumption = {};
  };
  // Calls see(path, entry) in the recipe's order; the path of a preset is "section (preset)".
  template <class See>
  void each_entry(See see) const;
  std::string comment(const Entry& entry) const;
  const config::FieldInfo& field(std::string_view path) const;

  const std::vector<config::Source>& sources_;
  // Fields by canonical path, presets by section.
  std::map<std::string, Entry, std::less<>> entries_, presets_;
  std::string base_, extends_, base_reason_;
  std::vector<OmittedKey> omitted_;
};

// Replaces all characters but letters, digits, `-`, `_` and `.` with `-`, for use in a file name.
std::string with_plain_characters(std::string_view text);

// The value in one line of at most `most` characters.
std::string shown(const config::Node& node, size_t most = 60);

}  // namespace capstan::importers
