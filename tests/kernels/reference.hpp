// Scalar references of the kernels, written from the formulas in kernels/*.hpp and templated on the scalar
// type: double for values, std::complex<double> for derivatives (complex step: f(x + ih) = f(x) + i h f'(x) +
// O(h²), exact to rounding for h = 1e-30). Only what is analytic may be instantiated with complex;
// comparisons look at the real part.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/activation.hpp"
#include "kernels/attention.hpp"
#include "kernels/common/dropout.hpp"
#include "kernels/decoding.hpp"
#include "kernels/gemm.hpp"
#include "kernels/norm.hpp"

namespace capstan::reference {

using Complex = std::complex<double>;
template <class S>
using Vec = std::vector<S>;

inline double real(double x) {
  return x;
}
inline double real(Complex x) {
  return x.real();
}
template <class S>
Vec<S> convert(const Vec<double>& x) {
  return Vec<S>(x.begin(), x.end());
}

// The gradient of a scalar function of x, one evaluation an element.
template <class F>
Vec<double> complex_step(const Vec<double>& x, F&& f) {
  constexpr double h = 1e-30;
  Vec<Complex> z = convert<Complex>(x);
  Vec<double> gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    z[i] = {x[i], h};
    gradient[i] = f(static_cast<const Vec<Complex>&>(z)).imag() / h;
    z[i] = {x[i], 0.0};
  }
  return gradient;
}
// sum_i w[i] y[i]: turns an array into the scalar that complex_step differentiates; w is the output gradient.
template <class S>
S contract(const Vec<S>& y, const Vec<double>& w) {
  S total{};
  for (size_t i = 0; i < y.size(); ++i) total += y[i] * w[i];
  return total;
}

// ---- products

template <class S>
Vec<S> gemm(const kernels::GemmShape& s, const Vec<S>& a, const Vec<S>& b, const Vec<S>& c, double alpha,
            double beta) {
  // Rows of A and columns of B, each contiguous.
  Vec<S> rows(static_cast<size_t>(s.m * s.k)), columns(static_cast<size_t>(s.n * s.k)), out = c;
  for (int64_t i = 0; i < s.m; ++i)
    for (int64_t k = 0; k < s.k; ++k)
      rows[static_cast<size_t>(i * s.k + k)] =
          a[static_cast<size_t>(s.trans_a ? k * s.lda + i : i * s.lda + k)];
  for (int64_t j = 0; j < s.n; ++j)
    for (int64_t k = 0; k < s.k; ++k)
      columns[static_cast<size_t>(j * s.k + k)] =
          b[static_cast<size_t>(s.trans_b ? j * s.ldb + k : k * s.ldb + j)];
  for (int64_t i = 0; i < s.m; ++i)
    for (int64_t j = 0; j < s.n; ++j) {
      // Four sums that do not wait for each other.
      const S *row = rows.data() + i * s.k, *column = columns.data() + j * s.k;
      S sums[4] = {};
      int64_t k = 0;
      for (; k + 4 <= s.k; k += 4) {
        sums[0] += row[k] * column[k];
        sums[1] += row[k + 1] * column[k + 1];
        sums[2] += row[k + 2] * column[k + 2];
        sums[3] += row[k + 3] * column[k + 3];
      }
      for (; k < s.k; ++k) sums[0] += row[k] * column[k];
      const auto at = static_cast<size_t>(i * s.ldc + j);
      out[at] = alpha * (sums[0] + sums[1] + sums[2] + sums[3]) + (beta == 0 ? S{} : beta * c[at]);
    }
  return out;
}

// ---- norm (plain rows)

