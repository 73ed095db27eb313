#include "kernels/cpu/router_f64.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/common/router.hpp"
#include "kernels/cpu/parallel.hpp"

namespace capstan::kernels::router_f64 {

namespace {

using Sums = SoftmaxSumsOf<double>;
using Chosen = ChosenExpertsOf<double>;

template <class T>
void widen_from(const T* x, int64_t n, double* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<double>(static_cast<float>(x[i]));
}
void widen(In x, int64_t from, int64_t n, double* to) {
  if (x.dtype == DType::bf16) return widen_from(x.as<bf16>() + from, n, to);
  if (x.dtype == DType::f16) return widen_from(x.as<f16>() + from, n, to);
  widen_from(x.as<float>() + from, n, to);
}

// In four sums, which the processor adds independently.
double dot(const double* a, const double* b, int64_t n) {
  double sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int64_t k = 0; k < 4; ++k) sums[k] += a[i + k] * b[i + k];
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// body(token) for all tokens.
template <class Body>
void each_token(Context& c, int64_t tokens, int64_t experts, const Body& body) {
  parallel_blocks(c, tokens, rows_per_block(experts), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) body(t);
  });
}

Sums sums_of(const double* logits, int64_t n) {
  Sums sums{*std::max_element(logits, logits + n), 0};
  for (int64_t e = 0; e < n; ++e) sums.sum += std::exp(logits[e] - sums.largest);
  return sums;
}

// The first n indices in [0, count): of the highest scores, NaNs before all, of equal ones the lower index.
void best(const double* scores, int64_t count, int64_t n, int32_t* indices) {
  std::iota(indices, indices + count, 0);
  std::partial_sort(indices, indices + n, indices + count, [scores](int32_t a, int32_t b) {
    const double x = scores[a], y = scores[b];
    const bool x_is_nan = std::isnan(x), y_is_nan = std::isnan(y);
    if (x_is_nan || y_is_nan) return x_is_nan && (!y_is_nan || a < b);
    return x > y || (x == y && a < b);
  });
}

// Leaves the groups out that a token may not choose: the groups' scores are sums of their best.
void limit_groups(const RouterShape& r, double* scores, int32_t* indices) {
  const int64_t size = r.experts / r.groups;
  double sums[kMaxGroups];
  for (int64_t g = 0; g < r.groups; ++g) {
    best(scores + g * size, size, r.group_best, indices);
    sums[g] = 0;
    for (int64_t i = 0; i < r.group_best; ++i) sums[g] += scores[g * size + indices[i]];
  }
  best(sums, r.groups, r.groups, indices);
  for (int64_t i = r.group_topk; i < r.groups; ++i) std::fill_n(scores + indices[i] * size, size, -INFINITY);
}

Chosen chosen_experts(const RouterShape& r, const double* logits, const int32_t* experts, int64_t token) {
  Chosen chosen{r, logits + token * r.experts, experts + token * r.topk, {}};
  if (has_softmax_of_all(r)) chosen.sums = sums_of(chosen.logits, r.experts);
  chosen.sum_chosen();
  return chosen;
}

// q = the probabilities of all experts for one token, for load balancing.
struct BalanceProbabilities {
  double q[kMaxExperts], sum = 0;

  BalanceProbabilities(const RouterLoss& l, const double* logits) {
    if (l.score == RouterScore::sigmoid) {
      for (int64_t e = 0; e < l.experts; ++e) sum += q[e] = sigmoid(logits[e]);
      sum += kRouterEpsilon;
      for (int64_t e = 0; e < l.experts; ++e) q[e] /= sum;
    } else {
      const Sums sums = sums_of(logits, l.experts);
      for (int64_t e = 0; e < l.experts; ++e) q[e] = softmax_value(logits[e], sums);
    }
  }
  double times(const float* counts, int64_t experts) const {
    double product = 0;
    for (int64_t e = 0; e < experts; ++e) product += q[e] * counts[e];
    return product;
  }
};

}  // namespace

// Weights are read once for several tokens.
void logits(Context& c, In x, In weight, In bias, int64_t tokens, int64_t experts, int64_t hidden,
            double* to) {
  constexpr int64_t kRows = 8, kDepth = 256;
  parallel_blocks(c, tokens, kRows, [&](int64_t begin, int64_t end, int) {
    double rows[kRows][kDepth], of_expert[kDepth];
    std::fill(to + begin * experts, to + end * experts, 0.0);
    for (int64_t t = begin; t < end && bias; ++t) widen(bias, 0, experts, to + t * experts);
    for (int64_t h = 0; h < hidden; h += kDepth) {
      const int64_t depth = std::min(kDepth, hidden - h);
      for (int64_t t = begin; t < end; ++t) widen(x, t * hidden + h, depth, rows[t - begin]);
      for (int64_t e = 0; e < experts; ++e) {
        widen(weight, e * hidden + h, depth, of_expert);
        for (int64_t t = begin; t < end; ++t) to[t * experts + e] += dot(rows[t - begin], of_expert, depth);
      }
    }
  });
}

