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
  std::string_view path;  // "recipes/quickstart.yaml", "configs/model/llama3-8b.yaml"
  std::string_view text;
};
std::span<const LibraryFile> library_files();  // embedded at build time, sorted by path

// Where names are looked up: the directories of CAPSTAN_RECIPE_PATH (DIR/NAME.yaml,
// DIR/configs/SECTION/NAME.yaml), then what is embedded. Tests give their own.
class Library {
 public:
  struct Found {
    // As printed: the path of a file, "recipes/x.yaml" for an embedded one.
    std::string name;
    // Path to read; empty: embedded, or MODEL-METHOD.
    std::string file;
    std::string text;  // without a file
  };
  struct Entry {
    // file: empty for an embedded one.
    std::string name, description, file;
    // Of a method: the presets of `model` for which it, or a recipe that it extends, has an entry in
    // `models`.
    std::vector<std::string> models;
    // Of MODEL-METHOD, the short name of a method with a model.
    std::string method;
  };
  Library() = default;
  Library(std::span<const LibraryFile> embedded, std::vector<std::string> directories)
      : embedded_(embedded), directories_(std::move(directories)) {}
  // Embedded files and CAPSTAN_RECIPE_PATH.
  static Library standard();
  const std::vector<std::string>& directories() const { return directories_; }

  // A file, or MODEL-METHOD.
  std::optional<Found> recipe(std::string_view name) const;
  std::optional<Found> preset(std::string_view section, std::string_view name) const;
  // Sorted by name, without those that begin with `_`, which others extend. description: the first comment.
  // recipes: every name that runs as it is, MODEL-METHOD included. methods: those to which a model is given.
  std::vector<Entry> recipes() const;
  std::vector<Entry> methods() const;
  std::vector<Entry> presets(std::string_view section) const;

 private:
  std::optional<Found> recipe_file(std::string_view name) const;
  using ModelsByRecipe = std::map<std::string, std::set<std::string>>;
  // The models that a recipe, or one that it extends, has an entry for. `known`: of recipes read before.
  const std::set<std::string>& models_of(const std::string& recipe, ModelsByRecipe& known) const;
  std::optional<Found> find(const std::string& in_directory, const std::string& embedded) const;
  std::vector<Entry> list(const std::string& subdirectory, const std::string& embedded_prefix) const;
  std::span<const LibraryFile> embedded_;
  std::vector<std::string> directories_;
};

// ErrorCode::not_found, "not found: recipe = NAME", with near names, else `otherwise`.
[[noreturn]] void fail_no_recipe(const Library& library, std::string_view name, std::string otherwise = {});

std::vector<Library::Entry> recipes();  // of Library::standard()

}  // namespace capstan::config