template <class S>
Vec<S> norm(bool rms, const Vec<S>& x, const Vec<S>& gamma, double gamma_offset, const Vec<S>& beta,
            double eps, int64_t cols) {
  Vec<S> y(x.size());
  for (size_t r = 0; r * static_cast<size_t>(cols) < x.size(); ++r) {
    const S* row = x.data() + r * static_cast<size_t>(cols);
    S mean{}, variance{};
    if (!rms) {
      for (int64_t i = 0; i < cols; ++i) mean += row[i];
      mean /= static_cast<double>(cols);
    }
    for (int64_t i = 0; i < cols; ++i) variance += (row[i] - mean) * (row[i] - mean);
    variance /= static_cast<double>(cols);
    const S rstd = 1.0 / std::sqrt(variance + eps);
    for (int64_t i = 0; i < cols; ++i) {
      const auto c = static_cast<size_t>(i);
      y[r * static_cast<size_t>(cols) + c] =
          (row[i] - mean) * rstd * (gamma[c] + gamma_offset) + (beta.empty() ? S{} : beta[c]);
    }
  }
  return y;
}

// ---- activation

using std::erf;
// erf of a complex number near the real axis: erf(x) + i y erf'(x).
inline Complex erf(Complex z) {
  return {std::erf(z.real()), z.imag() * 2.0 / std::sqrt(M_PI) * std::exp(-z.real() * z.real())};
}
template <class S>
S activate(kernels::ActivationKind kind, S x) {
  using Kind = kernels::ActivationKind;
  switch (kind) {
    case Kind::gelu:
      return x * 0.5 * (1.0 + erf(x * std::sqrt(0.5)));
    case Kind::gelu_tanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Kind::silu:
      return x / (1.0 + std::exp(-x));
    case Kind::relu:
      return real(x) > 0 ? x : S{};
    case Kind::squared_relu:
      return real(x) > 0 ? x * x : S{};
  }
  return {};
}
// x [rows, cols] or [rows, 2 cols] when gated, bias of that width or empty.
template <class S>
Vec<S> activation(kernels::ActivationKind kind, bool gated, const Vec<S>& x, const Vec<S>& bias, int64_t rows,
                  int64_t cols) {
  const auto width = static_cast<size_t>(gated ? 2 * cols : cols), n = static_cast<size_t>(cols);
  Vec<S> y(static_cast<size_t>(rows) * n);
  auto at = [&](size_t r, size_t c) { return x[r * width + c] + (bias.empty() ? S{} : bias[c]); };
  for (size_t r = 0; r < static_cast<size_t>(rows); ++r)
    for (size_t c = 0; c < n; ++c) y[r * n + c] = activate(kind, at(r, c)) * (gated ? at(r, n + c) : S{1.0});
  return y;
}

// ---- attention

template <class S>
Vec<S> rope(const kernels::QkvLayout& l, Vec<S> qkv, const Vec<double>& cos, const Vec<double>& sin,
            const Vec<int32_t>& positions, int64_t rotary_dim, bool interleaved, bool inverse) {
  const int64_t half = rotary_dim / 2;
  for (size_t r = 0; r < positions.size(); ++r)
    for (int64_t g = 0; g < l.groups; ++g)
      for (int64_t h = 0; h <= l.heads_per_group; ++h)
        for (int64_t i = 0; i < half; ++i) {
          S* head =
              qkv.data() + static_cast<int64_t>(r) * l.row() + (g * (l.heads_per_group + 2) + h) * l.head_dim;
          S& a = head[interleaved ? 2 * i : i];
          S& b = head[interleaved ? 2 * i + 1 : half + i];
          const double c = cos[static_cast<size_t>(positions[r] * half + i)];
          const double s = (inverse ? -1.0 : 1.0) * sin[static_cast<size_t>(positions[r] * half + i)];
          const S first = a * c - b * s, second = b * c + a * s;
          a = first;
          b = second;
        }
  return qkv;
}

template <class S>
S capped(S logit, double cap) {
  return cap > 0 ? cap * std::tanh(logit / cap) : logit;
}

