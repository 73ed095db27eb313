#include "config/core/library.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "config/core/composer.hpp"
#include "config/core/external.hpp"
#include "config/core/tree.hpp"

namespace capstan::config {

namespace fs = std::filesystem;

// `_name` is extended by others and is no run by itself: found, and not listed.
static bool is_base(std::string_view name) {
  return name.starts_with('_');
}

// A name is one path component, so that it cannot leave the directories it is looked up in.
static bool is_name(std::string_view name) {
  return !name.empty() && name.size() <= 200 && name[0] != '.' && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

Library Library::standard() {
  std::vector<std::string> directories;
  if (const char* paths = std::getenv("CAPSTAN_RECIPE_PATH"))
    for (const auto path : split(paths, ':'))
      if (!path.empty()) directories.emplace_back(path);
  return {library_files(), std::move(directories)};
}

std::optional<Library::Document> Library::find(const std::string& in_directory,
                                               const std::string& embedded) const {
  for (const auto& directory : directories_) {
    const fs::path path = fs::path(directory) / in_directory;
    std::error_code ignored;
    if (fs::is_regular_file(path, ignored)) return Document{path.string(), path.string(), {}};
  }
  for (const auto& file : embedded_)
    if (file.path == embedded) return Document{std::string(file.path), {}, std::string(file.text)};
  return std::nullopt;
}

std::optional<Library::Document> Library::recipe_file(std::string_view name) const {
  if (!is_name(name)) return std::nullopt;
  return find(std::string(name) + ".yaml", "recipes/" + std::string(name) + ".yaml");
}

std::optional<Library::Document> Library::recipe(std::string_view name) const {
  if (auto found = recipe_file(name)) return found;
  for (size_t dash = name.rfind('-'); dash != std::string_view::npos && dash > 0;
       dash = name.rfind('-', dash - 1)) {
    const std::string model(name.substr(0, dash)), method(name.substr(dash + 1));
    ModelsByRecipe known;
    if (models_of(method, known).contains(model))
      return Document{std::string(name),
                      {},
                      "extends: " + method + "\nname: " + std::string(name) + "\nmodel: " + model + "\n"};
  }
  return std::nullopt;
}

namespace {

// What the text of a recipe names itself: models that it has entries for, and recipes that it extends.
struct NamesInRecipe {
  std::vector<std::string> models, extends;
};

NamesInRecipe names_in(const std::string& recipe, const std::string& text) {
  NamesInRecipe names;
  std::vector<Diagnostic> ignored;
  const auto tree = parse_yaml(0, {{Source::Kind::file, recipe, normalized(text), {}}}, ignored);
  if (!tree) return names;
  if (const Node* entries = tree->find("models")) names.models = entries->keys;
  if (const Node* extends = tree->find("extends")) {
    if (extends->kind == Node::Kind::scalar) names.extends.push_back(extends->text);
    for (const Node& parent : extends->items) names.extends.push_back(parent.text);
  }
  return names;
}

// Each thread parses a shipped text once: every resolution of MODEL-METHOD asks for those of its methods.
const NamesInRecipe& names_in_shipped(const std::string& recipe, const std::string& text) {
  thread_local std::map<std::string, NamesInRecipe> by_text;
  const auto found = by_text.find(text);
  return found != by_text.end() ? found->second : by_text.emplace(text, names_in(recipe, text)).first->second;
}

}  // namespace

const std::set<std::string>& Library::models_of(const std::string& recipe, ModelsByRecipe& known) const {
  const auto [entry, is_new] = known.try_emplace(recipe);
  std::set<std::string>& models = entry->second;
  // A recipe that extends itself stops here too.
  if (!is_new) return models;
  const auto found = recipe_file(recipe);
  if (!found) return models;
  NamesInRecipe names;
  if (found->file.empty()) {
    names = names_in_shipped(found->name, found->text);
  } else {
    try {
      names = names_in(found->name, read_file(found->file, TreeLimits::kFileBytes));
    } catch (const Error&) {
      // Reported when the recipe is resolved.
      return models;
    }
  }
  models.insert(names.models.begin(), names.models.end());
  for (const std::string& parent : names.extends) {
    const auto& inherited = models_of(parent, known);
    models.insert(inherited.begin(), inherited.end());
  }
  return models;
}

std::optional<Library::Document> Library::preset(std::string_view section, std::string_view name) const {
  if (!is_name(name)) return std::nullopt;
  const std::string path = "configs/" + std::string(section) + "/" + std::string(name) + ".yaml";
  return find(path, path);
}

std::vector<Library::Entry> Library::list(const std::string& subdirectory,
                                          const std::string& embedded_prefix) const {
  std::vector<Entry> entries;
  const auto known = [&](std::string_view name) {
    return std::any_of(entries.begin(), entries.end(),
                       [&](const Entry& entry) { return entry.name == name; });
  };
  for (const auto& directory : directories_) {
    std::error_code problem;
    for (fs::directory_iterator it(fs::path(directory) / subdirectory, problem), end; !problem && it != end;
         it.increment(problem)) {
      std::error_code ignored;
      if (it->path().extension() != ".yaml" || !it->is_regular_file(ignored)) continue;
      const std::string name = it->path().stem().string();
      if (!is_name(name) || is_base(name) || known(name)) continue;
      Entry entry{name, {}, it->path().string(), {}, {}};
      try {
        entry.description = leading_comment(read_file(it->path(), TreeLimits::kFileBytes));
      } catch (const Error&) {
        entry.description = "(cannot be read)";
      }
      entries.push_back(std::move(entry));
    }
  }
  for (const auto& file : embedded_) {
    if (!file.path.starts_with(embedded_prefix) || !file.path.ends_with(".yaml")) continue;
    std::string_view name = file.path.substr(embedded_prefix.size());
    name.remove_suffix(5);
    if (is_name(name) && !is_base(name) && !known(name))
      entries.push_back({std::string(name), leading_comment(file.text), {}, {}, {}});
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.name < b.name; });
  return entries;
}

std::vector<Library::Entry> Library::methods() const {
  std::vector<Entry> entries = list("", "recipes/");
  ModelsByRecipe known;
  for (Entry& entry : entries) {
    const std::set<std::string>& models = models_of(entry.name, known);
    entry.models.assign(models.begin(), models.end());
  }
  std::erase_if(entries, [](const Entry& entry) { return entry.models.empty(); });
  return entries;
}

std::vector<Library::Entry> Library::recipes(const std::vector<Entry>& methods) const {
  std::vector<Entry> entries = list("", "recipes/");
  for (const Entry& method : methods) {
    std::erase_if(entries, [&](const Entry& entry) { return entry.name == method.name; });
    for (const std::string& model : method.models)
      if (const std::string name = model + "-" + method.name; !recipe_file(name))
        entries.push_back({name, method.name + " model=" + model, {}, {}, method.name});
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.name < b.name; });
  return entries;
}

std::vector<Library::Entry> Library::presets(std::string_view section) const {
  const std::string path = "configs/" + std::string(section);
  return list(path, path + "/");
}

void fail_no_recipe(const Library& library, std::string_view name, std::string otherwise) {
  std::vector<std::string> names;
  for (const auto methods = library.methods(); const auto& entries : {library.recipes(methods), methods})
    for (const auto& entry : entries) names.push_back(entry.name);
  const std::string near = near_paths_help(near_matches(name, names));
  if (const std::string model = model_as_recipe_help(std::string(name)); !model.empty())
    fail(ErrorCode::not_found, not_found_text("recipe", shortened(name)), model);
  if (otherwise.empty()) otherwise = "{recipe_list} lists the names";
  fail(ErrorCode::not_found, not_found_text("recipe", shortened(name)), near.empty() ? otherwise : near);
}

}  // namespace capstan::config
