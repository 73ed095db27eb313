#include "train/inference/loaded_model.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/json.hpp"
#include "checkpoint/reader.hpp"
#include "config/core/external.hpp"
#include "config/sections/pipeline_layout.hpp"
#include "parallel/pipeline.hpp"
#include "train/adapters/adapters.hpp"
#include "train/adapters/base_model.hpp"
#include "train/adapters/stored_adapters.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/setup/state.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/setup/transport.hpp"
#include "train/trainer/agreement.hpp"
#include "train/trainer/device_batch.hpp"

namespace capstan::train {

namespace {

// The forward pass of one micro-batch through this rank's stages.
class ForwardPass final : public parallel::StageComputation {
 public:
  using Stage = FunctionRef<Tensor(int64_t chunk, const Tensor& hidden_states)>;
  ForwardPass(Device& device, Shape hidden_states, DType type, Stage stage)
      : device_(device), hidden_states_(hidden_states), type_(type), stage_(stage) {}

  Tensor make_input(const parallel::PipelineAction&) override {
    return Tensor::empty(device_, hidden_states_, type_);
  }
  Tensor forward(int64_t, int64_t chunk, const Tensor& hidden_states) override {
    return stage_(chunk, hidden_states);
  }
  Tensor backward(int64_t, int64_t, const Tensor&) override {
    fail(ErrorCode::internal, "a backward pass through a model that does not train");
  }

 private:
  Device& device_;
  Shape hidden_states_;
  DType type_;
  Stage stage_;
};

// The ids at which the model's own settings end a text.
std::vector<int32_t> end_tokens_of(const BaseModel& weights) {
  const formats::Assets files = weights.assets();
  for (const char* name : {"generation_config.json", "config.json"}) {
    const auto file =
        std::find_if(files.begin(), files.end(), [&](const auto& f) { return f.first == name; });
    if (file == files.end()) continue;
    const std::string location = "`" + weights.path() + "`: " + name;
    const auto json = json_of(file->second, IfNotJson::discard);
    if (!json.is_object()) fail(ErrorCode::format, location + " is not a JSON object");
    const auto found = json.find("eos_token_id");
    std::vector<int32_t> ids;
    if (found == json.end() || found->is_null()) return ids;
    for (const auto& id : found->is_array() ? *found : Json::array({*found})) {
      if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > INT32_MAX)
        fail(ErrorCode::format, location + ": `eos_token_id` is neither an id nor a list of ids");
      ids.push_back(id.get<int32_t>());
    }
    return ids;
  }
  return {};
}

bool holds_adapters(const BaseModel& weights) {
  if (!weights.checkpoint()) return false;
  const auto names = weights.checkpoint()->names();
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& name) { return name.find(".adapter.") != std::string::npos; });
}

// True where a run on mock data names files of a tokenizer that do not exist: training has not read them.
bool never_had_tokenizer(const config::Config& config) {
  if (config.dataset.kind != config::DatasetKind::mock) return false;
  const config::TokenizerConfig& t = config.tokenizer;
  for (const auto* path : {&t.tokenizer_model, &t.vocab_file, &t.merge_file}) {
    std::error_code unknown;
    if (*path && !std::filesystem::exists(config::split_scheme((*path)->resolved).path, unknown)) return true;
  }
  return false;
}

}  // namespace

const text::Tokenizer& LoadedModel::require_tokenizer() const {
  if (tokenizer_) return *tokenizer_;
  const bool mock = config_.dataset.kind == config::DatasetKind::mock;
  fail(ErrorCode::unsupported,
       std::string("the checkpoint has no tokenizer") + (mock ? ", since its run trained on mock data" : "") +
           ": text cannot be tokenized",
       std::string("tokenizer.tokenizer_type=huggingface tokenizer.tokenizer_model=FILE names ") +
           (mock ? "one; a model trained on mock data has not learned any text"
                 : "the one of its training data"));
}