// Queries [tokens][heads][qk_dim], keys [tokens][groups][qk_dim], values [tokens][groups][v_dim].
template <class S>
struct Qkv {
  Vec<S> q, k, v;
};
inline kernels::QkvLayout packed_layout(const kernels::AttentionShape& a) {
  return {a.groups, a.heads_per_group, a.qk_dim};
}
template <class S>
Qkv<S> unpacked(const kernels::AttentionShape& a, const Vec<S>& packed) {
  const auto l = packed_layout(a);
  Qkv<S> x;
  for (int64_t row = 0; row < a.batch * a.seq; ++row) {
    const auto append = [&](Vec<S>& to, int64_t at) {
      to.insert(to.end(), packed.begin() + row * l.row() + at,
                packed.begin() + row * l.row() + at + l.head_dim);
    };
    for (int64_t h = 0; h < l.heads(); ++h) append(x.q, l.query(h));
    for (int64_t g = 0; g < l.groups; ++g) append(x.k, l.key(g)), append(x.v, l.value(g));
  }
  return x;
}
template <class S>
Vec<S> packed(const kernels::AttentionShape& a, const Qkv<S>& x) {
  const auto l = packed_layout(a);
  const int64_t d = l.head_dim;
  Vec<S> result(static_cast<size_t>(a.batch * a.seq * l.row()));
  for (int64_t row = 0; row < a.batch * a.seq; ++row) {
    const auto copy = [&](const Vec<S>& from, int64_t head, int64_t at) {
      std::copy_n(from.begin() + head * d, d, result.begin() + row * l.row() + at);
    };
    for (int64_t h = 0; h < l.heads(); ++h) copy(x.q, row * l.heads() + h, l.query(h));
    for (int64_t g = 0; g < l.groups; ++g) {
      copy(x.k, row * l.groups + g, l.key(g));
      copy(x.v, row * l.groups + g, l.value(g));
    }
  }
  return result;
}

// Queries, keys and values concatenated, for an error relative to all of them: without visible
// neighbors, the gradients of queries and keys are rounding errors alone.
inline Vec<double> joined(const Qkv<double>& x) {
  Vec<double> all = x.q;
  all.insert(all.end(), x.k.begin(), x.k.end());
  all.insert(all.end(), x.v.begin(), x.v.end());
  return all;
}

// Calls body(b, head, query, row of the query, first key, end of the keys) where keys are visible.
template <class Body>
void for_visible(const kernels::AttentionShape& a, const Vec<int32_t>& document_start, Body&& body) {
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t h = 0; h < a.heads(); ++h)
      for (int64_t i = 0; i < a.seq; ++i) {
        const int64_t row = b * a.seq + i;
        int64_t low = document_start.empty() ? 0 : document_start[static_cast<size_t>(row)];
        if (a.window > 0) low = std::max(low, i - a.window + 1);
        const int64_t high = a.causal ? i + 1 : a.seq;
        if (low < high) body(b, h, i, row, low, high);
      }
}
// 0, or the factor with which the expectation stays the same.
inline double dropout_factor(const kernels::AttentionShape& a, const Vec<int64_t>& dropout_rows, int64_t row,
                             int64_t head, int64_t key) {
  if (a.dropout <= 0) return 1;
  return kernels::keep_attention(a.dropout_key, dropout_rows[static_cast<size_t>(row)], a.head_offset + head,
                                 key, kernels::dropout_threshold(a.dropout))
             ? 1.0 / (1.0 - static_cast<double>(a.dropout))
             : 0.0;
}

