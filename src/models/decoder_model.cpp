#include "models/decoder_model.hpp"

#include <algorithm>
#include <string>

#include "base/text.hpp"
#include "comm/reduce.hpp"
#include "config/core/field.hpp"
#include "config/sections/config.hpp"
#include "kernels/table.hpp"
#include "models/architectures/options.hpp"
#include "ops/concat.hpp"
#include "ops/linear_cross_entropy.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::models {

namespace {

using config::ModelConfig;

// Refuses values of fields that no model computes, as the table of fields declares them
// (Field::unsupported). Recipes that are trained are refused earlier.
void refuse_unsupported(const ModelConfig& c) {
  config::Config recipe;
  recipe.model = c;
  std::vector<std::string> found;
  for (const auto& feature : config::missing_features(config::schema(), &recipe))
    if (feature.path.starts_with("model.")) found.push_back(feature.path + " (" + feature.reason + ")");
  if (!found.empty())
    fail(ErrorCode::unsupported, "this version cannot run a model with " + join(found, ", "),
         "{show_and_diff} work on such a recipe");
}

Tensor positions_tensor(Device& device, int64_t batch, int64_t seq) {
  std::vector<int32_t> positions(static_cast<size_t>(batch * seq));
  for (size_t i = 0; i < positions.size(); ++i)
    positions[i] = static_cast<int32_t>(static_cast<int64_t>(i) % seq);
  CategoryScope scope(MemoryCategory::data);
  return Tensor::from_host<int32_t>(device, {batch * seq}, positions);
}

Init embedding_init(const ModelConfig& config) {
  return {Init::Kind::normal, resolved(config.embedding_init_method_std, "embedding_init_method_std")};
}

void check_sizes(const ModelConfig& config) {
  require(config.num_layers > 0 && config.hidden_size > 0 && config.num_attention_heads > 0 &&
              config.vocab_size > 0,
          "a model needs model.num_layers, hidden_size, num_attention_heads and vocab_size above 0");
  const int64_t padded_vocab = resolved(config.padded_vocab_size, "padded_vocab_size");
  require(config.vocab_size <= padded_vocab,
          "model.padded_vocab_size=" + std::to_string(padded_vocab) +
              " is below model.vocab_size=" + std::to_string(config.vocab_size));
  const int64_t groups = resolved(config.num_query_groups, "num_query_groups");
  require(groups > 0 && config.num_attention_heads % groups == 0,
          "model.num_attention_heads=" + std::to_string(config.num_attention_heads) +
              " is not a multiple of model.num_query_groups=" + std::to_string(groups));
}

}  // namespace

DecoderModel::DecoderModel(const Architecture& architecture, const ModelConfig& config,
                           const ModelShard& shard)
    : stages_(shard.stages), parallel_(shard.parallel), adapters_(shard.adapters) {
  refuse_unsupported(config);
  check_sizes(config);
  if (architecture.check) architecture.check(config);
  hidden_ = config.hidden_size;
  vocab_ = config.vocab_size;
  if (const auto rope = rope_of(config)) rope_tables_ = std::make_unique<nn::RopeTables>(*rope);
  if (stages_.empty()) stages_ = {{0, config.num_layers, true, true, config.mtp_num_layers.value_or(0)}};
  final_softcap_ = static_cast<float>(config.final_logit_softcapping.value_or(0));
  if (config.position_embedding_type == config::PositionEmbedding::learned_absolute)
    learned_positions_ = resolved(config.max_position_embeddings, "max_position_embeddings");

  nn::ParamList list(parallel_, adapters_.get());
  if (any_stage(&Stage::embedding)) add_embedding(list, config);
  for (const Stage& stage : stages_)
    for (int64_t layer = stage.first_layer; layer < stage.first_layer + stage.layers; ++layer) {
      const std::string number = std::to_string(layer);
      layers_[layer] = architecture.make_layer(
          list, {"decoder.layers." + number, static_cast<int>(layer), "layer " + number}, config, layer);
      has_losses_of_layers_ = has_losses_of_layers_ || layers_[layer]->adds_losses();
    }
  if (std::ranges::any_of(stages_, &Stage::final_norm))
    final_norm_ = std::make_unique<nn::Norm>(list, nn::ModulePath{"decoder.final_layernorm", -1, "head"},
                                             hidden_, norm_kind(config));
  if (mtp_layers() > 0 && !embedding_) add_embedding(list, config);
  if (any_stage(&Stage::head)) add_output(list, config);
  add_mtp_layers(list, architecture, config);
  parameters_ = list.take();

  if (config.recompute_granularity == config::RecomputeGranularity::full) {
    const int64_t number = std::clamp<int64_t>(config.recompute_num_layers.value_or(1), 1, config.num_layers);
    const bool block = config.recompute_method == config::RecomputeMethod::block;
    recomputed_layers_ = block ? number : config.num_layers;
    region_layers_ = block ? 1 : number;
    recomputes_mtp_ = !block;
  }
  if (config.cpu_offloading) offloaded_layers_ = config.cpu_offloading_num_layers;
}

