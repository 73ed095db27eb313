#include "train/setup/stored_recipe.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "checkpoint/store.hpp"
#include "config/core/external.hpp"
#include "formats/external_model.hpp"
#include "train/records/run_list.hpp"
#include "train/setup/tokenizer.hpp"

namespace capstan::train {

namespace {

// Fields that concern training alone. Capacities of experts do: what they drop depends on how many tokens are
// computed at once, and an exported model has none.
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
                                    "model.moe_expert_capacity_factor",
                                    "model.moe_pad_expert_input_to_capacity",
                                    "model.moe_token_drop_policy",
                                    "model.cpu_offloading",
                                    "model.cpu_offloading_num_layers"};
  std::vector<std::string> kept = {"dist.distributed_backend"};
  if (ranks > 1)
    kept.insert(kept.end(), {"dist.tensor_model_parallel_size", "dist.pipeline_model_parallel_size"});
  for (const config::FieldInfo& field : config::schema().find_section("dist")->fields)
    if (std::find(kept.begin(), kept.end(), field.path) == kept.end()) paths.push_back(field.path);
  return paths;
}

// Sizes of training's batches, which need not be multiples of expert-parallel ranks.
constexpr const char* kBatchFields[] = {"train.global_batch_size", "train.rampup_batch_size",
                                        "train.train_samples", "validation.eval_global_batch_size",
                                        "validation.eval_micro_batch_size"};

// Resolves the recipe with training's batches, or without them where they do not fit these ranks, so that no
// error is about them.
template <class Resolve>
config::Resolution resolve_to_serve(config::Request request, const Resolve& resolve) {
  config::Resolution resolution = resolve(request);
  if (resolution.ok()) return resolution;
  request.unset.insert(request.unset.end(), std::begin(kBatchFields), std::end(kBatchFields));
  config::Resolution without = resolve(request);
  const auto errors = [](const config::Resolution& of) {
    return config::count(of.diagnostics, config::Level::error);
  };
  return errors(without) < errors(resolution) ? std::move(without) : std::move(resolution);
}

// The layouts that divide the model over this launch, to be shown in a message.
std::string fitting_layouts(const config::Config& config) {
  const int64_t world = config.dist.world_size;
  const std::string no_experts = config.dist.expert_model_parallel_size > 1 ? " dist.ep=1" : "";
  std::vector<std::string> fitting;
  for (int64_t tp = world; tp >= 1; --tp)
    if (world % tp == 0 && config.model.num_attention_heads % tp == 0 &&
        config.model.num_layers % (world / tp) == 0)
      fitting.push_back("`dist.tp=" + std::to_string(tp) + " dist.pp=" + std::to_string(world / tp) +
                        no_experts + "`");
  if (const auto experts = config.model.num_moe_experts; experts && *experts % world == 0)
    fitting.push_back("`dist.tp=1 dist.pp=1 dist.ep=" + std::to_string(world) + "`");
  return join(fitting, " or ");
}

// Tensor parallelism with expert parallelism, or with another division of the experts, needs rows that are
// sharded over the tensor-parallel ranks. Reported before the rules of training, which ask for sequence
// parallelism.
void check_one_kind_of_shard(const config::Resolution& resolution) {
  const config::DistConfig& d = resolution.config.dist;
  const int64_t tp = d.tensor_model_parallel_size, etp = d.expert_tensor_parallel_size.value_or(tp);
  if (!resolution.failed.empty() || !resolution.config.model.num_moe_experts || tp == 1) return;
  const bool has_expert_ranks = d.expert_model_parallel_size > 1;
  if (!has_expert_ranks && etp != tp)
    fail(ErrorCode::config,
         "dist.etp=" + std::to_string(etp) + " is not dist.tp=" + std::to_string(tp) +
             ": evaluation and generation do not shard the rows over the tensor-parallel ranks",
         "set dist.etp=" + std::to_string(tp) + ", or remove the override");
  if (!has_expert_ranks) return;
  const std::string fitting = fitting_layouts(resolution.config);
  fail(ErrorCode::config,
       "dist.tp=" + std::to_string(tp) + " and dist.ep=" + std::to_string(d.expert_model_parallel_size) +
           " exclude each other here: evaluation and generation do not shard the rows over the "
           "tensor-parallel ranks",
       fitting.empty() ? "set dist.tp=1 or dist.ep=1" : "give " + fitting);
}

