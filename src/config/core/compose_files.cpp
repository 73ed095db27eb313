#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "config/core/composer.hpp"
#include "config/core/external.hpp"

namespace capstan::config {

namespace fs = std::filesystem;

namespace {

// Help for a directory or file whose name is given as a recipe: what it is, and how to use it.
std::string found_help(const std::string& name) {
  std::error_code ignored;
  if (const std::string help = model_as_recipe_help(name); !help.empty()) return help;
  if (!fs::is_directory(name, ignored)) return "to use the file of that name write `./" + name + "`";
  if (fs::exists(fs::path(name) / "recipe.yaml", ignored))
    return "that is the directory of a run: its recipe is " + (fs::path(name) / "recipe.yaml").string();
  return "that is a directory; a recipe is a file in it, or a name";
}

// Files of one resolution, each counted as often as it is named.
constexpr size_t kMaxFiles = 100;
// Values in all of them.
constexpr int64_t kMaxTotalNodes = 50'000;

}  // namespace

int Composer::add_source(Source::Kind kind, std::string name, std::string text, std::string directory) {
  out_.sources.push_back({kind, std::move(name), normalized(std::move(text)), std::move(directory)});
  return static_cast<int>(out_.sources.size()) - 1;
}

std::string Composer::directory_of(const std::string& file) {
  std::error_code ignored;
  return fs::absolute(fs::path(file), ignored).lexically_normal().parent_path().string();
}

std::string Composer::canonical(const std::string& file) {
  std::error_code problem;
  const fs::path path = fs::weakly_canonical(file, problem);
  return problem ? file : path.string();
}

namespace {

void move_to_source(Node& node, int source) {
  for (SourceLocation* location : {&node.location, &node.anchor})
    if (location->known()) location->source = source;
  for (auto& location : node.key_locations)
    if (location.known()) location.source = source;
  for (auto& item : node.items) move_to_source(item, source);
}

// Recipes and presets of the binary are parsed once: a program that resolves many recipes reads the same few
// presets for each, and that is half of a resolution's time. By content, so that two libraries do not meet.
std::optional<Node> parse_embedded(int source, const std::vector<Source>& sources,
                                   std::vector<Diagnostic>& diagnostics) {
  constexpr size_t kMaxKnownTrees = 256;
  thread_local std::unordered_map<std::string, Node> known;
  const std::string& text = sources[static_cast<size_t>(source)].text;
  if (const auto found = known.find(text); found != known.end()) {
    Node tree = found->second;
    move_to_source(tree, source);
    return tree;
  }
  const size_t before = diagnostics.size();
  auto tree = parse_yaml(source, sources, diagnostics);
  if (tree && diagnostics.size() == before && known.size() < kMaxKnownTrees) known.emplace(text, *tree);
  return tree;
}

}  // namespace

std::optional<Node> Composer::parse(int source) {
  const bool embedded = out_.sources[static_cast<size_t>(source)].kind == Source::Kind::embedded;
  auto tree = embedded ? parse_embedded(source, out_.sources, out_.diagnostics)
                       : parse_yaml(source, out_.sources, out_.diagnostics);
  if (!tree) out_.malformed = true;
  if (tree && (total_nodes_ += tree->size()) > kMaxTotalNodes) {
    error("C0009", "more than " + std::to_string(kMaxTotalNodes) + " values in all files together",
          tree->location);
    out_.malformed = true;
    return std::nullopt;
  }
  return tree;
}

bool Composer::budget(SourceLocation location) {
  if (++files_ <= kMaxFiles) return true;
  if (files_ == kMaxFiles + 1)
    error("C0502", "more than " + std::to_string(kMaxFiles) + " files in one recipe", location);
  return false;
}

std::optional<int> Composer::read_named(const std::string& file, const std::string& shown,
                                        SourceLocation location) {
  try {
    return add_source(Source::Kind::file, shown, read_file(file, TreeLimits::kFileBytes), directory_of(file));
  } catch (const Error& problem) {
    error("C0001", problem.message(), location).help(problem.help());
    out_.malformed = true;
    return std::nullopt;
  }
}

void Composer::read_recipe() {
  const std::string& name = request_.recipe;
  if (name.empty())
    fail(ErrorCode::usage, "no recipe is given", "{recipe_list} lists the recipes included with Capstan");
  if (!text_ && is_external_model("model", name))
    fail(ErrorCode::not_found, not_found_text("recipe", shortened(name)), model_as_recipe_help(name));
  int source = -1;
  Origin origin;
  origin.given = true;
  std::string identity;
  if (name == "-") {
    std::string text = text_ ? *text_ : std::string(TreeLimits::kFileBytes + 1, '\0');
    if (!text_) {
      std::cin.read(text.data(), static_cast<std::streamsize>(text.size()));
      text.resize(static_cast<size_t>(std::cin.gcount()));
    }
    if (static_cast<int64_t>(text.size()) > TreeLimits::kFileBytes)
      fail(ErrorCode::format, "the recipe on standard input is larger than 4 MiB");
    source = add_source(Source::Kind::file, "<stdin>", std::move(text), current_directory_);
    origin.root = current_directory_;
    out_.recipe_name = "stdin";
  } else if (is_path(name)) {
    if (name.find("://") != std::string::npos)
      fail(ErrorCode::usage, "`" + shortened(name) + "` is an address, and recipes are read from files",
           "download the file and give its path");
    std::error_code ignored;
    if (!text_ && (fs::is_directory(name, ignored) || !model_scheme(name).empty()))
      fail(ErrorCode::not_found, not_found_text("recipe", shortened(name)), found_help(name));
    // A path that cannot be looked at fails where it is read.
    if (!text_ && !fs::exists(name, ignored) && !ignored)
      fail_not_found("recipe", name,
                     "a recipe is a YAML file, or a name without `/` ({recipe_list} lists the names)");
    source = add_source(Source::Kind::file, name, text_ ? *text_ : read_file(name, TreeLimits::kFileBytes),
                        directory_of(name));
    origin.root = out_.sources.back().directory;
    out_.recipe_name = fs::path(name).stem().string();
    identity = canonical(name);
  } else {
    const auto found = library_.recipe(name);
    if (!found) {
      std::error_code ignored;
      if (fs::exists(name, ignored))
        fail(ErrorCode::not_found, not_found_text("recipe", shortened(name)), found_help(name));
      if (const std::string file = name + ".yaml"; fs::is_regular_file(file, ignored))
        fail(ErrorCode::not_found, not_found_text("recipe", shortened(name)), near_paths_help({file}));
      fail_no_recipe(
          library_, name,
          "{recipe_list} lists them; a file is given by a path that contains `/` or ends in .yaml");
    }
    source = add_document(*found);
    if (!found->file.empty()) origin.root = out_.sources.back().directory;
    // A shorter recipe with the same values extends the name that was given.
    origin.base = true;
    out_.extends.push_back(name);
    out_.recipe_name = name;
    identity = found->file.empty() ? found->name : canonical(found->file);
  }
  budget({});
  std::vector<std::pair<std::string, SourceLocation>> ring{{identity, {}}};
  if (auto tree = parse(source)) read_tree(*tree, source, origin, ring);
}

int Composer::add_document(const Library::Document& document) {
  if (document.file.empty())
    return add_source(Source::Kind::embedded, document.name, document.text, current_directory_);
  return add_source(Source::Kind::file, document.name, read_file(document.file, TreeLimits::kFileBytes),
                    directory_of(document.file));
}

std::optional<std::string> Composer::inside(const std::string& text, int source, const Origin& origin,
                                            SourceLocation location) {
  if (text.find('\0') != std::string::npos) {
    error("C0503", "a file name with a zero byte", location);
    return std::nullopt;
  }
  if (origin.root.empty()) {
    error("C0503", "a recipe included with Capstan cannot name the file `" + shortened(text) + "`", location);
    return std::nullopt;
  }
  const fs::path path = fs::path(out_.sources[static_cast<size_t>(source)].directory) / text;
  const fs::path target = canonical(path.string()), root = canonical(origin.root);
  const auto [root_end, ignored] = std::mismatch(root.begin(), root.end(), target.begin(), target.end());
  if (root_end != root.end()) {
    error("C0503", "`" + shortened(text) + "` is outside the directory of the recipe", location,
          "leads to " + target.string())
        .help("files that a recipe names lie in " + root.string() +
              " or below; copy it there, or merge it with the override `@FILE`");
    return std::nullopt;
  }
  return path.lexically_normal().string();
}

void Composer::read_tree(const Node& tree, int source, const Origin& origin,
                         std::vector<std::pair<std::string, SourceLocation>>& ring) {
  if (const Node* extends = tree.find("extends")) {
    if (extends->kind == Node::Kind::scalar)
      extend(*extends, source, origin, ring);
    else if (extends->kind == Node::Kind::list)
      for (const auto& item : extends->items) extend(item, source, origin, ring);
    else
      error("C0501", "`extends` expects the name or path of a recipe, or a list of them", extends->location);
  }
  if (const Node* version = tree.find("schema"); version && version->text != "capstan/1")
    error("C0504", "`" + shortened(version->text) + "` is not a recipe format that this version reads",
          version->location)
        .help("write `schema: capstan/1`");
  read_layer(tree, origin);
  if (const Node* models = tree.find("models")) read_models(*models, origin);
}

void Composer::read_layer(const Node& tree, const Origin& origin) {
  out_.layers.push_back({origin.precedence, {}, origin.base, origin.given});
  layer_ = out_.layers.size() - 1;
  origin_ = &origin;
  if (const Node* unset = tree.find("unset")) unset_list(*unset);
  collect(tree);
  find_duplicates();
  origin_ = nullptr;
}

void Composer::read_models(const Node& models, const Origin& origin) {
  models_location_ = models.location;
  models_.insert(models.keys.begin(), models.keys.end());
  const auto is_entry = [](const Node& entry) {
    return entry.kind == Node::Kind::map && !entry.find("extends") && !entry.find("schema") &&
           !entry.find("models");
  };
  if (models.kind != Node::Kind::map || !std::all_of(models.items.begin(), models.items.end(), is_entry)) {
    error("C0501", "`models` expects a mapping from presets of `model` to the sections and fields for them",
          models.location);
    return;
  }
  const Node* entry = models.find(model_);
  if (!entry) return;
  const size_t layer = out_.layers.size();
  read_layer(*entry, origin);
  out_.layers[layer].of_model = true;
}

// The last choice of `model` that has an entry: weights in a directory that are chosen after it keep it.
void Composer::choose_entry() {
  const SectionInfo* section = schema_.find_section("model");
  if (!section) return;
  const auto& choices = out_.choices[section->index];
  for (const Choice& choice : choices)
    if (models_.contains(choice.preset)) model_with_entry_ = choice.preset;
  if (!model_.empty() && model_with_entry_ != model_)
    error("C0501", "`models` chooses another preset of `model` for `" + model_ + "`", models_location_);
  const bool described = std::any_of(out_.writes.begin(), out_.writes.end(), [&](const Write& write) {
    return write.field->required && write.field->section == section->name && !write.dead;
  });
  if (choices.empty() && !described) {
    const std::vector<std::string> names(models_.begin(), models_.end());
    error("C0507", "`" + out_.recipe_name + "` needs a model, and none is given", {})
        .help("write `model=NAME`; there are settings for " + join(names, ", "))
        .help("another preset of `model` takes the settings that all models share");
  }
  // A method that is given alone is named with its model.
  if (!is_path(request_.recipe) && !choices.empty() && library_.preset("model", choices.back().preset) &&
      out_.layers[choices.front().layer].precedence >= Layer::Precedence::file)
    out_.recipe_name = choices.back().preset + "-" + out_.recipe_name;
}

void Composer::extend(const Node& item, int source, const Origin& origin,
                      std::vector<std::pair<std::string, SourceLocation>>& ring) {
  if (item.kind != Node::Kind::scalar || item.text.empty()) {
    error("C0501", "`extends` expects the name or path of a recipe, or a list of them", item.location);
    return;
  }
  if (!budget(item.location)) return;
  std::string identity;
  std::optional<int> parent;
  Origin next = origin;
  next.given = false;
  if (is_path(item.text)) {
    const auto file = inside(item.text, source, origin, item.location);
    if (!file) return;
    identity = canonical(*file);
    if (cycle(identity, item, ring)) return;
    std::error_code ignored;
    const fs::path shown = fs::path(out_.sources[static_cast<size_t>(source)].name).parent_path() / item.text;
    if (report_model(*file, item)) return;
    parent = read_named(*file, shown.lexically_normal().string(), item.location);
  } else {
    const auto found = library_.recipe(item.text);
    if (!found) {
      std::vector<std::string> names;
      for (const auto methods = library_.methods();
           const auto& entries : {library_.recipes(methods), methods})
        for (const auto& entry : entries) names.push_back(entry.name);
      if (report_model((fs::path(origin.root) / item.text).string(), item)) return;
      auto& problem = error("C0501", not_found_text("recipe", shortened(item.text)), item.location);
      for (const auto& near : near_matches(item.text, names)) problem.help("did you mean `" + near + "`?");
      std::error_code ignored;
      if (!origin.root.empty() && fs::exists(fs::path(origin.root) / (item.text + ".yaml"), ignored))
        problem.help("for the file write `" + item.text + ".yaml`");
      if (problem.helps.empty()) problem.help("`capstan recipe ls` lists the names");
      return;
    }
    identity = found->file.empty() ? found->name : canonical(found->file);
    if (cycle(identity, item, ring)) return;
    next.root = found->file.empty() ? "" : directory_of(found->file);
    if (origin.precedence == Layer::Precedence::recipe && !origin.base) {
      next.base = true;
      if (out_.extends.empty() || out_.extends.back() != item.text) out_.extends.push_back(item.text);
    }
    if (found->file.empty())
      parent = add_document(*found);
    else
      parent = read_named(found->file, found->name, item.location);
  }
  if (!parent) return;
  ring.emplace_back(identity, item.location);
  if (auto tree = parse(*parent)) read_tree(*tree, *parent, next, ring);
  ring.pop_back();
}

// Reports a model of another program in place of a recipe.
bool Composer::report_model(const std::string& file, const Node& item) {
  const bool has_scheme = is_external_model("model", item.text);
  const std::string scheme = has_scheme ? "" : model_scheme(file);
  if (!has_scheme && scheme.empty()) return false;
  error("C0501", not_found_text("recipe", shortened(item.text)), item.location)
      .help((has_scheme ? "this names a model" : model_found_text(scheme)) + ": write `model: " + scheme +
            shortened(item.text) + "` in place of `extends`");
  return true;
}

bool Composer::cycle(const std::string& identity, const Node& item,
                     const std::vector<std::pair<std::string, SourceLocation>>& ring) {
  const auto first =
      std::find_if(ring.begin(), ring.end(), [&](const auto& link) { return link.first == identity; });
  if (first == ring.end()) return false;
  const auto shown = [](const std::string& name) { return fs::path(name).filename().string(); };
  std::string way;
  for (auto link = first; link != ring.end(); ++link) way += shown(link->first) + " → ";
  const bool direct = first + 1 == ring.end();
  auto& problem = error(
      "C0501",
      "`" + shown(identity) + "` extends itself" + (direct ? std::string() : ": " + way + shown(identity)),
      item.location, direct ? "" : "leads back to `" + shown(identity) + "`");
  for (auto link = first + 1; link != ring.end(); ++link)
    problem.related(link->second, "`" + shown(link->first) + "` is extended here");
  problem.help(direct ? "remove this line; to start from a recipe included with Capstan give its name, "
                        "`capstan recipe ls` lists them"
                      : "remove one of these lines");
  return true;
}

void Composer::collect(const Node& tree) {
  for (size_t i = 0; i < tree.items.size(); ++i) {
    std::string key = tree.keys[i];
    if (key == "extends" || key == "schema" || key == "unset" || key == "models") continue;
    const auto op = take_plus(key) ? Write::Op::append : Write::Op::set;
    const SourceLocation location = tree.key_locations[i];
    if (key.find('.') != std::string::npos || key.find('[') != std::string::npos) {
      if (const auto path = parse_path(key, location, out_.diagnostics))
        write(*path, tree.items[i], op, location);
      continue;
    }
    ParsedPath path;
    path.segments.push_back({Segment::Kind::name, key, {}, 0});
    path.location = location;
    write(path, tree.items[i], op, location);
  }
}

void Composer::unset_list(const Node& unset) {
  const auto one = [&](const Node& item) {
    if (item.kind != Node::Kind::scalar) {
      error("C0501", "`unset` expects paths such as `optimizer.lr`", item.location);
      return;
    }
    if (const auto path = parse_path(item.text, item.location, out_.diagnostics)) reset(*path, nullptr);
  };
  if (unset.kind == Node::Kind::list)
    for (const auto& item : unset.items) one(item);
  else
    one(unset);
}

void Composer::unset_requested() {
  for (const std::string& path : request_.unset) {
    CAPSTAN_ASSERT(schema_.find_field(path) || schema_.find_section(path),
                   "no field or section `" + path + "`");
    for (Write& write : out_.writes)
      if (write.field->path == path || write.field->section == path) write.take_back(Write::kRequested);
  }
}

void Composer::include(const SectionInfo& section, const std::string& file, SourceLocation location) {
  if (!budget(location)) return;
  std::string path = file;
  std::string shown = file;
  if (origin_) {
    const auto allowed = inside(file, location.source, *origin_, location);
    if (!allowed) return;
    path = *allowed;
    shown = (fs::path(out_.sources[static_cast<size_t>(location.source)].name).parent_path() / file)
                .lexically_normal()
                .string();
  }
  const Source& from = out_.sources[static_cast<size_t>(location.source)];
  if (from.kind == Source::Kind::file && canonical(path) == canonical(from.name)) {
    error("C0501", "`" + shown + "` includes itself", location)
        .help("move the fields of `" + section.name + "` into a file of their own, or write them here");
    return;
  }
  const auto source = read_named(path, shown, location);
  if (!source) return;
  const auto tree = parse(*source);
  if (tree && !report_recipe(section, *tree, shown, location))
    write_section(section, *tree, Write::Op::set, location);
}

void Composer::find_duplicates() {
  std::map<std::pair<const FieldInfo*, std::string>, const Write*> seen;
  for (const Write& later : out_.writes) {
    if (later.layer != layer_ || later.dead) continue;
    const auto [location, fresh] =
        seen.emplace(std::pair(later.field, ParsedPath{later.rest, {}}.text()), &later);
    if (fresh) continue;
    const Write& first = *location->second;
    out_.ambiguous.push_back(later.field);
    if (first.spelling == later.spelling)
      error("C0104", "`" + later.field->path + "` is given twice in one file", later.location,
            "given again here")
          .related(first.location, "first given here");
    else
      error(
          "C0104",
          "`" + first.spelling + "` and `" + later.spelling + "` are the same field, given twice in one file",
          later.location, "given again here")
          .related(first.location, "first given here")
          .help("keep one of them; the canonical name is `" + later.field->path + "`");
  }
}

}  // namespace capstan::config