bool DecoderModel::any_stage(bool Stage::*has) const {
  return std::any_of(stages_.begin(), stages_.end(), [has](const Stage& stage) { return stage.*has; });
}

int64_t DecoderModel::mtp_layers() const {
  int64_t layers = 0;
  for (const Stage& stage : stages_) layers += stage.mtp_layers;
  return layers;
}

// The rank of the first stage owns the embedding. Multi-token prediction and a tied output layer read a copy
// where they are on other ranks: a parameter of all of them.
void DecoderModel::add_embedding(nn::ParamList& list, const ModelConfig& config) {
  const bool owns = any_stage(&Stage::embedding), tied = config.share_embeddings_and_output_weights,
             copied_for_mtp = config.mtp_num_layers && mtp_layers() == 0,
             copied_for_head = tied && !any_stage(&Stage::head);
  const auto shared_as = [owns](bool copied) {
    if (!owns) return ParamSpec::Tied::copy;
    return copied ? ParamSpec::Tied::owner : ParamSpec::Tied::no;
  };
  nn::Embedding::Options embedding;
  embedding.vocab = resolved(config.padded_vocab_size, "padded_vocab_size");
  embedding.hidden = hidden_;
  embedding.positions = learned_positions_;
  embedding.dropout = config.hidden_dropout;
  embedding.multiplier = config.embedding_multiplier.value_or(1);
  embedding.init = embedding_init(config);
  if (tied) embedding.other_uses = {"output_layer.weight"};
  embedding.tied = shared_as(copied_for_mtp || copied_for_head);
  embedding.positions_tied = shared_as(copied_for_mtp);
  embedding_ = std::make_unique<nn::Embedding>(list, "embedding", embedding);
}

void DecoderModel::add_output(nn::ParamList& list, const ModelConfig& config) {
  const bool tied = config.share_embeddings_and_output_weights;
  if (tied && embedding_) return;
  // Without the embedding on this rank, the head of a tied model is a copy of its table.
  ParamSpec output = nn::ModulePath{tied ? "embedding.word_embeddings" : "output_layer", -1, "head"}.spec(
      "weight", {resolved(config.padded_vocab_size, "padded_vocab_size"), hidden_},
      tied ? embedding_init(config) : Init{Init::Kind::normal, config.init_method_std});
  output.sharding = {ShardingAxis::tensor, 0};
  if (tied) output.tied = ParamSpec::Tied::copy, output.other_uses = {"output_layer.weight"};
  output_ = &list.add(std::move(output));
}

void DecoderModel::add_mtp_layers(nn::ParamList& list, const Architecture& architecture,
                                  const ModelConfig& config) {
  // Layers of the last layer's kind. Dropout, routers and formats count them after the last layer.
  const nn::MtpLayer::Options mtp{.hidden = hidden_,
                                  .norm = norm_kind(config),
                                  .init = {Init::Kind::normal, config.init_method_std},
                                  .layer = [&](const nn::ModulePath& path) {
                                    return architecture.make_layer(list, path, config, config.num_layers - 1);
                                  }};
  for (int64_t depth = 0; depth < mtp_layers(); ++depth) {
    const std::string number = std::to_string(depth);
    mtp_layers_.push_back(std::make_unique<nn::MtpLayer>(
        list,
        nn::ModulePath{"mtp.layers." + number, static_cast<int>(config.num_layers + depth), "mtp " + number},
        mtp));
    has_losses_of_layers_ = has_losses_of_layers_ || mtp_layers_.back()->adds_losses();
  }
}

