#include "train/trainer/recipe.hpp"
#include "train/records/run_list.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/store.hpp"
#include "config/core/hash.hpp"
#include "config/tools/show.hpp"
#include "formats/external_model.hpp"
#include "train/trainer/tokenizer_setup.hpp"

namespace capstan::train {

namespace {

// The recipe that a checkpoint or run stores, whose paths are absolute.
config::Resolution resolve_recipe_text(const std::string& text) {
  config::Request request;
  request.recipe = std::string(checkpoint::kRecipeFile);
  return config::resolve_text(text, request);
}

// A recipe is named by its own `name`, not by that of the one it extends; else by its file.
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

void refuse_missing_features(const config::Config& config) {
  const auto missing = config::missing_features(config::schema(), &config);
  if (missing.empty()) return;
  std::string message = "this recipe is valid, but this version cannot train it:";
  for (const auto& feature : missing) message += "\n    " + feature.path + ": " + feature.reason;
  fail(ErrorCode::unsupported, message, "`capstan show` and `capstan diff` work on it");
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
      // What it extends and merges is named in it; recipe.yaml holds what came of all of them.
      break;
    }
  if (!overrides.empty()) record.given += "\n# on the command line:\n";
  for (const config::Override& override : overrides) {
    using Kind = config::Override::Kind;
    const char* flag = override.kind == Kind::set      ? "--set "
                       : override.kind == Kind::append ? "--append "
                       : override.kind == Kind::unset  ? "--unset "
                       : override.kind == Kind::file   ? "-f "
                                                       : "";
    std::string text = override.text;
    std::replace(text.begin(), text.end(), '\n', ' ');
    record.given += std::string("#   ") + flag + text + "\n";
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
         "the recipe that the checkpoint carries does not resolve: " + stored.diagnostics.front().message,
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

namespace {

// Fields that concern training alone.
std::vector<std::string> left_out(int64_t ranks) {
  std::vector<std::string> paths = {"ddp",
                                    "comm_overlap",
                                    "profiling",
                                    "train.num_microbatches",
                                    "model.recompute_granularity",
                                    "model.recompute_method",
                                    "model.recompute_num_layers",
                                    "model.recompute_modules",
                                    "model.distribute_saved_activations",
                                    "model.cpu_offloading",
                                    "model.cpu_offloading_num_layers"};
  std::vector<std::string> kept = {"dist.distributed_backend"};
  if (ranks > 1)
    kept.insert(kept.end(), {"dist.tensor_model_parallel_size", "dist.pipeline_model_parallel_size"});
  for (const config::FieldInfo& field : config::schema().find_section("dist")->fields)
    if (std::find(kept.begin(), kept.end(), field.path) == kept.end()) paths.push_back(field.path);
  return paths;
}

// Only tensor and pipeline parallelism share a model that answers one question at a time.
void check_serving_layout(const config::Config& config) {
  const config::DistConfig& d = config.dist;
  if (d.context_parallel_size > 1)
    fail(ErrorCode::config,
         "dist.context_parallel_size=" + std::to_string(d.context_parallel_size) +
             ": evaluation and generation run under tensor and pipeline parallelism only",
         "leave it out; dist.tp and dist.pp share the model");
  if (d.sequence_parallel)
    fail(ErrorCode::config,
         "dist.sequence_parallel=true: evaluation and generation do not split the rows between tensor ranks",
         "leave it out; the tokens are the same");
  const int64_t tp = d.tensor_model_parallel_size, pp = d.pipeline_model_parallel_size;
  if (tp * pp == d.world_size) return;
  std::vector<std::string> fitting;
  for (int64_t t = d.world_size; t >= 1; --t)
    if (d.world_size % t == 0 && config.model.num_attention_heads % t == 0 &&
        config.model.num_layers % (d.world_size / t) == 0)
      fitting.push_back("`dist.tp=" + std::to_string(t) + " dist.pp=" + std::to_string(d.world_size / t) +
                        "`");
  fail(ErrorCode::config,
       "a model is served by tensor * pipeline = " + std::to_string(tp) + " * " + std::to_string(pp) + " = " +
           std::to_string(tp * pp) + (tp * pp == 1 ? " rank" : " ranks") + ", and there are " +
           std::to_string(d.world_size),
       (fitting.empty() ? "" : "give " + join(fitting, " or ") + "; or ") + "start " +
           std::to_string(tp * pp));
}

}  // namespace

// A checkpoint is read with the tokenizer that lies in it: an override that names another one would be
// ignored.
static void refuse_other_tokenizer(const StoredRecipe& stored) {
  std::error_code unknown;
  if (!std::filesystem::exists(stored.checkpoint / "tokenizer.json", unknown) &&
      !std::filesystem::exists(stored.checkpoint / "tokenizer.model", unknown))
    return;
  const auto type = stored.resolution.config.tokenizer.tokenizer_type;
  if (type == config::TokenizerKind::none || type == config::TokenizerKind::byte) return;
  for (const char* const field : {"tokenizer.tokenizer_model", "tokenizer.vocab_file", "tokenizer.merge_file",
                                  "tokenizer.pre_tokenizer"}) {
    const config::SourceLocation& location = stored.resolution.origin(field).location;
    if (location.known() &&
        stored.resolution.sources[static_cast<size_t>(location.source)].kind == config::Source::Kind::cli)
      fail(ErrorCode::config,
           "`" + std::string(field) + "`: `" + stored.checkpoint.string() +
               "` holds the tokenizer that it was trained with, and is read with no other",
           "take the override out");
  }
}

// Likewise a model of another program that has one of its own, unless the override names the same under
// another name.
static void refuse_other_tokenizer(const StoredRecipe& stored, const formats::ExternalModel& model) {
  const config::Resolution& resolution = stored.resolution;
  const std::string own = model.tokenizer();
  const auto overridden =
      std::find_if(resolution.origins.begin(), resolution.origins.end(), [](const auto& entry) {
        return entry.first.starts_with("tokenizer.") && entry.second.kind == config::Origin::Kind::cli;
      });
  const bool reads_text = resolution.config.tokenizer.tokenizer_type != config::TokenizerKind::none;
  if (own.empty() || overridden == resolution.origins.end() || !reads_text) return;
  config::Config its = resolution.config;
  its.tokenizer = {};
  its.tokenizer.tokenizer_type = config::TokenizerKind::huggingface;
  its.tokenizer.tokenizer_model = config::Path{own, own};
  const auto named = load_tokenizer(resolution.config);
  if (!named || named->identity() == load_tokenizer(its)->identity()) return;
  fail(ErrorCode::config,
       "`" + overridden->first + "`: `" + model.name() + "` has a tokenizer of its own, and " +
           tokenizer_name(resolution.config.tokenizer) + " is another one",
       "take the override out; a model directory without tokenizer files is read with the one that is named");
}

StoredRecipe stored_recipe(const std::string& name, std::vector<config::Override> overrides, int64_t ranks) {
  StoredRecipe stored;
  config::Request request;
  request.overrides = std::move(overrides);
  request.ranks = ranks;
  request.ranks_origin = "this launch";
  request.unset = left_out(ranks);
  if (formats::is_external(name)) {
    const auto model = formats::ExternalModel::open(formats::absolute_name(name));
    stored.checkpoint = model->name();
    stored.resolution = formats::resolve_recipe(*model, std::move(request));
    if (stored.resolution.ok()) refuse_other_tokenizer(stored, *model);
  } else {
    stored.checkpoint = checkpoint::resolve_checkpoint(records::saved_in(name), &stored.refused).path;
    request.recipe = (stored.checkpoint / std::string(checkpoint::kRecipeFile)).string();
    stored.resolution = config::resolve(request);
  }
  if (!stored.resolution.ok()) return stored;
  refuse_other_tokenizer(stored);
  if (const auto& peft = stored.resolution.config.peft; peft && peft->random_base)
    fail(ErrorCode::unsupported,
         "`" + name + "` holds adapters beside random weights (peft.random_base), which are not kept",
         "such a run shows that its recipe works; train the recipe itself for a model");
  check_serving_layout(stored.resolution.config);
  return stored;
}

}  // namespace capstan::train
