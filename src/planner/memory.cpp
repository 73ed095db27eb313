#include "planner/memory.hpp"

#include <algorithm>
#include <utility>

#include "kernels/table.hpp"
#include "parallel/flat_store.hpp"
#include "planner/adapters.hpp"
#include "planner/counts.hpp"
#include "planner/linear_layers.hpp"
#include "train/setup/device.hpp"

namespace capstan::planner {

namespace {

bool holds(const RunShape& s, size_t stage, int64_t pipeline_rank) {
  return s.stage_ranks[stage] == pipeline_rank;
}

// The tables of a rank: the embedding, of which multi-token prediction reads a copy, and the output layer,
// which is a copy of it where they are tied.
struct HeldTables {
  bool embedding = false, output = false;
  int64_t count() const { return (embedding ? 1 : 0) + (output ? 1 : 0); }
};
HeldTables held_tables(const RunShape& s, int64_t rank) {
  HeldTables held;
  for (size_t i = 0; i < s.stages.size(); ++i) {
    if (!holds(s, i, rank)) continue;
    held.embedding |= s.stages[i].embedding || s.stages[i].mtp_layers > 0;
    held.output |= s.stages[i].head;
  }
  if (s.tied && held.embedding) held.output = false;
  return held;
}

RankParameters of_layer(const RunShape& s, const LayerParameters& p) {
  return {p.sharded / real(s.tp) + p.replicated, p.experts / real(s.ep * s.etp)};
}

}  // namespace

RankParameters rank_parameters(const RunShape& s, int64_t pipeline_rank) {
  RankParameters sum;
  const auto add = [&](const LayerParameters& p, int64_t count) {
    const RankParameters one = of_layer(s, p);
    sum.dense += real(count) * one.dense, sum.experts += real(count) * one.experts;
  };
  for (size_t i = 0; i < s.stages.size(); ++i) {
    if (!holds(s, i, pipeline_rank)) continue;
    const StageShape& stage = s.stages[i];
    if (stage.dense_layers > 0) add(layer_parameters(s, false), stage.dense_layers);
    if (stage.expert_layers > 0) add(layer_parameters(s, true), stage.expert_layers);
    if (stage.mtp_layers > 0) add(mtp_parameters(s), stage.mtp_layers);
    // Multi-token prediction reads the output of the final norm.
    if (stage.mtp_layers > 0 || (stage.head && stage.states_out == 1))
      sum.dense += real(s.norm_vectors * s.hidden);
  }
  const HeldTables held = held_tables(s, pipeline_rank);
  sum.dense += real(held.count()) * real(s.vocab * s.hidden) / real(s.tp);
  if (held.embedding) sum.dense += real(s.positions * s.hidden);
  return sum;
}

RankParameters trained_parameters(const RunShape& s, int64_t pipeline_rank) {
  if (!s.adapters) return rank_parameters(s, pipeline_rank);
  const AdapterParameters dense = adapter_parameters(s, false), experts = adapter_parameters(s, true);
  RankParameters sum;
  for (size_t i = 0; i < s.stages.size(); ++i) {
    if (s.stage_ranks[i] != pipeline_rank) continue;
    const double in_dense = real(s.stages[i].dense_layers), in_experts = real(s.stages[i].expert_layers);
    sum.dense += in_dense * dense.dense + in_experts * experts.dense;
    sum.experts += in_experts * experts.experts;
  }
  return sum;
}

namespace {

// Parameters of which a rank keeps a state that is sharded from a strategy on: all, or its part.
double kept(const RunShape& s, const RankParameters& p, config::ShardingStrategy least) {
  if (s.sharding < least) return p.total();
  return p.dense / real(s.dense_shards()) + p.experts / real(s.expert_shards());
}

}  // namespace

double updated_parameters(const RunShape& s, const RankParameters& trained) {
  return kept(s, trained, config::ShardingStrategy::optim) /
         (s.shards_over_instances ? real(s.instances) : 1);
}

namespace {

// Experts instead of an MLP; GEMMs in 8 or 4 bits.
struct LayerKind {
  bool experts = false, low_precision = false;
};

// Bytes of one element of an input of a GEMM that a layer saves, for the gradient of the weight or of an
// adapter.
double saved_input(const RunShape& s, LayerKind kind, LinearLayer::Input input) {
  using enum LinearLayer::Input;
  if (s.adapters) return s.activation_bytes * saves_input(s, kind.experts, input);
  // With sequence parallelism a column-parallel layer saves its rank's rows, which it gathers again in the
  // backward pass, and quantizes them there.
  if (s.sequence_parallel && (input == attention || input == mlp)) return s.activation_bytes;
  return kind.low_precision ? s.saved_operand_bytes : s.activation_bytes;
}

double layer_activations_with(const RunShape& s, const RecomputeShape& recompute, LayerKind kind) {
  using enum LinearLayer::Input;
  const double bytes = s.activation_bytes, h = real(s.hidden), t = real(s.tp), tokens = s.tokens();
  const auto saved = [&](LinearLayer::Input input) { return saved_input(s, kind, input); };
  // Whether a GEMM saves another tensor than that which it reads.
  const bool saves_codes = kind.low_precision && s.saved_operand_bytes != bytes && !s.adapters;
  // What sequence parallelism divides, what tensor parallelism divides in any case, and what neither does:
  // bytes of a token.
  double sequence = 0, tensor = 0, full = 0;
  if (recompute.full && recompute.layers < 0) {
    sequence = bytes * h;
    return tokens * sequence / (s.sequence_parallel ? t : 1);
  }
  // Inputs of all norms, and of the two GEMMs that follow those of the inputs.
  sequence += real(s.norms_per_layer) * bytes * h;
  const double inputs = (saved(attention) + (s.adapters || !kind.experts ? saved(mlp) : bytes)) * h;
  if (!recompute.norms) sequence += inputs;
  if (s.adapters) full += adapter_activations(s, kind.experts);
  if (s.hidden_dropout) sequence += 2 * h;
  const double query = real(s.query_width()), kv = real(s.kv_width());
  // Attention saves its outputs, and so does the output projection where it saves codes.
  const double output = bytes + (saves_codes ? saved(other) : 0);
  double core = output * real(s.output_width()) + 4 * real(s.heads);
  // Latent attention recomputes queries, keys and values too.
  if (!s.latent || !recompute.attention) core += bytes * (query + kv + real(s.value_width()));
  if (s.latent) {
    const LatentShape& l = *s.latent;
    sequence += (bytes + (s.adapters ? bytes : saved(attention))) * real(l.q_rank + l.kv_rank) +
                bytes * real(l.rope_dim);
  }
  // Queries, keys and values before the norms.
  if (s.qk_norm_across_heads) core += bytes * (query + 2 * kv);
  // Scores, softmax and its dropout mask (Korthikanti et al. 2022).
  if (s.stores_scores && !recompute.attention) core += 5 * real(s.heads * s.seq);
  tensor += core;
  const double widths = s.gated ? 2 : 1;
  double routed = 0;
  if (!kind.experts) {
    if (!recompute.mlp) tensor += (widths * bytes + saved(mlp_hidden)) * real(s.ffn);
  } else {
    const ExpertShape& e = *s.experts;
    if (!recompute.experts) {
      // Inputs of the experts, hidden layers, and outputs with biases, which are weighted afterward.
      const double hidden = widths * bytes + (recompute.activation ? 0 : saved(experts_hidden));
      routed = s.expert_rows() *
               (saved(experts) * h + hidden * real(e.ffn) / real(s.etp) + (s.mlp_bias ? bytes * h : 0));
      if (!recompute.shared) tensor += (widths * bytes + saved(mlp_hidden)) * real(e.shared_ffn);
    }
    sequence += 4 * real(e.count);
  }
  return routed + tokens * (full + sequence / (s.sequence_parallel ? t : 1) + tensor / t);
}

// Bytes that the weight gradients of a layer need of one micro-batch, on one rank: inputs of its GEMMs, and
// gradients of their outputs. Zero-bubble schedules keep them after the backward pass.
double weight_gradient_operands(const RunShape& s, LayerKind kind) {
  if (s.frozen_base()) return 0;
  const double t = real(s.tp), tokens = s.tokens();
  // Of inputs and of gradients of outputs.
  const double element = kind.low_precision ? s.saved_operand_bytes : s.activation_bytes;
  // Of all tokens, which sequence parallelism has gathered for the GEMM; divided by it; divided by tensor
  // parallelism; and of routed experts.
  double gathered = 0, sequence = 0, tensor = 0, routed = 0;
  for (const LinearLayer& layer : dense_layers(s, kind.experts)) {
    using enum LinearLayer::Sharding;
    (layer.sharding == none     ? sequence
     : layer.sharding == inputs ? tensor
                                : gathered) += element * real(layer.in);
    (layer.sharding == none      ? sequence
     : layer.sharding == outputs ? tensor
                                 : gathered) += element * real(layer.out);
  }
  if (kind.experts)
    for (const LinearLayer& layer : routed_layers(s))
      routed += s.expert_rows() * element * (layer.inputs(s.etp) + layer.outputs(s.etp));
  return routed + tokens * (gathered + sequence / (s.sequence_parallel ? t : 1) + tensor / t);
}

}  // namespace

double layer_activations(const RunShape& s, bool expert_layer) {
  return layer_activations_with(s, s.recompute, {expert_layer, is_low_precision(s.format)});
}

std::vector<ChunksInFlight> chunks_in_flight(const RunShape& s, int64_t rank) {
  const int64_t m = s.micro_batches(), after = s.pp - rank, first = std::min(m, after);
  switch (s.schedule) {
    case config::PipelineSchedule::gpipe:
      return {{m, 0}};
    case config::PipelineSchedule::zb_h1: {
      // Weight gradients come `rank` micro-batches after the backward pass.
      const int64_t later = std::min(m - first, rank);
      return {{first, later}, {first - 1, later + 1}};
    }
    case config::PipelineSchedule::zb_v: {
      // When the V is full, and after the last `rank` backward passes of both chunks, whose weight gradients
      // come at the end. The schedule is that of 2 P - 1 micro-batches, without those that do not exist.
      const int64_t missing = std::max<int64_t>(0, 2 * s.pp - 1 - m);
      const int64_t later =
          std::max<int64_t>(0, rank - missing) + std::clamp<int64_t>(s.pp - missing, 0, rank);
      return {{std::min(2 * m, 2 * s.pp), 0}, {first - 1, later + 1}};
    }
    case config::PipelineSchedule::one_f_one_b:
    case config::PipelineSchedule::interleaved:
    case config::PipelineSchedule::pipedream:
      break;
  }
  if (s.vpp == 1) return {{first, 0}};
  return {{std::min(m * s.vpp, 2 * (after - 1) + (s.vpp - 1) * s.group + 1), 0}};
}

namespace {

// Bytes of activations of one rank on the device, and of those in host memory.
struct Activations {
  double device = 0, host = 0;
  // Of the device's, those of the layer that is recomputed, and operands of weight gradients that a
  // zero-bubble schedule still has when all else is computed.
  double recomputed = 0, delayed = 0;
};

// Bytes of one layer: what it keeps if it is not recomputed in full, and if it is; what it has when it is
// recomputed; and the operands of its weight gradients.
struct LayerBytes {
  LayerBytes(const RunShape& s, LayerKind kind)
      : full(layer_activations_with(s, {}, kind)),
        kept(s.recompute.full ? full : layer_activations_with(s, s.recompute, kind)),
        input(layer_activations_with(s, {.full = true}, kind)),
        operands(weight_gradient_operands(s, kind)) {}
  double full, kept, input, operands;
};

// Layers whose GEMMs have one format.
struct FormatBytes {
  FormatBytes(const RunShape& s, bool low_precision)
      : dense(s, {false, low_precision}), expert(s.experts ? LayerBytes(s, {true, low_precision}) : dense) {}
  LayerBytes dense, expert;
};
struct ModelBytes {
  explicit ModelBytes(const RunShape& s)
      : low(s, is_low_precision(s.format)), high(is_low_precision(s.format) ? FormatBytes(s, false) : low) {}
  FormatBytes low, high;
};

// Bytes of one chunk of a rank for a micro-batch.
struct ChunkBytes {
  // On the device, and in host memory; of its largest layer there.
  double held = 0, on_host = 0, offloaded = 0;
  // What it has more than it keeps when the backward pass recomputes one of its layers, after it has freed
  // those behind it.
  double recomputed = 0;
  // Operands of its weight gradients.
  double operands = 0;
};

// Bytes of the hidden states of a micro-batch on one rank.
double state_bytes(const RunShape& s) {
  return s.activation_bytes * s.tokens() * real(s.hidden) / (s.sequence_parallel ? real(s.tp) : 1);
}

// first_layer: of the stage.
ChunkBytes bytes_of_chunk(const RunShape& s, const StageShape& stage, int64_t first_layer,
                          const ModelBytes& model) {
  ChunkBytes chunk;
  // Recomputation by blocks, and offload, take the first layers.
  int64_t few = !s.recompute.full ? 0 : s.recompute.layers >= 0 ? s.recompute.layers : stage.layers() + 1;
  int64_t away = s.offloaded_layers;
  const auto add = [&](const LayerBytes& bytes, bool recomputed, bool on_host) {
    const double kept = recomputed ? bytes.input : bytes.kept;
    (on_host ? chunk.on_host : chunk.held) += kept;
    if (on_host) chunk.offloaded = std::max(chunk.offloaded, kept);
    chunk.recomputed = std::max(chunk.recomputed - (on_host ? 0 : kept), bytes.full - kept);
    chunk.operands += bytes.operands;
  };
  for (int64_t k = 0; k < stage.layers(); ++k) {
    const FormatBytes& format = s.is_low_precision_layer(first_layer + k) ? model.low : model.high;
    add(k < stage.dense_layers ? format.dense : format.expert, few-- > 0, away-- > 0);
  }
  // Which leave out multi-token prediction. A depth saves the embedding and the hidden states that it
  // combines, both again side by side, and the input of its norm; recomputed, the embedding beside the input
  // of a layer.
  const FormatBytes& mtp = s.format == GemmFormat::fp4 ? model.high : model.low;
  const bool recomputed = s.recompute.full && s.recompute.layers < 0;
  for (int64_t k = 0; k < stage.mtp_layers; ++k) {
    add(s.is_expert_layer(s.layers - 1) ? mtp.expert : mtp.dense, recomputed, false);
    chunk.held += (recomputed ? 1 : 5) * state_bytes(s);
  }
  return chunk;
}

// Micro-batches of a rank's chunk among the `count` that all its chunks keep: where these take turns, the
// first ones have more.
double kept_of_chunk(const RunShape& s, int64_t chunk, int64_t count) {
  if (s.vpp == 1 || s.schedule == config::PipelineSchedule::zb_v) return real(count) / real(s.vpp);
  const int64_t round = s.group * s.vpp;
  return real(count / round * s.group + std::clamp<int64_t>(count % round - chunk * s.group, 0, s.group));
}

Activations activations_in_flight(const RunShape& s, int64_t rank, const ModelBytes& model) {
  std::vector<ChunkBytes> chunks;
  int64_t layer = 0;
  double recomputed = 0, offloaded = 0;
  for (size_t i = 0; i < s.stages.size(); ++i) {
    const int64_t first = std::exchange(layer, layer + s.stages[i].layers());
    if (!holds(s, i, rank)) continue;
    const ChunkBytes& chunk = chunks.emplace_back(bytes_of_chunk(s, s.stages[i], first, model));
    recomputed = std::max(recomputed, chunk.recomputed);
    offloaded = std::max(offloaded, chunk.offloaded);
  }
  Activations most{.recomputed = recomputed};
  for (const ChunksInFlight& in_flight : chunks_in_flight(s, rank)) {
    double held = 0, on_host = 0, operands = 0;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const double live = kept_of_chunk(s, static_cast<int64_t>(i), in_flight.activations);
      held += chunks[i].held * live, on_host += chunks[i].on_host * live;
      operands += chunks[i].operands * real(in_flight.weight_gradients) / real(s.vpp);
    }
    most.device = std::max(most.device, held + operands);
    most.host = std::max(most.host, on_host);
    most.delayed = std::max(most.delayed, operands);
  }
  // Two layers on their way to or from the host are on the device.
  most.device += recomputed + 2 * offloaded;
  return most;
}

// Elements of the largest weight of a layer on one rank, whose gradient is a temporary buffer.
double largest_weight(const RunShape& s) {
  const double widths = s.gated ? 2 : 1;
  return real(s.hidden) * std::max(widths * real(s.ffn), real(s.query_width() + 2 * s.kv_width())) /
         real(s.tp);
}

// Embedding and output layer of a rank, which stay in 16 bits where layers are quantized.
double tables(const RunShape& s, int64_t rank) {
  return real(held_tables(s, rank).count()) * real(s.vocab * s.hidden) / real(s.tp);
}

// Parameters of one layer, the last one, on one rank.
double layer_block(const RunShape& s) {
  return of_layer(s, layer_parameters(s, s.is_expert_layer(s.layers - 1))).total();
}

// Bytes of a frozen weight, on average over those of a rank: those of layers may be quantized.
double frozen_bytes(const RunShape& s, int64_t rank, const RankParameters& all) {
  if (!s.frozen_bytes) return s.parameter_bytes;
  const double in_full = tables(s, rank) / all.total();
  return in_full * s.parameter_bytes + (1 - in_full) * *s.frozen_bytes;
}

// Bytes of the largest weight that is kept in 4 bits, while a GEMM reads it: the experts of a layer are one.
double expanded_weight(const RunShape& s) {
  if (!s.frozen_bytes) return 0;
  double largest = largest_weight(s);
  if (s.experts)
    largest = std::max(largest, (s.gated ? 2.0 : 1.0) * real(s.hidden) * real(s.experts->count) *
                                    real(s.experts->ffn) / real(s.ep * s.etp));
  return s.parameter_bytes * largest;
}

// Weights of one rank whose GEMMs are in 8 or 4 bits: those of its layers.
RankParameters low_precision_weights(const RunShape& s, int64_t rank) {
  RankParameters sum;
  int64_t layer = 0;
  for (size_t i = 0; i < s.stages.size(); ++i)
    for (const int64_t end = layer + s.stages[i].layers(); layer < end; ++layer) {
      if (!holds(s, i, rank) || !s.is_low_precision_layer(layer)) continue;
      const LayerParameters of_layer = layer_parameters(s, s.is_expert_layer(layer));
      sum.dense += of_layer.sharded / real(s.tp);
      sum.experts += of_layer.experts / real(s.ep * s.etp);
    }
  return sum;
}

// What these take beside the parameters. Where ranks gather codes, each holds codes of all weights, which
// serve the forward pass, and its part of the parameters.
double code_bytes(const RunShape& s, int64_t rank) {
  using enum config::ShardingStrategy;
  if (s.code_bytes == 0 || s.sharding == optim_grads_params) return 0;
  const bool gathered = s.gathers_codes && s.sharding != no_shard && !s.adapters;
  // The first micro-batch is at its peak before the backward pass has quantized any weight.
  const double layouts = s.micro_batches() > 1 || s.pp > 1 ? 2 : 1;
  const auto of_one = [&](int64_t shards) {
    return layouts * s.code_bytes - (gathered ? s.parameter_bytes * (1 - 1 / real(shards)) : 0);
  };
  const RankParameters weights = low_precision_weights(s, rank);
  return weights.dense * of_one(s.dense_shards()) + weights.experts * of_one(s.expert_shards());
}

// Gradients in the buckets that are reduced at a time, three. A weight that is larger than a bucket has one
// of its own: then these are those of an MLP or of all experts of a layer, and the larger one of the next.
double waiting_gradients(const RunShape& s, double trained) {
  const double bucket = real(s.bucket_elements.value_or(
      parallel::default_bucket_elements(static_cast<int64_t>(trained), s.dp * s.cp)));
  double large = 0;
  if (!s.adapters) {
    const double widths = s.gated ? 2 : 1;
    const bool experts = s.is_expert_layer(s.layers - 1);
    const RankParameters layer = of_layer(s, layer_parameters(s, experts));
    const double weights = experts ? layer.experts : (1 + widths) * real(s.hidden * s.ffn) / real(s.tp),
                 others = experts ? layer.dense : layer.dense - weights;
    large = weights + std::max(others, weights * widths / (1 + widths));
  }
  return std::min(std::max(real(parallel::FlatStore::kPendingReductions) * bucket, large), trained);
}

MemoryShape states(const RunShape& s, int64_t rank) {
  const RankParameters all = rank_parameters(s, rank), trained = trained_parameters(s, rank);
  MemoryShape m;
  using enum config::ShardingStrategy;
  const double updated = updated_parameters(s, trained);
  m.parameters = s.parameter_bytes * kept(s, trained, optim_grads_params);
  if (s.adapters) m.parameters += frozen_bytes(s, rank, all) * kept(s, all, optim_grads_params);
  m.parameters += code_bytes(s, rank);
  m.gradients = s.gradient_bytes * kept(s, trained, optim_grads);
  const double device = 1 - s.offloaded_state;
  m.main_parameters = device * s.main_bytes * updated;
  m.moments = device * s.moment_bytes * updated;
  // The host keeps the updated parameters too, until they are copied.
  m.host = s.offloaded_state * (s.main_bytes + s.moment_bytes + s.parameter_bytes) * updated;
  // Gradients of a micro-batch before they are reduced, and what their reduction receives: of the tables, of
  // which one is received at a time, and of the buckets that are reduced.
  if (s.sharding == optim_grads) {
    const double table = real(s.vocab * s.hidden) / real(s.tp),
                 trained_tables = s.adapters ? 0 : tables(s, rank),
                 waiting = waiting_gradients(s, trained.total());
    m.gradients += s.gradient_bytes * (trained_tables + waiting);
    m.workspace += s.reduced_bytes * (std::min(table, trained_tables) + waiting);
  }
  // Two blocks are gathered: the one that computes, and the next one.
  if (s.sharding == optim_grads_params) m.parameters += 2 * s.parameter_bytes * largest_block(s);
  return m;
}

// Whether gradients that a rank has all of are reduced in buffers beside them.
bool receives_gradients(const RunShape& s) {
  return s.buffered_reductions && s.sharding <= config::ShardingStrategy::optim && s.dp * s.cp > 1;
}

// Bytes that the reduction of gradients takes when the last backward pass ends: the buckets that are
// received, and all replicated gradients that are sent with fewer bits than they are kept with.
double reduction_buffers(const RunShape& s, int64_t rank) {
  if (!receives_gradients(s)) return 0;
  const double trained = trained_parameters(s, rank).total();
  const bool copies = s.sharding == config::ShardingStrategy::no_shard && s.reduced_bytes < s.gradient_bytes;
  return s.reduced_bytes * (waiting_gradients(s, trained) + (copies ? trained : 0));
}

// What the reduction of the output layer's gradient receives, which begins before any layer is freed. A tied
// one waits for the gradient of the embedding.
double head_reduction(const RunShape& s) {
  if (!receives_gradients(s) || s.tied || s.frozen_base()) return 0;
  return s.reduced_bytes * real(s.vocab * s.hidden) / real(s.tp);
}

// Whether a rank has layers of the model, or of multi-token prediction.
bool has_layers(const RunShape& s, int64_t rank) {
  for (size_t i = 0; i < s.stages.size(); ++i)
    if (holds(s, i, rank) && s.stages[i].layers() + s.stages[i].mtp_layers > 0) return true;
  return false;
}

// Hidden states and gradients of them that are on their way from or to other stages: two tensors each of what
// a stage receives and sends.
double transferred_states(const RunShape& s, int64_t rank) {
  int64_t most = 0;
  for (size_t i = 0; i < s.stages.size(); ++i)
    if (holds(s, i, rank))
      most = std::max(most, s.stages[i].states_out + s.stages[i > 0 ? i - 1 : 0].states_out);
  return s.pp > 1 ? 2 * real(most) * state_bytes(s) : 0;
}

// Gradients that exist beside all that a layer saves: of the outputs of an MLP or of experts, and of their
// hidden layer. With ZeRO 3 the peak comes later (add_sharded_blocks).
double layer_gradients(const RunShape& s, int64_t rank) {
  if (s.sharding == config::ShardingStrategy::optim_grads_params) return 0;
  const double transferred = transferred_states(s, rank);
  if (!has_layers(s, rank)) return transferred;
  if (s.is_expert_layer(s.layers - 1))
    return transferred +
           s.activation_bytes * s.expert_rows() * (real(s.hidden) + real(s.experts->ffn) / real(s.etp));
  return transferred + state_bytes(s) + s.activation_bytes * s.tokens() * real(s.ffn) / real(s.tp);
}

// Rows of a micro-batch whose logits exist at a time.
double logit_rows(const RunShape& s) {
  if (!s.chunked_logits) return s.tokens();
  static const auto& kernel = *train::backend_of(config::DeviceKind::cuda).table().cross_entropy;
  const DType compute = s.activation_bytes < 4 ? DType::bf16 : DType::f32;
  return real(kernel.chunk_rows(static_cast<int64_t>(s.tokens()), s.vocab / s.tp, compute, true));
}

// With ZeRO 3, buffers of gradients before they are sharded, beside `logits`, the bytes of the output layer:
// the gradient of its table while there are logits, and afterward those of a table, a layer and one more of
// the larger, and what the reduction of a table and a layer receives.
void add_sharded_blocks(const RunShape& s, double logits, MemoryShape& m) {
  const double table = real(s.vocab * s.hidden) / real(s.tp), layer = layer_block(s);
  const double waiting = s.gradient_bytes * (layer + std::max(table, layer)),
               received = s.reduced_bytes * (table + layer);
  m.gradients += s.gradient_bytes * table;
  if (logits > waiting + received) {
    m.workspace += logits;
  } else {
    m.gradients += waiting;
    m.workspace += received;
  }
}

}  // namespace

