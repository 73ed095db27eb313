// The router of a mixture-of-experts layer: which experts a token is sent to, with which probabilities, and
// the router's losses. Logits are fp32 [N, experts], or fp64, in which choices, probabilities and losses are
// then computed before they are rounded to fp32; their gradients are fp32 always.
#pragma once

#include "kernels/router.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// See kernels::RouterShape. Megatron's routers: softmax with pre_softmax false; softmax with pre_softmax true
// (OLMoE, DeepSeek-V2; with normalize as `norm_topk_prob` true, which gives what pre_softmax false gives);
// sigmoid, with normalize where topk > 1.
struct RouterOptions {
  int64_t topk = 2;
  kernels::RouterScore score = kernels::RouterScore::softmax;
  bool pre_softmax = false;
  bool normalize = false;
  double scaling_factor = 1;
  // Number of groups; 0: no limit of groups. group_best: scores of a group that are summed, Megatron's
  // topk / group_topk if 0 (DeepSeek-V3: 2; DeepSeek-V2 as its authors and Transformers compute it: 1).
  int64_t groups = 0, group_topk = 0, group_best = 0;
};

struct Routing {
  // i32 [N, topk], the highest score first. Without a gradient.
  Tensor experts;
  // fp32 [N, topk].
  Var probabilities;
};

// Chooses the experts of each token and computes their probabilities. expert_bias fp32 [experts] is added to
// the scores for the choice only; undefined: none. padding i32 [N]: 1 for rows that are sent to no expert,
// whose experts are -1 and probabilities 0; undefined: there are none. In a recomputed region the choice of
// the first pass is used again. Saves the logits and the choice.
Routing route(Tape& tape, const Var& logits, const RouterOptions& options, const Tensor& expert_bias = {},
              const Tensor& padding = {});
// The experts alone, i32 [N, topk], chosen anew in each pass: for losses that count choices without bias and
// groups.
Tensor choose_experts(Tape& tape, const Tensor& logits, const RouterOptions& options,
                      const Tensor& padding = {});

// How often the tokens of each segment chose an expert: fp32 [segments, experts], exact up to 2^24. experts:
// i32 [N, topk].
Tensor count_choices(Tape& tape, const Tensor& experts, int64_t of_experts,
                     const kernels::TokenSegments& segments);

// One segment with all rows of a [rows, …] tensor.
inline kernels::TokenSegments one_segment(int64_t rows) {
  return {1, rows > 0 ? rows : 1, 0};
}

// Load-balancing loss, fp32 [1]: factor * sum over tokens t and experts e of q[t, e] f[segment of t, e],
// with q the softmax over all experts, or the sigmoid divided by its sum, and f the counts of a segment
// divided by their sum (kernels::RouterLoss). counts fp32 [segments, experts] has no gradient: those of
// count_choices, summed over the ranks that share the segments. With tokens on several ranks each rank has
// the part of its tokens; the sum of the parts is the loss. Megatron: factor = coefficient * experts /
// tokens, with one segment that has all tokens of the micro-batch (aux_loss) or one for each sequence
// (seq_aux_loss). Transformers' `load_balancing_loss_func` is topk times this loss with coefficient 1.
// padding: as for route(); it has no part in the losses.
Var balance_loss(Tape& tape, const Var& logits, const Tensor& counts, kernels::RouterScore score,
                 const kernels::TokenSegments& segments, double factor, const Tensor& padding = {});
// z-loss, fp32 [1]: factor * sum over tokens of logsumexp(logits)^2. Megatron: factor = coefficient / tokens.
Var z_loss(Tape& tape, const Var& logits, double factor, const Tensor& padding = {});

// x, whose backward pass also starts that of `loss` (fp32 [1]), with gradient[0] (fp32 [1]; undefined: 1):
// Megatron's MoEAuxLossAutoScaler. Gradients are sums over loss tokens, divided once per step: a loss that is
// a mean of the micro-batch takes the sum of the micro-batch's loss weights, which include a loss scale.
Var attach_loss(Tape& tape, const Var& x, const Var& loss, const Tensor& gradient = {});

}  // namespace capstan::ops
