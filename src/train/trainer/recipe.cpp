#include "train/trainer/recipe.hpp"

#include <algorithm>
#include <cstdlib>

#include "base/error.hpp"
#include "checkpoint/store.hpp"
#include "config/core/hash.hpp"
#include "config/tools/show.hpp"

namespace capstan::train {

namespace {

// The recipe that a checkpoint or run stores, whose paths are absolute.
config::Resolution resolve_recipe_text(const std::string& text) {
  config::Request request;
  request.recipe = std::string(checkpoint::kRecipeFile);
  return config::resolve_text(text, request);
}

// Returns the `name` that the recipe itself or the command line sets, else its file name. A name inherited by
// `extends` does not count.
std::string own_name(const config::Resolution& resolution) {
  const config::Origin& origin = resolution.origin("name");
  const bool own = origin.kind == config::Origin::Kind::cli ||
                   (origin.kind == config::Origin::Kind::file && origin.location.source == 0);
  return own && !resolution.config.name.empty() ? resolution.config.name : resolution.recipe_name;
}

bool longer(const RecipeChange& change) {
  if (change.path != "train.train_iters" && change.path != "train.train_samples" &&
      change.path != "train.epochs")
    return false;
  return std::atof(change.after.c_str()) > std::atof(change.before.c_str());
}

}  // namespace

static void refuse(const std::vector<config::MissingFeature>& missing) {
  if (missing.empty()) return;
  std::string message = "this recipe is valid, but this version cannot train it:";
  for (const auto& feature : missing) message += "\n    " + feature.path + ": " + feature.reason;
  fail(ErrorCode::unsupported, message, "{show_and_diff} work on it");
}
void refuse_missing_features(const config::Config& config) {
  refuse(config::missing_features(config::schema(), &config));
}
void refuse_missing_estimates(const config::Config& config) {
  auto missing = config::missing_features(config::schema(), &config);
  std::erase_if(missing,
                [](const config::MissingFeature& feature) { return feature.path == "train.device"; });
  refuse(missing);
}

RecipeRecord recipe_record(const config::Resolution& resolution, std::span<const config::Override> overrides,
                           std::string command) {
  RecipeRecord record;
  record.name = own_name(resolution);
  record.command = std::move(command);
  for (const config::Source& source : resolution.sources)
    if (source.kind != config::Source::Kind::cli && !source.name.starts_with("configs/")) {
      record.given += "# " + source.name + "\n" + source.text;
      if (!record.given.ends_with('\n')) record.given += '\n';
      // The text names the files that it extends and merges; recipe.yaml holds the result.
      break;
    }
  if (!overrides.empty()) record.given += "\n# overrides:\n";
  for (const config::Override& override : overrides) {
    std::string text = config::token_text(override);
    std::replace(text.begin(), text.end(), '\n', ' ');
    record.given += "#   " + text + "\n";
  }
  for (const auto& [path, origin] : resolution.origins) {
    using Kind = config::Origin::Kind;
    if (origin.kind == Kind::cli) record.from_command_line.push_back(path);
    if (origin.kind == Kind::file || origin.kind == Kind::preset) record.from_files.push_back(path);
  }
  record.resolved = config::resolved_recipe(resolution);
  record.hash = config::config_hash(config::schema(), &resolution.config);
  return record;
}

static config::Resolution resolve_stored(const std::string& text) {
  config::Resolution stored = resolve_recipe_text(text);
  if (!stored.ok())
    fail(ErrorCode::format,
         "the recipe in the checkpoint does not resolve: " + stored.diagnostics.front().message,
         "it was written by another version, or changed since");
  return stored;
}

config::Config stored_config(const std::string& text) {
  return resolve_stored(text).config;
}

std::vector<RecipeChange> changes_since(const std::string& stored, const config::Resolution& now) {
  const config::Resolution before = resolve_stored(stored);
  // Compared in the form in which recipes are stored: paths absolute.
  const config::Resolution stored_now = resolve_recipe_text(config::resolved_recipe(now));
  const auto differences = config::diff(before, stored_now);
  std::vector<RecipeChange> changes;
  for (const config::Change& difference : differences) {
    RecipeChange change{difference.path, difference.before, difference.after,
                        difference.effect == config::Effect::math};
    if (longer(change)) change.alters_numerics = false;
    // A derived value follows its inputs, which are compared instead.
    if (now.origin(change.path).kind == config::Origin::Kind::derived)
      if (const config::Derivation* derivation = config::schema().find_derivation(change.path))
        for (const std::string& input : derivation->inputs)
          for (const config::Change& other : differences)
            if (other.path == input) change.alters_numerics = false;
    changes.push_back(std::move(change));
  }
  return changes;
}

}  // namespace capstan::train
