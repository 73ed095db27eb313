// The shape of a training run: the sizes of the model and of the layout, from which FLOPs, parameters, memory
// and time follow by formula. Plain numbers: a recipe gives one, and so does a row of a published table.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "config/sections/config.hpp"

namespace capstan::planner {

// A size as a factor of a formula.
inline double real(int64_t size) {
  return static_cast<double>(size);
}

// Format of the operands of GEMMs.
enum class GemmFormat : uint8_t { fp32, tf32, bf16, fp8, fp4 };
// 8 or 4 bits.
inline bool is_low_precision(GemmFormat format) {
  return format == GemmFormat::fp8 || format == GemmFormat::fp4;
}

// Activations that are recomputed in the backward pass.
struct RecomputeShape {
  // All but the inputs of layers; `layers` of each stage, -1: of all.
  bool full = false;
  int64_t layers = -1;
  // Parts of a layer: the core of attention (of latent attention its up-projections too), norms, the dense
  // MLP, router and experts, only the shared expert, and the activation function of routed experts.
  bool attention = false, norms = false, mlp = false, experts = false, shared = false, activation = false;
  bool any() const { return full || attention || norms || mlp || experts || shared || activation; }
  bool operator==(const RecomputeShape&) const = default;
};

// Exchange of keys and values between the ranks of context parallelism.
enum class ContextExchange : uint8_t { ring, all_gather, all_to_all };

// How tokens come to the ranks of their experts. alltoall: a copy for each of its experts. allgather: all
// tokens to all ranks. deduplicated: one copy for each fast domain that has experts of a token, which hands
// it to its ranks, as the dispatchers DeepEP and HybridEP do; Capstan's trainer has none of these.
enum class TokenDispatch : uint8_t { alltoall, allgather, deduplicated };

struct ExpertShape {
  int64_t count = 1, topk = 1;
  int64_t ffn = 0;              // width of one expert
  int64_t shared_ffn = 0;       // width of the shared experts, 0: none
  std::vector<int64_t> layers;  // indices of the layers with experts, ascending
  // The experts of a token are in at most so many groups of experts; 0: in any.
  int64_t group_topk = 0;
  // Vectors of one value per expert beside the router's matrix: its bias, and the one that balances the load.
  int64_t bias_vectors = 0;
  // Rows of experts by those of a balanced load: less than one where their capacity drops tokens, and the
  // capacity where they are padded to it.
  double filled = 1;
  // The capacity of an expert, by the rows of a balanced load.
  std::optional<double> capacity;
  // GEMMs of codes of 8 bits decode them, and multiply in 16 bits: the trainer's on CUDA. False: at the rate
  // of the codes.
  bool decodes_codes = false;
};

// Multi-head latent attention (DeepSeek-V2).
struct LatentShape {
  bool norms = true;   // of the compressed queries, keys and values
  int64_t q_rank = 0;  // 0: queries are not compressed
  int64_t kv_rank = 512;
  int64_t nope_dim = 128, rope_dim = 64, v_dim = 128;  // of one head
};

// A linear layer of attention, of an MLP or of an expert.
struct LinearLayer {
  // Inside a layer of the model.
  std::string_view path;
  // What it reads: the input of attention, of the (shared) MLP or of the routed experts, or what these
  // compute.
  enum class Input : uint8_t { attention, mlp, mlp_hidden, experts, experts_hidden, other };
  Input input = Input::other;
  // How tensor parallelism shards it: not, by its outputs or by its inputs.
  enum class Sharding : uint8_t { none, outputs, inputs };
  Sharding sharding = Sharding::none;
  int64_t in = 0, out = 0;

