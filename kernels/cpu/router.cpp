// Routing of tokens to experts. Bytes in fp32 for N tokens and E experts: 4 N E for the choice, the
// probabilities and a loss, 8 N E for a backward pass.
#include "kernels/router.hpp"

#include <algorithm>
#include <numeric>

#include "kernels/common/router.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/router_f64.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/router.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

// The values of one token's experts, and after them those that fill the last vector.
struct ExpertValues {
  HWY_ALIGN float v[kMaxExperts + kLanes];

  HWY_INLINE void read(const float* from, int64_t n, float padding) {
    std::copy(from, from + n, v);
    std::fill(v + n, v + round_up(n, kStep), padding);
  }
};

// p = e^(x - largest) for n experts; the padding is 0.
HWY_INLINE SoftmaxSums exponentials(const float* x, int64_t n, ExpertValues& p) {
  p.read(x, n, -INFINITY);
  VF top = splat(-INFINITY), sum = hn::Zero(DF());
  for (int64_t i = 0; i < n; i += kStep) top = hn::Max(top, load(p.v + i));
  const float largest = max_lanes(top);
  for (int64_t i = 0; i < n; i += kStep) {
    const VF e = exp_not_positive(hn::Sub(load(p.v + i), splat(largest)));
    store(e, p.v + i);
    sum = hn::Add(sum, e);
  }
  return {largest, sum_lanes(sum)};
}
// p *= factor; returns the sum.
HWY_INLINE float multiply(ExpertValues& p, int64_t n, float factor) {
  VF sum = hn::Zero(DF());
  for (int64_t i = 0; i < n; i += kStep) {
    const VF v = hn::Mul(load(p.v + i), splat(factor));
    store(v, p.v + i);
    sum = hn::Add(sum, v);
  }
  return sum_lanes(sum);
}
// s = the sigmoid of x, with 0 as padding; returns the sum.
HWY_INLINE float sigmoids(const float* x, int64_t n, ExpertValues& s) {
  s.read(x, n, -INFINITY);
  VF sum = hn::Zero(DF());
  for (int64_t i = 0; i < n; i += kStep) {
    VF v = sigmoid(load(s.v + i));
    if (i + kStep > n) v = hn::IfThenElseZero(hn::FirstN(DF(), static_cast<size_t>(n - i)), v);
    store(v, s.v + i);
    sum = hn::Add(sum, v);
  }
  return sum_lanes(sum);
}

// The scores by which experts are chosen.
HWY_INLINE void choice_scores(const RouterShape& r, const float* logits, const float* bias, ExpertValues& s) {
  if (r.score == RouterScore::sigmoid)
    sigmoids(logits, r.experts, s);
  else if (has_softmax_of_all(r))
    multiply(s, r.experts, 1.0f / exponentials(logits, r.experts, s).sum);
  else
    s.read(logits, r.experts, 0);
  if (bias)
    for (int64_t e = 0; e < r.experts; ++e) s.v[e] += bias[e];
}

// The groups of which a token may choose experts, a bit for each.
HWY_INLINE uint64_t allowed_groups(const RouterShape& r, const float* scores) {
  const int64_t size = r.experts / r.groups;
  uint64_t keys[kMaxExperts], groups[kMaxGroups];
  for (int64_t g = 0; g < r.groups; ++g) {
    for (int64_t i = 0; i < size; ++i) keys[i] = choice_key(scores[g * size + i], i);
    std::partial_sort(keys, keys + r.group_best, keys + size);
    float sum = 0;
    for (int64_t i = 0; i < r.group_best; ++i) sum += number_of_key(keys[i]);
    groups[g] = choice_key(sum, g);
  }
  std::partial_sort(groups, groups + r.group_topk, groups + r.groups);
  uint64_t allowed = 0;
  for (int64_t i = 0; i < r.group_topk; ++i) allowed |= uint64_t{1} << index_of_choice(groups[i]);
  return allowed;
}

HWY_INLINE void choose_row(const RouterShape& r, const float* scores, int32_t* experts) {
  const uint64_t allowed = r.groups > 1 ? allowed_groups(r, scores) : ~uint64_t{0};
  const int64_t size = r.groups > 1 ? r.experts / r.groups : r.experts;
  uint64_t keys[kMaxExperts];
  int64_t n = 0;
  for (int64_t e = 0; e < r.experts; ++e)
    if ((allowed >> (e / size) & 1) != 0) keys[n++] = choice_key(scores[e], e);
  std::partial_sort(keys, keys + r.topk, keys + n);
  for (int64_t k = 0; k < r.topk; ++k) experts[k] = static_cast<int32_t>(index_of_choice(keys[k]));
}

