#include "planner/overrides.hpp"

#include <algorithm>

#include "base/checked.hpp"
#include "base/wording.hpp"
#include "config/sections/batch_ramp.hpp"

namespace capstan::planner {

bool divides_tensors(const RunShape& s, int64_t tp) {
  const bool groups = s.latent || s.kv_groups % tp == 0 || tp % s.kv_groups == 0;
  return s.heads % tp == 0 && groups && s.ffn % tp == 0 && s.vocab % tp == 0 &&
         (!s.experts || s.experts->shared_ffn % tp == 0);
}

namespace {

// How layers are divided over stages: evenly; with the embedding and the output layer as one more each; or
// the same number for all stages but the last, which has fewer.
enum class Division : uint8_t { none, even, with_ends, short_last };
Division division_of(const RunShape& s) {
  const int64_t stages = s.pp * s.vpp;
  if (s.layers % stages == 0) return Division::even;
  if (s.pp == 1) return Division::none;
  if ((s.layers + 2) % stages == 0 && s.layers + 2 != stages) return Division::with_ends;
  const bool has_rest = s.layers > (stages - 1) * ceil_div(s.layers, stages);
  return s.vpp == 1 && has_rest ? Division::short_last : Division::none;
}

int64_t short_last_stage(const RunShape& s) {
  return s.layers - (s.pp - 1) * ceil_div(s.layers, s.pp);
}

}  // namespace

bool divide_layers(RunShape& s) {
  const Division division = division_of(s);
  if (division == Division::none) return false;
  // As many layers as all stages have room for, of which the ends have fewer.
  RunShape longer = s;
  if (division == Division::with_ends) longer.layers += 2;
  if (division == Division::short_last) longer.layers = s.pp * ceil_div(s.layers, s.pp);
  split_evenly(longer);
  s.stages = std::move(longer.stages), s.stage_ranks = std::move(longer.stage_ranks);
  const auto drop = [](StageShape& stage, int64_t layers) {
    const int64_t dense = std::min(layers, stage.dense_layers);
    stage.dense_layers -= dense, stage.expert_layers -= layers - dense;
  };
  if (division == Division::with_ends) drop(s.stages.front(), 1), drop(s.stages.back(), 1);
  if (division == Division::short_last) drop(s.stages.back(), longer.layers - s.layers);
  return true;
}

config::PipelineSchedule default_schedule(int64_t vpp) {
  return vpp > 1 ? config::PipelineSchedule::interleaved : config::PipelineSchedule::one_f_one_b;
}

int64_t largest_stage(const RunShape& s) {
  int64_t most = 0;
  for (const StageShape& stage : s.stages) most = std::max(most, stage.layers());
  return most;
}

namespace {

bool has_dense_layers(const RunShape& s) {
  return !s.experts || std::ssize(s.experts->layers) < s.layers;
}

}  // namespace

std::vector<RecomputeShape> selective_recomputations(const RunShape& s, const RecomputeShape& least) {
  std::vector<RecomputeShape> found;
  // Inputs of GEMMs in 8 or 4 bits are saved as such: recomputation of norms saves nothing.
  const bool low = is_low_precision(s.format);
  for (const bool mlp : {false, true})
    for (const bool norms : {false, true}) {
      if (norms && (low || !s.input_norms)) continue;
      RecomputeShape r = least;
      r.attention |= s.latent.has_value();
      r.norms |= norms, r.mlp |= mlp && has_dense_layers(s), r.experts |= mlp && s.experts;
      r.activation |= s.experts && !mlp;
      if (r.any()) found.push_back(r);
    }
  return found;
}

std::vector<RecomputeShape> partial_recomputations(const RunShape& s) {
  std::vector<RecomputeShape> found;
  const int64_t all = largest_stage(s);
  for (const int64_t quarters : {1, 2, 3}) {
    const int64_t layers = all * quarters / 4;
    if (layers > 0 && (found.empty() || found.back().layers < layers))
      found.push_back({.full = true, .layers = layers});
  }
  return found;
}

namespace {

using Words = std::vector<std::string>;

void add_number(Words& words, const char* field, int64_t before, int64_t value) {
  if (before != value) words.push_back(field + std::to_string(value));
}

void add_layout(Words& words, const RunShape& base, const RunShape& s) {
  add_number(words, "dist.tp=", base.tp, s.tp);
  if (base.sequence_parallel != s.sequence_parallel)
    words.push_back(std::string("dist.sp=") + (s.sequence_parallel ? "true" : "false"));
  add_number(words, "dist.pp=", base.pp, s.pp);
  if (base.vpp != s.vpp) words.push_back(s.vpp == 1 ? "dist.vpp=null" : "dist.vpp=" + std::to_string(s.vpp));
  // Unless it is given, the schedule follows from the chunks.
  if (s.pp > 1 && base.schedule != s.schedule &&
      (s.schedule != default_schedule(s.vpp) || base.schedule != default_schedule(base.vpp)))
    words.push_back("dist.pipeline_schedule=" + std::string(config::enum_name(s.schedule)));
  const bool same_stages = base.pp == s.pp && base.vpp == s.vpp;
  const Division division = same_stages ? Division::none : division_of(s);
  if (division == Division::with_ends) {
    words.emplace_back("dist.account_for_embedding_in_pipeline_split=true");
    words.emplace_back("dist.account_for_loss_in_pipeline_split=true");
  }
  if (division == Division::short_last)
    words.push_back("dist.num_layers_in_last_pipeline_stage=" + std::to_string(short_last_stage(s)));
  add_number(words, "dist.cp=", base.cp, s.cp);
  if (s.experts) {
    add_number(words, "dist.ep=", base.ep, s.ep);
    // Unless it is given, that of dense layers.
    if (base.etp != s.etp || base.tp != s.tp) words.push_back("dist.etp=" + std::to_string(s.etp));
  }
  using enum config::ShardingStrategy;
  if (base.sharding != s.sharding)
    words.emplace_back(s.sharding == optim         ? "ddp=zero1"
                       : s.sharding == optim_grads ? "ddp=zero2"
                                                   : "ddp=zero3");
  add_number(words, "train.micro_batch_size=", base.micro_batch, s.micro_batch);
}

// Modules of selective recomputation.
std::string modules_text(const RunShape& s) {
  const RecomputeShape& r = s.recompute;
  std::string text;
  const auto add = [&](bool on, const char* name) {
    if (on) text += (text.empty() ? "" : ",") + std::string(name);
  };
  add(r.attention, s.latent ? "mla_up_proj" : "core_attn");
  add(r.norms, "layernorm");
  add(r.mlp, "mlp");
  add(r.experts, "moe");
  add(r.shared && !r.experts, "shared_experts");
  add(r.activation && !r.experts, "moe_act");
  return text;
}

void add_recomputation(Words& words, const RunShape& base, const RunShape& s) {
  const RecomputeShape &before = base.recompute, &after = s.recompute;
  if (before == after) return;
  const bool was_selective = before.any() && !before.full;
  if (after.full) {
    words.insert(words.end(),
                 {"model.recompute_granularity=full",
                  std::string("model.recompute_method=") + (after.layers < 0 ? "uniform" : "block"),
                  "model.recompute_num_layers=" + std::to_string(after.layers < 0 ? 1 : after.layers)});
    if (was_selective) words.emplace_back("~model.recompute_modules");
    return;
  }
  words.push_back(std::string("model.recompute_granularity=") + (after.any() ? "selective" : "null"));
  if (before.full)
    words.insert(words.end(), {"model.recompute_method=null", "model.recompute_num_layers=null"});
  words.push_back(after.any() ? "model.recompute_modules=[" + modules_text(s) + "]"
                              : "~model.recompute_modules");
}

}  // namespace

std::string recomputation_text(const RunShape& s) {
  const RecomputeShape& r = s.recompute;
  if (!r.any()) return "none";
  if (!r.full) return modules_text(s);
  return r.layers < 0 || r.layers >= largest_stage(s) ? "full" : counted(r.layers, "layer");
}

std::vector<std::string> overrides_of(const RunShape& base, const RunShape& s) {
  Words words;
  add_layout(words, base, s);
  add_recomputation(words, base, s);
  if (s.offloaded_layers == 0 && base.offloaded_layers > 0)
    words.emplace_back("model.cpu_offloading=false");
  else if (s.offloaded_layers != base.offloaded_layers)
    words.insert(words.end(), {"model.cpu_offloading=true",
                               "model.cpu_offloading_num_layers=" + std::to_string(s.offloaded_layers)});
  if (s.offloaded_state == 0 && base.offloaded_state > 0) {
    words.emplace_back("optimizer.optimizer_cpu_offload=false");
  } else if (s.offloaded_state != base.offloaded_state) {
    words.emplace_back("optimizer.optimizer_cpu_offload=true");
    if (base.offloaded_state > 0) words.emplace_back("optimizer.optimizer_offload_fraction=1");
  }
  return words;
}

std::optional<config::Config> legal_recipe(const Resolver& resolve, std::vector<std::string>& overrides,
                                           int64_t global_batch) {
  std::vector<Words> further = {{},
                                {"dist.pipeline_model_parallel_layout=null"},
                                {"dist.num_layers_in_last_pipeline_stage=null"},
                                {"dist.account_for_embedding_in_pipeline_split=false",
                                 "dist.account_for_loss_in_pipeline_split=false"}};
  // A recipe may write down the schedule that it would have anyway.
  if (std::none_of(overrides.begin(), overrides.end(),
                   [](const std::string& one) { return one.starts_with("dist.pipeline_schedule="); }))
    further.push_back({"dist.pipeline_schedule=null"});
  for (const Words& words : further) {
    Words all = overrides;
    all.insert(all.end(), words.begin(), words.end());
    auto config = resolve(all);
    const auto differs = [&] { return config && config::full_batch_size(*config) != global_batch; };
    if (differs()) {
      all.push_back("train.global_batch_size=" + std::to_string(global_batch));
      config = resolve(all);
    }
    if (!config || differs()) continue;
    overrides = std::move(all);
    return config;
  }
  return std::nullopt;
}

}  // namespace capstan::planner
