// The recipes and presets that come with the binary, and those that a user puts beside them.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace capstan::config {

struct LibraryFile {
  // "recipes/quickstart.yaml", "configs/model/llama3-8b.yaml".
  std::string_view path;
  std::string_view text;
};
// The files embedded at build time, sorted by path.
std::span<const LibraryFile> library_files();

// Looks up names in the directories of CAPSTAN_RECIPE_PATH (DIR/NAME.yaml, DIR/configs/SECTION/NAME.yaml),
// then among the embedded files. Tests pass their own directories and files.
class Library {
 public:
  // A recipe or preset.
  struct Document {
    // Name in messages: the path of a file, or "recipes/x.yaml" for an embedded one.
    std::string name;
    // Path of the file to read. Empty: the file is embedded, or the name is MODEL-METHOD.
    std::string file;
    // Text of the recipe, if `file` is empty.
    std::string text;
  };
  struct Entry {
    // `file` is empty for an embedded recipe or preset.
    std::string name, description, file;
    // Models of a method: the presets of `model` for which it, or a recipe that it extends, has an entry in
    // `models`.
    std::vector<std::string> models;
    // The method of MODEL-METHOD, the short name of a method with a model.
    std::string method;
  };
  Library() = default;
  Library(std::span<const LibraryFile> embedded, std::vector<std::string> directories)
      : embedded_(embedded), directories_(std::move(directories)) {}
  // Embedded files and CAPSTAN_RECIPE_PATH.
  static Library standard();
  const std::vector<std::string>& directories() const { return directories_; }

  // Finds a recipe: a file, or MODEL-METHOD.
  std::optional<Document> recipe(std::string_view name) const;
  std::optional<Document> preset(std::string_view section, std::string_view name) const;
  // Sorted by name, without those that begin with `_`, which others extend. description: the first comment.
  // recipes: every name that runs as it is, MODEL-METHOD included. methods: those to which a model is given.
  std::vector<Entry> methods() const;
  std::vector<Entry> recipes() const { return recipes(methods()); }
  // For callers that have the methods: to list them reads every recipe.
  std::vector<Entry> recipes(const std::vector<Entry>& methods) const;
  std::vector<Entry> presets(std::string_view section) const;

 private:
  std::optional<Document> recipe_file(std::string_view name) const;
  using ModelsByRecipe = std::map<std::string, std::set<std::string>>;
  // Returns the models for which a recipe, or one that it extends, has an entry. `known` caches the result of
  // recipes read before.
  const std::set<std::string>& models_of(const std::string& recipe, ModelsByRecipe& known) const;
  std::optional<Document> find(const std::string& in_directory, const std::string& embedded) const;
  std::vector<Entry> list(const std::string& subdirectory, const std::string& embedded_prefix) const;
  std::span<const LibraryFile> embedded_;
  std::vector<std::string> directories_;
};

// Throws ErrorCode::not_found, "not found: recipe = NAME", with similar names, or with `otherwise` if there
// are none.
[[noreturn]] void fail_no_recipe(const Library& library, std::string_view name, std::string otherwise = {});

}  // namespace capstan::config
