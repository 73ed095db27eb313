#include "train/adapters/adapters.hpp"

#include <cmath>
#include <filesystem>
#include <map>

#include "base/error.hpp"
#include "base/missing.hpp"
#include "config/core/external.hpp"
#include "config/sections/adapter_targets.hpp"
#include "ops/adapter.hpp"
#include "train/adapters/base_model.hpp"
#include "train/adapters/stored_adapters.hpp"
#include "train/setup/state.hpp"

namespace capstan::train {

BaseModel open_base(const config::Config& config, const std::string& expected, comm::Communicator& ranks) {
  CAPSTAN_ASSERT(config.checkpoint.pretrained_checkpoint, "adapters without a base, which the rules refuse");
  const std::string& name = config.checkpoint.pretrained_checkpoint->resolved;
  std::error_code unknown;
  if (!std::filesystem::exists(config::split_scheme(name).path, unknown))
    fail_not_found("checkpoint.pretrained_checkpoint", name,
                   "set checkpoint.pretrained_checkpoint to the new place of the base model");
  BaseModel base = BaseModel::open(name);
  if (expected.empty()) return base;
  base.share_hash(ranks);
  if (base.hash() != expected)
    fail(ErrorCode::failed,
         "checkpoint.pretrained_checkpoint `" + base.path() +
             "` is not the base model of these adapters (hash " + base.hash() + " instead of " + expected +
             ")",
         "name the checkpoint that the run began with");
  return base;
}

BaseWeights load_base(const config::Config& config, parallel::FlatStore& store, const std::string& expected,
                      comm::Communicator& ranks) {
  BaseModel base = open_base(config, expected, ranks);
  base.share_hash(ranks);
  load_parameters(base.parameters(config.model), store, ParameterSet::base);
  return {base.path(), base.hash(), base.prediction_layers()};
}

StoredAdapters open_first_adapters(const config::Config& config, const BaseWeights& weights) {
  BaseModel base = BaseModel::open_verified(weights.path);
  StoredAdapters adapters = open_adapters(config.peft->adapter->resolved, base, config.model,
                                          config::adapts_parts(config.peft->scheme));
  require_same_adapters(*config.peft, adapters, config.model);
  if (adapters.base_hash != weights.hash) require_own_base(adapters, base);
  return adapters;
}

// Collective. DoRA's magnitudes begin as the lengths of the rows of W + s B A. After load_base().
static void initialize_magnitudes(const config::Config& config, Device& device, parallel::FlatStore& store) {
  if (!config::has_magnitudes(config.peft->scheme)) return;
  std::map<std::string, const Parameter*> by_name;
  for (const auto& parameter : store.parameters()) by_name[parameter->name()] = parameter.get();
  std::map<const Parameter*, std::vector<float>> lengths;
  StepContext context{device, store};
  store.set_direction(ParamStore::PassDirection::forward);
  for (const auto& parameter : store.parameters()) {
    const ParamSpec& spec = parameter->spec();
    if (spec.row_norms_of.empty()) continue;
    // Such as "….linear_q.adapter.".
    const std::string around = spec.name.substr(0, spec.name.rfind('.') + 1);
    const Parameter& weight = *by_name.at(spec.row_norms_of);
    const std::string fused = weight.name().substr(0, weight.name().rfind('.'));
    ops::ColumnSegments rows;
    for (const config::LayerSlice& part : config::layer_slices(config.model, fused, weight.shape()[0]))
      if (part.path + ".adapter." == around) rows = {part.groups, part.begin, part.count};
    // A is sharded where the columns of W are: beside row-parallel layers.
    const Parameter& a = *by_name.at(around + "linear_in.weight");
    const Tensor squared = ops::squared_row_lengths(
        context, weight, a, *by_name.at(around + "linear_out.weight"),
        static_cast<float>(config::adapter_scale(*config.peft)),
        a.spec().sharding.over_tensor_ranks() ? store.groups().dense.tensor : nullptr, rows);
    std::vector<float>& values = lengths[parameter.get()] = squared.to_host<float>();
    for (float& value : values) value = std::sqrt(value);
  }
  store.before_load();
  for (const auto& shard : store.parameter_shards()) {
    const auto found = lengths.find(shard.parameter);
    if (found == lengths.end()) continue;
    const auto values =
        std::span<const float>(found->second)
            .subspan(static_cast<size_t>(shard.range.begin), static_cast<size_t>(shard.range.count));
    CAPSTAN_ASSERT(shard.memory.dtype() == DType::f32, "main parameters of adapters are fp32");
    shard.values().copy_from_host_bytes(std::as_bytes(values));
    shard.set_changed();
  }
  store.after_load();
}

void begin_adapters(const config::Config& config, Device& device, parallel::FlatStore& store,
                    const BaseWeights& weights) {
  if (!config.peft->adapter) return initialize_magnitudes(config, device, store);
  load_parameters(*open_first_adapters(config, weights).tensors, store, ParameterSet::adapters);
}

}  // namespace capstan::train
