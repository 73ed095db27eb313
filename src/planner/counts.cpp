#include "planner/counts.hpp"

#include <algorithm>

#include "planner/adapters.hpp"
#include "planner/linear_layers.hpp"

namespace capstan::planner {

namespace {

// Fraction of the experts that compute a token.
double chosen_experts(const RunShape& s) {
  return s.experts ? real(s.experts->topk) / real(s.experts->count) : 0;
}

// Multiply-adds of one token in one layer, without scores and router.
double layer_macs(const RunShape& s, bool expert_layer) {
  const double routed = expert_layer ? real(s.experts->topk) * weights_of(routed_layers(s)) : 0;
  return weights_of(dense_layers(s, expert_layer)) + routed;
}

// Multiply-adds of all layers and of the output layer, without scores.
double linear_macs(const RunShape& s) {
  const double experts = s.experts ? real(std::ssize(s.experts->layers)) : 0,
               head = real(s.hidden) * real(s.vocab);
  const double macs =
      (real(s.layers) - experts) * layer_macs(s, false) + (experts > 0 ? experts * layer_macs(s, true) : 0);
  // One layer, the projection of the two inputs with its norms, and the output layer.
  const double mtp = layer_macs(s, s.is_expert_layer(s.layers - 1)) + 2 * real(s.hidden) * real(s.hidden) +
                     3 * real(s.hidden) + head;
  return macs + head + real(s.mtp_layers) * mtp;
}

}  // namespace

double score_macs(const RunShape& s) {
  return real(s.query_width() + s.output_width()) * real(s.seq);
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
  p.sharded = real(s.sink_parameters);
  for (const LinearLayer& linear : dense_layers(s, expert_layer))
    (linear.sharding == LinearLayer::Sharding::none ? p.replicated : p.sharded) += linear.weights();
  if (s.latent && s.latent->norms) p.replicated += norms * real(s.latent->kv_rank + s.latent->q_rank);
  if (s.qkv_bias && !s.latent) p.sharded += real(s.query_width() + 2 * s.kv_width());
  if (s.output_bias) p.replicated += h;
  const double inputs = s.gated ? 2 : 1;
  if (!expert_layer) {
    if (s.mlp_bias) p.sharded += inputs * real(s.ffn), p.replicated += h;
    return p;
  }
  const ExpertShape& e = *s.experts;
  p.experts = real(e.count) * (weights_of(routed_layers(s)) + (s.mlp_bias ? inputs * real(e.ffn) + h : 0));
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
