#include "planner/memory.hpp"

#include <algorithm>

#include "planner/counts.hpp"

namespace capstan::planner {

namespace {

// Ranks over which a state is sharded: data and context parallelism together.
double dense_replicas(const RunShape& s) {
  return real(s.dp * s.cp);
}

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

double layer_activations(const RunShape& s, bool expert_layer) {
  const double bytes = s.activation_bytes, h = real(s.hidden), t = real(s.tp), tokens = s.tokens();
  // Inputs of GEMMs in 8 bits.
  const double input = s.format == GemmFormat::fp8 || s.format == GemmFormat::fp4 ? 1 : bytes;
  // What sequence parallelism divides, and what tensor parallelism divides in any case: bytes of a token.
  double sequence = 0, tensor = 0;
  if (s.recompute.full && s.recompute.layers < 0) {
    sequence = bytes * h;
    return tokens * sequence / (s.sequence_parallel ? t : 1);
  }
  // Inputs of both norms, and of the two GEMMs that follow them.
  sequence += 2 * bytes * h;
  if (!s.recompute.norms) sequence += 2 * input * h;
  if (s.hidden_dropout) sequence += 2 * h;
  const double query = real(s.query_width()), kv = real(s.kv_width());
  double attention = bytes * (query + 2 * kv) + input * query + 4 * real(s.heads);
  if (s.latent) {
    const LatentShape& l = *s.latent;
    const double heads = real(s.heads);
    sequence += bytes * 2 * real(l.q_rank + l.kv_rank) + bytes * real(l.rope_dim);
    attention = (s.recompute.attention ? 0 : bytes * heads * real(2 * (l.nope_dim + l.rope_dim) + l.v_dim)) +
                input * heads * real(l.v_dim) + 4 * heads;
  }
  // Scores, softmax and its dropout mask (Korthikanti et al. 2022).
  if (s.stores_scores && !s.recompute.attention) attention += 5 * real(s.heads * s.seq);
  tensor += attention;
  const double widths = s.gated ? 2 : 1;
  const auto mlp = [&](double width) {
    double kept = 0;
    if (!s.recompute.mlp) kept += widths * bytes * width;
    if (!s.recompute.mlp && !s.recompute.activation) kept += input * width;
    return kept;
  };
  if (!expert_layer) {
    tensor += mlp(real(s.ffn));
  } else {
    const ExpertShape& e = *s.experts;
    // Each token is sent to topk experts: their inputs, hidden layers and outputs (balanced load).
    const double routed = s.recompute.mlp ? 0 : input * h + mlp(real(e.ffn)) + bytes * h;
    sequence += real(e.topk) * routed + 4 * real(e.count);
    tensor += mlp(real(e.shared_ffn));
  }
  return tokens * (sequence / (s.sequence_parallel ? t : 1) + tensor / t);
}

int64_t chunks_in_flight(const RunShape& s, int64_t rank) {
  const int64_t m = s.micro_batches();
  switch (s.schedule) {
    case config::PipelineSchedule::gpipe:
      return m;
    case config::PipelineSchedule::zb_h1:
      return std::min(m, s.pp);
    case config::PipelineSchedule::zb_v:
      return std::min(2 * m, 2 * s.pp);
    case config::PipelineSchedule::one_f_one_b:
    case config::PipelineSchedule::interleaved:
    case config::PipelineSchedule::pipedream:
      break;
  }
  if (s.vpp == 1) return std::min(m, s.pp - rank);
  return std::min(m * s.vpp, 2 * (s.pp - rank - 1) + (s.vpp - 1) * s.group + 1);
}

namespace {

// Bytes of activations of one rank on the device, and of those in host memory.
struct Activations {
  double device = 0, host = 0;
};

// Activations of the chunks in flight, on average over the chunks of the rank.
Activations activations_in_flight(const RunShape& s, int64_t rank) {
  RunShape without = s, recomputes = s;
  without.recompute = {}, recomputes.recompute.layers = -1;
  double chunks = 0, held = 0, on_host = 0, recomputed = 0, offloaded = 0;
  for (size_t i = 0; i < s.stages.size(); ++i) {
    if (!holds(s, i, rank)) continue;
    const StageShape& stage = s.stages[i];
    ++chunks;
    // Recomputation by blocks, and offload, take the first layers.
    int64_t few = !s.recompute.full ? 0 : s.recompute.layers >= 0 ? s.recompute.layers : stage.layers() + 1;
    int64_t away = s.offloaded_layers;
    const auto add = [&](bool expert, int64_t count) {
      const double all = layer_activations(s.recompute.full ? without : s, expert);
      for (int64_t layer = 0; layer < count; ++layer, --few, --away) {
        const double kept = few > 0 ? layer_activations(recomputes, expert) : all;
        (away > 0 ? on_host : held) += kept;
        if (few > 0) recomputed = std::max(recomputed, layer_activations(without, expert));
        if (away > 0) offloaded = std::max(offloaded, kept);
      }
    };
    add(false, stage.dense_layers);
    add(true, stage.expert_layers);
    if (stage.mtp_layers > 0) add(s.is_expert_layer(s.layers - 1), stage.mtp_layers);
  }
  if (chunks == 0) return {};
  const double in_flight = real(chunks_in_flight(s, rank)) / chunks;
  // Two layers on their way to or from the host are on the device.
  return {held * in_flight + recomputed + 2 * offloaded, on_host * in_flight};
}

// Elements of the largest weight of a layer on one rank, whose gradient is a temporary buffer.
double largest_weight(const RunShape& s) {
  const double widths = s.gated ? 2 : 1;
  return real(s.hidden) * std::max(widths * real(s.ffn), real(s.query_width() + 2 * s.kv_width())) /
         real(s.tp);
}

// Parameters of the layer that has the most of them, or of the vocabulary, on one rank.
double largest_block(const RunShape& s) {
  const RankParameters layer = of_layer(s, layer_parameters(s, s.is_expert_layer(s.layers - 1)));
  return std::max(layer.total(), real(s.vocab * s.hidden) / real(s.tp));
}

// Embedding and output layer of a rank, which stay in 16 bits where layers are quantized.
double tables(const RunShape& s, int64_t rank) {
  double count = 0;
  for (size_t i = 0; i < s.stages.size(); ++i)
    if (holds(s, i, rank)) count += (s.stages[i].embedding ? 1 : 0) + (s.stages[i].head && !s.tied ? 1 : 0);
  return count * real(s.vocab * s.hidden) / real(s.tp);
}

MemoryShape states(const RunShape& s, int64_t rank) {
  const RankParameters p = rank_parameters(s, rank);
  MemoryShape m;
  if (s.frozen_base) {
    const double in_full = s.frozen_bytes ? tables(s, rank) : p.total();
    m.parameters = (in_full + s.adapter_parameters) * s.parameter_bytes +
                   (p.total() - in_full) * s.frozen_bytes.value_or(0);
    m.gradients = s.adapter_parameters * s.gradient_bytes;
    m.main_parameters = s.adapter_parameters * s.main_bytes;
    m.moments = s.adapter_parameters * s.moment_bytes;
    return m;
  }
  using enum config::ShardingStrategy;
  // Replicated parameters, and a rank's part of the sharded ones.
  const double part = p.dense / dense_replicas(s) + p.experts / real(std::max<int64_t>(1, s.expert_dp()));
  const auto of = [&](config::ShardingStrategy least) { return s.sharding >= least ? part : p.total(); };
  m.parameters = s.parameter_bytes * of(optim_grads_params);
  m.gradients = s.gradient_bytes * of(optim_grads);
  const double device = 1 - s.offloaded_state;
  m.main_parameters = device * s.main_bytes * of(optim);
  m.moments = device * s.moment_bytes * of(optim);
  // The host keeps the updated parameters too, until they are copied.
  m.host = s.offloaded_state * (s.main_bytes + s.moment_bytes + s.parameter_bytes) * of(optim);
  // Two blocks are gathered: the one that computes, and the next one. Gradients of two wait for their
  // reduction, which has a buffer of one.
  if (s.sharding >= optim_grads) {
    m.gradients += 2 * s.gradient_bytes * largest_block(s);
    m.workspace += s.reduced_bytes * largest_block(s);
  }
  if (s.sharding == optim_grads_params) m.parameters += 2 * s.parameter_bytes * largest_block(s);
  return m;
}

}  // namespace

std::vector<MemoryShape> memory_by_rank(const RunShape& s) {
  std::vector<MemoryShape> ranks;
  for (int64_t rank = 0; rank < s.pp; ++rank) {
    MemoryShape m = states(s, rank);
    const Activations activations = activations_in_flight(s, rank);
    m.activations = activations.device, m.host += activations.host;
    const double rows = s.tokens() * s.activation_bytes * real(s.hidden);
    for (size_t i = 0; i < s.stages.size(); ++i) {
      if (!holds(s, i, rank)) continue;
      if (s.stages[i].embedding) m.activations += rows / real(s.tp);
      if (!s.stages[i].head) continue;
      const double depth = real(1 + s.stages[i].mtp_layers);
      m.activations += depth * rows;
      m.workspace += depth * s.tokens() * s.logit_bytes * real(s.vocab) / real(s.tp);
    }
    // Gathered inputs, and the gradient of a weight before it is added.
    m.workspace += rows + (s.frozen_base ? 0 : s.activation_bytes * largest_weight(s));
    ranks.push_back(m);
  }
  return ranks;
}

}  // namespace capstan::planner
