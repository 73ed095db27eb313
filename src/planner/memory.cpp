#include "planner/memory.hpp"

#include <algorithm>

#include "kernels/table.hpp"
#include "parallel/flat_store.hpp"
#include "planner/adapters.hpp"
#include "planner/counts.hpp"
#include "train/setup/device.hpp"

namespace capstan::planner {

namespace {

bool holds(const RunShape& s, size_t stage, int64_t pipeline_rank) {
  return s.stage_ranks[stage] == pipeline_rank;
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
  const double table = real(s.vocab * s.hidden) / real(s.tp);
  bool embedding = false;
  for (size_t i = 0; i < s.stages.size(); ++i) {
    if (!holds(s, i, pipeline_rank)) continue;
    const StageShape& stage = s.stages[i];
    if (stage.dense_layers > 0) add(layer_parameters(s, false), stage.dense_layers);
    if (stage.expert_layers > 0) add(layer_parameters(s, true), stage.expert_layers);
    if (stage.mtp_layers > 0) add(mtp_parameters(s), stage.mtp_layers);
    if (stage.embedding) sum.dense += table + real(s.positions * s.hidden);
    embedding = embedding || stage.embedding;
    if (!stage.head) continue;
    sum.dense += real(s.norm_vectors * s.hidden);
    // A tied output layer is the embedding; the last stage has a copy of it.
    if (!s.tied || !embedding) sum.dense += table;
  }
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

// Bytes of one element of an input of a GEMM that a layer saves, for the gradient of the weight or of an
// adapter.
double saved_input(const RunShape& s, bool expert_layer, AdaptedLinear::Input input) {
  using enum AdaptedLinear::Input;
  if (s.adapters) return s.activation_bytes * saves_input(s, expert_layer, input);
  // With sequence parallelism a column-parallel layer saves its rank's rows, which it gathers again in the
  // backward pass, and quantizes them there.
  if (s.sequence_parallel && (input == attention || input == mlp)) return s.activation_bytes;
  return is_low_precision(s.format) ? 1 : s.activation_bytes;
}

double layer_activations_with(const RunShape& s, const RecomputeShape& recompute, bool expert_layer) {
  using enum AdaptedLinear::Input;
  const double bytes = s.activation_bytes, h = real(s.hidden), t = real(s.tp), tokens = s.tokens();
  const auto saved = [&](AdaptedLinear::Input input) { return saved_input(s, expert_layer, input); };
  // What sequence parallelism divides, what tensor parallelism divides in any case, and what neither does:
  // bytes of a token.
  double sequence = 0, tensor = 0, full = 0;
  if (recompute.full && recompute.layers < 0) {
    sequence = bytes * h;
    return tokens * sequence / (s.sequence_parallel ? t : 1);
  }
  // Inputs of all norms, and of the two GEMMs that follow those of the inputs.
  sequence += real(s.norms_per_layer) * bytes * h;
  const double inputs = (saved(attention) + (s.adapters || !expert_layer ? saved(mlp) : saved(experts))) * h;
  if (!recompute.norms) sequence += inputs;
  if (s.adapters) full += adapter_activations(s, expert_layer);
  if (s.hidden_dropout) sequence += 2 * h;
  const double query = real(s.query_width()), kv = real(s.kv_width());
  // A frozen output projection saves nothing, but attention saves its outputs.
  const double output = s.adapters ? bytes : saved(other);
  double core = bytes * (query + 2 * kv) + output * query + 4 * real(s.heads);
  if (s.latent) {
    const LatentShape& l = *s.latent;
    const double heads = real(s.heads);
    sequence += bytes * 2 * real(l.q_rank + l.kv_rank) + bytes * real(l.rope_dim);
    core = (recompute.attention ? 0 : bytes * heads * real(2 * (l.nope_dim + l.rope_dim) + l.v_dim)) +
           output * heads * real(l.v_dim) + 4 * heads;
  }
  // Queries, keys and values before the norms.
  if (s.qk_norm_across_heads) core += bytes * (query + 2 * kv);
  // Scores, softmax and its dropout mask (Korthikanti et al. 2022).
  if (s.stores_scores && !recompute.attention) core += 5 * real(s.heads * s.seq);
  tensor += core;
  const double widths = s.gated ? 2 : 1;
  if (!expert_layer) {
    if (!recompute.mlp) tensor += (widths * bytes + saved(mlp_hidden)) * real(s.ffn);
  } else {
    const ExpertShape& e = *s.experts;
    // Each token is sent to topk experts (balanced load): their inputs, gathered over the ranks that share an
    // expert, and hidden layers.
    double routed = 0;
    if (!recompute.experts) {
      routed = saved(experts) * h * real(s.etp) +
               (widths * bytes + (recompute.activation ? 0 : saved(experts_hidden))) * real(e.ffn);
      // Outputs with biases, which are weighted afterward.
      if (s.mlp_bias) routed += bytes * h;
      if (!recompute.shared) tensor += (widths * bytes + saved(mlp_hidden)) * real(e.shared_ffn);
    }
    sequence += real(e.topk) * routed + 4 * real(e.count);
  }
  return tokens * (full + sequence / (s.sequence_parallel ? t : 1) + tensor / t);
}

}  // namespace

double layer_activations(const RunShape& s, bool expert_layer) {
  return layer_activations_with(s, s.recompute, expert_layer);
}

double layer_weight_gradient_operands(const RunShape& s, bool expert_layer) {
  if (s.frozen_base()) return 0;
  const double h = real(s.hidden), t = real(s.tp), tokens = s.tokens();
  // Of inputs and of gradients of outputs.
  const double element = is_low_precision(s.format) ? 1 : s.activation_bytes;
  // Of all tokens, which sequence parallelism has gathered for the GEMM; divided by it; and divided by tensor
  // parallelism.
  double gathered = 0, sequence = 0, tensor = 0;
  const auto column = [&](double from, double to) { gathered += element * from, tensor += element * to; };
  const auto row = [&](double from, double to) { tensor += element * from, gathered += element * to; };
  const double query = real(s.query_width());
  if (s.latent) {
    const LatentShape& l = *s.latent;
    const double heads = real(s.heads), query_in = heads * real(l.nope_dim + l.rope_dim);
    if (l.q_rank > 0) sequence += element * (h + real(l.q_rank));
    column(l.q_rank > 0 ? real(l.q_rank) : h, query_in);
    sequence += element * (h + real(l.kv_rank + l.rope_dim));
    column(real(l.kv_rank), heads * real(l.nope_dim + l.v_dim));
    row(heads * real(l.v_dim), h);
  } else {
    column(h, query + 2 * real(s.kv_width()));
    row(query, h);
  }
  const double widths = s.gated ? 2 : 1;
  const auto mlp = [&](double width) {
    column(h, widths * width);
    row(width, h);
  };
  if (!expert_layer) {
    mlp(real(s.ffn));
  } else {
    const ExpertShape& e = *s.experts;
    // Rows of an expert, and gradients of its outputs, are gathered over the ranks that share it.
    const double rows = 2 * h * real(s.etp);
    sequence += real(e.topk) * element * (rows + (1 + widths) * real(e.ffn));
    if (e.shared_ffn > 0) mlp(real(e.shared_ffn));
  }
  return tokens * (gathered + sequence / (s.sequence_parallel ? t : 1) + tensor / t);
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
  // Of the device's, those of the layer that is recomputed.
  double recomputed = 0;
};

// Bytes of one layer: what it keeps if it is not recomputed in full, and if it is; what it has when it is
// recomputed; and the operands of its weight gradients.
struct LayerBytes {
  LayerBytes(const RunShape& s, bool expert_layer)
      : full(layer_activations_with(s, {}, expert_layer)),
        kept(s.recompute.full ? full : layer_activations_with(s, s.recompute, expert_layer)),
        input(layer_activations_with(s, {.full = true}, expert_layer)),
        operands(layer_weight_gradient_operands(s, expert_layer)) {}
  double full, kept, input, operands;
};

// Activations of the chunks in flight, on average over the chunks of the rank.
Activations activations_in_flight(const RunShape& s, int64_t rank, const LayerBytes& dense,
                                  const LayerBytes& expert) {
  double chunks = 0, held = 0, on_host = 0, recomputed = 0, offloaded = 0, operands = 0;
  for (size_t i = 0; i < s.stages.size(); ++i) {
    if (!holds(s, i, rank)) continue;
    const StageShape& stage = s.stages[i];
    ++chunks;
    // Recomputation by blocks, and offload, take the first layers.
    int64_t few = !s.recompute.full ? 0 : s.recompute.layers >= 0 ? s.recompute.layers : stage.layers() + 1;
    int64_t away = s.offloaded_layers;
    const auto add = [&](const LayerBytes& bytes, int64_t count) {
      operands += real(count) * bytes.operands;
      for (int64_t layer = 0; layer < count; ++layer, --few, --away) {
        const double kept = few > 0 ? bytes.input : bytes.kept;
        (away > 0 ? on_host : held) += kept;
        if (few > 0) recomputed = std::max(recomputed, bytes.full);
        if (away > 0) offloaded = std::max(offloaded, kept);
      }
    };
    add(dense, stage.dense_layers);
    add(expert, stage.expert_layers);
    add(s.is_expert_layer(s.layers - 1) ? expert : dense, stage.mtp_layers);
  }
  if (chunks == 0) return {};
  Activations most{0, 0, recomputed};
  for (const ChunksInFlight& in_flight : chunks_in_flight(s, rank)) {
    const double live = real(in_flight.activations) / chunks;
    most.device = std::max(most.device, held * live + operands * real(in_flight.weight_gradients) / chunks);
    most.host = std::max(most.host, on_host * live);
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
  double count = 0;
  for (size_t i = 0; i < s.stages.size(); ++i)
    if (holds(s, i, rank)) count += (s.stages[i].embedding ? 1 : 0) + (s.stages[i].head && !s.tied ? 1 : 0);
  return count * real(s.vocab * s.hidden) / real(s.tp);
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

// Weights of one rank whose GEMMs are in 8 or 4 bits: those of its layers, without experts.
double low_precision_weights(const RunShape& s, int64_t rank) {
  double sum = 0;
  int64_t layer = 0;
  for (size_t i = 0; i < s.stages.size(); ++i)
    for (const int64_t end = layer + s.stages[i].layers(); layer < end; ++layer)
      if (holds(s, i, rank) && s.is_low_precision_layer(layer))
        sum += layer_parameters(s, s.is_expert_layer(layer)).sharded / real(s.tp);
  return sum;
}

// What these take beside the parameters. Where ranks gather codes, each holds codes of all weights, which
// serve the forward pass, and its part of the parameters.
double code_bytes(const RunShape& s, int64_t rank) {
  using enum config::ShardingStrategy;
  if (s.code_bytes == 0 || s.sharding == optim_grads_params) return 0;
  const bool gathered = s.gathers_codes && s.sharding != no_shard && s.dense_shards() > 1 && !s.adapters;
  const double parameters = gathered ? s.parameter_bytes * (1 - 1 / real(s.dense_shards())) : 0;
  // The first micro-batch is at its peak before the backward pass has quantized any weight.
  const double layouts = s.micro_batches() > 1 || s.pp > 1 ? 2 : 1;
  return low_precision_weights(s, rank) * (layouts * s.code_bytes - parameters);
}

// Gradients in the buckets that are reduced at a time. A weight of all experts of a layer is a bucket of its
// own where it is larger; there are two.
double waiting_gradients(const RunShape& s, double trained) {
  const double bucket = real(s.bucket_elements.value_or(
      parallel::default_bucket_elements(static_cast<int64_t>(trained), s.dp * s.cp)));
  const double experts = s.experts && !s.adapters ? of_layer(s, layer_parameters(s, true)).experts : 0;
  return std::min(std::max(real(parallel::FlatStore::kPendingReductions) * bucket, experts + bucket),
                  trained);
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

// Bytes that the reduction of gradients takes when the last backward pass ends: the buckets that are
// received, and all replicated gradients that are sent with fewer bits than they are kept with.
double reduction_buffers(const RunShape& s, int64_t rank) {
  if (s.sharding > config::ShardingStrategy::optim || s.dp * s.cp == 1) return 0;
  const double trained = trained_parameters(s, rank).total();
  const bool copies = s.sharding == config::ShardingStrategy::no_shard && s.reduced_bytes < s.gradient_bytes;
  return s.reduced_bytes * (waiting_gradients(s, trained) + (copies ? trained : 0));
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
  const LayerBytes dense(s, false), expert = s.experts ? LayerBytes(s, true) : dense;
  std::vector<MemoryShape> ranks;
  const double expanded = expanded_weight(s);
  for (int64_t rank = 0; rank < s.pp; ++rank) {
    MemoryShape m = states(s, rank);
    m.parameters += expanded;
    const Activations activations = activations_in_flight(s, rank, dense, expert);
    m.activations = activations.device, m.host += activations.host;
    const double rows = s.tokens() * s.activation_bytes * real(s.hidden);
    double logits = 0;
    for (size_t i = 0; i < s.stages.size(); ++i) {
      if (!holds(s, i, rank)) continue;
      if (s.stages[i].embedding) m.activations += rows / real(s.tp);
      if (!s.stages[i].head) continue;
      const double depth = real(1 + s.stages[i].mtp_layers);
      m.activations += depth * rows;
      logits = (s.chunked_logits ? 1 : depth) * logit_rows(s) * s.logit_bytes * real(s.vocab) / real(s.tp);
    }
    // A layer is recomputed, and its weights are expanded, when the logits are gone.
    logits = std::max(0.0, logits - activations.recomputed - expanded);
    if (s.sharding == config::ShardingStrategy::optim_grads_params && !s.adapters)
      add_sharded_blocks(s, logits, m);
    else
      m.workspace += logits;
    // Gathered inputs, and the gradient of a weight before it is added.
    m.workspace += rows + (s.frozen_base() ? 0 : s.activation_bytes * largest_weight(s));
    m.workspace = std::max(m.workspace, reduction_buffers(s, rank) - m.activations);
    ranks.push_back(m);
  }
  return ranks;
}

}  // namespace capstan::planner