// lse may be null. Masked queries give 0 and -infinity. sinks: of each head, a logit without a value; null:
// none.
template <class S>
Vec<S> attention(const kernels::AttentionShape& a, const Qkv<S>& x, const Vec<int32_t>& document_start,
                 const Vec<int64_t>& dropout_rows, Vec<double>* lse, const Vec<S>* sinks = nullptr) {
  Vec<S> out(static_cast<size_t>(a.batch * a.seq * a.heads() * a.v_dim));
  if (lse)
    lse->assign(static_cast<size_t>(a.batch * a.heads() * a.seq), -std::numeric_limits<double>::infinity());
  for_visible(
      a, document_start, [&](int64_t b, int64_t h, int64_t i, int64_t row, int64_t low, int64_t high) {
        const int64_t group = h / a.heads_per_group;
        const S* q = x.q.data() + (row * a.heads() + h) * a.qk_dim;
        Vec<S> p(static_cast<size_t>(high - low));
        const S* sink = sinks ? &(*sinks)[static_cast<size_t>(h)] : nullptr;
        double highest = sink ? real(*sink) : -std::numeric_limits<double>::infinity();
        for (int64_t j = low; j < high; ++j) {
          const S* k = x.k.data() + ((b * a.seq + j) * a.groups + group) * a.qk_dim;
          S dot{};
          for (int64_t e = 0; e < a.qk_dim; ++e) dot += q[e] * k[e];
          p[static_cast<size_t>(j - low)] = capped(dot * static_cast<double>(a.scale), a.softcap);
          highest = std::max(highest, real(p[static_cast<size_t>(j - low)]));
        }
        S sum = sink ? std::exp(*sink - highest) : S{};
        for (S& value : p) {
          value = std::exp(value - highest);
          sum += value;
        }
        if (lse) (*lse)[static_cast<size_t>((b * a.heads() + h) * a.seq + i)] = highest + std::log(real(sum));
        const S inverse = S(1) / sum;
        S* const to = out.data() + (row * a.heads() + h) * a.v_dim;
        for (int64_t j = low; j < high; ++j) {
          const S weight =
              p[static_cast<size_t>(j - low)] * inverse * dropout_factor(a, dropout_rows, row, h, j);
          const S* v = x.v.data() + ((b * a.seq + j) * a.groups + group) * a.v_dim;
          for (int64_t e = 0; e < a.v_dim; ++e) to[e] += weight * v[e];
        }
      });
  return out;
}
template <class S>
Vec<S> attention(const kernels::AttentionShape& a, const Vec<S>& qkv, const Vec<int32_t>& document_start,
                 const Vec<int64_t>& dropout_rows, Vec<double>* lse) {
  return attention(a, unpacked(a, qkv), document_start, dropout_rows, lse);
}