void choose(Context& c, RouterShape r, In typed_logits, const float* bias, const int32_t* padding,
            int32_t* experts) {
  if (typed_logits.dtype == DType::f64)
    return router_f64::choose(c, r, typed_logits.as<double>(), bias, padding, experts);
  const auto* logits = typed_logits.as<float>();
  parallel_blocks(c, r.tokens, rows_per_block(r.experts), [&](int64_t begin, int64_t end, int) HWY_ATTR {
    ExpertValues scores;
    for (int64_t t = begin; t < end; ++t) {
      if (is_padding(padding, t)) {
        std::fill_n(experts + t * r.topk, r.topk, -1);
        continue;
      }
      choice_scores(r, logits + t * r.experts, bias, scores);
      choose_row(r, scores.v, experts + t * r.topk);
    }
  });
}

// The chosen experts of a token; `p` gets the exponentials of all experts with pre_softmax.
HWY_INLINE ChosenExperts chosen_experts(const RouterShape& r, const float* logits, const int32_t* experts,
                                        int64_t token, ExpertValues& p) {
  ChosenExperts chosen{r, logits + token * r.experts, experts + token * r.topk, {}};
  if (has_softmax_of_all(r)) chosen.sums = exponentials(chosen.logits, r.experts, p);
  chosen.sum_chosen();
  return chosen;
}

void probabilities(Context& c, RouterShape r, In typed_logits, const int32_t* experts, float* to) {
  if (typed_logits.dtype == DType::f64)
    return router_f64::probabilities(c, r, typed_logits.as<double>(), experts, to);
  const auto* logits = typed_logits.as<float>();
  parallel_blocks(c, r.tokens, rows_per_block(r.experts), [&](int64_t begin, int64_t end, int) HWY_ATTR {
    ExpertValues p;
    for (int64_t t = begin; t < end; ++t) {
      if (!has_experts(r, experts, t)) {
        std::fill_n(to + t * r.topk, r.topk, 0.0f);
        continue;
      }
      const ChosenExperts chosen = chosen_experts(r, logits, experts, t, p);
      const float factor = chosen.factor();
      for (int64_t k = 0; k < r.topk; ++k) to[t * r.topk + k] = chosen.score(k) * factor;
    }
  });
}

void backward(Context& c, RouterShape r, In typed_logits, const int32_t* experts, const float* dprobabilities,
              float* dlogits) {
  if (typed_logits.dtype == DType::f64)
    return router_f64::backward(c, r, typed_logits.as<double>(), experts, dprobabilities, dlogits);
  const auto* logits = typed_logits.as<float>();
  parallel_blocks(c, r.tokens, rows_per_block(r.experts), [&](int64_t begin, int64_t end, int) HWY_ATTR {
    ExpertValues p;
    for (int64_t t = begin; t < end; ++t) {
      float* to = dlogits + t * r.experts;
      if (!has_experts(r, experts, t)) {
        std::fill_n(to, r.experts, 0.0f);
        continue;
      }
      const ChosenExperts chosen = chosen_experts(r, logits, experts, t, p);
      const float* d = dprobabilities + t * r.topk;
      const auto gradient = chosen.score_gradient(d);
      if (has_softmax_of_all(r)) {
        multiply(p, r.experts, -gradient.product / chosen.sums.sum);
        std::copy(p.v, p.v + r.experts, to);
      } else {
        std::fill(to, to + r.experts, 0.0f);
      }
      for (int64_t k = 0; k < r.topk; ++k) to[chosen.experts[k]] = chosen.logit_gradient(gradient, d, k);
    }
  });
}

void count(Context& c, const int32_t* experts, int64_t tokens, int64_t topk, TokenSegments segments,
           int64_t of_experts, float* counts) {
  parallel_blocks(c, segments.count, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t s = begin; s < end; ++s) {
      float* own = counts + s * of_experts;
      std::fill(own, own + of_experts, 0.0f);
      const SegmentRange range = tokens_of(segments, s, tokens);
      for (int64_t i = range.begin * topk; i < range.end * topk; ++i)
        if (experts[i] >= 0) own[experts[i]] += 1;
    }
  });
}

// ---- losses

