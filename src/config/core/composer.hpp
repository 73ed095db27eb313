// How compose() works: one object per resolution, its parts in files by what they read.
//
//   compose.cpp            paths and mappings: which field or section is meant, and the list of writes
//   compose_files.cpp      recipes, `extends`, `unset`, included files, and what a file may name
//   compose_overrides.cpp  the command line: set, add, append, reset, `-f`
//   compose_presets.cpp    the presets that sections chose
//   unknown_key.cpp        which existing key an unknown key may have meant
//
// Internal to the module; others include compose.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/core/compose.hpp"

namespace capstan::config {

class Composer {
 public:
  // model: the model whose entries of `models` are read. Empty: it is not known yet.
  Composer(const Schema& schema, const Library& library, const Request& request, const std::string* text,
           std::string model = {});
  Composition run();
  // After run(): the model whose entries of `models` a second pass must read. Empty: none.
  const std::string& model_with_entry() const { return model_with_entry_; }

 private:
  // The directory that `extends` and `@file` inside a file may not leave; empty for embedded files: names
  // only.
  struct Origin {
    std::string root;
    Layer::Precedence precedence = Layer::Precedence::recipe;
    // See Layer.
    bool base = false, given = false;
  };

  struct Target {
    // The section, if the path names one.
    const SectionInfo* section = nullptr;
    // Otherwise the field, and the rest of the path below it.
    const FieldInfo* field = nullptr;
    std::vector<Segment> rest;
    std::string spelling;
    // The first part of absolute aliases: `parallel` of `parallel.tp`
    bool prefix = false;
  };

  // paths and mappings (compose.cpp)
  Diagnostic& error(const char* code, std::string message, SourceLocation location, std::string label = {});
  void unknown(const std::string& section, const std::string& key, SourceLocation location);
  std::optional<Target> find(const ParsedPath& path);
  void write(const ParsedPath& path, const Node& value, Write::Op op, SourceLocation location);
  void add_write(const Target& target, const Node& value, Write::Op op, SourceLocation location);
  void write_members(const std::string& section, const Node& map);
  void write_section(const SectionInfo& section, const Node& value, Write::Op op, SourceLocation location);
  // Removes the `+` of a key such as `key+`, which appends. Returns whether there was one.
  static bool take_plus(std::string& key);
  static bool same(const std::vector<Segment>& a, const std::vector<Segment>& b);
  bool equal(const FieldInfo& field, const Node& a, const Node& b) const;
  bool alias_prefix(const std::string& name) const { return alias_prefixes_.count(name) > 0; }

  // files (compose_files.cpp)
  int add_source(Source::Kind kind, std::string name, std::string text, std::string directory);
  std::optional<Node> parse(int source);
  bool budget(SourceLocation location);
  // Reads a file named inside another one or on the command line; problems become diagnostics at `location`.
  std::optional<int> read_named(const std::string& file, const std::string& shown, SourceLocation location);
  static std::string directory_of(const std::string& file);
  static std::string canonical(const std::string& file);
  // The file that a recipe names, when it stays inside the recipe's directory.
  std::optional<std::string> inside(const std::string& text, int source, const Origin& origin,
                                    SourceLocation location);
  void read_recipe();
  int add_document(const Library::Document& document);
  void read_tree(const Node& tree, int source, const Origin& origin,
                 std::vector<std::pair<std::string, SourceLocation>>& ring);
  void extend(const Node& item, int source, const Origin& origin,
              std::vector<std::pair<std::string, SourceLocation>>& ring);
  bool cycle(const std::string& identity, const Node& item,
             const std::vector<std::pair<std::string, SourceLocation>>& ring);
  bool report_model(const std::string& file, const Node& item);
  // The keys of a file, or of an entry of `models`, as one layer.
  void read_layer(const Node& tree, const Origin& origin);
  void read_models(const Node& models, const Origin& origin);
  void choose_entry();
  void collect(const Node& tree);
  void unset_list(const Node& unset);
  void unset_requested();
  void include(const SectionInfo& section, const std::string& file, SourceLocation location);

  // Reports fields that one file sets twice, under any of their names.
  void find_duplicates();

  // command line, and what is imposed on it (compose_overrides.cpp)
  void read_overrides(const std::vector<Override>& given, const std::string& name,
                      Layer::Precedence precedence);
  void include_override(const ParsedOverride& one);
  void apply(const ParsedOverride& one);

  // On the command line, a later override of the same spelling replaces the earlier one. Two spellings of one
  // field have the same precedence and must agree.
  void replace_earlier();

  // `~path`: a field or section goes back to the value of its preset or parent, an item or key is removed.
  void reset(const ParsedPath& path, const Node* expected);

  // presets (compose_presets.cpp)
  void choose_presets();
  Diagnostic& preset_error(const SectionInfo& section, std::string message, SourceLocation location);
  bool preset_exists(const SectionInfo& section, const Node& value);
  // Report a preset that is something else, and return true.
  bool report_unnamed_model(const SectionInfo& section, const std::string& name, SourceLocation location);
  bool report_recipe(const SectionInfo& section, const Node& tree, const std::string& name,
                     SourceLocation location);
  void read_preset(const SectionInfo& section, const std::string& name, SourceLocation location,
                   std::vector<std::string>& chain);

  const Schema& schema_;
  const Library& library_;
  const Request& request_;
  const std::string* text_;
  const std::string model_;
  // Location of the last `models`, and the keys of all `models`.
  SourceLocation models_location_;
  std::set<std::string> models_;
  std::string model_with_entry_;
  Composition out_;
  std::string current_directory_;
  // `parallel` of `parallel.tp`
  std::set<std::string> alias_prefixes_;
  // Origin of the file being read. Null on the command line.
  const Origin* origin_ = nullptr;
  size_t layer_ = 0;
  size_t files_ = 0;
  int64_t total_nodes_ = 0;
  int unknown_ = 0;
};

}  // namespace capstan::config