void DecoderModel::check_positions(int64_t positions) const {
  if (learned_positions_ > 0 && positions > learned_positions_)
    fail(ErrorCode::usage,
         "a sequence of " + std::to_string(positions) + " tokens is longer than the model's " +
             std::to_string(learned_positions_) + " learned positions",
         "shorten the text, or train with a larger model.max_position_embeddings");
}

nn::TokenContext DecoderModel::token_context(Tape& tape, const Batch& batch,
                                             const ForwardOptions& options) const {
  const int64_t rows = batch.batch * batch.seq;
  CAPSTAN_ASSERT(rows > 0 && batch.tokens.elements() == rows, "a batch of " + std::to_string(batch.batch) +
                                                                  " x " + std::to_string(batch.seq) +
                                                                  " with tokens " + batch.tokens.text());
  const int64_t positions = batch.positions_end > 0 ? batch.positions_end : batch.seq;
  check_positions(positions);
  nn::TokenContext context;
  context.batch = batch.batch;
  context.seq = batch.seq;
  if (rope_tables_ || learned_positions_ > 0)
    context.positions =
        batch.positions.defined() ? batch.positions : positions_tensor(tape.device(), batch.batch, batch.seq);
  if (rope_tables_) context.rope = rope_tables_->in(tape.context(), positions);
  context.documents = {batch.document_start, batch.cu_seqlens, batch.max_seqlen};
  context.dropout_rows = batch.dropout_rows;
  context.hidden_dropout_rows = ops::local_rows(batch.dropout_rows, parallel_.tensor);
  context.padding = ops::local_rows(batch.padding, parallel_.tensor);
  context.tokens =
      batch.tokens_in_use > 0 ? batch.tokens_in_use : rows * comm::ranks_of(parallel_.context.group);
  context.training = options.training;
  context.seed = options.seed;
  if (options.training && has_losses_of_layers_) context.loss_weight_sum = loss_weight_sum(tape, batch);
  context.router_statistics = options.router_statistics;
  return context;
}

Tensor DecoderModel::loss_weight_sum(Tape& tape, const Batch& batch) const {
  Tensor sum = Tensor::zeros(tape.device(), {1});
  ops::add_column_sum(batch.loss_mask.view({batch.batch * batch.seq, 1}), sum);
  if (comm::ranks_of(parallel_.context.group) > 1)
    comm::all_reduce_sum_any(*parallel_.context.group, sum, "loss tokens");
  return sum;
}

nn::HiddenStates DecoderModel::forward_layers(Tape& tape, const Stage& stage, nn::HiddenStates hidden_states,
                                              const nn::TokenContext& context, bool recompute) const {
  const int64_t last = stage.first_layer + stage.layers;
  const auto forward_layer = [this, context](Tape& on, nn::HiddenStates states, int64_t index) {
    const RangeScope range(on.device(), [&] { return "layer " + std::to_string(index); });
    const GraphScope graph(on.device(), "layer");
    return layer(index).forward(on, std::move(states), context);
  };
  const int64_t recomputed =
      recompute ? std::min(last, stage.first_layer + recomputed_layers_) : stage.first_layer;
  for (int64_t first = stage.first_layer; first < last;) {
    const bool offloads = first - stage.first_layer < offloaded_layers_;
    if (first >= recomputed) {
      hidden_states = forward_layer(tape, std::move(hidden_states), first);
      tape.end_layer("layer " + std::to_string(first++), offloads);
      continue;
    }
    const int64_t end = std::min(first + region_layers_, recomputed);
    Var x = nn::materialize(tape, std::move(hidden_states));
    const auto region = [forward_layer, first, end](Tape& inner, std::span<const Var> inputs) {
      nn::HiddenStates s{inputs[0], {}};
      for (int64_t i = first; i < end; ++i) s = forward_layer(inner, std::move(s), i);
      return std::vector<Var>{nn::materialize(inner, std::move(s))};
    };
    const std::string name = "layers " + std::to_string(first) + "-" + std::to_string(end - 1);
    hidden_states = {tape.recompute(name, {std::move(x)}, region)[0], {}};
    tape.end_layer(name, offloads);
    first = end;
  }
  return hidden_states;
}