  double weights() const { return real(in) * real(out); }
  bool of_experts() const { return input == Input::experts || input == Input::experts_hidden; }
  // Of one rank.
  double inputs(int64_t ranks) const { return real(in) / (sharding == Sharding::inputs ? real(ranks) : 1); }
  double outputs(int64_t ranks) const {
    return real(out) / (sharding == Sharding::outputs ? real(ranks) : 1);
  }
};

// A linear layer with an adapter in a `fraction` of the layers of its kind.
struct AdaptedLinear {
  LinearLayer layer;
  double fraction = 1;
};
struct AdapterShape {
  int64_t rank = 0;
  // Each output of an adapted layer is scaled (DoRA).
  bool magnitudes = false;
  std::vector<AdaptedLinear> dense_layer, expert_layer;
  const std::vector<AdaptedLinear>& of_layer(bool experts) const {
    return experts ? expert_layer : dense_layer;
  }
};

// Newton-Schulz iterations of Muon, of queries, keys and values apart or together.
struct MuonShape {
  int64_t steps = 5;
  bool split_qkv = true;
  config::MuonTpMode tp_mode = config::MuonTpMode::duplicated;
};

// The layers of one of the PP * VPP pipeline stages.
struct StageShape {
  bool embedding = false, head = false;
  int64_t dense_layers = 0, expert_layers = 0, mtp_layers = 0;
  // Tensors of hidden states that go to the next stage: those of the model, and of each depth of multi-token
  // prediction up to here.
  int64_t states_out = 1;
  int64_t layers() const { return dense_layers + expert_layers; }
};

struct RunShape {
  // ---- model ----
  int64_t layers = 1, hidden = 1, heads = 1, kv_groups = 1, head_dim = 1;
  int64_t ffn = 4;    // width of a dense MLP
  int64_t vocab = 1;  // padded
  int64_t seq = 1;    // tokens
  bool gated = false, tied = true;
  // Rows of learned positions; 0: none.
  int64_t positions = 0;
  // Parameters of a norm per hidden unit: 1 for RMSNorm, 2 for LayerNorm.
  int64_t norm_vectors = 1;
  // Norms of a layer, without those of queries and keys; norm after the last layer.
  int64_t norms_per_layer = 2;
  // Attention and MLP read the output of a norm, which can be recomputed.
  bool input_norms = true;
  bool qkv_bias = false, output_bias = false, mlp_bias = false;
  // Parameters of the norms of queries and keys, and of attention sinks, of one layer.
  int64_t qk_norm_parameters = 0, sink_parameters = 0;
  // These norms go over all heads, by a kernel of their own.
  bool qk_norm_across_heads = false;
  // Elements of the masks of dropout are kept, one byte each.
  bool hidden_dropout = false;
  // Sliding window in tokens and every how many layers attention is full; 0: all layers are full.
  int64_t window = 0, full_every = 0;
  std::optional<ExpertShape> experts;
  std::optional<LatentShape> latent;
  int64_t mtp_layers = 0;

  // ---- layout ----
  int64_t tp = 1, pp = 1, vpp = 1, cp = 1, ep = 1, etp = 1, dp = 1;
  bool sequence_parallel = false;
  config::ShardingStrategy sharding = config::ShardingStrategy::no_shard;
  // Groups of data-parallel ranks, each of which has all sharded state (HSDP); the optimizer's state can be
  // sharded over them too.
  int64_t instances = 1;
  bool shards_over_instances = false;
  config::PipelineSchedule schedule = config::PipelineSchedule::one_f_one_b;
  // Micro-batches that pass through a chunk before the next chunk's turn.
  int64_t group = 1;
  int64_t micro_batch = 1, global_batch = 1;  // samples
  // All PP * VPP stages, in the order of the forward pass, and the rank of each.
  std::vector<StageShape> stages;
  std::vector<int64_t> stage_ranks;