// Evaluation and generation run one sequence at a time, so only tensor, pipeline and expert parallelism can
// divide the model. Expert-parallel ranks all compute the dense layers, and exchange tokens for the experts.
void check_serving_layout(const config::Config& config) {
  const config::DistConfig& d = config.dist;
  if (d.context_parallel_size > 1)
    fail(ErrorCode::config,
         "dist.context_parallel_size=" + std::to_string(d.context_parallel_size) +
             ": evaluation and generation run under tensor, pipeline and expert parallelism only",
         "remove the override; dist.tp and dist.pp shard the model, dist.ep its experts");
  if (d.sequence_parallel)
    fail(ErrorCode::config,
         "dist.sequence_parallel=true: evaluation and generation do not shard the rows over the "
         "tensor-parallel ranks",
         "remove the override; it does not change the generated tokens");
  const int64_t tp = d.tensor_model_parallel_size, pp = d.pipeline_model_parallel_size,
                ep = d.expert_model_parallel_size;
  if (tp * pp * ep == d.world_size) return;
  const std::string fitting = fitting_layouts(config);
  fail(ErrorCode::config,
       "the model needs tensor * pipeline" + std::string(ep > 1 ? " * expert" : "") + " = " +
           std::to_string(tp) + " * " + std::to_string(pp) + (ep > 1 ? " * " + std::to_string(ep) : "") +
           " = " + counted(tp * pp * ep, "rank") + ", and there are " + std::to_string(d.world_size),
       (fitting.empty() ? "" : "give " + fitting + "; or ") + "start " + counted(tp * pp * ep, "rank"));
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
               "` holds the tokenizer that it was trained with, which cannot be replaced",
           "remove the override");
  }
}

// Refuses an override of the tokenizer that the model of another program brings, unless it names the same one
// under another name.
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
       "remove the override; a model directory without tokenizer files is read with the one that is named");
}

// A preset among the overrides that would change a field, which the recipe of the model has written out.
static std::vector<std::string> hidden_presets(const config::Resolution& resolution,
                                               const std::vector<config::Override>& overrides) {
  std::vector<std::string> hidden;
  for (const config::Override& override : overrides) {
    const std::string token = config::token_text(override);
    const size_t equals = token.find('=');
    if (equals == std::string::npos) continue;
    const config::SectionInfo* section = config::schema().find_section(token.substr(0, equals));
    if (section && config::hidden_fields(resolution, section->name) > 0)
      hidden.push_back(section->name + token.substr(equals));
  }
  return hidden;
}

// Like a field of it, a preset of the tokenizer would be ignored.
static void refuse_tokenizer_preset(const StoredRecipe& stored) {
  if (stored.resolution.config.tokenizer.tokenizer_type == config::TokenizerKind::none) return;
  for (const std::string& preset : stored.hidden_presets)
    if (preset.starts_with("tokenizer="))
      fail(ErrorCode::config,
           "`" + preset + "`: `" + stored.checkpoint.string() +
               "` names the tokenizer that it was trained with, which cannot be replaced",
           "remove the override");
}

StoredRecipe stored_recipe(const std::string& name, const std::vector<config::Override>& overrides,
                           int64_t ranks) {
  StoredRecipe stored;
  config::Request request;
  request.overrides = overrides;
  request.ranks = ranks;
  request.ranks_origin = "this launch";
  request.unset = left_out(ranks);
  if (config::is_external_model("model", name)) {
    // An error names a model that is not there as the user did.
    std::error_code unknown;
    const bool exists = std::filesystem::exists(config::split_scheme(name).path, unknown);
    const auto model = formats::ExternalModel::open(
        exists ? config::absolute_name(name, std::filesystem::current_path()) : name);
    stored.checkpoint = model->name();
    stored.resolution = resolve_to_serve(
        request, [&](const config::Request& asked) { return formats::resolve_recipe(*model, asked); });
    if (stored.resolution.ok()) refuse_other_tokenizer(stored, *model);
  } else {
    stored.checkpoint = checkpoint::resolve_checkpoint(records::saved_in(name), &stored.refused).path;
    request.recipe = (stored.checkpoint / std::string(checkpoint::kRecipeFile)).string();
    stored.resolution =
        resolve_to_serve(request, [](const config::Request& asked) { return config::resolve(asked); });
  }
  check_one_kind_of_shard(stored.resolution);
  // The bubble of a pipeline is filled by micro-batches of training.
  std::erase_if(stored.resolution.diagnostics,
                [](const config::Diagnostic& one) { return one.code == "R0315"; });
  if (!stored.resolution.ok()) return stored;
  stored.hidden_presets = hidden_presets(stored.resolution, overrides);
  refuse_tokenizer_preset(stored);
  refuse_other_tokenizer(stored);
  if (const auto& peft = stored.resolution.config.peft; peft && peft->random_base)
    fail(ErrorCode::unsupported,
         "`" + name + "` holds adapters on a random base model (peft.random_base), which is not saved",
         "such a run shows that its recipe works; train the recipe itself for a model");
  check_serving_layout(stored.resolution.config);
  return stored;
}

}  // namespace capstan::train