LoadedModel::LoadedModel(const std::filesystem::path& checkpoint, const config::Config& config,
                         comm::World& world, const std::string& adapter)
    : config_(config), mesh_(mesh_sizes(config, world.size()), world.rank()) {
  CAPSTAN_ASSERT(mesh_.size(comm::Axis::cp) == 1 && !config.dist.sequence_parallel,
                 "a model for evaluation whose sequences are split");
  require_agreement(world, {{"the program", program_identity()},
                            {"the checkpoint", checkpoint.string()},
                            {"the adapters", adapter}});
  require_same_recipe(world, config);
  // Layers of multi-token prediction take part in training only.
  config_.model.mtp_num_layers.reset();
  // Overrides may give the experts a capacity. Every expert-parallel rank has all tokens: with `alltoall` it
  // counts its own, with `allgather` the copies of all ranks, which would drop different tokens each.
  if (config_.model.moe_expert_capacity_factor)
    config_.model.moe_token_dispatcher_type = config::TokenDispatcher::alltoall;
  // The contents of the checkpoint were verified when it was chosen.
  BaseModel weights = BaseModel::open_verified(checkpoint.string());
  if (const checkpoint::Reader* reader = weights.checkpoint()) {
    config::TokenizerConfig& tokenizer = config_.tokenizer;
    if (tokenizer.tokenizer_type != config::TokenizerKind::none &&
        tokenizer.tokenizer_type != config::TokenizerKind::byte &&
        (reader->has_file("tokenizer.json") || reader->has_file("tokenizer.model"))) {
      tokenizer.tokenizer_type = reader->has_file("tokenizer.json") ? config::TokenizerKind::huggingface
                                                                    : config::TokenizerKind::sentencepiece;
      // The directory: a tokenizer_config.json beside it belongs to it.
      tokenizer.tokenizer_model = config::Path{checkpoint.string(), checkpoint.string()};
    }
  }
  if (never_had_tokenizer(config_)) config_.tokenizer.tokenizer_type = config::TokenizerKind::none;
  std::optional<StoredAdapters> adapters;
  if (!adapter.empty()) {
    if (config.peft)
      fail(ErrorCode::usage,
           "`" + checkpoint.string() + "` already holds adapters, to which no others can be added",
           "load the base model of both, with the other adapters");
    adapters = open_adapters(adapter, weights, config_.model);
    if (!adapters->base_hash.empty()) weights.share_hash(world.communicator());
    require_own_base(*adapters, weights);
    config_.peft = adapters->peft;
  } else if (config.peft && !holds_adapters(weights)) {
    fail(ErrorCode::usage,
         "`" + checkpoint.string() + "` holds a full model, which has no adapters for `peft` to describe",
         "leave `peft` out; adapters in another directory are given with the model");
  }
  tokenizer_ = load_tokenizer(config_);
  if (tokenizer_ && weights.checkpoint() && tokenizer_name(config_.tokenizer) != checkpoint.string())
    require_own_tokenizer(config_, *tokenizer_, *weights.checkpoint());
  if (tokenizer_ && adapters && adapters->run)
    require_adapter_tokenizer(
        config_, *tokenizer_,
        checkpoint::Reader::open(adapters->run->checkpoint, checkpoint::Verification::structure), adapter);
  end_tokens_ = end_tokens_of(weights);
  device_ = make_device(config.train.device, config.train.threads.value_or(0), local_rank_of(world));
  choose_tf32(*device_, config.mixed_precision);
  limit_memory(*device_, config.resilience);
  connect(mesh_, choose_transport(config, world, gpu_of(world, *device_)).transport, config, world, *device_);
  model_ = models::build(config_.model, model_shard(config_, mesh_));
  parallel::FlatStore::Options options{.compute = compute_type(config.mixed_precision), .gradients = false};
  if (config_.peft) quantize_base(*config_.peft, config_.model, options);
  store_ =
      std::make_unique<parallel::FlatStore>(*device_, model_->parameters(), store_groups(mesh_), options);
  context_ = std::make_unique<StepContext>(StepContext{*device_, *store_});
  checkpoint::TensorSource& source = weights.parameters(config_.model);
  if (adapters) {
    load_parameters(source, *store_, ParameterSet::base);
    load_parameters(*adapters->tensors, *store_, ParameterSet::adapters);
  } else if (config.peft) {
    load_base(config, *store_, stored_base_hash(*weights.checkpoint()), world.communicator());
    load_parameters(source, *store_, ParameterSet::adapters);
  } else {
    load_parameters(source, *store_);
  }
}

