#include "planner/counts.hpp"

#include <algorithm>

#include "planner/adapters.hpp"

namespace capstan::planner {

namespace {

// Multiply-adds of the attention projections of one token.
double projection_macs(const RunShape& s) {
  const double h = real(s.hidden);
  if (!s.latent) return h * real(2 * s.query_width() + 2 * s.kv_width());
  const LatentShape& l = *s.latent;
  const double heads = real(s.heads), query = heads * real(l.nope_dim + l.rope_dim);
  const double queries = l.q_rank > 0 ? real(l.q_rank) * (h + query) : h * query;
  return queries + h * real(l.kv_rank + l.rope_dim) + real(l.kv_rank) * heads * real(l.nope_dim + l.v_dim) +
         heads * real(l.v_dim) * h;
}

// Fraction of the experts that compute a token.
double chosen_experts(const RunShape& s) {
  return s.experts ? real(s.experts->topk) / real(s.experts->count) : 0;
}

double mlp_matrices(const RunShape& s) {
  return s.gated ? 3 : 2;
}

// Multiply-adds of all layers and of the output layer, without scores.
double linear_macs(const RunShape& s) {
  double macs = 0;
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    const LayerMacs one = layer_macs(s, s.is_expert_layer(layer));
    macs += one.attention + one.mlp;
  }
  const double head = real(s.hidden) * real(s.vocab);
  const LayerMacs last = layer_macs(s, s.is_expert_layer(s.layers - 1));
  // One layer, the projection of the two inputs with its norms, and the output layer.
  const double mtp =
      last.attention + last.mlp + 2 * real(s.hidden) * real(s.hidden) + 3 * real(s.hidden) + head;
  return macs + head + real(s.mtp_layers) * mtp;
}

}  // namespace

LayerMacs layer_macs(const RunShape& s, bool expert_layer) {
  const double h = real(s.hidden);
  const double width =
      expert_layer ? real(s.experts->ffn * s.experts->topk + s.experts->shared_ffn) : real(s.ffn);
  return {projection_macs(s), mlp_matrices(s) * h * width};
}

double score_macs(const RunShape& s) {
  if (!s.latent) return 2 * real(s.query_width()) * real(s.seq);
  return real(s.heads) * real(s.latent->nope_dim + s.latent->rope_dim + s.latent->v_dim) * real(s.seq);
}

double causal_fraction(const RunShape& s) {
  if (s.window <= 0) return 0.5;
  // A token attends to those before it, up to the window.
  const double width = std::min(real(s.window) / real(s.seq), 1.0), windowed = width - width * width / 2;
  if (s.full_every <= 0) return windowed;
  const double full = real(s.layers / s.full_every) / real(s.layers);
  return full * 0.5 + (1 - full) * windowed;
}

double flops_per_token(const RunShape& s, FlopConvention convention) {
  const double depth = real(s.layers + s.mtp_layers), scores = depth * score_macs(s);
  // Frozen weights have no gradients.
  const AdapterParameters adapters = all_adapters(s);
  const double linear = (s.frozen_base() ? 4 : 6) * linear_macs(s) +
                        6 * (adapters.dense + adapters.experts * chosen_experts(s));
  switch (convention) {
    case FlopConvention::causal:
      return linear + 6 * scores * causal_fraction(s);
    case FlopConvention::full:
      return linear + 6 * scores;
    case FlopConvention::six_n:
      return 6 * (active_parameters(s) + scores);
    case FlopConvention::hardware:
      break;
  }
  const double head = real(s.hidden) * real(s.vocab);
  return 8 * (linear_macs(s) - head + scores) + 6 * head;
}

LayerParameters layer_parameters(const RunShape& s, bool expert_layer) {
  const double h = real(s.hidden), norms = real(s.norm_vectors);
  LayerParameters p;
  p.replicated = real(s.norms_per_layer) * norms * h + real(s.qk_norm_parameters);
  p.sharded = projection_macs(s) + real(s.sink_parameters);
  if (s.latent) {
    // The down-projections are replicated, and so are the norms of what they give.
    const LatentShape& l = *s.latent;
    const double down = h * real(l.kv_rank + l.rope_dim) + (l.q_rank > 0 ? h * real(l.q_rank) : 0);
    p.sharded -= down;
    p.replicated += down + (l.norms ? norms * real(l.kv_rank + l.q_rank) : 0);
  }
  if (s.qkv_bias && !s.latent) p.sharded += real(s.query_width() + 2 * s.kv_width());
  if (s.output_bias) p.replicated += h;
  const double matrices = mlp_matrices(s), inputs = s.gated ? 2 : 1;
  if (!expert_layer) {
    p.sharded += matrices * h * real(s.ffn) + (s.mlp_bias ? inputs * real(s.ffn) : 0);
    p.replicated += s.mlp_bias ? h : 0;
    return p;
  }
  const ExpertShape& e = *s.experts;
  p.experts = real(e.count) * (matrices * h * real(e.ffn) + (s.mlp_bias ? inputs * real(e.ffn) + h : 0));
  p.sharded += matrices * h * real(e.shared_ffn);
  p.replicated += (h + real(e.bias_vectors)) * real(e.count);
  return p;
}

LayerParameters mtp_parameters(const RunShape& s) {
  LayerParameters p = layer_parameters(s, s.is_expert_layer(s.layers - 1));
  // Projection of hidden states and embedding, both with a norm, and the last norm.
  p.replicated += 2 * real(s.hidden) * real(s.hidden) + 3 * real(s.norm_vectors) * real(s.hidden);
  return p;
}

namespace {

// Embedding and output layer, positions, last norm, and the layers with `experts_counted` of the experts.
double parameters_with(const RunShape& s, double experts_counted) {
  const auto of = [&](const LayerParameters& p) {
    return p.sharded + p.replicated + p.experts * experts_counted;
  };
  double sum = real(s.vocab * s.hidden * (s.tied ? 1 : 2)) + real(s.positions * s.hidden) +
               real(s.norm_vectors * s.hidden);
  for (int64_t layer = 0; layer < s.layers; ++layer) sum += of(layer_parameters(s, s.is_expert_layer(layer)));
  const AdapterParameters adapters = all_adapters(s);
  sum += adapters.dense + adapters.experts * experts_counted;
  return sum + real(s.mtp_layers) * of(mtp_parameters(s));
}

}  // namespace

double total_parameters(const RunShape& s) {
  return parameters_with(s, 1);
}

double active_parameters(const RunShape& s) {
  return parameters_with(s, chosen_experts(s));
}

}  // namespace capstan::planner
