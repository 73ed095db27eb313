#include "train/trainer/setup.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "checkpoint/store.hpp"
#include "config/sections/adapter_targets.hpp"
#include "config/sections/data_sources.hpp"
#include "config/sections/pipeline_layout.hpp"
#include "data/gpt_dataset.hpp"
#include "data/sft_dataset.hpp"
#include "formats/external_model.hpp"
#include "kernels/table.hpp"
#include "nn/initialize.hpp"
#include "optim/optimizer.hpp"
#include "train/adapters/adapters.hpp"
#include "train/records/run_list.hpp"
#include "train/trainer/inputs.hpp"
#include "train/trainer/saver.hpp"
#include "train/trainer/shard_regions.hpp"

namespace capstan::train {

void check_device(config::DeviceKind kind) {
  if (kind == config::DeviceKind::cuda)
    fail(ErrorCode::unsupported, "train.device: cuda: this build has no CUDA backend",
         "train.device=cpu trains here; recipes for GPUs can be checked and shown without one");
  if (kind == config::DeviceKind::meta)
    fail(ErrorCode::unsupported,
         "train.device: meta: it has shapes and no memory, so that nothing could be learnt",
         "train.device=cpu");
}

int threads_per_rank(int64_t threads, int local_ranks) {
  return threads > 0 ? static_cast<int>(threads) : std::max(1, available_cores() / local_ranks);
}

std::unique_ptr<Device> make_device(config::DeviceKind kind, int64_t threads, int local_ranks) {
  check_device(kind);
  const int count = threads_per_rank(threads, local_ranks);
  if (kind == config::DeviceKind::checked) return make_checked_device(kernels::cpu_table(), count);
  return make_cpu_device(kernels::cpu_table(), count);
}

DType compute_type(const config::MixedPrecisionConfig& precision) {
  switch (precision.params_dtype) {
    case config::Precision::fp32:
      return DType::f32;
    case config::Precision::bf16:
      return DType::bf16;
    default:
      break;
  }
  fail(ErrorCode::unsupported, "mixed_precision.params_dtype: this build trains in fp32 and bf16",
       "mixed_precision=bf16_mixed");
}

namespace {
data::PreTokenizerChoice choice_of(config::PreTokenizer pre_tokenizer) {
  switch (pre_tokenizer) {
    case config::PreTokenizer::gpt2:
      break;
    case config::PreTokenizer::llama3:
      return data::PreTokenizerChoice::llama3;
    case config::PreTokenizer::qwen:
      return data::PreTokenizerChoice::qwen2;
  }
  return data::PreTokenizerChoice::gpt2;
}
}  // namespace

std::shared_ptr<const data::Tokenizer> load_tokenizer_files(const std::string& name) {
  if (name.starts_with("hf:")) return data::Tokenizer::load(name.substr(3));
  if (records::is_run(name))  // its checkpoints have it
    return data::Tokenizer::load(checkpoint::resolve_checkpoint(records::saved_in(name)).path.string());
  if (!interchange::is_external(name)) return data::Tokenizer::load(name);
  const auto files = interchange::ExternalModel::open(name)->assets();
  if (std::none_of(files.begin(), files.end(),
                   [](const auto& file) { return file.first == "tokenizer.json"; }))
    fail(ErrorCode::not_found, "`" + name + "` holds no tokenizer",
         "tokenizer.tokenizer_model=FILE, a tokenizer.json or a SentencePiece .model");
  return data::Tokenizer::from_texts(files, name);
}

std::string tokenizer_name(const config::TokenizerConfig& tokenizer) {
  switch (tokenizer.tokenizer_type) {
    case config::TokenizerKind::none:
      break;
    case config::TokenizerKind::byte:
      return "bytes";
    case config::TokenizerKind::huggingface:
    case config::TokenizerKind::sentencepiece:
      return tokenizer.tokenizer_model ? tokenizer.tokenizer_model->text : "";
    case config::TokenizerKind::gpt2_bpe:
      return tokenizer.vocab_file ? tokenizer.vocab_file->text : "";
  }
  return {};
}

std::shared_ptr<const data::Tokenizer> load_tokenizer(const config::Config& config) {
  const config::TokenizerConfig& t = config.tokenizer;
  std::shared_ptr<const data::Tokenizer> tokenizer;
  switch (t.tokenizer_type) {
    case config::TokenizerKind::none:
      return nullptr;
    case config::TokenizerKind::byte:
      tokenizer = data::byte_tokenizer();
      break;
    case config::TokenizerKind::huggingface:
    case config::TokenizerKind::sentencepiece:
      if (!t.tokenizer_model)
        fail(ErrorCode::config, "tokenizer.tokenizer_model is not given",
             "tokenizer.tokenizer_model=path/to/tokenizer.json");
      tokenizer = load_tokenizer_files(t.tokenizer_model->resolved);
      break;
    case config::TokenizerKind::gpt2_bpe: {
      if (!t.vocab_file || !t.merge_file)
        fail(ErrorCode::config, "tokenizer.vocab_file and tokenizer.merge_file are not both given");
      tokenizer = data::Tokenizer::load_pair(t.vocab_file->resolved, t.merge_file->resolved,
                                             choice_of(t.pre_tokenizer));
      break;
    }
  }
  if (config.model.vocab_size > 0 && tokenizer->vocab_size() > config.model.vocab_size)
    fail(ErrorCode::config,
         "the tokenizer has " + std::to_string(tokenizer->vocab_size()) + " tokens, the model's vocabulary " +
             std::to_string(config.model.vocab_size),
         "model.vocab_size=" + std::to_string(tokenizer->vocab_size()));
  return tokenizer;
}

namespace {
data::Blend blend_of(const std::vector<config::WeightedPrefix>& sources) {
  data::Blend result;
  for (const auto& source : sources) {
    result.prefixes.push_back(source.prefix);
    if (!source.weight) continue;
    if (!result.weights) result.weights.emplace();
    result.weights->push_back(*source.weight);
  }
  return result;
}

static_assert(static_cast<int>(config::SampleFormat::text) == static_cast<int>(data::SftFormat::text) &&
              static_cast<int>(config::LossMode::all) == static_cast<int>(data::SftLoss::all));
}  // namespace

std::optional<int32_t> end_of_document(const config::Config& config, const data::Tokenizer& tokenizer) {
  const auto named = tokenizer.id_of(config.tokenizer.eod_token);
  return named ? named : tokenizer.eod();
}

// A stored recipe has a directory before the name all the same.
bool names_known_template(const config::Path& chosen) {
  const std::filesystem::path text = chosen.text;
  const std::string name = text.filename().string();
  const auto known = data::chat::known_templates();
  return !std::filesystem::exists(chosen.resolved) && (text.is_absolute() || !text.has_parent_path()) &&
         std::any_of(known.begin(), known.end(), [&](const auto& one) { return one.name == name; });
}

std::shared_ptr<const data::chat::ChatTemplate> chat_template_of(const config::Config& config,
                                                                 const data::Tokenizer& tokenizer) {
  const auto& chosen = config.tokenizer.chat_template;
  if (!chosen) return data::own_chat_template(tokenizer);
  return data::chat::ChatTemplate::load(names_known_template(*chosen)
                                            ? std::filesystem::path(chosen->text).filename().string()
                                            : chosen->resolved);
}

data::SftOptions sft_options(const config::Config& config, const data::Tokenizer& tokenizer) {
  const config::DatasetConfig& d = config.dataset;
  const auto names = [](const std::vector<config::Path>& paths) {
    std::vector<std::string> result;
    for (const config::Path& path : paths) result.push_back(path.resolved);
    return result;
  };
  data::SftOptions options;
  options.train_files = names(d.train_files);
  options.valid_files = names(d.valid_files);
  options.test_files = names(d.test_files);
  if (d.split) options.split = *d.split;
  options.format = static_cast<data::SftFormat>(d.format);
  options.loss = static_cast<data::SftLoss>(d.loss_mode);
  options.packing = d.packing;
  options.truncate = d.too_long == config::TooLong::truncate;
  options.on_bad_line =
      d.on_bad_line == config::BadLine::skip ? data::OnBadLine::skip : data::OnBadLine::fail;
  options.max_train_samples = d.max_train_samples;
  options.sequence_length = config.model.seq_length;
  options.seed = static_cast<uint64_t>(d.random_seed);
  options.tokenizer = &tokenizer;
  if (config.tokenizer.chat_template) options.chat_template = chat_template_of(config, tokenizer);
  options.eod = end_of_document(config, tokenizer);
  options.threads = static_cast<int>(config.train.threads.value_or(0));
  return options;
}

// Megatron's order depends on how many samples each split will be asked for: those that Megatron-LM would ask for.
static void set_megatron_order(const config::Config& config, data::GptDatasetOptions& options) {
  int64_t steps = 0;
  if (config.train.epochs && !config.train.train_iters) {
    data::GptDatasetOptions counted = options;  // an epoch has as many samples in either order
    counted.wanted = {data::Wanted::yes, data::Wanted::no, data::Wanted::no};
    steps = steps_of_epochs(config, *data::build_gpt_datasets(counted)[0]);
  } else {
    steps = total_iterations(config);
  }
  const auto& v = config.validation;
  const int64_t batch = *config.train.global_batch_size,
                eval_batch = v.eval_global_batch_size.value_or(batch);
  options.order = data::DataOrder::megatron;
  options.num_samples[0] = checked_mul(steps, batch);
  if (v.eval_interval)
    options.num_samples[1] = checked_mul(checked_mul(steps / *v.eval_interval + 1, v.eval_iters), eval_batch);
  options.num_samples[2] = checked_mul(v.eval_iters, eval_batch);
}

std::array<std::shared_ptr<const data::Dataset>, 3> open_datasets(const config::Config& config,
                                                                  const data::Tokenizer* tokenizer) {
  const config::DatasetConfig& d = config.dataset;
  std::array<std::shared_ptr<const data::Dataset>, 3> result;
  if (d.kind == config::DatasetKind::sft) {
    CAPSTAN_ASSERT(tokenizer, "fine-tuning data without a tokenizer, which the rules refuse");
    data::SftOptions options = sft_options(config, *tokenizer);
    // Files that only an evaluation would read; beside others `split` is not used.
    if (!config.validation.eval_interval && (!options.valid_files.empty() || !options.test_files.empty())) {
      options.valid_files.clear(), options.test_files.clear();
      options.split = "1,0,0";
    }
    const auto splits = data::build_sft_datasets(options);
    if (config.validation.eval_interval && !splits[1])
      fail(ErrorCode::failed, "the validation split has no sample",
           "a larger share, as in dataset.split=90,10,0; files in dataset.valid_files; or "
           "validation.eval_interval=null");
    std::copy(splits.begin(), splits.end(), result.begin());
    return result;
  }
  data::GptDatasetOptions options;
  options.sequence_length = config.model.seq_length;
  options.seed = static_cast<uint64_t>(d.random_seed);
  options.vocab_size = config.model.vocab_size;
  options.tokenizer = tokenizer;
  options.tokenizer_name = tokenizer_name(config.tokenizer);
  options.mock = d.kind == config::DatasetKind::mock;
  if (!options.mock) {
    const config::DataSources sources = config::data_sources(d);
    if (sources.shares) {
      options.blend = blend_of(sources.splits[0]);
      if (d.split) options.split = *d.split;
    } else {
      for (size_t i = 0; i < 3; ++i) options.blend_per_split[i] = blend_of(sources.splits[i]);
    }
  }
  const bool evaluated = config.validation.eval_interval.has_value();
  const bool own_test = !d.test_blend.empty();
  options.wanted = {data::Wanted::yes, evaluated ? data::Wanted::yes : data::Wanted::no,
                    !evaluated || options.mock ? data::Wanted::no
                    : own_test                 ? data::Wanted::yes
                                               : data::Wanted::if_possible};
  if (d.path_to_cache) options.cache = d.path_to_cache->resolved;
  options.documents.reset_position_ids = d.reset_position_ids;
  options.documents.reset_attention_mask = d.reset_attention_mask;
  options.documents.eod_mask_loss = d.eod_mask_loss;
  if (tokenizer) options.documents.eod = end_of_document(config, *tokenizer);
  if (d.sample_order == config::SampleOrder::megatron && !options.mock) set_megatron_order(config, options);
  const auto splits = data::build_gpt_datasets(options);
  std::copy(splits.begin(), splits.end(), result.begin());
  return result;
}

std::map<std::string, int64_t> sent_bytes(const comm::Mesh& mesh) {
  std::map<std::string, int64_t> sent;
  for (const std::string& group : mesh.group_names()) sent[group] = mesh.group(group).sent();
  return sent;
}

comm::MeshSizes mesh_sizes(const config::Config& config, int64_t world) {
  const config::DistConfig& d = config.dist;
  const int64_t tp = d.tensor_model_parallel_size, groups = config.model.num_query_groups.value_or(tp);
  return {.world = world,
          .tp = tp,
          .cp = d.context_parallel_size,
          .pp = d.pipeline_model_parallel_size,
          .experts = config.model.num_moe_experts.has_value(),
          .ep = d.expert_model_parallel_size,
          .etp = d.expert_tensor_parallel_size.value_or(tp),
          .pp_before_dp = d.use_tp_pp_dp_mapping,
          .hierarchical_cp = d.hierarchical_context_parallel_sizes,
          .optimizer_instances = config.ddp.num_distributed_optimizer_instances,
          .kv_sharers = groups > 0 && tp % groups == 0 ? tp / groups : 1};
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
}  // namespace

namespace {
nn::AdapterOptions::First first_of(config::LoraInit init) {
  switch (init) {
    case config::LoraInit::xavier:
      return nn::AdapterOptions::First::xavier;
    case config::LoraInit::kaiming:
      return nn::AdapterOptions::First::kaiming;
    case config::LoraInit::normal:
      return nn::AdapterOptions::First::normal;
    case config::LoraInit::zero:
      break;
  }
  return nn::AdapterOptions::First::zero;
}

std::shared_ptr<const nn::AdapterOptions> adapter_options(const config::PeftConfig& peft) {
  auto options = std::make_shared<nn::AdapterOptions>();
  options->adapts = [peft](std::string_view path) { return config::adapts(peft, path); };
  options->rank = peft.dim;
  options->scale = config::adapter_scale(peft);
  options->dropout = peft.dropout;
  options->parts = config::adapts_parts(peft.scheme);
  options->magnitudes = config::has_magnitudes(peft.scheme);
  options->a = first_of(peft.lora_a_init);
  options->b = first_of(peft.lora_b_init);
  return options;
}
}  // namespace

models::ModelShard model_shard(const config::Config& config, const comm::Mesh& mesh) {
  models::ModelShard part;
  if (config.peft) part.adapters = adapter_options(*config.peft);
  part.parallel.tensor = tensor_parallel(config, mesh);
  ops::ContextParallel& context = part.parallel.context;
  context.group = &mesh.group("cp");
  if (!config.dist.hierarchical_context_parallel_sizes.empty())
    context.inner = &mesh.group("cp-inner"), context.outer = &mesh.group("cp-outer");
  const auto& exchanges = config.dist.cp_comm_type;
  if (exchanges.size() == 1) context.exchange = exchange_of(exchanges[0]);
  if (exchanges.size() > 1)
    for (const auto type : exchanges) part.parallel.exchange_of_layer.push_back(exchange_of(type));
  const auto stages = config::pipeline_stages(config);
  CAPSTAN_ASSERT(stages, "a pipeline split that the rules have let pass");
  int64_t layer = 0;
  for (size_t i = 0; i < stages->size(); ++i) {
    const config::PipelineStage& stage = (*stages)[i];
    if (static_cast<int64_t>(i) % mesh.size(comm::Axis::pp) == mesh.index(comm::Axis::pp))
      part.stages.push_back({layer, stage.layers, stage.embedding, stage.loss});
    layer += stage.layers;
  }
  return part;
}

int64_t micro_batches_of(const config::Config& config, const comm::Mesh& mesh) {
  return *config.train.global_batch_size / (config.train.micro_batch_size * mesh.size(comm::Axis::dp));
}

parallel::PipelineShape pipeline_shape(const config::Config& config, int64_t micro_batches) {
  const config::DistConfig& d = config.dist;
  return {.ranks = d.pipeline_model_parallel_size,
          .chunks = d.virtual_pipeline_model_parallel_size.value_or(1),
          .micro_batches = micro_batches,
          .group = d.microbatch_group_size_per_vp_stage.value_or(d.pipeline_model_parallel_size),
          .all_forward_first = d.pipeline_schedule == config::PipelineSchedule::gpipe};
}

parallel::FlatStore::Options store_options(const config::Config& config) {
  parallel::FlatStore::Options options;
  options.compute = compute_type(config.mixed_precision);
  options.reduce = config.mixed_precision.grad_reduce_in_fp32 ? DType::f32 : options.compute;
  options.sharding = config.ddp.data_parallel_sharding_strategy;
  options.shard_over_replicas = config.ddp.outer_dp_sharding_strategy != config::ShardingStrategy::no_shard;
  options.overlap_grad_reduce = config.ddp.overlap_grad_reduce;
  options.overlap_param_gather = config.ddp.overlap_param_gather;
  options.decay_qk_norm = config.optimizer.apply_wd_to_qk_layernorm;
  if (config.peft) {
    options.trains = [](const Parameter& parameter) { return parameter.spec().adapter; };
    options.second_factor_lr = config.peft->lora_plus_ratio.value_or(1);
    quantize_base(*config.peft, config.model, options);
  }
  if (config.ddp.bucket_size) options.bucket_elements = *config.ddp.bucket_size;
  return options;
}

parallel::StoreGroups store_groups(const comm::Mesh& mesh) {
  parallel::StoreGroups groups;
  groups.shard = &mesh.group("shard");
  groups.replica = &mesh.group("replica");
  groups.tensor = &mesh.group("tp");
  if (mesh.shares_keys()) groups.kv_replicas = &mesh.group("tp-kv");
  groups.embedding = &mesh.group("embedding");
  groups.model = &mesh.group("tp-pp");
  return groups;
}

namespace {
// The rectangle as a part of the matrix that nn::initialize sees: its elements follow one another there.
nn::InitRegion as_matrix(const checkpoint::Region& where, const Shape& global) {
  if (where.rank() == 0) return {0, 1, 0, 1};
  nn::InitRegion part{where.offsets[0], where.sizes[0], 0, 1};
  for (size_t d = 1; d < where.rank(); ++d) {
    part.column = part.column * global[static_cast<int>(d)] + where.offsets[d];
    part.columns *= where.sizes[d];
  }
  return part;
}
}  // namespace

void initialize_parameters(parallel::FlatStore& store, uint64_t seed, ThreadPool& pool) {
  store.before_load();
  std::vector<float> values;
  const auto make = [&](const Parameter& parameter, const parallel::FlatRange& range) {
    const ParamSpec& spec = parameter.spec();
    values.resize(static_cast<size_t>(range.count));
    for (const ShardRegion& part : shard_regions(spec.shape, parameter.shard(), range))
      nn::initialize(spec, seed, as_matrix(part.where, spec.shape),
                     std::span(values).subspan(static_cast<size_t>(part.elements.begin - range.begin),
                                               static_cast<size_t>(part.elements.count)),
                     pool);
  };
  for (const auto& piece : store.parameter_shards())
    for (const parallel::FlatRange& range : chunks_of(piece.range)) {
      make(*piece.parameter, range);
      const Tensor target =
          piece.values.flat_range(range.begin - piece.range.begin, range.count, {range.count});
      if (target.dtype() == DType::f32) {
        target.copy_from_host_bytes(std::as_bytes(std::span(values)));
      } else {
        const std::vector<bf16> rounded(values.begin(), values.end());
        target.copy_from_host_bytes(std::as_bytes(std::span(rounded)));
      }
    }
  for (const auto& parameter : store.parameters()) {
    if (!store.quantized(*parameter)) continue;
    make(*parameter, {0, parameter->shape().elements()});
    store.set_quantized(*parameter, values);
  }
  store.after_load();
}

int64_t total_iterations(const config::Config& config) {
  if (config.train.train_iters) return *config.train.train_iters;
  if (config.train.train_samples) return *config.train.train_samples / *config.train.global_batch_size;
  fail(ErrorCode::config,
       config.train.epochs ? "the length of the run, train.epochs, is not known before its data is opened"
                           : "none of train.train_iters, train.train_samples and train.epochs is given",
       "train.train_iters=1000");
}

int64_t steps_of_epochs(const config::Config& config, const data::Dataset& data) {
  CAPSTAN_ASSERT(config.train.epochs, "a run whose length is given in passes");
  if (data.epoch_samples() == data::SampleSource::kEndless)
    fail(ErrorCode::config, "train.epochs counts passes over data, and generated data has no end",
         "train.train_iters=100 train.epochs=null");
  return ceil_div(data.samples_in(*config.train.epochs), *config.train.global_batch_size);
}

int64_t total_iterations_of_data(const config::Config& config) {
  if (!config.train.epochs || config.train.train_iters) return total_iterations(config);
  config::Config counted = config;
  counted.validation.eval_interval.reset();  // the training split alone
  counted.dataset.sample_order =
      config::SampleOrder::capstan;  // an epoch has as many samples in either order
  require_files(missing_files(counted));
  std::shared_ptr<const data::Tokenizer> tokenizer;
  if (counted.dataset.kind != config::DatasetKind::mock) tokenizer = load_tokenizer(counted);
  const auto datasets = open_datasets(counted, tokenizer.get());
  if (!datasets[0]) fail(ErrorCode::config, "dataset.split gives the training data no share");
  return steps_of_epochs(config, *datasets[0]);
}

optim::Schedule make_schedule(const config::Config& config, bool decoupled) {
  const config::SchedulerConfig& s = config.scheduler;
  const config::OptimizerConfig& o = config.optimizer;
  const int64_t batch = *config.train.global_batch_size, all_samples = total_iterations(config) * batch;
  const auto samples = [&](const std::optional<int64_t>& in_samples, const std::optional<int64_t>& iters,
                           int64_t otherwise) {
    return in_samples ? *in_samples : iters ? *iters * batch : otherwise;
  };
  optim::ScheduleOptions options;
  options.style = s.lr_decay_style;
  options.wsd_style = s.lr_wsd_decay_style;
  options.max_lr = decoupled ? o.decoupled_lr.value_or(o.lr) : o.lr;
  options.min_lr = (decoupled ? o.decoupled_min_lr : o.min_lr).value_or(0.0);
  options.init_lr = s.lr_warmup_init;
  options.decay_samples = samples(s.lr_decay_samples, s.lr_decay_iters, all_samples);
  const int64_t by_fraction = s.lr_warmup_fraction
                                  ? static_cast<int64_t>(std::llround(
                                        *s.lr_warmup_fraction * static_cast<double>(options.decay_samples)))
                                  : 0;
  options.warmup_samples = samples(s.lr_warmup_samples, s.lr_warmup_iters, by_fraction);
  const int64_t wsd_by_fraction =
      s.lr_wsd_decay_fraction ? static_cast<int64_t>(std::llround(*s.lr_wsd_decay_fraction *
                                                                  static_cast<double>(options.decay_samples)))
                              : 0;
  options.wsd_decay_samples = samples(s.lr_wsd_decay_samples, s.lr_wsd_decay_iters, wsd_by_fraction);
  options.weight_decay_style = s.weight_decay_incr_style;
  options.weight_decay_samples = all_samples;
  options.start_weight_decay = s.start_weight_decay.value_or(o.weight_decay);
  options.end_weight_decay = s.end_weight_decay.value_or(o.weight_decay);
  return optim::Schedule(options);
}

std::vector<int64_t> ContextShard::positions(int64_t seq) const {
  std::vector<int64_t> result;
  for (const kernels::PositionRun& run : ops::context_rows(ranks, rank, seq).runs)
    for (int64_t p = run.begin; p < run.end(); ++p) result.push_back(p);
  return result;
}

double loss_tokens(const data::MicroBatch& batch, ContextShard cut) {
  double sum = 0;
  const auto positions = cut.positions(batch.sequence_length);
  for (int64_t row = 0; row < batch.rows; ++row)
    for (const int64_t p : positions)
      sum += static_cast<double>(batch.loss_mask[static_cast<size_t>(row * batch.sequence_length + p)]);
  return sum;
}

models::Batch upload(Device& device, const data::MicroBatch& batch, bool row_ids, ContextShard cut) {
  const int64_t seq = batch.sequence_length;
  const std::vector<int64_t> here = cut.positions(seq);
  models::Batch result;
  result.batch = batch.rows;
  result.seq = static_cast<int64_t>(here.size());
  result.positions_end = seq;
  const int64_t n = result.batch * result.seq;
  CategoryScope scope(MemoryCategory::data);
  // value_of(sequence, position in it), for every token of this rank.
  const auto on_device = [&]<class T>(T, const auto& value_of) {
    std::vector<T> values;
    values.reserve(static_cast<size_t>(n));
    for (int64_t row = 0; row < batch.rows; ++row)
      for (const int64_t p : here) values.push_back(static_cast<T>(value_of(row, p)));
    return Tensor::from_host<T>(device, {n}, std::span<const T>(values));
  };
  const auto of = [&](const auto& all) {
    return [&all, seq](int64_t row, int64_t p) { return all[static_cast<size_t>(row * seq + p)]; };
  };
  result.tokens = on_device(int32_t{}, of(batch.tokens));
  result.labels = on_device(int32_t{}, of(batch.labels));
  result.loss_mask = on_device(float{}, of(batch.loss_mask));
  result.positions = on_device(int32_t{}, of(batch.position_ids));
  const bool packed = std::any_of(batch.cu_seqlens.begin(), batch.cu_seqlens.end(),
                                  [](const auto& c) { return c.size() > 2; });
  if (packed)
    result.document_start = on_device(int32_t{}, [&](int64_t row, int64_t p) {
      const auto& bounds = batch.cu_seqlens[static_cast<size_t>(row)];
      return *(std::upper_bound(bounds.begin(), bounds.end(), static_cast<int32_t>(p)) - 1);
    });
  // (consumed-sample number, position in the sample): the same on every layout. 2^24 positions, 2^39 samples.
  if (row_ids)
    result.row_ids = on_device(int64_t{}, [&](int64_t row, int64_t p) {
      return static_cast<int64_t>(batch.sample_ids[static_cast<size_t>(row)] << 24) + p;
    });
  return result;
}

}  // namespace capstan::train
