// The operations of latent attention against scalar references.
#include "ops/latent_qkv.hpp"

#include <doctest/doctest.h>

#include <cmath>

#include "ops/attention.hpp"
#include "tests/ops/op_check.hpp"

using namespace capstan;
using namespace capstan::test;

namespace {

// Cosines and sines of any angles, [positions, rope_dim / 2]; not of unit length, as with YaRN.
struct Angles {
  int64_t positions;
  Vec<double> cosines, sines;
  Angles(int64_t count, int64_t rope_dim, uint64_t seed) : positions(count) {
    for (const double a : testing::random_values(count * rope_dim / 2, seed, 3)) {
      cosines.push_back(static_cast<float>(1.25 * std::cos(a)));
      sines.push_back(static_cast<float>(1.25 * std::sin(a)));
    }
  }
  ops::RopeTable on(Device& device, int64_t rope_dim) const {
    return {upload(device, {{positions, rope_dim / 2}, cosines}, DType::f32),
            upload(device, {{positions, rope_dim / 2}, sines}, DType::f32)};
  }
};

// Packed QKV, element by element.
template <class V>
V packed(const ops::LatentHeads& h, const V& q, const V& kv, const V& k_rope, const Angles& angles,
         const Vec<int32_t>& positions) {
  using S = typename V::value_type;
  const auto rotated = [&](const V& x, int64_t first, int64_t token, int64_t i) {
    const auto at = static_cast<size_t>(positions[static_cast<size_t>(token)] * h.rope_dim / 2 + i / 2);
    const S a = x[static_cast<size_t>(first + i / 2 * 2)], b = x[static_cast<size_t>(first + i / 2 * 2 + 1)];
    return i % 2 == 0 ? a * angles.cosines[at] - b * angles.sines[at]
                      : b * angles.cosines[at] + a * angles.sines[at];
  };
  V result;
  // Width of each packed head.
  const int64_t width = std::max(h.qk_dim(), h.value_dim);
  for (int64_t token = 0; token < static_cast<int64_t>(positions.size()); ++token)
    for (int64_t head = 0; head < h.heads; ++head) {
      const int64_t of_q = (token * h.heads + head) * h.qk_dim(),
                    of_kv = (token * h.heads + head) * (h.nope_dim + h.value_dim);
      for (int64_t i = 0; i < h.nope_dim; ++i) result.push_back(q[static_cast<size_t>(of_q + i)]);
      for (int64_t i = 0; i < h.rope_dim; ++i) result.push_back(rotated(q, of_q + h.nope_dim, token, i));
      result.resize(result.size() + static_cast<size_t>(width - h.qk_dim()));
      for (int64_t i = 0; i < h.nope_dim; ++i) result.push_back(kv[static_cast<size_t>(of_kv + i)]);
      for (int64_t i = 0; i < h.rope_dim; ++i)
        result.push_back(rotated(k_rope, token * h.rope_dim, token, i));
      result.resize(result.size() + static_cast<size_t>(width - h.qk_dim()));
      for (int64_t i = 0; i < h.value_dim; ++i)
        result.push_back(kv[static_cast<size_t>(of_kv + h.nope_dim + i)]);
      result.resize(result.size() + static_cast<size_t>(width - h.value_dim));
    }
  return result;
}

}  // namespace

TEST_CASE("split_columns: both parts, and the gradient of one of them alone") {
  for (const DType type : kTypes)
    for (const std::vector<bool>& used : std::vector<std::vector<bool>>{{}, {true, false}, {false, true}}) {
      OpCase c{.inputs = {random_value({5, 11}, 3)}, .type = type, .used_outputs = used};
      check_op(
          "split_columns", c,
          [](Tape& t, Vars x, const Handles&) {
            auto [first, second] = ops::split_columns(t, x[0], 7);
            return Vars{first, second};
          },
          [](const auto& x, const auto&) {
            using L = std::decay_t<decltype(x)>;
            L parts(2);
            for (size_t i = 0; i < x[0].size(); ++i) parts[i % 11 < 7 ? 0 : 1].push_back(x[0][i]);
            return parts;
          });
    }
}

TEST_CASE("latent_qkv: heads, a rotated key for all of them, and gradients") {
  const Vec<int32_t> positions{0, 3, 1, 5, 2};
  for (const DType type : kTypes)
    for (const ops::LatentHeads& h : {ops::LatentHeads{1, 3, 2, 5}, ops::LatentHeads{3, 5, 4, 7},
                                      ops::LatentHeads{2, 16, 8, 16}, ops::LatentHeads{5, 1, 34, 3}})
      for (const uint64_t seed : {1, 2}) {
        const Angles angles(6, h.rope_dim, seed + 9);
        OpCase c{.inputs = {random_value({5, h.heads * h.qk_dim()}, seed),
                            random_value({5, h.heads * (h.nope_dim + h.value_dim)}, seed + 1),
                            random_value({5, h.rope_dim}, seed + 2)},
                 .type = type,
                 .tolerance = tolerance(type)};
        check_op(
            "latent_qkv", c,
            [&](Tape& t, Vars x, const Handles&) {
              return Vars{ops::latent_qkv(t, x[0], x[1], x[2], h, angles.on(t.device(), h.rope_dim),
                                          Tensor::from_host<int32_t>(t.device(), {5}, positions))};
            },
            [&](const auto& x, const auto&) {
              using L = std::decay_t<decltype(x)>;
              return L{packed(h, x[0], x[1], x[2], angles, positions)};
            });
      }
}

TEST_CASE("attention of packed QKV whose values have a width of their own") {
  for (const DType type : kTypes)
    for (const auto& [qk, v] : {std::pair<int64_t, int64_t>{9, 7}, {3, 10}, {48, 32}}) {
      const int64_t width = std::max(qk, v), seq = 6, row = 3 * 3 * width;
      const kernels::QkvLayout layout{3, 1, width};
      OpCase c{.inputs = {random_value({2 * seq, row}, 4)}, .type = type, .tolerance = 2 * tolerance(type)};
      const double scale = 0.25;
      check_op(
          "attention", c,
          [&, qk = qk, v = v](Tape& t, Vars x, const Handles&) {
            ops::AttentionOptions o(layout);
            o.shape.qk_dim = qk;
            o.shape.v_dim = v;
            o.shape.batch = 2;
            o.shape.seq = seq;
            o.shape.scale = static_cast<float>(scale);
            return Vars{ops::attention(t, std::move(x[0]), o)};
          },
          [&, qk = qk, v = v](const auto& x, const auto&) {
            using L = std::decay_t<decltype(x)>;
            using S = typename L::value_type::value_type;
            typename L::value_type out(static_cast<size_t>(2 * seq * 3 * v));
            for (int64_t query = 0; query < 2 * seq; ++query)
              for (int64_t head = 0; head < 3; ++head) {
                const auto at = [&](int64_t token, int64_t i) {
                  return x[0][static_cast<size_t>(token * row + head * 3 * width + i)];
                };
                S total{};
                for (int64_t key = query / seq * seq; key <= query; ++key) {
                  S score{};
                  for (int64_t i = 0; i < qk; ++i) score += at(query, i) * at(key, width + i);
                  const S weight = std::exp(scale * score);
                  total += weight;
                  for (int64_t i = 0; i < v; ++i)
                    out[static_cast<size_t>((query * 3 + head) * v + i)] += weight * at(key, 2 * width + i);
                }
                for (int64_t i = 0; i < v; ++i) out[static_cast<size_t>((query * 3 + head) * v + i)] /= total;
              }
            return L{out};
          });
    }
}
