// Scalar references of the router, written from the papers' formulas: GShard and Switch (load balancing),
// ST-MoE (z-loss), DeepSeek-V2 and V3 (groups, bias). Templated like reference.hpp.
#pragma once

#include <numeric>

#include "kernels/router.hpp"
#include "tests/kernels/reference.hpp"

namespace capstan::reference {

template <class S>
Vec<S> softmax(const Vec<S>& x) {
  double largest = -INFINITY;
  for (const S& v : x) largest = std::max(largest, real(v));
  Vec<S> p;
  S sum{};
  for (const S& v : x) {
    p.push_back(std::exp(v - largest));
    sum += p.back();
  }
  for (S& v : p) v /= sum;
  return p;
}
template <class S>
Vec<S> sigmoid_of(const Vec<S>& x) {
  Vec<S> s;
  for (const S& v : x) s.push_back(1.0 / (1.0 + std::exp(-v)));
  return s;
}
// Row t of [rows, cols].
template <class S>
Vec<S> row_of(const Vec<S>& x, int64_t t, int64_t cols) {
  return {x.begin() + t * cols, x.begin() + (t + 1) * cols};
}

// The bias of each expert after a step with these loads (Wang et al. 2024, algorithm 1).
inline Vec<double> updated_bias(Vec<double> bias, const Vec<double>& loads, double rate) {
  const double mean = std::accumulate(loads.begin(), loads.end(), 0.0) / static_cast<double>(loads.size());
  for (size_t e = 0; e < bias.size(); ++e) bias[e] += loads[e] < mean ? rate : loads[e] > mean ? -rate : 0;
  return bias;
}

// Indices of the n highest values, of equal ones the lower index first.
inline std::vector<int64_t> highest(const Vec<double>& values, int64_t n) {
  std::vector<int64_t> order(values.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  order.resize(static_cast<size_t>(n));
  return order;
}

// The scores of one token by which experts are chosen.
inline Vec<double> choice_scores(const kernels::RouterShape& r, const Vec<double>& logits,
                                 const Vec<double>& bias) {
  Vec<double> s = r.score == kernels::RouterScore::sigmoid ? sigmoid_of(logits)
                  : r.pre_softmax                          ? softmax(logits)
                                                           : logits;
  for (size_t e = 0; e < bias.size(); ++e) s[e] += bias[e];
  return s;
}

// Whether a token is padding; `padding` may be empty: none is.
inline bool is_padding(const Vec<int32_t>& padding, int64_t token) {
  return !padding.empty() && padding[static_cast<size_t>(token)] != 0;
}

// experts [tokens, topk], -1 of padding.
inline Vec<int32_t> choose(const kernels::RouterShape& r, const Vec<double>& logits, const Vec<double>& bias,
                           const Vec<int32_t>& padding = {}) {
  Vec<int32_t> experts;
  for (int64_t t = 0; t < r.tokens; ++t) {
    if (is_padding(padding, t)) {
      experts.insert(experts.end(), static_cast<size_t>(r.topk), -1);
      continue;
    }
    Vec<double> s = choice_scores(r, row_of(logits, t, r.experts), bias);
    if (r.groups > 1) {
      const int64_t size = r.experts / r.groups;
      Vec<double> sums, kept(s.size(), -INFINITY);
      for (int64_t g = 0; g < r.groups; ++g) {
        const Vec<double> own = row_of(s, g, size);
        double sum = 0;
        for (const int64_t i : highest(own, r.group_best)) sum += own[static_cast<size_t>(i)];
        sums.push_back(sum);
      }
      for (const int64_t g : highest(sums, r.group_topk))
        std::copy(s.begin() + g * size, s.begin() + (g + 1) * size, kept.begin() + g * size);
      s = kept;
    }
    for (const int64_t e : highest(s, r.topk)) experts.push_back(static_cast<int32_t>(e));
  }
  return experts;
}

// [tokens, topk]; 0 without experts.
template <class S>
Vec<S> router_probabilities(const kernels::RouterShape& r, const Vec<S>& logits,
                            const Vec<int32_t>& experts) {
  Vec<S> result;
  for (int64_t t = 0; t < r.tokens; ++t) {
    if (experts[static_cast<size_t>(t * r.topk)] < 0) {
      result.insert(result.end(), static_cast<size_t>(r.topk), S{});
      continue;
    }
    const Vec<S> row = row_of(logits, t, r.experts);
    const Vec<S> scores = r.score == kernels::RouterScore::sigmoid ? sigmoid_of(row)
                          : r.pre_softmax                          ? softmax(row)
                                                                   : row;
    Vec<S> chosen;
    for (int64_t k = 0; k < r.topk; ++k)
      chosen.push_back(scores[static_cast<size_t>(experts[static_cast<size_t>(t * r.topk + k)])]);
    if (r.score == kernels::RouterScore::softmax && !r.pre_softmax) chosen = softmax(chosen);
    S sum{};
    for (const S& v : chosen) sum += v;
    for (const S& v : chosen)
      result.push_back(v / (r.normalize ? sum + 1e-20 : S{1}) * double{r.scaling_factor});
  }
  return result;
}

// [segments, experts].
inline Vec<double> choice_counts(const Vec<int32_t>& experts, int64_t topk, const kernels::TokenSegments& s,
                                 int64_t of_experts) {
  Vec<double> counts(static_cast<size_t>(s.count * of_experts));
  for (size_t i = 0; i < experts.size(); ++i) {
    if (experts[i] < 0) continue;
    const int64_t token = static_cast<int64_t>(i) / topk;
    counts[static_cast<size_t>((s.first_row + token) / s.rows * of_experts + experts[i])] += 1;
  }
  return counts;
}

// The values of all tokens; 0 of padding.
template <class S>
Vec<S> router_loss(const kernels::RouterLoss& l, const Vec<S>& logits, const Vec<double>& counts,
                   const Vec<int32_t>& padding = {}) {
  Vec<S> values;
  for (int64_t t = 0; t < l.tokens; ++t) {
    if (is_padding(padding, t)) {
      values.push_back(S{});
      continue;
    }
    const Vec<S> row = row_of(logits, t, l.experts);
    S value{};
    if (l.kind == kernels::RouterLoss::Kind::z) {
      S sum{};
      for (const S& v : row) sum += std::exp(v);
      value = std::log(sum) * std::log(sum);
    } else {
      Vec<S> q = l.score == kernels::RouterScore::sigmoid ? sigmoid_of(row) : softmax(row);
      S sum{};
      for (const S& v : q) sum += v;
      if (l.score == kernels::RouterScore::sigmoid)
        for (S& v : q) v /= sum + 1e-20;
      const Vec<double> n = row_of(counts, (l.segments.first_row + t) / l.segments.rows, l.experts);
      for (size_t e = 0; e < n.size(); ++e) value += q[e] * (n[e] / std::accumulate(n.begin(), n.end(), 0.0));
    }
    values.push_back(value * double{l.factor});
  }
  return values;
}

}  // namespace capstan::reference
