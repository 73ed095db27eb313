// Routing of tokens to experts: choice of the experts, their probabilities, and the losses of the router.
#pragma once

#include "kernels/step_control.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

enum class RouterScore : uint8_t { softmax, sigmoid };

// Limits of the kernels' buffers.
inline constexpr int64_t kMaxExperts = 1024, kMaxGroups = 64;

// The score s[e] of expert e is the sigmoid of its logit; or with pre_softmax the softmax over all experts;
// otherwise the logit. A token chooses the experts with the highest s[e] + bias[e], and of equal ones the
// lower index.
struct RouterShape {
  int64_t tokens = 0, experts = 0;
  // Experts of a token.
  int64_t topk = 0;
  RouterScore score = RouterScore::softmax;
  bool pre_softmax = false;
  // Divides the probabilities of a token by their sum.
  bool normalize = false;
  // Multiplies the probabilities.
  float scaling_factor = 1;
  // Consecutive groups of experts / groups experts. The experts of a token are in group_topk of the groups:
  // those with the highest sum of their `group_best` highest scores with bias. 1 group: no limit.
  int64_t groups = 1, group_topk = 1, group_best = 1;
};

// Segments (sequences) of consecutive tokens: that of token t is (first_row + t) / rows. first_row: the row
// of token 0 where other ranks have tokens of the same segments.
struct TokenSegments {
  int64_t count = 1;
  // Tokens of a segment.
  int64_t rows = 1;
  int64_t first_row = 0;
};

// A loss of the router, the sum of values of tokens. Padding has the value 0.
struct RouterLoss {
  enum class Kind : uint8_t {
    // Load balancing: value[t] = factor * sum over e of q[t,e] f[segment of t, e], where q is the softmax
    // over all experts, or the sigmoid divided by its sum over all experts, and f the counts of a segment
    // divided by their sum.
    balance,
    // value[t] = factor * logsumexp(logits[t])^2.
    z,
  } kind = Kind::balance;
  RouterScore score = RouterScore::softmax;
  int64_t tokens = 0, experts = 0;
  TokenSegments segments;
  float factor = 1;
};

// padding i32 [tokens]: 1 for tokens that are padding, which have no experts (-1), else 0; null: none is.
// logits [tokens, experts], fp32; or fp64 on devices with the kernel `logits`, which then compute scores and
// losses in fp64 too, and round results to fp32.
struct Router {
  // logits[t, e] = bias[e] + sum over h of x[t, h] weight[e, h], in fp64. x, weight and bias [experts]: each
  // fp32, bf16 or fp16; bias may be null. Null on devices without fp64.
  void (*logits)(Context&, In x, In weight, In bias, int64_t tokens, int64_t experts, int64_t hidden,
                 double* logits) = nullptr;
  // experts i32 [tokens, topk], the highest score first. bias fp32 [experts]; null: none.
  void (*choose)(Context&, RouterShape, In logits, const float* bias, const int32_t* padding,
                 int32_t* experts);
  // probabilities fp32 [tokens, topk] of the chosen experts: their softmax where the score is the logit; else
  // s[e], divided by their sum + 1e-20 if `normalize` is set. Times the scaling factor. 0 without experts.
  void (*probabilities)(Context&, RouterShape, In logits, const int32_t* experts, float* probabilities);
  // dlogits fp32 [tokens, experts], all of which it writes.
  void (*backward)(Context&, RouterShape, In logits, const int32_t* experts, const float* dprobabilities,
                   float* dlogits);
  // counts fp32 [segments, experts] = how often the tokens of a segment chose an expert, of `tokens` tokens
  // with topk experts each.
  void (*count)(Context&, const int32_t* experts, int64_t tokens, int64_t topk, TokenSegments,
                int64_t of_experts, float* counts);
  // values fp32 [tokens]. counts fp32 [segments, experts], for `balance`.
  void (*loss)(Context&, RouterLoss, In logits, const float* counts, const int32_t* padding, float* values);
  // dlogits = gradient[0] times the derivative of the sum of values. gradient fp32 [1].
  void (*loss_backward)(Context&, RouterLoss, In logits, const float* counts, const int32_t* padding,
                        const float* gradient, float* dlogits);
  // Balancing by a bias of the experts (Wang et al. 2024): bias[e] += rate * sign(mean of the loads -
  // loads[e]), with sign(0) = 0, unless control->skip is set. loads: counts, fp32 [experts], whole numbers up
  // to 2^24, so that the sign is exact. control: one StepControl. bias fp32 [experts].
  void (*update_bias)(Context&, const float* loads, int64_t experts, float rate, In control, float* bias);
};

}  // namespace capstan::kernels
