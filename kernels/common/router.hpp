// Formulas of the router that devices share.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.hpp"
#include "kernels/common/sort_key.hpp"
#include "kernels/router.hpp"

namespace capstan::kernels {

// Added to a denominator.
inline constexpr float kRouterEpsilon = 1e-20f;

// The sort key of an expert, or of a group: the highest score first (sort_key.hpp). Never 0.
CAPSTAN_HOST_DEVICE inline uint64_t choice_key(float score, int64_t index) {
  return sort_key(score, index + 1);
}
CAPSTAN_HOST_DEVICE inline int64_t index_of_choice(uint64_t key) {
  return index_of_key(key) - 1;
}

// T: float, or double for logits in fp64.

// The largest logit, and the sum of e^(logit - largest).
template <class T>
struct SoftmaxSumsOf {
  T largest = 0, sum = 1;
  CAPSTAN_HOST_DEVICE T log_sum_exp() const { return largest + std::log(sum); }
};
using SoftmaxSums = SoftmaxSumsOf<float>;
template <class T>
CAPSTAN_HOST_DEVICE T softmax_value(T logit, const SoftmaxSumsOf<T>& sums) {
  return std::exp(logit - sums.largest) / sums.sum;
}
template <class T>
CAPSTAN_HOST_DEVICE T sigmoid(T logit) {
  return T{1} / (T{1} + std::exp(-logit));
}

// Whether scores are the softmax over all experts, or probabilities that over the chosen ones.
CAPSTAN_HOST_DEVICE inline bool has_softmax_of_all(const RouterShape& r) {
  return r.score == RouterScore::softmax && r.pre_softmax;
}
CAPSTAN_HOST_DEVICE inline bool has_softmax_of_chosen(const RouterShape& r) {
  return r.score == RouterScore::softmax && !r.pre_softmax;
}

// The chosen experts of one token. sums: of the softmax over all experts; sum_chosen() sets them where it is
// over the chosen ones.
template <class T>
struct ChosenExpertsOf {
  RouterShape shape;
  const T* logits;
  const int32_t* experts;
  SoftmaxSumsOf<T> sums;

  CAPSTAN_HOST_DEVICE T logit(int64_t k) const { return logits[experts[k]]; }
  CAPSTAN_HOST_DEVICE T score(int64_t k) const {
    return shape.score == RouterScore::sigmoid ? sigmoid(logit(k)) : softmax_value(logit(k), sums);
  }
  CAPSTAN_HOST_DEVICE void sum_chosen() {
    if (!has_softmax_of_chosen(shape)) return;
    sums = {logit(0), 0};
    for (int64_t k = 1; k < shape.topk; ++k) sums.largest = std::fmax(sums.largest, logit(k));
    for (int64_t k = 0; k < shape.topk; ++k) sums.sum += std::exp(logit(k) - sums.largest);
  }
  // Whether the scores are divided by their sum + kRouterEpsilon.
  CAPSTAN_HOST_DEVICE bool normalizes() const { return shape.normalize && !has_softmax_of_chosen(shape); }
  // Multiplies the scores.
  CAPSTAN_HOST_DEVICE T factor() const {
    if (!normalizes()) return shape.scaling_factor;
    T sum = 0;
    for (int64_t k = 0; k < shape.topk; ++k) sum += score(k);
    return shape.scaling_factor / (sum + kRouterEpsilon);
  }
  // The derivatives by the scores are factor * (dprobabilities[k] - shift).
  struct ScoreGradient {
    T factor, shift;
    // The sum over k of score times derivative, for the softmax over all experts.
    T product;
  };
  CAPSTAN_HOST_DEVICE ScoreGradient score_gradient(const float* dprobabilities) const {
    T sum = 0, product = 0;
    for (int64_t k = 0; k < shape.topk; ++k) {
      const T s = score(k);
      sum += s, product += s * dprobabilities[k];
    }
    ScoreGradient g{shape.scaling_factor, 0, 0};
    if (normalizes()) {
      const T by = sum + kRouterEpsilon;
      g.factor /= by, g.shift = product / by;
    }
    g.product = g.factor * (product - g.shift * sum);
    return g;
  }
  // The derivative by the logit of chosen expert k.
  CAPSTAN_HOST_DEVICE T logit_gradient(const ScoreGradient& g, const float* dprobabilities, int64_t k) const {
    const T s = score(k), d = g.factor * (dprobabilities[k] - g.shift);
    return shape.score == RouterScore::sigmoid ? d * s * (T{1} - s) : s * (d - g.product);
  }
};
using ChosenExperts = ChosenExpertsOf<float>;

// padding [tokens] and experts [tokens, topk] as in router.hpp.
CAPSTAN_HOST_DEVICE inline bool is_padding(const int32_t* padding, int64_t token) {
  return padding && padding[token] != 0;
}
CAPSTAN_HOST_DEVICE inline bool has_experts(const RouterShape& r, const int32_t* experts, int64_t token) {
  return experts[token * r.topk] >= 0;
}

// The tokens of a segment among `tokens`: [begin, end).
struct SegmentRange {
  int64_t begin, end;
};
CAPSTAN_HOST_DEVICE inline SegmentRange tokens_of(const TokenSegments& s, int64_t segment, int64_t tokens) {
  const int64_t begin = segment * s.rows - s.first_row, end = begin + s.rows;
  return {begin < 0 ? 0 : begin, end < tokens ? end : tokens};
}
CAPSTAN_HOST_DEVICE inline int64_t segment_of(const TokenSegments& s, int64_t token) {
  return (s.first_row + token) / s.rows;
}
// The counts of a token's segment, of counts [segments, experts].
CAPSTAN_HOST_DEVICE inline const float* counts_of(const RouterLoss& l, const float* counts, int64_t token) {
  return counts + segment_of(l.segments, token) * l.experts;
}

// The next bias of an expert, from its load and the sum of the loads of all experts.
CAPSTAN_HOST_DEVICE inline float updated_bias(float bias, float load, double sum, int64_t experts,
                                              float rate) {
  const double all = static_cast<double>(load) * static_cast<double>(experts);
  return all < sum ? bias + rate : all > sum ? bias - rate : bias;
}

}  // namespace capstan::kernels