  // ---- formats ----
  GemmFormat format = GemmFormat::bf16;
  // Bytes of one parameter, gradient, main parameter, and of all moments of one parameter. main_bytes 0: the
  // optimizer updates the parameters themselves.
  double parameter_bytes = 2, gradient_bytes = 4, main_bytes = 4, moment_bytes = 8;
  std::optional<MuonShape> muon;
  // Elements of a bucket of gradients; nullopt: parallel::default_bucket_elements().
  std::optional<int64_t> bucket_elements;
  // Bytes of one gradient on the wire; and whether a reduction receives them in a buffer of its own, as the
  // trainer's does.
  double reduced_bytes = 4;
  bool buffered_reductions = false;
  double activation_bytes = 2;
  // Bytes that are moved to quantize one operand: two are read, and one is written for each of two layouts.
  // Current scaling reads two more for the largest magnitude. NVFP4 (7) reads four more, for those of the
  // rows and of the transformed columns, and writes half a byte for each layout.
  double quantized_bytes = 4;
  // In 8 bits, whether the GEMMs of weight gradients are too; first and last layers whose GEMMs are in 16
  // bits.
  bool low_weight_gradients = true;
  int64_t first_high_layers = 0, last_high_layers = 0;
  // Bytes of an element of the input of a GEMM, as it is kept for the GEMM of the weight gradient: in that
  // format, where this GEMM is too, with its scales.
  double saved_operand_bytes = 2;
  // Bytes of a weight in that format, with its scales, of which a rank keeps one layout for the forward pass
  // and one for the backward pass; and whether ranks gather updated weights in it (fp8_param_gather).
  double code_bytes = 0;
  bool gathers_codes = false;

  // ---- execution ----
  RecomputeShape recompute;
  ContextExchange context_exchange = ContextExchange::ring;
  TokenDispatch dispatch = TokenDispatch::alltoall;
  // Bytes of the output layer and its loss for each logit; and whether they compute a part of a micro-batch
  // at a time, as the trainer does.
  double logit_bytes = 8;
  bool chunked_logits = false;
  // Adapters are trained: parameters of their own on each rank, and weights without gradients (frozen_base).
  std::optional<AdapterShape> adapters;
  // Bytes of one frozen weight of a linear layer, where it is quantized.
  std::optional<double> frozen_bytes;
  // Fraction of main parameters and moments that is in host memory and updated there.
  double offloaded_state = 0;
  // First layers of each stage whose saved activations are in host memory.
  int64_t offloaded_layers = 0;
  // Attention writes its scores (no flash attention).
  bool stores_scores = false;
  bool overlap_grad_reduce = false, overlap_param_gather = false, overlap_tp = false, overlap_p2p = false,
       overlap_ep = false, overlap_shared = false;

  bool frozen_base() const { return adapters.has_value(); }
  int64_t gpus() const { return tp * pp * cp * dp; }
  int64_t micro_batches() const { return global_batch / (micro_batch * dp); }
  int64_t tokens_per_step() const { return global_batch * seq; }
  // Tokens of one micro-batch on one rank, before tensor parallelism.
  double tokens() const { return static_cast<double>(micro_batch * seq) / static_cast<double>(cp); }
  // Rows that the tensors of routed experts have on one rank for a micro-batch. After an all-to-all they are
  // those of a balanced load. Otherwise each rank has the tokens of all ranks that share the experts, and its
  // tensors have as many rows as may be for its own experts.
  double expert_rows() const;
  // Data-parallel replicas of routed experts.
  int64_t expert_dp() const { return gpus() / (etp * ep * pp); }
  // Ranks over which the state of dense parameters and of routed experts is sharded.
  int64_t dense_shards() const { return std::max<int64_t>(1, dp * cp / instances); }
  int64_t expert_shards() const { return std::max<int64_t>(1, expert_dp() / instances); }
  bool is_low_precision_layer(int64_t layer) const {
    return layer >= first_high_layers && layer < layers - last_high_layers;
  }
  bool is_expert_layer(int64_t layer) const {
    return experts && std::ranges::binary_search(experts->layers, layer);
  }
  // Width of all query heads, of all key heads and value heads, and of attention's outputs: elements of one
  // token.
  int64_t query_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_groups * head_dim; }
  int64_t value_width() const { return kv_groups * (latent ? latent->v_dim : head_dim); }
  int64_t output_width() const { return heads * (latent ? latent->v_dim : head_dim); }
};

// The shape of a resolved recipe. Throws ErrorCode::config where the layers cannot be divided into stages.
RunShape run_shape(const config::Config& config);

// Divides the layers evenly over the stages: the first ones hold one more where they do not divide. Sets
// stages and stage_ranks from layers, pp, vpp and schedule.
void split_evenly(RunShape& shape);

}  // namespace capstan::planner
