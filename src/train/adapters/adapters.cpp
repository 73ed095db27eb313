#include "train/adapters/adapters.hpp"

#include <cmath>
#include <map>
#include <memory>
#include <set>

#include "base/error.hpp"
#include "config/sections/adapter_targets.hpp"
#include "ops/adapter.hpp"
#include "train/adapters/base_model.hpp"
#include "train/adapters/stored_adapters.hpp"
#include "train/trainer/state.hpp"

namespace capstan::train {

std::function<bool(const std::string&)> quantized_weights(const config::PeftConfig& peft,
                                                          const config::ModelConfig& model) {
  if (peft.base_quantization == config::BaseQuantization::none) return nullptr;
  auto names = std::make_shared<std::set<std::string>>();
  for (const std::string& layer : config::adaptable_layers(model, config::PeftScheme::lora))
    names->insert(layer + ".weight");
  return [names](const std::string& name) { return names->count(name) > 0; };
}

parallel::Nf4Options nf4_options(const config::PeftConfig& peft) {
  return {.block = peft.quantization_block, .two_stage = peft.quantization_double};
}

void quantize_base(const config::PeftConfig& peft, const config::ModelConfig& model,
                   parallel::FlatStore::Options& options) {
  if (const auto quantized = quantized_weights(peft, model))
    options.quantized = [quantized](const Parameter& parameter) { return quantized(parameter.name()); };
  options.nf4 = nf4_options(peft);
}

BaseWeights load_base(const config::Config& config, parallel::FlatStore& store, const std::string& expected,
                      comm::Communicator& ranks) {
  CAPSTAN_ASSERT(config.checkpoint.pretrained_checkpoint, "adapters without a base, which the rules refuse");
  BaseModel base = BaseModel::open(config.checkpoint.pretrained_checkpoint->resolved);
  base.share_hash(ranks);
  if (!expected.empty() && base.hash() != expected)
    fail(ErrorCode::failed,
         "checkpoint.pretrained_checkpoint `" + base.path() +
             "` holds other weights than those that the adapters were trained beside (hash " + base.hash() +
             " instead of " + expected + ")",
         "name the checkpoint that the run began with");
  load_parameters(base.parameters(config.model), store, Which::base);
  return {base.path(), base.hash()};
}

void begin_adapters(const config::Config& config, Device& device, parallel::FlatStore& store,
                    const BaseWeights& beside) {
  if (!config.peft->adapter) return initialize_magnitudes(config, device, store);
  BaseModel base = BaseModel::open_verified(beside.path);
  const StoredAdapters adapters = open_adapters(config.peft->adapter->resolved, base, config.model,
                                                config::adapts_parts(config.peft->scheme));
  require_same_adapters(*config.peft, adapters, config.model);
  if (adapters.base_hash != beside.hash) require_own_base(adapters, base);
  load_parameters(*adapters.tensors, store, Which::adapters);
}

void initialize_magnitudes(const config::Config& config, Device& device, parallel::FlatStore& store) {
  if (!config.peft || !config::has_magnitudes(config.peft->scheme)) return;
  std::map<std::string, const Parameter*> by_name;
  for (const auto& parameter : store.parameters()) by_name[parameter->name()] = parameter.get();
  std::map<const Parameter*, std::vector<float>> lengths;
  StepContext context{device, store};
  store.set_direction(ParamStore::PassDirection::forward);
  for (const auto& parameter : store.parameters()) {
    const ParamSpec& spec = parameter->spec();
    if (spec.row_lengths_of.empty()) continue;
    const std::string around = spec.name.substr(0, spec.name.rfind('.') + 1);  // "….linear_q.adapter."
    const Parameter& weight = *by_name.at(spec.row_lengths_of);
    const std::string fused = weight.name().substr(0, weight.name().rfind('.'));
    ops::ColumnRuns rows;
    for (const config::LayerPart& part : config::layer_parts(config.model, fused, weight.shape()[0]))
      if (part.path + ".adapter." == around) rows = {part.groups, part.begin, part.count};
    const Tensor squared = ops::squared_row_lengths(
        context, weight, *by_name.at(around + "linear_in.weight"), *by_name.at(around + "linear_out.weight"),
        static_cast<float>(config::adapter_scale(*config.peft)),
        spec.partial_over_tensor ? store.groups().tensor : nullptr, rows);
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
    CAPSTAN_ASSERT(shard.values.dtype() == DType::f32, "main parameters of adapters are fp32");
    shard.values.copy_from_host_bytes(std::as_bytes(values));
  }
  store.after_load();
}

}  // namespace capstan::train
