#include "models/gpt.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/text.hpp"
#include "comm/reduce.hpp"
#include "config/core/field.hpp"
#include "config/sections/config.hpp"
#include "config/sections/moe_layers.hpp"
#include "config/sections/rotary.hpp"
#include "kernels/table.hpp"
#include "ops/linear_cross_entropy.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::models {

namespace {

using config::ModelConfig;

// The value of a field that resolution has set.
template <class T>
T resolved(const std::optional<T>& value, const char* field) {
  CAPSTAN_ASSERT(value.has_value(), std::string("model.") + field + " has not been resolved");
  return *value;
}

// Refuses values of fields that no model computes, as the table of fields declares them
// (Field::unsupported), and combinations that no field refuses. Recipes that are trained are refused earlier.
void refuse_unsupported(const ModelConfig& c) {
  config::Config recipe;
  recipe.model = c;
  std::vector<std::string> found;
  for (const auto& feature : config::missing_features(config::schema(), &recipe))
    if (feature.path.starts_with("model.")) found.push_back(feature.path + " (" + feature.reason + ")");
  if (c.num_moe_experts && c.moe_shared_expert_intermediate_size && config::has_mlp_biases(c))
    found.push_back("model.add_mlp_bias (a shared expert with biases)");
  if (!found.empty())
    fail(ErrorCode::unsupported, "this version cannot run a model with " + join(found, ", "),
         "{show_and_diff} work on such a recipe");
}

void require(bool condition, const std::string& message) {
  if (!condition) fail(ErrorCode::config, message);
}

kernels::ActivationKind activation_kind_of(config::Activation activation) {
  switch (activation) {
    case config::Activation::gelu:
      return kernels::ActivationKind::gelu;
    case config::Activation::gelu_tanh:
      return kernels::ActivationKind::gelu_tanh;
    case config::Activation::quick_gelu:
    case config::Activation::silu:
      return kernels::ActivationKind::silu;
    case config::Activation::relu:
      return kernels::ActivationKind::relu;
    case config::Activation::squared_relu:
      return kernels::ActivationKind::squared_relu;
  }
  fail(ErrorCode::internal, "unknown activation");
}
kernels::ActivationFunction activation_of(const ModelConfig& c) {
  kernels::ActivationFunction function{.kind = activation_kind_of(c.activation_func),
                                       .gated = c.gated_linear_unit};
  if (c.activation_func == config::Activation::quick_gelu) function.slope = 1.702f;
  if (!function.gated) return function;
  function.limit = static_cast<float>(c.activation_func_clamp_value.value_or(0));
  function.up_offset = static_cast<float>(c.glu_linear_offset);
  return function;
}

nn::Attention::Options::Sink sink_of(config::SoftmaxType type) {
  using Sink = nn::Attention::Options::Sink;
  switch (type) {
    case config::SoftmaxType::vanilla:
      return Sink::none;
    case config::SoftmaxType::off_by_one:
      return Sink::zero;
    case config::SoftmaxType::learnable:
      return Sink::learned;
  }
  fail(ErrorCode::internal, "unknown softmax");
}

ops::RouterOptions router_of(const ModelConfig& c) {
  const bool sigmoid = c.moe_router_score_function == config::RouterScore::sigmoid;
  ops::RouterOptions router;
  router.topk = c.moe_router_topk;
  router.score = sigmoid ? kernels::RouterScore::sigmoid : kernels::RouterScore::softmax;
  router.pre_softmax = c.moe_router_pre_softmax;
  router.normalize = sigmoid && c.moe_router_topk > 1;
  router.scaling_factor = c.moe_router_topk_scaling_factor.value_or(1);
  router.groups = c.moe_router_num_groups.value_or(0);
  router.group_topk = c.moe_router_group_topk.value_or(0);
  router.group_best = c.moe_router_group_score_topk.value_or(0);
  return router;
}

// The mixture of experts of a model whose dense layers have the MLP `dense`.
bool recomputes(const ModelConfig& c, config::RecomputeModule module) {
  return c.recompute_granularity == config::RecomputeGranularity::selective &&
         std::count(c.recompute_modules.begin(), c.recompute_modules.end(), module) > 0;
}

nn::Moe::Options moe_options(const ModelConfig& c, const nn::Mlp::Options& dense) {
  nn::Moe::Options o;
  o.hidden = dense.hidden;
  o.experts = *c.num_moe_experts;
  o.ffn = resolved(c.moe_ffn_hidden_size, "moe_ffn_hidden_size");
  o.bias = dense.bias;
  o.activation = dense.activation;
  o.router = router_of(c);
  o.router_in_fp64 = c.moe_router_dtype == config::RouterDtype::fp64;
  o.expert_bias = c.moe_router_enable_expert_bias;
  if (c.moe_router_load_balancing_type == config::RouterBalancing::aux_loss)
    o.balance = nn::Moe::Balance::micro_batch;
  if (c.moe_router_load_balancing_type == config::RouterBalancing::seq_aux_loss)
    o.balance = nn::Moe::Balance::sequence;
  if (c.moe_router_load_balancing_type == config::RouterBalancing::global_aux_loss)
    o.balance = nn::Moe::Balance::global_batch;
  o.input_jitter = c.moe_input_jitter_eps.value_or(0);
  o.balance_coefficient = c.moe_aux_loss_coeff;
  o.z_coefficient = c.moe_z_loss_coeff.value_or(0);
  if (c.moe_token_dispatcher_type == config::TokenDispatcher::allgather)
    o.dispatcher = nn::TokenDispatcher::Kind::allgather;
  o.capacity_factor = c.moe_expert_capacity_factor;
  if (c.moe_token_drop_policy == config::TokenDropPolicy::position)
    o.drop_policy = kernels::DropPolicy::position;
  o.pad_to_capacity = c.moe_pad_expert_input_to_capacity;
  o.shared_ffn = c.moe_shared_expert_intermediate_size.value_or(0);
  o.shared_gate = c.moe_shared_expert_gate;
  o.overlap_shared = c.moe_shared_expert_overlap;
  o.recompute_activation = recomputes(c, config::RecomputeModule::moe_act);
  o.recompute_shared = recomputes(c, config::RecomputeModule::shared_experts);
  o.init = dense.init;
  o.output_init = dense.output_init;
  return o;
}

nn::NormKind norm_kind(const ModelConfig& c) {
  return {c.normalization == config::Normalization::rms_norm, c.layernorm_epsilon,
          c.layernorm_zero_centered_gamma};
}

nn::RopeScaling::Kind scaling_kind_of(config::RopeScaling type) {
  switch (type) {
    case config::RopeScaling::llama3:
      return nn::RopeScaling::Kind::llama3;
    case config::RopeScaling::linear:
      return nn::RopeScaling::Kind::linear;
    case config::RopeScaling::yarn:
      return nn::RopeScaling::Kind::yarn;
    case config::RopeScaling::longrope:
      return nn::RopeScaling::Kind::longrope;
  }
  fail(ErrorCode::internal, "unknown scaling of RoPE");
}

std::optional<nn::RopeOptions> rope_of(const ModelConfig& c) {
  const int64_t head_dim = resolved(c.kv_channels, "kv_channels");
  if (c.position_embedding_type != config::PositionEmbedding::rope) return std::nullopt;
  nn::RopeOptions rope;
  rope.rotary_dim = config::rotary_width(c);
  require(rope.rotary_dim > 0 && rope.rotary_dim % 2 == 0,
          c.multi_latent_attention
              ? "model.qk_pos_emb_head_dim=" + std::to_string(rope.rotary_dim) + " is an odd number"
              : "model.rotary_percent=" + to_text(c.rotary_percent) + " of a head of " +
                    std::to_string(head_dim) + " elements rotates " + std::to_string(rope.rotary_dim) +
                    " of them, an odd number");
  rope.base = c.rotary_base;
  rope.interleaved = c.rotary_interleaved;
  if (!c.rope_scaling) return rope;
  nn::RopeScaling& s = rope.scaling.emplace();
  s.kind = scaling_kind_of(c.rope_scaling_type);
  s.factor = c.rope_scaling_factor;
  s.original_positions = c.rope_scaling_original_max_position_embeddings;
  s.low_freq_factor = c.rope_scaling_low_freq_factor;
  s.high_freq_factor = c.rope_scaling_high_freq_factor;
  s.beta_fast = c.rope_scaling_beta_fast;
  s.beta_slow = c.rope_scaling_beta_slow;
  s.truncate = c.rope_scaling_truncate;
  s.short_factors = c.rope_scaling_short_factors;
  s.long_factors = c.rope_scaling_long_factors;
  if (s.kind == nn::RopeScaling::Kind::yarn || s.kind == nn::RopeScaling::Kind::longrope)
    s.attention_factor = resolved(c.rope_scaling_attention_factor, "rope_scaling_attention_factor");
  if (s.kind == nn::RopeScaling::Kind::longrope)
    for (const auto* factors : {&s.short_factors, &s.long_factors})
      require(static_cast<int64_t>(factors->size()) == rope.rotary_dim / 2,
              "model.rope_scaling_short_factors and model.rope_scaling_long_factors need " +
                  std::to_string(rope.rotary_dim / 2) + " values each, one for each rotated pair");
  return rope;
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
  require(!config.qk_layernorm_across_heads || config.normalization == config::Normalization::rms_norm,
          "model.qk_layernorm_across_heads=true needs model.normalization=RMSNorm");
  require(!config.apply_residual_connection_post_layernorm ||
              config.norm_placement == config::NormPlacement::input,
          "model.apply_residual_connection_post_layernorm=true needs model.norm_placement=input");
  require(!config.multi_latent_attention || config.position_embedding_type == config::PositionEmbedding::rope,
          "model.multi_latent_attention=true needs model.position_embedding_type=rope");
  require(!config.multi_latent_attention || (config.kv_lora_rank > 0 && config.q_lora_rank.value_or(1) > 0 &&
                                             config.qk_head_dim > 0 && config.v_head_dim > 0),
          "model.multi_latent_attention=true needs model.q_lora_rank, kv_lora_rank, qk_head_dim and "
          "v_head_dim above 0");
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

GptModel::GptModel(const ModelConfig& config, const ModelShard& shard)
    : stages_(shard.stages), parallel_(shard.parallel), adapters_(shard.adapters) {
  refuse_unsupported(config);
  check_sizes(config);
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
      layers_[layer] = std::make_unique<nn::TransformerLayer>(
          list, nn::ModulePath{"decoder.layers." + number, static_cast<int>(layer), "layer " + number},
          layer_options(config, layer));
    }
  if (any_stage(&Stage::head)) add_head(list, config);
  parameters_ = list.take();

  if (config.recompute_granularity == config::RecomputeGranularity::full) {
    const int64_t number = std::clamp<int64_t>(config.recompute_num_layers.value_or(1), 1, config.num_layers);
    const bool block = config.recompute_method == config::RecomputeMethod::block;
    recomputed_layers_ = block ? number : config.num_layers;
    region_layers_ = block ? 1 : number;
    recomputes_mtp_ = !block;
  }
  has_router_losses_ =
      config.num_moe_experts && (config.moe_aux_loss_coeff > 0 || config.moe_z_loss_coeff.value_or(0) > 0);
  if (config.cpu_offloading) offloaded_layers_ = config.cpu_offloading_num_layers;
}

bool GptModel::any_stage(bool Stage::*has) const {
  return std::any_of(stages_.begin(), stages_.end(), [has](const Stage& stage) { return stage.*has; });
}

// The stage with the head has a copy of the embedding where it is another rank's and multi-token prediction
// reads it: a parameter of both stages.
void GptModel::add_embedding(nn::ParamList& list, const ModelConfig& config) {
  const bool owns = any_stage(&Stage::embedding), has_head = any_stage(&Stage::head),
             tied = config.share_embeddings_and_output_weights,
             reads_again = config.mtp_num_layers.has_value();
  const auto shared_as = [&](bool shared) {
    if (!shared || (owns && has_head)) return ParamSpec::Tied::no;
    return owns ? ParamSpec::Tied::owner : ParamSpec::Tied::copy;
  };
  nn::Embedding::Options embedding;
  embedding.vocab = resolved(config.padded_vocab_size, "padded_vocab_size");
  embedding.hidden = hidden_;
  embedding.positions = learned_positions_;
  embedding.dropout = config.hidden_dropout;
  embedding.multiplier = config.embedding_multiplier.value_or(1);
  embedding.init = embedding_init(config);
  if (tied) embedding.other_uses = {"output_layer.weight"};
  embedding.tied = shared_as(tied || reads_again);
  embedding.positions_tied = shared_as(reads_again);
  embedding_ = std::make_unique<nn::Embedding>(list, "embedding", embedding);
}

void GptModel::add_head(nn::ParamList& list, const ModelConfig& config) {
  const bool tied = config.share_embeddings_and_output_weights;
  const int64_t mtp_layers = stages_.back().mtp_layers;
  final_norm_ = std::make_unique<nn::Norm>(list, nn::ModulePath{"decoder.final_layernorm", -1, "head"},
                                           hidden_, norm_kind(config));
  if (mtp_layers > 0 && !embedding_) add_embedding(list, config);
  if (!tied || !embedding_) {
    // Without the embedding on this rank, the head of a tied model is a copy of its table.
    ParamSpec output = nn::ModulePath{tied ? "embedding.word_embeddings" : "output_layer", -1, "head"}.spec(
        "weight", {resolved(config.padded_vocab_size, "padded_vocab_size"), hidden_},
        tied ? embedding_init(config) : Init{Init::Kind::normal, config.init_method_std});
    output.sharding = {ShardingAxis::tensor, 0};
    if (tied) output.tied = ParamSpec::Tied::copy, output.other_uses = {"output_layer.weight"};
    output_ = &list.add(std::move(output));
  }
  // Layers of the last layer's kind. Dropout, routers and formats count them after the last layer.
  for (int64_t depth = 0; depth < mtp_layers; ++depth) {
    const std::string number = std::to_string(depth);
    mtp_layers_.push_back(std::make_unique<nn::MtpLayer>(
        list,
        nn::ModulePath{"mtp.layers." + number, static_cast<int>(config.num_layers + depth), "mtp " + number},
        layer_options(config, config.num_layers - 1)));
  }
}

static std::optional<nn::LatentAttention::Sizes> latent_of(const ModelConfig& c) {
  if (!c.multi_latent_attention) return std::nullopt;
  return nn::LatentAttention::Sizes{
      .q_rank = c.q_lora_rank,
      .kv_rank = c.kv_lora_rank,
      .nope_dim = c.qk_head_dim,
      .value_dim = c.v_head_dim,
      .recompute_up_projections = recomputes(c, config::RecomputeModule::mla_up_proj)};
}

nn::TransformerLayer::Options GptModel::layer_options(const ModelConfig& c, int64_t layer) const {
  const Init init{Init::Kind::normal, c.init_method_std};
  const Init output_init{Init::Kind::normal,
                         c.init_method_std / std::sqrt(2.0 * static_cast<double>(c.num_layers))};
  nn::TransformerLayer::Options o;
  o.norm = norm_kind(c);
  o.input_norms = c.norm_placement != config::NormPlacement::output;
  o.output_norms = c.norm_placement != config::NormPlacement::input;
  o.hidden_dropout = c.hidden_dropout;
  o.residual_post_layernorm = c.apply_residual_connection_post_layernorm;
  o.recompute_mlp = recomputes(
      c, config::is_moe_layer(c, layer) ? config::RecomputeModule::moe : config::RecomputeModule::mlp);
  o.recompute_norms = recomputes(c, config::RecomputeModule::layernorm);
  o.latent = latent_of(c);
  nn::Attention::Options& a = o.attention;
  a.hidden = hidden_;
  a.heads = c.num_attention_heads;
  a.groups = resolved(c.num_query_groups, "num_query_groups");
  a.head_dim = resolved(c.kv_channels, "kv_channels");
  a.qkv_bias = c.add_bias_linear || c.add_qkv_bias;
  a.output_bias = c.add_attention_output_bias.value_or(c.add_bias_linear);
  if (c.qk_layernorm) a.qk_norm = o.norm;
  if (c.qk_layernorm && o.latent)
    a.qk_norm->epsilon = resolved(c.latent_layernorm_epsilon, "latent_layernorm_epsilon");
  a.qk_norm_across_heads = c.qk_layernorm_across_heads;
  a.rope = rope_of(c);
  a.scale = resolved(c.softmax_scale, "softmax_scale");
  a.softcap = c.attn_logit_softcapping.value_or(0);
  const bool full_attention =
      c.window_attn_skip_freq && *c.window_attn_skip_freq > 0 && (layer + 1) % *c.window_attn_skip_freq == 0;
  if (c.window_size && !full_attention) a.window = *c.window_size;
  a.sink = sink_of(c.softmax_type);
  a.dropout = c.attention_dropout;
  a.init = init;
  a.output_init = output_init;
  nn::Mlp::Options& m = o.mlp;
  m.hidden = hidden_;
  m.ffn = resolved(c.ffn_hidden_size, "ffn_hidden_size");
  m.bias = config::has_mlp_biases(c);
  m.activation = activation_of(c);
  m.init = init;
  m.output_init = output_init;
  if (config::is_moe_layer(c, layer)) o.moe = moe_options(c, m);
  return o;
}

void GptModel::check_positions(int64_t positions) const {
  if (learned_positions_ > 0 && positions > learned_positions_)
    fail(ErrorCode::usage,
         "a sequence of " + std::to_string(positions) + " tokens is longer than the model's " +
             std::to_string(learned_positions_) + " learned positions",
         "shorten the text, or train with a larger model.max_position_embeddings");
}

nn::TokenContext GptModel::token_context(Tape& tape, const Batch& batch,
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
  context.training = options.training;
  context.seed = options.seed;
  if (options.training && has_router_losses_) context.loss_weight_sum = loss_weight_sum(tape, batch);
  context.router_statistics = options.router_statistics;
  return context;
}

Tensor GptModel::loss_weight_sum(Tape& tape, const Batch& batch) const {
  const Tensor sum = Tensor::zeros(tape.device(), {1});
  ops::add_column_sum(batch.loss_mask.view({batch.batch * batch.seq, 1}), sum);
  if (comm::ranks_of(parallel_.context.group) > 1)
    comm::all_reduce_sum_any(*parallel_.context.group, sum, "loss tokens");
  return sum;
}

nn::HiddenStates GptModel::forward_layers(Tape& tape, const Stage& stage, nn::HiddenStates hidden_states,
                                          const nn::TokenContext& context, bool recompute) const {
  const int64_t last = stage.first_layer + stage.layers;
  const auto forward_layer = [this, context](Tape& on, nn::HiddenStates states, int64_t index) {
    const RangeScope range(on.device(), [&] { return "layer " + std::to_string(index); });
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

StageResult GptModel::forward_stage(Tape& tape, size_t index, const Batch& batch, const Var& input,
                                    const ForwardOptions& options) const {
  const Stage& stage = stages_.at(index);
  const nn::TokenContext context = token_context(tape, batch, options);
  nn::HiddenStates hidden_states{stage.embedding ? embedding_->forward(tape, batch.tokens, context) : input,
                                 {}};
  hidden_states = forward_layers(tape, stage, std::move(hidden_states), context, options.recompute);
  if (!stage.head) {
    StageResult result{nn::materialize(tape, std::move(hidden_states)), {}};
    tape.output("hidden_states", result.hidden_states);
    return result;
  }
  const Var x = nn::normalize(tape, *final_norm_, std::move(hidden_states)).y;
  Loss loss = head_loss(tape, x, batch.labels, batch.loss_mask, "loss");
  if (options.training && !mtp_layers_.empty())
    predict_later_tokens(tape, x, batch, context, options.recompute, loss);
  return {{}, std::move(loss)};
}

Loss GptModel::head_loss(Tape& tape, const Var& hidden_states, const Tensor& labels, const Tensor& loss_mask,
                         const std::string& output) const {
  const Var x = ops::copy_to_tensor_parallel(tape, hidden_states, parallel_.tensor, "final hidden states");
  ops::CrossEntropyResult loss =
      ops::linear_cross_entropy(tape, x, head(), labels, loss_mask, vocab_, parallel_.tensor, final_softcap_);
  tape.output(output, loss.sum);
  return {std::move(loss.sum), std::move(loss.exact_sum), std::move(loss.per_token), {}};
}

// Depth k predicts the token k after the label of each position, from the hidden states of depth k - 1 and
// the embedding of the token k after the position. Rotary positions and documents are those of the position.
void GptModel::predict_later_tokens(Tape& tape, Var hidden_states, const Batch& batch,
                                    const nn::TokenContext& context, bool recompute, Loss& loss) const {
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
      hidden_states =
          tape.recompute("mtp " + std::to_string(depth - 1), {std::move(hidden_states), embedding},
                         [&layer, context](Tape& inner, std::span<const Var> inputs) {
                           return std::vector<Var>{layer.forward(inner, inputs[0], inputs[1], context)};
                         })[0];
    else
      hidden_states = layer.forward(tape, hidden_states, embedding, context);
    loss.mtp_sums.push_back(
        head_loss(tape, hidden_states, later.labels, later.loss_mask, mtp_loss_name(depth)).exact_sum);
  }
}

Tensor GptModel::all_logits(Tape& tape, const Batch& batch) const {
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

KvCache GptModel::make_cache(Device& device, int64_t batch, int64_t capacity) const {
  check_positions(capacity);
  KvCache cache;
  cache.batch = batch;
  cache.capacity = capacity;
  cache.layers.resize(layers_.size());
  CategoryScope scope(MemoryCategory::data);
  cache.past_on_device = Tensor::zeros(device, {1}, DType::i32);
  return cache;
}

Tensor GptModel::decode_stage(Tape& tape, size_t index, const Tensor& tokens, const Tensor& input,
                              KvCache& cache) const {
  const Stage& stage = stages_.at(index);
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
