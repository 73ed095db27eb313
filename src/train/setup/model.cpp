#include "train/setup/model.hpp"

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "config/sections/adapter_targets.hpp"
#include "config/sections/pipeline_layout.hpp"
#include "nn/initialize.hpp"
#include "tensor/region.hpp"
#include "train/setup/device.hpp"
#include "train/setup/shard_regions.hpp"

namespace capstan::train {

DType compute_type(const config::MixedPrecisionConfig& precision) {
  switch (precision.params_dtype) {
    case config::Precision::fp32:
      return DType::f32;
    case config::Precision::bf16:
      return DType::bf16;
    case config::Precision::fp16:
      break;
  }
  return DType::f16;
}

// The pipeline ranks that hold a table of embeddings: those of the first stage and of multi-token prediction,
// with `head` also that of the output layer, which is tied.
static std::vector<int64_t> embedding_ranks(const config::Config& config, bool head) {
  const auto stages = config::pipeline_stages(config);
  const std::vector<int64_t> ranks = config::stage_ranks(config.dist);
  std::vector<int64_t> holders;
  for (size_t i = 0; stages && i < std::min(stages->size(), ranks.size()); ++i) {
    const config::PipelineStage& stage = (*stages)[i];
    if (!stage.embedding && stage.mtp_layers == 0 && !(head && stage.loss)) continue;
    if (std::ranges::find(holders, ranks[i]) == holders.end()) holders.push_back(ranks[i]);
  }
  return holders;
}

comm::MeshSizes mesh_sizes(const config::Config& config, int64_t world) {
  const config::DistConfig& d = config.dist;
  const int64_t tp = d.tensor_model_parallel_size, groups = config.model.num_query_groups.value_or(tp);
  const bool positions = config.model.position_embedding_type == config::PositionEmbedding::learned_absolute;
  return {.world = world,
          .tp = tp,
          .cp = d.context_parallel_size,
          .pp = d.pipeline_model_parallel_size,
          .experts = config.model.num_moe_experts.has_value(),
          .ep = d.expert_model_parallel_size,
          .etp = d.expert_tensor_parallel_size.value_or(tp),
          .pp_before_dp = d.use_tp_pp_dp_mapping,
          .hierarchical_cp =
              d.context_parallel_size > 1 ? d.hierarchical_context_parallel_sizes : std::vector<int64_t>{},
          .optimizer_instances = config.ddp.num_distributed_optimizer_instances,
          .kv_replicas = groups > 0 && tp % groups == 0 ? tp / groups : 1,
          .stage_ranks = config::stage_ranks(d),
          .embedding_ranks = embedding_ranks(config, config.model.share_embeddings_and_output_weights),
          .position_ranks = positions ? embedding_ranks(config, false) : std::vector<int64_t>()};
}

std::map<std::string, int64_t> sent_bytes(const comm::Mesh& mesh) {
  std::map<std::string, int64_t> sent;
  for (const std::string& group : mesh.group_names()) {
    const std::string counted =
        group.starts_with("pp-") ? "pp" : comm::Mesh::repeated_group(group).value_or(group);
    sent[counted] += mesh.group(group).sent_bytes() + mesh.group(group).channel().sent_bytes();
  }
  return sent;
}

ops::TensorParallel tensor_parallel(const config::Config& config, const comm::Mesh& mesh) {
  const config::CommOverlapConfig& overlap = config.comm_overlap;
  return {&mesh.group("tp"), config.dist.sequence_parallel,
          overlap.tp_comm_overlap ? overlap.tp_comm_num_splits : 1};
}

namespace {
ops::ContextExchange exchange_of(config::CpCommType type) {
  switch (type) {
    case config::CpCommType::p2p:
      break;
    case config::CpCommType::all_gather:
      return ops::ContextExchange::all_gather;
    case config::CpCommType::a2a:
      return ops::ContextExchange::a2a;
    case config::CpCommType::a2a_p2p:
      return ops::ContextExchange::a2a_p2p;
  }
  return ops::ContextExchange::p2p;
}

nn::AdapterOptions::InitialValues initial_values_of(config::LoraInit init) {
  switch (init) {
    case config::LoraInit::xavier:
      return nn::AdapterOptions::InitialValues::xavier;
    case config::LoraInit::kaiming:
      return nn::AdapterOptions::InitialValues::kaiming;
    case config::LoraInit::normal:
      return nn::AdapterOptions::InitialValues::normal;
    case config::LoraInit::zero:
      break;
  }
  return nn::AdapterOptions::InitialValues::zero;
}

std::shared_ptr<const nn::AdapterOptions> adapter_options(const config::PeftConfig& peft) {
  auto options = std::make_shared<nn::AdapterOptions>();
  options->adapts = [peft](std::string_view path) { return config::adapts(peft, path); };
  options->rank = peft.dim;
  options->scale = config::adapter_scale(peft);
  options->dropout = peft.dropout;
  options->split_fused = config::adapts_parts(peft.scheme);
  options->magnitudes = config::has_magnitudes(peft.scheme);
  options->a = initial_values_of(peft.lora_a_init);
  options->b = initial_values_of(peft.lora_b_init);
  return options;
}
}  // namespace

models::ModelShard model_shard(const config::Config& config, const comm::Mesh& mesh) {
  models::ModelShard shard;
  if (config.peft) shard.adapters = adapter_options(*config.peft);
  shard.parallel.tensor = tensor_parallel(config, mesh);
  shard.parallel.data = &mesh.group("dp-cp");
  if (mesh.has_experts())
    shard.parallel.experts = {&mesh.group("ep"), &mesh.group("etp"), &mesh.group("etp-ep")};
  ops::ContextParallel& context = shard.parallel.context;
  context.group = &mesh.group("cp");
  if (config.dist.context_parallel_size > 1 && !config.dist.hierarchical_context_parallel_sizes.empty())
    context.inner = &mesh.group("cp-inner"), context.outer = &mesh.group("cp-outer");
  const auto& exchanges = config.dist.cp_comm_type;
  if (exchanges.size() == 1) context.exchange = exchange_of(exchanges[0]);
  if (exchanges.size() > 1)
    for (const auto type : exchanges) shard.parallel.exchange_of_layer.push_back(exchange_of(type));
  // Multi-token prediction has layers of the last layer's kind after it.
  if (auto& of_layer = shard.parallel.exchange_of_layer; !of_layer.empty())
    of_layer.resize(of_layer.size() + static_cast<size_t>(config.model.mtp_num_layers.value_or(0)),
                    of_layer.back());
  const auto stages = config::pipeline_stages(config);
  CAPSTAN_ASSERT(stages, "a pipeline split that the rules have let pass");
  const std::vector<int64_t> ranks = config::stage_ranks(config.dist);
  int64_t layer = 0, mtp_layer = 0;
  for (size_t i = 0; i < stages->size(); ++i) {
    const config::PipelineStage& stage = (*stages)[i];
    // A model that is read without its layers for multi-token prediction keeps the layout of its training.
    const int64_t mtp_layers = config.model.mtp_num_layers ? stage.mtp_layers : 0;
    if (ranks.at(i) == mesh.index(comm::Axis::pp))
      shard.stages.push_back({layer, stage.layers, stage.embedding, stage.loss, mtp_layers, mtp_layer});
    layer += stage.layers, mtp_layer += mtp_layers;
  }
  return shard;
}

int64_t micro_batches_of(const config::Config& config, const comm::Mesh& mesh) {
  return *config.train.global_batch_size / (config.train.micro_batch_size * mesh.size(comm::Axis::dp));
}

parallel::PipelineShape pipeline_shape(const config::Config& config, int64_t micro_batches) {
  const config::DistConfig& d = config.dist;
  const bool pipelined = d.pipeline_model_parallel_size > 1;
  return {.ranks = d.pipeline_model_parallel_size,
          .chunks = d.virtual_pipeline_model_parallel_size.value_or(1),
          .micro_batches = micro_batches,
          .group = d.microbatch_group_size_per_vp_stage.value_or(d.pipeline_model_parallel_size),
          .order =
              pipelined && d.pipeline_schedule ? *d.pipeline_schedule : config::PipelineSchedule::one_f_one_b,
          .stage_ranks = config::stage_ranks(d)};
}

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

namespace {

ScalingRecipe recipe_of(const config::MixedPrecisionConfig& precision) {
  if (precision.fp4) return ScalingRecipe::nvfp4;
  switch (precision.fp8_recipe) {
    case config::Fp8Recipe::delayed:
      return ScalingRecipe::delayed;
    case config::Fp8Recipe::mxfp8:
      return ScalingRecipe::mxfp8;
    case config::Fp8Recipe::blockwise:
      return ScalingRecipe::blockwise;
    case config::Fp8Recipe::tensorwise:
      break;
  }
  return ScalingRecipe::tensorwise;
}

parallel::LowPrecisionOptions low_precision_options(const config::MixedPrecisionConfig& precision,
                                                    int64_t layers, int64_t seed) {
  parallel::LowPrecisionOptions options;
  options.seed = static_cast<uint64_t>(seed);
  if (!precision.fp8 && !precision.fp4) return options;
  options.format.recipe = recipe_of(precision);
  options.format.forward = precision.fp4 ? DType::f4e2m1x2 : DType::f8e4m3;
  options.format.gradient =
      precision.fp8 == config::Fp8Format::hybrid ? DType::f8e5m2 : options.format.forward;
  options.format.weight_gradient = precision.fp4 || precision.fp8_wgrad;
  options.history_length = precision.fp8_amax_history_len;
  options.maximum_of_history = precision.fp8_amax_compute_algo == config::Fp8AmaxAlgo::max;
  options.margin = precision.fp8_margin;
  const bool edges = precision.first_last_layers_bf16;
  const int64_t first = edges ? precision.num_layers_at_start_in_bf16 : 0,
                last = layers - (edges ? precision.num_layers_at_end_in_bf16 : 0);
  // Layers of multi-token prediction come after the last layer; as in Megatron, their GEMMs are in 8 bits,
  // and with FP4 in bf16.
  const bool mtp = !precision.fp4;
  options.covers = [first, last, layers, mtp](const Parameter& parameter) {
    const ParamSpec& spec = parameter.spec();
    return spec.linear && spec.layer >= first && (spec.layer < last || (mtp && spec.layer >= layers));
  };
  return options;
}

}  // namespace

// The parameters that Muon updates: weight matrices other than embeddings and the output layer; each expert's
// matrix is one. The rows are those of the queries, the keys and the values of one group of heads, where a
// matrix packs them.
static std::function<std::optional<std::vector<int64_t>>(const Parameter&)> muon_matrices(
    const config::Config& config) {
  std::vector<int64_t> qkv;
  if (const auto& m = config.model; config.optimizer.muon_split_qkv)
    qkv = {m.num_attention_heads / *m.num_query_groups * *m.kv_channels, *m.kv_channels, *m.kv_channels};
  return [qkv](const Parameter& parameter) -> std::optional<std::vector<int64_t>> {
    const std::string& name = parameter.name();
    const bool experts = parameter.spec().grid() == ParameterGrid::expert;
    if (parameter.spec().shape.rank() != (experts ? 3 : 2)) return std::nullopt;
    for (const char* other : {"word_embeddings.weight", "position_embeddings.weight", "output_layer.weight"})
      if (name.ends_with(other)) return std::nullopt;
    return name.ends_with(".linear_qkv.weight") ? qkv : std::vector<int64_t>();
  };
}

parallel::FlatStore::Options store_options(const config::Config& config, int rank) {
  parallel::FlatStore::Options options;
  options.compute = compute_type(config.mixed_precision);
  if (config.optimizer.main_params_dtype == config::Precision::bf16) options.main = DType::bf16;
  if (config.optimizer.main_grads_dtype == config::Precision::bf16) options.main_grads = DType::bf16;
  options.reduce = config.mixed_precision.grad_reduce_in_fp32 ? DType::f32 : options.compute;
  options.sharding = config.ddp.data_parallel_sharding_strategy;
  options.shard_over_replicas = config.ddp.outer_dp_sharding_strategy != config::ShardingStrategy::no_shard;
  options.overlap_grad_reduce = config.ddp.overlap_grad_reduce;
  options.overlap_param_gather = config.ddp.overlap_param_gather;
  if (config.optimizer.optimizer == config::OptimizerKind::muon) options.matrix = muon_matrices(config);
  options.decay_qk_norm = config.optimizer.apply_wd_to_qk_layernorm;
  if (config.optimizer.optimizer_cpu_offload)
    options.offload_fraction = config.optimizer.optimizer_offload_fraction;
  if (const auto& directory = config.optimizer.optimizer_offload_path) {
    options.state_directory = directory->resolved;
    options.chunk_elements = config.optimizer.optimizer_offload_chunk_size;
    options.state_owner = "rank " + std::to_string(rank);
  }
  if (config.peft) {
    options.trainable = [](const Parameter& parameter) { return parameter.spec().adapter; };
    options.lora_b_lr_ratio = config.peft->lora_plus_ratio.value_or(1);
    quantize_base(*config.peft, config.model, options);
  }
  options.gather_codes = config.mixed_precision.fp8 && config.mixed_precision.fp8_param_gather;
  options.low_precision =
      low_precision_options(config.mixed_precision, config.model.num_layers, config.rng.seed);
  if (config.ddp.bucket_size) options.bucket_elements = *config.ddp.bucket_size;
  return options;
}

parallel::StoreGroups store_groups(const comm::Mesh& mesh) {
  parallel::StoreGroups groups;
  groups.dense = {.shard = &mesh.group("shard"),
                  .replica = &mesh.group("replica"),
                  .tensor = &mesh.group("tp-gradients"),
                  .model = &mesh.group("tp-pp")};
  if (mesh.has_experts())
    groups.expert = {.shard = &mesh.group("expert-shard"),
                     .replica = &mesh.group("expert-replica"),
                     .tensor = &mesh.group("etp-gradients"),
                     .model = &mesh.group("etp-ep-pp")};
  if (mesh.has_kv_replicas()) groups.kv_replicas = &mesh.group("tp-kv");
  groups.embedding = &mesh.group("embedding");
  groups.position_embedding = &mesh.group("position_embedding");
  return groups;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const config::Config& config, Device& device,
                                                 const parallel::FlatStore& store) {
  return optim::build(config.optimizer, device, store.flat_buffers(), static_cast<uint64_t>(config.rng.seed));
}

void initialize_parameters(parallel::FlatStore& store, uint64_t seed, ThreadPool& pool) {
  store.before_load();
  std::vector<float> values;
  std::vector<std::byte> rounded;
  const auto make = [&](const Parameter& parameter, const FlatRange& range) {
    const ParamSpec& spec = parameter.spec();
    values.resize(static_cast<size_t>(range.count));
    for (const ShardRegion& region : shard_regions(spec.shape, parameter.shard(), range))
      nn::initialize(spec, seed, region.where,
                     std::span(values).subspan(static_cast<size_t>(region.elements.begin - range.begin),
                                               static_cast<size_t>(region.elements.count)),
                     pool);
  };
  for (const auto& shard : store.parameter_shards()) {
    for (const FlatRange& range : chunks_of(shard.range)) {
      make(*shard.parameter, range);
      const Tensor target =
          shard.values().flat_range(range.begin - shard.range.begin, range.count, {range.count});
      if (target.dtype() == DType::f32) {
        target.copy_from_host_bytes(std::as_bytes(std::span(values)));
      } else {
        rounded.resize(static_cast<size_t>(target.bytes()));
        constexpr int64_t kTile = 1 << 14;
        pool.parallel_for(ceil_div(range.count, kTile), [&](int64_t tile, int) {
          const int64_t begin = tile * kTile;
          const Region part = full_region({std::min(kTile, range.count - begin)});
          copy_region(part, part, reinterpret_cast<const std::byte*>(values.data() + begin), DType::f32, part,
                      rounded.data() + begin * size_of(target.dtype()), target.dtype());
        });
        target.copy_from_host_bytes(rounded);
      }
    }
    shard.set_changed();
  }
  for (const auto& parameter : store.parameters()) {
    if (!store.quantized(*parameter)) continue;
    make(*parameter, {0, parameter->shape().elements()});
    store.set_quantized(*parameter, values);
  }
  store.after_load();
}

}  // namespace capstan::train
