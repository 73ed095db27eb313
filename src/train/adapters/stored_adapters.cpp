#include "train/adapters/stored_adapters.hpp"

#include "base/error.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "checkpoint/store.hpp"
#include "config/core/external.hpp"
#include "config/sections/adapter_targets.hpp"
#include "formats/peft_mapping.hpp"
#include "train/records/run_list.hpp"
#include "train/setup/state.hpp"

namespace capstan::train {

namespace fs = std::filesystem;

std::optional<fs::path> peft_directory(const std::string& name) {
  if (const auto [scheme, path] = config::split_scheme(name); scheme == "peft:") return fs::path(path);
  std::error_code error;
  if (!fs::is_directory(name, error)) return std::nullopt;
  if (formats::is_peft(name)) return fs::path(name);
  // A directory that is no run and has no checkpoint is read as PEFT's: that reader reports the missing
  // files.
  const bool ours = records::is_run(name) || fs::exists(fs::path(name) / checkpoint::kManifestFile, error) ||
                    fs::exists(fs::path(name) / "checkpoints", error) ||
                    !checkpoint::list_checkpoints(name).empty();
  return ours ? std::nullopt : std::optional<fs::path>(name);
}

namespace {

StoredRecipe recipe_of_run(const std::string& name, const std::vector<config::Override>& overrides) {
  if (config::is_external_model("model", name))
    fail(ErrorCode::usage, "`" + name + "` is a full model: it holds no adapters");
  StoredRecipe stored = stored_recipe(name, overrides, 1);
  stored.resolution.require_ok();
  if (!stored.resolution.config.peft)
    fail(ErrorCode::usage, "`" + name + "` holds a full model, not adapters");
  return stored;
}

constexpr const char* kNameBase = "{name_base}";

// Looks whether the weights that `field` names are there, before anything is read.
void require_base(const char* field, const std::string& name, const std::string& otherwise) {
  std::error_code unknown;
  if (!fs::exists(config::split_scheme(name).path, unknown)) fail_not_found(field, name, otherwise);
}

std::string named_base(const std::string& name, const std::vector<config::Override>& overrides) {
  const auto directory = peft_directory(name);
  if (!directory) {
    const StoredRecipe run = recipe_of_run(name, overrides);
    if (const auto& from = run.resolution.config.checkpoint.pretrained_checkpoint) {
      require_base("checkpoint.pretrained_checkpoint", from->resolved, kNameBase);
      return from->resolved;
    }
    fail(ErrorCode::usage, "`" + name + "` does not name the base model of its adapters", kNameBase);
  }
  const std::string base_name = formats::read_peft(*directory).config.base_model;
  std::error_code error;
  // The path may be relative to the current directory or to the adapter's directory.
  for (const fs::path& base : {fs::path(base_name), *directory / base_name}) {
    if (base_name.empty() || !fs::is_directory(base, error)) continue;
    return config::model_scheme(base) + base.string();
  }
  const std::string file = (*directory / "adapter_config.json").string();
  if (base_name.empty())
    fail(ErrorCode::usage, "`" + file + "` does not name the base model of its adapters", kNameBase);
  std::string help = near_paths_help(near_paths(base_name));
  if (help.empty()) help = download_help(base_name);
  fail(ErrorCode::not_found, not_found_text("base_model_name_or_path", base_name) + " (of `" + file + "`)",
       help + (help.empty() ? "" : "; ") + kNameBase);
}

}  // namespace

StoredAdapters open_adapters(const std::string& name, BaseModel& base, const config::ModelConfig& model,
                             std::optional<bool> parts) {
  StoredAdapters result;
  if (const auto directory = peft_directory(name)) {
    result.name = "`" + directory->string() + "`";
    auto set = formats::to_capstan(formats::read_peft(*directory), model,
                                   formats::class_names(model, base.assets()), parts, result.name);
    result.peft = set.peft;
    result.tensors = formats::adapter_tensors(std::move(set.modules), result.name);
    return result;
  }
  result.name = "`" + name + "`";
  result.run = recipe_of_run(name, {});
  result.peft = *result.run->resolution.config.peft;
  auto reader = checkpoint::Reader::open(result.run->checkpoint, checkpoint::Verification::structure);
  result.base_hash = stored_base_hash(reader);
  result.tensors = std::make_unique<checkpoint::Reader>(std::move(reader));
  return result;
}

StoredBase base_of_adapters(const std::string& name, const std::optional<std::string>& base,
                            const std::vector<config::Override>& overrides) {
  if (base) require_base("base", *base, "");
  const std::string from = base ? *base : named_base(name, overrides);
  StoredRecipe recipe = stored_recipe(from, {}, 1);
  recipe.resolution.require_ok();
  std::vector<config::Override> left_out;
  if (recipe.resolution.config.model.mtp_num_layers) {
    left_out.push_back(config::Override::token("model.mtp_num_layers=null"));
    recipe = stored_recipe(from, left_out, 1);
    recipe.resolution.require_ok();
  }
  if (recipe.resolution.config.peft)
    fail(ErrorCode::usage, "the base `" + recipe.checkpoint.string() + "` holds adapters itself",
         "merge them first: capstan merge " + recipe.checkpoint.string() + " MERGED");
  BaseModel weights = BaseModel::open_verified(recipe.checkpoint.string());
  return {std::move(recipe), std::move(weights), std::move(left_out)};
}

void require_own_base(const StoredAdapters& adapters, BaseModel& base) {
  if (adapters.base_hash.empty() || base.hash() == adapters.base_hash) return;
  fail(ErrorCode::failed,
       "`" + base.path() + "` is not the base model of the adapters in " + adapters.name + " (hash " +
           base.hash() + " instead of " + adapters.base_hash + ")",
       "name the weights that their training began with");
}

void require_same_adapters(const config::PeftConfig& recipe, const StoredAdapters& adapters,
                           const config::ModelConfig& model) {
  std::vector<std::string> problems;
  const auto compare = [&](const char* field, const std::string& here, const std::string& there) {
    if (here != there)
      problems.push_back("peft." + std::string(field) + " is " + here + " in the recipe, and " + there +
                         " in " + adapters.name);
  };
  const config::PeftConfig& stored = adapters.peft;
  compare("scheme", std::string(enum_name(recipe.scheme)), std::string(enum_name(stored.scheme)));
  compare("dim", std::to_string(recipe.dim), std::to_string(stored.dim));
  compare("alpha", to_text(recipe.alpha), to_text(stored.alpha));
  compare("use_rslora", recipe.use_rslora ? "true" : "false", stored.use_rslora ? "true" : "false");
  if (recipe.scheme == stored.scheme) {
    std::vector<std::string> more, less;
    for (const std::string& path : config::adaptable_layers(model, recipe.scheme)) {
      const bool here = config::adapts(recipe, path), there = config::adapts(stored, path);
      if (here && !there) more.push_back(path);
      if (there && !here) less.push_back(path);
    }
    const auto listed = [&](const std::vector<std::string>& paths, const std::string& before) {
      if (paths.empty()) return;
      const size_t count = paths.size();
      problems.push_back("peft.target_modules: " + before + counted(count, "layer") + " (" +
                         join_some(paths, ", ", 4) + ")");
    };
    listed(more, adapters.name + " has no adapters of ");
    listed(less, "the recipe has no adapters, unlike " + adapters.name + ", of ");
  }
  if (problems.empty()) return;
  fail(ErrorCode::config,
       "peft.adapter: the adapters in " + adapters.name + " are not the recipe's:\n    " +
           join(problems, "\n    "),
       "to continue with them: " + join(adapter_overrides(stored), " "));
}

std::vector<std::string> adapter_overrides(const config::PeftConfig& peft) {
  std::vector<std::string> names;
  for (const std::string& name : peft.target_modules)
    names.push_back(name.find('*') == std::string::npos ? name : in_quotes(name));
  std::vector<std::string> result = {"peft.scheme=" + std::string(enum_name(peft.scheme)),
                                     "peft.dim=" + std::to_string(peft.dim),
                                     "peft.alpha=" + to_text(peft.alpha),
                                     std::string("peft.use_rslora=") + (peft.use_rslora ? "true" : "false"),
                                     "peft.target_modules=[" + join(names, ",") + "]"};
  names.clear();
  for (const std::string& name : peft.exclude_modules) names.push_back(in_quotes(name));
  result.push_back("peft.exclude_modules=[" + join(names, ",") + "]");
  return result;
}

}  // namespace capstan::train