void choose(Context& c, const RouterShape& r, const double* logits, const float* bias, const int32_t* padding,
            int32_t* experts) {
  each_token(c, r.tokens, r.experts, [&](int64_t t) {
    if (is_padding(padding, t)) {
      std::fill_n(experts + t * r.topk, r.topk, -1);
      return;
    }
    const double* row = logits + t * r.experts;
    double scores[kMaxExperts];
    const bool softmax = has_softmax_of_all(r);
    const Sums sums = softmax ? sums_of(row, r.experts) : Sums{};
    for (int64_t e = 0; e < r.experts; ++e) {
      scores[e] = r.score == RouterScore::sigmoid ? sigmoid(row[e])
                  : softmax                       ? softmax_value(row[e], sums)
                                                  : row[e];
      if (bias) scores[e] += bias[e];
    }
    int32_t indices[kMaxExperts];
    if (r.groups > 1) limit_groups(r, scores, indices);
    best(scores, r.experts, r.topk, indices);
    std::copy_n(indices, r.topk, experts + t * r.topk);
  });
}

void probabilities(Context& c, const RouterShape& r, const double* logits, const int32_t* experts,
                   float* to) {
  each_token(c, r.tokens, r.experts, [&](int64_t t) {
    if (!has_experts(r, experts, t)) {
      std::fill_n(to + t * r.topk, r.topk, 0.0f);
      return;
    }
    const Chosen chosen = chosen_experts(r, logits, experts, t);
    const double factor = chosen.factor();
    for (int64_t k = 0; k < r.topk; ++k) to[t * r.topk + k] = static_cast<float>(chosen.score(k) * factor);
  });
}

void backward(Context& c, const RouterShape& r, const double* logits, const int32_t* experts,
              const float* dprobabilities, float* dlogits) {
  each_token(c, r.tokens, r.experts, [&](int64_t t) {
    float* to = dlogits + t * r.experts;
    if (!has_experts(r, experts, t)) {
      std::fill_n(to, r.experts, 0.0f);
      return;
    }
    const Chosen chosen = chosen_experts(r, logits, experts, t);
    const float* d = dprobabilities + t * r.topk;
    const auto gradient = chosen.score_gradient(d);
    const bool all = has_softmax_of_all(r);
    for (int64_t e = 0; e < r.experts; ++e)
      to[e] = all ? static_cast<float>(-softmax_value(chosen.logits[e], chosen.sums) * gradient.product) : 0;
    for (int64_t k = 0; k < r.topk; ++k)
      to[chosen.experts[k]] = static_cast<float>(chosen.logit_gradient(gradient, d, k));
  });
}

void loss(Context& c, const RouterLoss& l, const double* logits, const float* counts, const int32_t* padding,
          float* values) {
  each_token(c, l.tokens, l.experts, [&](int64_t t) {
    const double* row = logits + t * l.experts;
    if (is_padding(padding, t)) {
      values[t] = 0;
      return;
    }
    double value;
    if (l.kind == RouterLoss::Kind::z) {
      const double lse = sums_of(row, l.experts).log_sum_exp();
      value = lse * lse;
    } else {
      const float* n = counts_of(l, counts, t);
      value = BalanceProbabilities(l, row).times(n, l.experts) / std::accumulate(n, n + l.experts, 0.0);
    }
    values[t] = static_cast<float>(l.factor * value);
  });
}

// Of balance: q (n - q·n) for counts n, divided by their sum, times 1 - s where the score is the sigmoid s.
void loss_backward(Context& c, const RouterLoss& l, const double* logits, const float* counts,
                   const int32_t* padding, const float* gradient, float* dlogits) {
  const double scale = static_cast<double>(l.factor) * gradient[0];
  each_token(c, l.tokens, l.experts, [&](int64_t t) {
    const double* row = logits + t * l.experts;
    float* to = dlogits + t * l.experts;
    if (is_padding(padding, t)) {
      std::fill_n(to, l.experts, 0.0f);
      return;
    }
    if (l.kind == RouterLoss::Kind::z) {
      const Sums sums = sums_of(row, l.experts);
      const double factor = 2 * sums.log_sum_exp() * scale;
      for (int64_t e = 0; e < l.experts; ++e)
        to[e] = static_cast<float>(softmax_value(row[e], sums) * factor);
      return;
    }
    const BalanceProbabilities p(l, row);
    const float* n = counts_of(l, counts, t);
    const double product = p.times(n, l.experts), by = scale / std::accumulate(n, n + l.experts, 0.0);
    for (int64_t e = 0; e < l.experts; ++e) {
      const double d = by * p.q[e] * (n[e] - product);
      to[e] = static_cast<float>(l.score == RouterScore::sigmoid ? d * (1 - sigmoid(row[e])) : d);
    }
  });
}

}  // namespace capstan::kernels::router_f64