// The gradient of sum(dout * attention(x)) by the analytic formulas in double: complex step costs one forward
// pass an element, which only tiny shapes can afford (tests/kernels/attention.cpp checks this function
// against it). `saved`: the output as the forward pass has rounded it, from which the backward pass of a
// kernel computes the sum of p * dp; null: that sum without rounding.
inline Qkv<double> attention_gradient(const kernels::AttentionShape& a, const Qkv<double>& x,
                                      const Vec<double>& dout, const Vec<int32_t>& document_start,
                                      const Vec<int64_t>& dropout_rows, const Vec<double>* saved = nullptr) {
  Qkv<double> grad{Vec<double>(x.q.size()), Vec<double>(x.k.size()), Vec<double>(x.v.size())};
  for_visible(a, document_start, [&](int64_t b, int64_t h, int64_t, int64_t row, int64_t low, int64_t high) {
    const auto q_at = static_cast<size_t>((row * a.heads() + h) * a.qk_dim),
               out_at = static_cast<size_t>((row * a.heads() + h) * a.v_dim);
    const auto qk = static_cast<size_t>(a.qk_dim), width = static_cast<size_t>(a.v_dim),
               n = static_cast<size_t>(high - low);
    // The head of key low + j, among key and value heads.
    const auto head_of = [&](size_t j) {
      return static_cast<size_t>((b * a.seq + low) * a.groups + h / a.heads_per_group) +
             j * static_cast<size_t>(a.groups);
    };
    Vec<double> p(n), dp(n), slope(n, 1.0);
    double highest = -std::numeric_limits<double>::infinity(), sum = 0, inner = 0;
    const double *q = &x.q[q_at], *g = &dout[out_at];
    for (size_t j = 0; j < n; ++j) {
      p[j] = std::transform_reduce(q, q + qk, &x.k[head_of(j) * qk], 0.0);
      p[j] = capped(p[j] * static_cast<double>(a.scale), a.softcap);
      if (a.softcap > 0) slope[j] = 1 - p[j] * p[j] / (double{a.softcap} * double{a.softcap});
      highest = std::max(highest, p[j]);
    }
    for (double& value : p) sum += value = std::exp(value - highest);
    for (size_t j = 0; j < n; ++j) {
      p[j] /= sum;
      const double keep = dropout_factor(a, dropout_rows, row, h, low + static_cast<int64_t>(j));
      dp[j] = keep * std::transform_reduce(g, g + width, &x.v[head_of(j) * width], 0.0);
      double* const value = &grad.v[head_of(j) * width];
      for (size_t e = 0; e < width; ++e) value[e] += p[j] * keep * g[e];
      inner += p[j] * dp[j];
    }
    if (saved) inner = std::transform_reduce(g, g + width, &(*saved)[out_at], 0.0);
    for (size_t j = 0; j < n; ++j) {
      const double ds = p[j] * (dp[j] - inner) * slope[j] * static_cast<double>(a.scale);
      const double* const k = &x.k[head_of(j) * qk];
      double *const query = &grad.q[q_at], *const key = &grad.k[head_of(j) * qk];
      for (size_t e = 0; e < qk; ++e) query[e] += ds * k[e];
      for (size_t e = 0; e < qk; ++e) key[e] += ds * q[e];
    }
  });
  return grad;
}
inline Vec<double> attention_gradient(const kernels::AttentionShape& a, const Vec<double>& qkv,
                                      const Vec<double>& dout, const Vec<int32_t>& document_start,
                                      const Vec<int64_t>& dropout_rows) {
  return packed(a, attention_gradient(a, unpacked(a, qkv), dout, document_start, dropout_rows));
}

// ---- cross-entropy: per-row negative log-likelihood, log of the sum of exponentials minus the label's logit

template <class S>
Vec<S> cross_entropy(const Vec<S>& logits, const Vec<int32_t>& labels, int64_t cols, int64_t row_stride) {
  Vec<S> loss(labels.size());
  for (size_t r = 0; r < labels.size(); ++r) {
    const S* row = logits.data() + static_cast<int64_t>(r) * row_stride;
    double highest = -std::numeric_limits<double>::infinity();
    for (int64_t c = 0; c < cols; ++c) highest = std::max(highest, real(row[c]));
    S sum{};
    for (int64_t c = 0; c < cols; ++c) sum += std::exp(row[c] - highest);
    loss[r] = std::log(sum) + highest - row[labels[r]];
  }
  return loss;
}

// ---- sampling: one token by a full sort and the definition of the distribution function

inline int32_t sampled_token(const Vec<double>& logits, const kernels::SamplingOptions& options,
                             int64_t position) {
  Vec<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  if (options.temperature == 0) return static_cast<int32_t>(order[0]);
  if (options.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(options.top_k)));
  Vec<double> p;
  double sum = 0, mass = 0, below = 0;
  for (const size_t i : order)
    sum += p.emplace_back(std::exp((logits[i] - logits[order[0]]) / options.temperature));
  size_t count = 0;
  while (count < p.size() && (options.top_p == 1 || mass < options.top_p * sum)) mass += p[count++];
  PhiloxSequence random(philox_key(options.seed, purpose::sampling, static_cast<uint64_t>(position)));
  const double target = random.uniform() * mass;
  for (size_t i = 0; i < count; ++i)
    if ((below += p[i]) > target) return static_cast<int32_t>(order[i]);
  return static_cast<int32_t>(order[count - 1]);
}

}  // namespace capstan::reference