double largest_block(const RunShape& s) {
  return std::max(layer_block(s), real(s.vocab * s.hidden) / real(s.tp));
}

std::vector<MemoryShape> memory_by_rank(const RunShape& s) {
  const ModelBytes model(s);
  std::vector<MemoryShape> ranks;
  const double expanded = expanded_weight(s);
  for (int64_t rank = 0; rank < s.pp; ++rank) {
    MemoryShape m = states(s, rank);
    const double gradients = layer_gradients(s, rank);
    m.parameters += expanded;
    const Activations activations = activations_in_flight(s, rank, model);
    m.activations = activations.device, m.host += activations.host;
    const double rows = s.tokens() * s.activation_bytes * real(s.hidden);
    double logits = 0, head = 0;
    for (size_t i = 0; i < s.stages.size(); ++i) {
      if (!holds(s, i, rank)) continue;
      const StageShape& stage = s.stages[i];
      if (stage.embedding) m.activations += rows / real(s.tp);
      if (!stage.head) continue;
      // That of the copy of the embedding begins when multi-token prediction is freed, before other layers.
      head = head_reduction(s) * (stage.mtp_layers > 0 && stage.layers() > 0 && s.pp > 1 ? 2 : 1);
      const double depth = real(stage.states_out);
      m.activations += depth * rows;
      logits = (s.chunked_logits ? 1 : depth) * logit_rows(s) * s.logit_bytes * real(s.vocab) / real(s.tp);
    }
    // A layer is recomputed and differentiated, and its weights are expanded, when the logits are gone. So is
    // the gradient of the output layer reduced, where no layer follows.
    logits = std::max(logits - activations.recomputed - expanded, gradients);
    if (!has_layers(s, rank)) head = std::max(0.0, gradients + head - logits);
    if (s.sharding == config::ShardingStrategy::optim_grads_params && !s.adapters)
      add_sharded_blocks(s, logits, m);
    else
      m.workspace += logits;
    // Gathered inputs, and the gradient of a weight before it is added.
    m.workspace += head + rows + (s.frozen_base() ? 0 : s.activation_bytes * largest_weight(s));
    m.workspace = std::max(m.workspace, reduction_buffers(s, rank) + activations.delayed - m.activations);
    ranks.push_back(m);
  }
  return ranks;
}

}  // namespace capstan::planner