StageResult DecoderModel::forward_stage(Tape& tape, size_t index, const Batch& batch, const Var& input,
                                        const ForwardOptions& options) const {
  const Stage& stage = stages_.at(index);
  const nn::TokenContext context = token_context(tape, batch, options);
  // Of the model, then of each depth of multi-token prediction so far.
  std::vector<Var> states{stage.embedding ? embedding_->forward(tape, batch.tokens, context) : input};
  if (options.training && stage.states_in() > 1) states = ops::split_rows(tape, input, stage.states_in());
  nn::HiddenStates hidden_states =
      forward_layers(tape, stage, {std::move(states[0]), {}}, context, options.recompute);
  states[0] = stage.final_norm() ? nn::normalize(tape, *final_norm_, std::move(hidden_states)).y
                                 : nn::materialize(tape, std::move(hidden_states));
  if (options.training && stage.mtp_layers > 0)
    predict_later_tokens(tape, states, batch, context, options.recompute);
  if (stage.head) return {{}, losses(tape, states, batch)};
  StageResult result{states.size() > 1 ? ops::concat_rows(tape, states) : std::move(states[0]), {}};
  tape.output("hidden_states", result.hidden_states);
  return result;
}

Loss DecoderModel::head_loss(Tape& tape, const Var& hidden_states, const Tensor& labels,
                             const Tensor& loss_mask, const std::string& output) const {
  const Var x = ops::copy_to_tensor_parallel(tape, hidden_states, parallel_.tensor, "final hidden states");
  ops::CrossEntropyResult loss =
      ops::linear_cross_entropy(tape, x, head(), labels, loss_mask, vocab_, parallel_.tensor, final_softcap_);
  tape.output(output, loss.sum);
  return {std::move(loss.sum), std::move(loss.exact_sum), std::move(loss.per_token), {}};
}

Loss DecoderModel::losses(Tape& tape, std::span<const Var> states, const Batch& batch) const {
  Loss loss = head_loss(tape, states[0], batch.labels, batch.loss_mask, "loss");
  for (size_t depth = 1; depth < states.size(); ++depth) {
    const LaterTokens& later = batch.later.at(depth - 1);
    loss.mtp_sums.push_back(
        head_loss(tape, states[depth], later.labels, later.loss_mask, mtp_loss_name(depth)).exact_sum);
  }
  return loss;
}

// Depth k predicts the token k after the label of each position, from the hidden states of depth k - 1 and
// the embedding of the token k after the position. Rotary positions and documents are those of the position.
void DecoderModel::predict_later_tokens(Tape& tape, std::vector<Var>& states, const Batch& batch,
                                        const nn::TokenContext& context, bool recompute) const {
  CAPSTAN_ASSERT(batch.later.size() == mtp_layers_.size(),
                 "a batch for " + std::to_string(batch.later.size()) + " depths of multi-token prediction");
  for (size_t depth = 1; depth <= mtp_layers_.size(); ++depth) {
    const RangeScope range(tape.device(), [&] { return "mtp " + std::to_string(depth - 1); });
    const nn::MtpLayer& layer = *mtp_layers_[depth - 1];
    const LaterTokens& later = batch.later[depth - 1];
    nn::TokenContext at_later = context;
    if (learned_positions_ > 0) at_later.positions = later.positions;
    const Var embedding = embedding_->forward(tape, later.tokens, at_later, depth);
    if (recompute && recomputes_mtp_)
      states.push_back(tape.recompute("mtp " + std::to_string(depth - 1), {states.back(), embedding},
                                      [&layer, context](Tape& inner, std::span<const Var> inputs) {
                                        return std::vector<Var>{
                                            layer.forward(inner, inputs[0], inputs[1], context)};
                                      })[0]);
    else
      states.push_back(layer.forward(tape, states.back(), embedding, context));
  }
}