// q = the probabilities of all experts for one token, for load balancing.
HWY_INLINE void balance_probabilities(const RouterLoss& l, const float* logits, ExpertValues& q) {
  if (l.score == RouterScore::sigmoid)
    multiply(q, l.experts, 1.0f / (sigmoids(logits, l.experts, q) + kRouterEpsilon));
  else
    multiply(q, l.experts, 1.0f / exponentials(logits, l.experts, q).sum);
}
HWY_INLINE float dot(const ExpertValues& q, const float* counts, int64_t n) {
  VF sum = hn::Zero(DF());
  for (int64_t i = 0; i < n; i += kStep)
    sum = hn::MulAdd(load(q.v + i), load_lanes(counts + i, std::min(kStep, n - i)), sum);
  return sum_lanes(sum);
}
// 1 / the sum of the counts of a segment.
HWY_INLINE float inverse_sum(const float* counts, int64_t n) {
  VF sum = hn::Zero(DF());
  for (int64_t i = 0; i < n; i += kStep) sum = hn::Add(sum, load_lanes(counts + i, std::min(kStep, n - i)));
  return 1.0f / sum_lanes(sum);
}

void loss(Context& c, RouterLoss l, In typed_logits, const float* counts, const int32_t* padding,
          float* values) {
  if (typed_logits.dtype == DType::f64)
    return router_f64::loss(c, l, typed_logits.as<double>(), counts, padding, values);
  const auto* logits = typed_logits.as<float>();
  parallel_blocks(c, l.tokens, rows_per_block(l.experts), [&](int64_t begin, int64_t end, int) HWY_ATTR {
    ExpertValues q;
    for (int64_t t = begin; t < end; ++t) {
      const float* row = logits + t * l.experts;
      if (is_padding(padding, t)) {
        values[t] = 0;
      } else if (l.kind == RouterLoss::Kind::z) {
        const float lse = exponentials(row, l.experts, q).log_sum_exp();
        values[t] = l.factor * lse * lse;
      } else {
        balance_probabilities(l, row, q);
        const float* own = counts_of(l, counts, t);
        values[t] = l.factor * dot(q, own, l.experts) * inverse_sum(own, l.experts);
      }
    }
  });
}

// The derivative of the value of balance by a token's logits: q (n - q·n) for counts n, times 1 - s where the
// score is the sigmoid s. scale: divides by the sum of the counts.
HWY_INLINE void balance_gradient(const RouterLoss& l, const float* logits, const float* counts, float scale,
                                 ExpertValues& q, float* dlogits) {
  float by = 1;
  if (l.score == RouterScore::sigmoid)
    by = 1.0f / (sigmoids(logits, l.experts, q) + kRouterEpsilon);
  else
    balance_probabilities(l, logits, q);
  const float product = dot(q, counts, l.experts) * by;
  for (int64_t i = 0; i < l.experts; i += kStep) {
    const int64_t n = std::min(kStep, l.experts - i);
    const VF s = load(q.v + i);
    VF d = hn::Mul(hn::Mul(s, splat(scale * by)), hn::Sub(load_lanes(counts + i, n), splat(product)));
    if (l.score == RouterScore::sigmoid) d = hn::Mul(d, hn::Sub(splat(1.0f), s));
    store_lanes(d, dlogits + i, n);
  }
}

void loss_backward(Context& c, RouterLoss l, In typed_logits, const float* counts, const int32_t* padding,
                   const float* gradient, float* dlogits) {
  if (typed_logits.dtype == DType::f64)
    return router_f64::loss_backward(c, l, typed_logits.as<double>(), counts, padding, gradient, dlogits);
  const auto* logits = typed_logits.as<float>();
  parallel_blocks(c, l.tokens, rows_per_block(l.experts), [&](int64_t begin, int64_t end, int) HWY_ATTR {
    ExpertValues q;
    const float scale = l.factor * gradient[0];
    for (int64_t t = begin; t < end; ++t) {
      const float* row = logits + t * l.experts;
      float* to = dlogits + t * l.experts;
      if (is_padding(padding, t)) {
        std::fill_n(to, l.experts, 0.0f);
      } else if (l.kind == RouterLoss::Kind::z) {
        const SoftmaxSums sums = exponentials(row, l.experts, q);
        multiply(q, l.experts, 1.0f / sums.sum);
        multiply(q, l.experts, 2 * sums.log_sum_exp() * scale);
        std::copy(q.v, q.v + l.experts, to);
      } else {
        const float* own = counts_of(l, counts, t);
        balance_gradient(l, row, own, scale * inverse_sum(own, l.experts), q, to);
      }
    }
  });
}

void update_bias(Context&, const float* loads, int64_t experts, float rate, In control, float* bias) {
  if (control.as<StepControl>()->skip != 0) return;
  const double sum = std::accumulate(loads, loads + experts, 0.0);
  for (int64_t e = 0; e < experts; ++e) bias[e] = updated_bias(bias[e], loads[e], sum, experts, rate);
}

Router router_family() {
  return {.logits = router_f64::logits,
          .choose = choose,
          .probabilities = probabilities,
          .backward = backward,
          .count = count,
          .loss = loss,
          .loss_backward = loss_backward,
          .update_bias = update_bias};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(Router, router)
#endif