Tensor LoadedModel::pass(int64_t rows, Stage stage) {
  device_->use_graphs(launches_graphs(config_.model, passes_++));
  const auto chunks = static_cast<int64_t>(model_->stages().size());
  Tensor answer;
  const auto one_stage = [&](int64_t chunk, const Tensor& hidden_states) {
    const auto index = static_cast<size_t>(chunk);
    Tape tape(*context_, Tape::Mode::inference);
    Tensor result = stage(tape, index, hidden_states);
    if (model_->stages()[index].head) answer = result;
    return result;
  };
  ForwardPass work(*device_, {rows, model_->hidden()}, compute_type(config_.mixed_precision), one_stage);
  std::vector<parallel::PipelineAction> steps;
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    steps.push_back({parallel::ActionKind::forward, 0, static_cast<int32_t>(chunk)});
  parallel::run_actions(pipeline_shape(config_, 1), steps,
                        parallel::pipeline_comm(mesh_, tensor_parallel(config_, mesh_)), work);

  return answer;
}

template <class T>
std::vector<T> LoadedModel::on_every_rank(const Tensor& answer, int64_t values) {
  comm::Communicator& stages = mesh_.group("pp");
  std::vector<T> result(static_cast<size_t>(values));
  if (answer.defined()) result = answer.to_host<T>();
  CAPSTAN_ASSERT(static_cast<int64_t>(result.size()) == values, "an answer of " + answer.text());
  stages.broadcast(result.data(), values * static_cast<int64_t>(sizeof(T)),
                   static_cast<int>(config::stage_ranks(config_.dist).back()));
  return result;
}

Tensor LoadedModel::decode(const Tensor& tokens, models::KvCache& cache) {
  const int64_t count = tokens.elements();
  Tensor logits = pass(count, [&](Tape& tape, size_t stage, const Tensor& hidden_states) {
    return model_->decode_stage(tape, stage, tokens, hidden_states, cache);
  });
  cache.advance(count);
  return logits;
}

Tensor LoadedModel::upload_ids(std::span<const int32_t> ids) const {
  CategoryScope scope(MemoryCategory::data);
  return Tensor::from_host<int32_t>(*device_, {static_cast<int64_t>(ids.size())}, ids);
}

std::vector<float> LoadedModel::next_logits(std::span<const int32_t> tokens, models::KvCache& cache) {
  return on_every_rank<float>(decode(upload_ids(tokens), cache), config_.model.vocab_size);
}

Tensor LoadedModel::next_token(const Tensor& tokens, models::KvCache& cache,
                               const kernels::SamplingOptions& options) {
  const Tensor logits = decode(tokens, cache);
  // The model's vocabulary may be larger than the tokenizer's.
  int64_t known = config_.model.vocab_size;
  if (tokenizer_) known = std::min(known, static_cast<int64_t>(tokenizer_->vocab_size()));
  const Tensor token =
      logits.defined() ? ops::sample_tokens(logits, known, options, cache.past_on_device) : Tensor();
  return mesh_.size(comm::Axis::pp) == 1 ? token : upload_ids(on_every_rank<int32_t>(token, 1));
}

std::vector<float> LoadedModel::all_logits(const data::MicroBatch& batch) {
  CAPSTAN_ASSERT(mesh_.size(comm::Axis::pp) == 1 && mesh_.size(comm::Axis::tp) == 1,
                 "logits of a model that several ranks share");
  Tape tape(*context_, Tape::Mode::inference);
  return model_->all_logits(tape, upload(*device_, batch, false)).to_host<float>();
}

std::vector<float> LoadedModel::token_losses(const data::MicroBatch& batch) {
  const models::Batch here = upload(*device_, batch, false);
  const int64_t rows = here.batch * here.seq;
  const Tensor losses = pass(rows, [&](Tape& tape, size_t stage, const Tensor& hidden_states) {
    const Var input = hidden_states.defined() ? tape.input("hidden_states", hidden_states, false) : Var{};
    const auto output = model_->forward_stage(tape, stage, here, input, {.training = false});
    return model_->stages()[stage].head ? output.loss.per_token : output.hidden_states.value;
  });
  return on_every_rank<float>(losses, rows);
}

}  // namespace capstan::train