Tensor DecoderModel::all_logits(Tape& tape, const Batch& batch) const {
  const Stage& stage = stages_.at(0);
  CAPSTAN_ASSERT(stage.embedding && stage.head, "logits of a model shard");
  const nn::TokenContext context = token_context(tape, batch, {.training = false});
  nn::HiddenStates hidden_states{embedding_->forward(tape, batch.tokens, context), {}};
  hidden_states = forward_layers(tape, stage, std::move(hidden_states), context, false);
  const Var x =
      ops::copy_to_tensor_parallel(tape, nn::normalize(tape, *final_norm_, std::move(hidden_states)).y,
                                   parallel_.tensor, "final hidden states");
  return ops::head_logits(tape, x.value, head(), vocab_, parallel_.tensor, final_softcap_);
}

KvCache DecoderModel::make_cache(Device& device, int64_t batch, int64_t capacity) const {
  check_positions(capacity);
  KvCache cache;
  cache.batch = batch;
  cache.capacity = capacity;
  cache.layers.resize(layers_.size());
  CategoryScope scope(MemoryCategory::data);
  cache.past_on_device = Tensor::zeros(device, {1}, DType::i32);
  return cache;
}

Tensor DecoderModel::decode_stage(Tape& tape, size_t index, const Tensor& tokens, const Tensor& input,
                                  KvCache& cache) const {
  const Stage& stage = stages_.at(index);
  CAPSTAN_ASSERT(stage.head == stage.final_norm(), "generation through layers of multi-token prediction");
  Device& device = tape.device();
  const int64_t count = cache.batch > 0 ? tokens.elements() / cache.batch : 0;
  CAPSTAN_ASSERT(
      count > 0 && tokens.elements() == count * cache.batch && cache.layers.size() == layers_.size(),
      "tokens " + tokens.text() + " for a cache of " + std::to_string(cache.batch) + " sequences");
  if (cache.past + count > cache.capacity)
    fail(ErrorCode::usage, std::to_string(cache.past) + " + " + std::to_string(count) +
                               " tokens do not fit a cache for " + std::to_string(cache.capacity));
  nn::TokenContext context;
  context.batch = cache.batch;
  context.seq = count;
  if (rope_tables_ || learned_positions_ > 0)
    context.positions = ops::positions_after(cache.past_on_device, cache.batch, count);
  const int64_t length = cache.past + count;
  if (cache.valid_length == 0) {
    cache.valid_length =
        rope_tables_ ? rope_tables_->valid_cache_length(length, cache.capacity) : cache.capacity;
    if (rope_tables_) cache.rope = rope_tables_->in(tape.context(), cache.valid_length);
  }
  if (length > cache.valid_length)
    fail(ErrorCode::usage,
         "a cache whose keys were rotated for sequences up to " + std::to_string(cache.valid_length) +
             " tokens cannot take " + std::to_string(length),
         "make a new cache and compute all tokens again");
  context.rope = cache.rope;
  nn::HiddenStates hidden_states{
      stage.embedding ? embedding_->forward(tape, tokens.view({tokens.elements()}), context) : Var{input, -1},
      {}};
  const GraphScope graph(device, "decoding");
  // The cache has the layers of all stages here, in their order.
  auto keys_values = cache.layers.begin() + std::distance(layers_.begin(), layers_.find(stage.first_layer));
  for (int64_t i = 0; i < stage.layers; ++i)
    hidden_states = layer(stage.first_layer + i)
                        .forward(tape, std::move(hidden_states), context,
                                 {&*keys_values++, cache.past_on_device, cache.capacity});
  if (!stage.head) return nn::materialize(tape, std::move(hidden_states)).value;
  // The head computes only the last token of each sequence.
  const Var x = nn::materialize(tape, std::move(hidden_states));
  const Tensor last = Tensor::empty(device, {cache.batch, hidden_}, x.dtype());
  launch(device, device.table().elementwise->copy_rows, x.value.slice(0, count - 1, x.size(0) - count + 1),
         count * hidden_, last, hidden_, cache.batch, hidden_);
  const ops::NormResult normed = final_norm_->forward(tape, Var{last, -1}, {});
  return ops::head_logits(tape, normed.y.value, head(), vocab_, parallel_.tensor, final_softcap_);
}

}  // namespace capstan::models
