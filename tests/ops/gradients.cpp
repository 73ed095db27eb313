// Values and gradients of the operations against scalar references.
#include <doctest/doctest.h>

#include "ops/activation.hpp"
#include "ops/attention.hpp"
#include "ops/bias_dropout_add.hpp"
#include "ops/cast.hpp"
#include "ops/concat.hpp"
#include "ops/embedding.hpp"
#include "ops/linear.hpp"
#include "ops/linear_cross_entropy.hpp"
#include "ops/matmul.hpp"
#include "ops/norm.hpp"
#include "ops/rope.hpp"
#include "ops/router_logits.hpp"
#include "ops/scale.hpp"
#include "support/sanitized.hpp"
#include "tests/ops/op_check.hpp"

using namespace capstan;
using namespace capstan::test;

namespace {

template <class S>
Vec<S> linear_reference(const Vec<S>& x, const Vec<S>& w, const Vec<S>& bias, size_t rows, size_t in,
                        size_t out) {
  Vec<S> y(rows * out);
  for (size_t r = 0; r < rows; ++r)
    for (size_t o = 0; o < out; ++o) {
      S sum = bias.empty() ? S{} : bias[o];
      for (size_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
  return y;
}

}  // namespace

TEST_CASE("linear: value and gradients of input, weight and bias") {
  for (const DType type : kTypes)
    for (const bool bias : {false, true})
      for (const uint64_t seed : {1, 2}) {
        const int64_t rows = 5 + static_cast<int64_t>(seed), in = 7, out = 9;
        OpCase c{.inputs = {random_value({rows, in}, seed)},
                 .parameters = {random_value({out, in}, seed + 10)},
                 .type = type,
                 .tolerance = tolerance(type)};
        if (bias) c.parameters.push_back(random_value({out}, seed + 20));
        check_op(
            "linear", c,
            [](Tape& t, Vars x, const Handles& p) {
              return Vars{ops::linear(t, x[0], *p[0], p.size() > 1 ? p[1] : nullptr)};
            },
            [&](const auto& x, const auto& p) {
              using L = std::decay_t<decltype(x)>;
              return L{linear_reference(x[0], p[0], p.size() > 1 ? p[1] : typename L::value_type{},
                                        static_cast<size_t>(rows), static_cast<size_t>(in),
                                        static_cast<size_t>(out))};
            });
      }
}

TEST_CASE("embedding: rows of tables, shards, gradients summed over repeated ids") {
  const Vec<int32_t> ids{3, 0, 3, 8, 5, 3, 0}, positions{0, 1, 2, 0, 1, 2, 3};
  for (const DType type : kTypes)
    for (const bool learned : {false, true})
      for (const int64_t first_row : {int64_t{0}, int64_t{2}}) {  // with 2: ids 0 and 8 lie in other shards
        const int64_t cols = 5, rows = first_row ? 6 : 9;
        OpCase c{.parameters = {random_value({rows, cols}, 1)}, .type = type, .tolerance = tolerance(type)};
        if (learned) c.parameters.push_back(random_value({6, cols}, 2));
        check_op(
            "embedding", c,
            [&](Tape& t, Vars, const Handles& p) {
              const Tensor i = Tensor::from_host<int32_t>(t.device(), {7}, ids);
              const Tensor at = Tensor::from_host<int32_t>(t.device(), {7}, positions);
              return Vars{
                  ops::embedding(t, i, *p[0], learned ? p[1] : nullptr, learned ? at : Tensor(), first_row)};
            },
            [&](const auto&, const auto& p) {
              using L = std::decay_t<decltype(p)>;
              typename L::value_type y(7 * static_cast<size_t>(cols));
              for (size_t r = 0; r < 7; ++r)
                for (size_t col = 0; col < static_cast<size_t>(cols); ++col) {
                  const int64_t row = ids[r] - first_row;
                  if (row >= 0 && row < rows) y[r * 5 + col] += p[0][static_cast<size_t>(row) * 5 + col];
                  if (learned) y[r * 5 + col] += p[1][static_cast<size_t>(positions[r]) * 5 + col];
                }
              return L{y};
            });
      }
}

TEST_CASE("norm: with and without residual, each output used or not") {
  for (const DType type : kTypes)
    for (const bool rms : {false, true})
      for (const bool residual : {false, true})
        for (const auto& used : {std::vector<bool>{true, true}, {false, true}, {true, false}}) {
          const int64_t rows = 6, cols = 11;
          const float offset = rms ? 1.0f : 0.0f;
          OpCase c{.inputs = {random_value({rows, cols}, 1)},
                   .parameters = {random_value({cols}, 3)},
                   .type = type,
                   .tolerance = tolerance(type),
                   .used_outputs = used};
          if (residual) c.inputs.push_back(random_value({rows, cols}, 2));
          if (!rms) c.parameters.push_back(random_value({cols}, 4));
          check_op(
              "norm", c,
              [&](Tape& t, Vars x, const Handles& p) {
                ops::NormResult r = ops::norm(t, std::move(x[0]), x.size() > 1 ? x[1] : Var{}, *p[0],
                                              rms ? nullptr : p[1], {rms, 1e-3f, offset});
                return Vars{r.sum, r.y};
              },
              [&](const auto& x, const auto& p) {
                using L = std::decay_t<decltype(x)>;
                auto sum = x[0];
                for (size_t i = 0; i < sum.size() && residual; ++i) sum[i] += x[1][i];
                return L{sum, reference::norm(rms, sum, p[0], offset, rms ? typename L::value_type{} : p[1],
                                              1e-3f, cols)};
              });
        }
}

TEST_CASE("norm_across_heads: all queries as one vector, all keys as another, values pass") {
  const kernels::QkvLayout layout{2, 3, 5};
  const int64_t tokens = 3;
  for (const DType type : kTypes) {
    OpCase c{.inputs = {random_value({tokens, layout.row()}, 1)},
             .parameters = {random_value({30}, 2), random_value({10}, 3)},
             .type = type,
             .tolerance = tolerance(type)};
    check_op(
        "norm_across_heads", c,
        [&](Tape& t, Vars x, const Handles& p) {
          return Vars{ops::norm_across_heads(t, x[0], layout, {6, 2}, *p[0], *p[1], {true, 1e-3f, 1.0f}, {})};
        },
        [&](const auto& x, const auto& p) {
          using L = std::decay_t<decltype(x)>;
          using V = typename L::value_type;
          V y = x[0];
          const auto kind = [&](size_t i) { return i / 5 % 5 == 4 ? 2 : i / 5 % 5 == 3 ? 1 : 0; };
          for (const int which : {0, 1})
            for (size_t row = 0; row < y.size(); row += 50) {
              V part;
              for (size_t i = 0; i < 50; ++i)
                if (kind(i) == which) part.push_back(x[0][row + i]);
              const V n = reference::norm(true, part, p[static_cast<size_t>(which)], 1, V{}, 1e-3f,
                                          static_cast<int64_t>(part.size()));
              size_t next = 0;
              for (size_t i = 0; i < 50; ++i)
                if (kind(i) == which) y[row + i] = n[next++];
            }
          return L{y};
        });
  }
}

TEST_CASE("scale: by the factor as x's type has it") {
  for (const DType type : kTypes) {
    // sqrt(3072)
    const double factor = type == DType::bf16 ? 55.5 : type == DType::f16 ? 55.4375 : 55.4256258422;
    check_op(
        "scale", {.inputs = {random_value({3, 5}, 1)}, .type = type, .tolerance = tolerance(type) / 10},
        [](Tape& t, Vars x, const Handles&) {
          return Vars{ops::scale(t, std::move(x[0]), std::sqrt(3072.0))};
        },
        [&](const auto& x, const auto&) {
          auto y = x[0];
          for (auto& v : y) v *= factor;
          return std::decay_t<decltype(x)>{y};
        });
  }
}

TEST_CASE("concat_columns: the columns of the first input, then those of the second") {
  for (const DType type : kTypes)
    check_op(
        "concat_columns",
        {.inputs = {random_value({5, 3}, 1), random_value({5, 4}, 2)},
         .type = type,
         .tolerance = tolerance(type)},
        [](Tape& t, Vars x, const Handles&) { return Vars{ops::concat_columns(t, x[0], x[1])}; },
        [](const auto& x, const auto&) {
          std::decay_t<decltype(x[0])> y;
          for (size_t row = 0; row < 5; ++row) {
            y.insert(y.end(), &x[0][row * 3], &x[0][row * 3] + 3);
            y.insert(y.end(), &x[1][row * 4], &x[1][row * 4] + 4);
          }
          return std::decay_t<decltype(x)>{y};
        });
}

TEST_CASE("concat_rows: one part after the other; split_rows: the parts of a value again") {
  for (const DType type : kTypes)
    for (const size_t count : {2, 3}) {
      OpCase parts{.type = type, .tolerance = tolerance(type)};
      for (size_t i = 0; i < count; ++i) parts.inputs.push_back(random_value({5, 3}, i));
      check_op(
          "concat_rows", parts, [](Tape& t, Vars x, const Handles&) { return Vars{ops::concat_rows(t, x)}; },
          [](const auto& x, const auto&) {
            std::decay_t<decltype(x[0])> y;
            for (const auto& part : x) y.insert(y.end(), part.begin(), part.end());
            return std::decay_t<decltype(x)>{y};
          });
      check_op(
          "split_rows",
          {.inputs = {random_value({5 * static_cast<int64_t>(count), 3}, count)},
           .type = type,
           .tolerance = tolerance(type)},
          [count](Tape& t, Vars x, const Handles&) {
            return ops::split_rows(t, x[0], static_cast<int64_t>(count));
          },
          [count](const auto& x, const auto&) {
            std::decay_t<decltype(x)> parts_of_x;
            for (size_t i = 0; i < count; ++i)
              parts_of_x.emplace_back(x[0].begin() + static_cast<std::ptrdiff_t>(15 * i),
                                      x[0].begin() + static_cast<std::ptrdiff_t>(15 * (i + 1)));
            return parts_of_x;
          });
    }
}

TEST_CASE("attention: causal, window, documents, dropout, capped scores, each with and without sinks") {
  const kernels::QkvLayout layout{2, 2, 4};
  const int64_t batch = 2, seq = 5;
  const Vec<int32_t> documents{0, 0, 2, 2, 2, 0, 1, 1, 1, 4};
  const Vec<int64_t> ids = testing::dropout_rows(batch * seq);
  enum class Sinks { none, zero, learned };
  for (const DType type : kTypes)
    for (const auto& [variant, sinks] : {std::pair{0, Sinks::none},
                                         {1, Sinks::none},
                                         {2, Sinks::none},
                                         {3, Sinks::none},
                                         {4, Sinks::none},
                                         {0, Sinks::zero},
                                         {1, Sinks::learned},
                                         {2, Sinks::learned},
                                         {3, Sinks::learned},
                                         {4, Sinks::learned}}) {
      kernels::AttentionShape shape;
      shape.groups = layout.groups;
      shape.heads_per_group = layout.heads_per_group;
      shape.qk_dim = shape.v_dim = layout.head_dim;
      shape.batch = batch;
      shape.seq = seq;
      shape.scale = 0.5f;
      shape.window = variant == 1 ? 3 : 0;
      shape.softcap = variant == 4 ? 0.9f : 0;
      shape.dropout = variant == 3 ? 0.3f : 0;
      shape.dropout_key = philox_key(5, purpose::attention_dropout, 1);
      shape.head_offset = 4;
      const Vec<int32_t> starts = variant == 2 ? documents : Vec<int32_t>{};
      OpCase c{.inputs = {random_value({batch * seq, layout.row()}, 1, 1.5)},
               .type = type,
               .tolerance = tolerance(type)};
      if (sinks == Sinks::learned) c.parameters.push_back(random_value({layout.heads()}, 2, 2));
      check_op(
          "attention", c,
          [&, variant = variant, sinks = sinks](Tape& t, Vars x, const Handles& p) {
            ops::AttentionOptions o(ops::qkv_layout(x[0].size(1), 2, 4));
            o.shape.batch = batch;
            o.shape.seq = seq;
            o.shape.scale = shape.scale;
            o.shape.window = shape.window;
            o.shape.softcap = shape.softcap;
            o.shape.dropout = shape.dropout;
            o.shape.dropout_key = shape.dropout_key;
            o.shape.head_offset = shape.head_offset;
            o.sink = {sinks != Sinks::none, p.empty() ? nullptr : p[0]};
            if (variant == 2)
              o.documents.start = Tensor::from_host<int32_t>(t.device(), {batch * seq}, documents);
            if (variant == 3) o.dropout_rows = Tensor::from_host<int64_t>(t.device(), {batch * seq}, ids);
            return Vars{ops::attention(t, std::move(x[0]), o)};
          },
          [&, sinks = sinks](const auto& x, const auto& p) {
            using L = std::decay_t<decltype(x)>;
            using V = typename L::value_type;
            const V logits = p.empty() ? V(static_cast<size_t>(layout.heads())) : p[0];
            return L{reference::attention(shape, reference::unpacked(shape, x[0]), starts, ids, nullptr,
                                          sinks == Sinks::none ? nullptr : &logits)};
          });
    }
}

namespace {
// Each query head and key head of packed QKV on its own; values pass. weights: gammas of queries and keys,
// then betas with LayerNorm.
template <class V>
V heads_normalized(const V& qkv, const kernels::QkvLayout& layout, const std::vector<V>& weights, bool rms) {
  V y = qkv;
  const int64_t d = layout.head_dim, per_group = layout.heads_per_group + 2;
  for (int64_t head = 0; head * d < static_cast<int64_t>(y.size()); ++head) {
    const int64_t kind = head % per_group;
    if (kind == per_group - 1) continue;
    const size_t which = kind == per_group - 2 ? 1 : 0;
    const V part(y.begin() + head * d, y.begin() + (head + 1) * d);
    const V n =
        reference::norm(rms, part, weights[which], rms ? 1.0 : 0.0, rms ? V{} : weights[which + 2], 1e-3f, d);
    std::copy(n.begin(), n.end(), y.begin() + head * d);
  }
  return y;
}
}  // namespace

TEST_CASE(
    "attention after a norm of each head and a rotation: either, both, parts of a head, both pairings") {
  const kernels::QkvLayout layout{2, 2, 6};
  const int64_t batch = 2, seq = 3;
  const Vec<int32_t> positions{0, 3, 1, 5, 2, 2};
  enum class Kind { none, rms, layer };
  for (const DType type : kTypes)
    for (const Kind kind : {Kind::none, Kind::rms, Kind::layer})
      for (const auto& [rotary, interleaved] :
           {std::pair<int64_t, bool>{0, false}, {6, false}, {6, true}, {4, false}, {4, true}}) {
        const bool rms = kind == Kind::rms;
        Vec<double> cosines, sines;
        for (const double a : testing::random_values(6 * rotary / 2, 9, 3)) {
          cosines.push_back(static_cast<float>(std::cos(a)));
          sines.push_back(static_cast<float>(std::sin(a)));
        }
        kernels::AttentionShape shape;
        shape.groups = layout.groups;
        shape.heads_per_group = layout.heads_per_group;
        shape.qk_dim = shape.v_dim = layout.head_dim;
        shape.batch = batch;
        shape.seq = seq;
        shape.scale = 0.5f;
        OpCase c{.inputs = {random_value({batch * seq, layout.row()}, 1)},
                 .type = type,
                 .tolerance = 2 * tolerance(type)};
        if (kind != Kind::none)
          for (uint64_t i = 0; i < (rms ? 2u : 4u); ++i) c.parameters.push_back(random_value({6}, 2 + i));
        check_op(
            "attention after its transform", c,
            [&](Tape& t, Vars x, const Handles& p) {
              ops::AttentionOptions o(layout);
              o.shape.batch = batch;
              o.shape.seq = seq;
              o.shape.scale = shape.scale;
              if (rotary > 0) {
                o.transform.table = {upload(t.device(), {{6, rotary / 2}, cosines}, DType::f32),
                                     upload(t.device(), {{6, rotary / 2}, sines}, DType::f32)};
                o.transform.positions = Tensor::from_host<int32_t>(t.device(), {batch * seq}, positions);
                o.transform.interleaved = interleaved;
              }
              if (kind != Kind::none) {
                o.transform.norm = {p[0], rms ? nullptr : p[2], p[1], rms ? nullptr : p[3]};
                o.transform.norm_options = {rms, 1e-3f, rms ? 1.0f : 0.0f};
              }
              return Vars{ops::attention(t, std::move(x[0]), o)};
            },
            [&](const auto& x, const auto& p) {
              using L = std::decay_t<decltype(x)>;
              auto y = kind == Kind::none ? x[0] : heads_normalized(x[0], layout, p, rms);
              y = reference::rope(layout, y, cosines, sines, positions, rotary, interleaved, false);
              return L{reference::attention(shape, y, {}, {}, nullptr)};
            });
      }
}

TEST_CASE("attention saves qkv, its output and a statistic for each head, after any transform") {
  struct Saved final : TapeObserver {
    int64_t bytes = 0;
    void observe(const TapeEvent& event) override {
      if (event.phase == 'F' && event.name == "attention") bytes = event.saved_bytes;
    }
  };
  const kernels::QkvLayout layout{2, 3, 8};
  const int64_t rows = 10;
  for (const bool norm : {false, true})
    for (const bool rotates : {false, true}) {
      const auto device = make_cpu_device(kernels::cpu_table(), 1);
      nn::ParamList list;
      for (const char* name : {"q", "k"}) list.add(nn::ModulePath{name}.spec("weight", {8}, {}));
      const auto parameters = list.take();
      SimpleStore store(*device, parameters);
      Saved saved;
      StepContext context{*device, store, &saved};
      Tape tape(context);
      ops::AttentionOptions o(layout);
      o.shape.batch = 1;
      o.shape.seq = rows;
      o.shape.scale = 0.5f;
      if (norm) o.transform.norm = {.q_gamma = parameters[0].get(), .k_gamma = parameters[1].get()};
      o.transform.norm_options.rms = true;
      if (rotates) {
        o.transform.table = {Tensor::zeros(*device, {rows, 4}), Tensor::zeros(*device, {rows, 4})};
        o.transform.positions = Tensor::zeros(*device, {rows}, DType::i32);
      }
      Var qkv = tape.input("qkv", Tensor::zeros(*device, {rows, layout.row()}), true);
      Var own{ops::copy_of(qkv.value), qkv.slot};
      (void)ops::attention(tape, std::move(own), o);
      CHECK(saved.bytes == 4 * rows * (layout.row() + layout.heads() * 8 + layout.heads()));
    }
}

TEST_CASE("bias_activation: every kind, gated or not, with and without bias") {
  using Kind = kernels::ActivationKind;
  for (const DType type : kTypes)
    for (const Kind kind : {Kind::gelu, Kind::gelu_tanh, Kind::silu, Kind::relu, Kind::squared_relu})
      for (const bool gated : {false, true})
        for (const bool bias : {false, true}) {
          const int64_t rows = 3, cols = 7, width = gated ? 14 : 7;
          OpCase c{.inputs = {random_value({rows, width}, 1, 2)}, .type = type, .tolerance = tolerance(type)};
          if (bias) c.parameters.push_back(random_value({width}, 2));
          check_op(
              "bias_activation", c,
              [&](Tape& t, Vars x, const Handles& p) {
                return Vars{ops::bias_activation(t, x[0], bias ? p[0] : nullptr, kind, gated)};
              },
              [&](const auto& x, const auto& p) {
                using L = std::decay_t<decltype(x)>;
                return L{reference::activation(kind, gated, x[0], bias ? p[0] : typename L::value_type{},
                                               rows, cols)};
              });
        }
}

TEST_CASE("activation: slopes, limits beyond which no gradient passes, an offset of the linear branch") {
  using Kind = kernels::ActivationKind;
  for (const DType type : kTypes)
    for (const kernels::ActivationFunction& f :
         {kernels::ActivationFunction{.kind = Kind::silu, .slope = 1.702f, .limit = 0.75f, .up_offset = 1},
          {.kind = Kind::silu, .gated = false, .slope = 1.702f},
          {.kind = Kind::gelu, .limit = 1.25f},
          {.kind = Kind::relu, .up_offset = -0.5f}}) {
      const size_t cols = 7, width = f.gated ? 14 : 7;
      check_op(
          "activation",
          {.inputs = {random_value({5, static_cast<int64_t>(width)}, 1, 2)},
           .type = type,
           .tolerance = tolerance(type)},
          [&](Tape& t, Vars x, const Handles&) { return Vars{ops::activation(t, x[0], f)}; },
          [&](const auto& x, const auto&) {
            using V = typename std::decay_t<decltype(x)>::value_type;
            using S = typename V::value_type;
            const auto clamped = [&](S v, double least) {
              if (f.limit > 0 && reference::real(v) > double{f.limit}) return S(f.limit);
              return f.limit > 0 && reference::real(v) < least ? S(least) : v;
            };
            V y;
            for (size_t r = 0; r < 5; ++r)
              for (size_t c = 0; c < cols; ++c) {
                S v = x[0][r * width + c];
                if (f.gated) v = clamped(v, -INFINITY);
                const double slope = double{f.slope};
                v = f.slope == 1 ? reference::activate(f.kind, v) : v / (1.0 + std::exp(-slope * v));
                if (f.gated) v *= clamped(x[0][r * width + cols + c], -double{f.limit}) + double{f.up_offset};
                y.push_back(v);
              }
            return std::decay_t<decltype(x)>{y};
          });
    }
}

TEST_CASE("router_logits: value and gradients of input, weight and bias") {
  const size_t rows = 5, hidden = 9, experts = 7;
  for (const DType type : kTypes)
    for (const bool bias : {false, true}) {
      OpCase c{.inputs = {random_value({rows, hidden}, 1)},
               .parameters = {random_value({experts, hidden}, 2)},
               .type = type,
               .tolerance = tolerance(type)};
      if (bias) c.parameters.push_back(random_value({experts}, 3));
      check_op(
          "router_logits", c,
          [&](Tape& t, Vars x, const Handles& p) {
            return Vars{ops::router_logits(t, x[0], *p[0], bias ? p[1] : nullptr)};
          },
          [&](const auto& x, const auto& p) {
            using L = std::decay_t<decltype(x)>;
            return L{
                linear_reference(x[0], p[0], bias ? p[1] : typename L::value_type{}, rows, hidden, experts)};
          });
    }
}

TEST_CASE("bias_dropout_add: every combination; the mask of backward is the mask of forward") {
  const Vec<int64_t> ids = testing::dropout_rows(4);
  const PhiloxKey key = philox_key(3, purpose::hidden_dropout, 7);
  for (const DType type : kTypes)
    for (const float p : {0.0f, 0.4f})
      for (const bool bias : {false, true})
        for (const bool residual : {false, true}) {
          OpCase c{.inputs = {random_value({4, 9}, 1)}, .type = type, .tolerance = tolerance(type)};
          if (residual) c.inputs.push_back(random_value({4, 9}, 2));
          if (bias) c.parameters.push_back(random_value({9}, 3));
          check_op(
              "bias_dropout_add", c,
              [&](Tape& t, Vars x, const Handles& h) {
                const ops::Dropout dropout{p, key, Tensor::from_host<int64_t>(t.device(), {4}, ids)};
                return Vars{ops::bias_dropout_add(t, std::move(x[0]), bias ? h[0] : nullptr,
                                                  residual ? x[1] : Var{}, dropout)};
              },
              [&](const auto& x, const auto& h) {
                using L = std::decay_t<decltype(x)>;
                auto y = x[0];
                const uint32_t threshold = kernels::dropout_threshold(p);
                for (size_t i = 0; i < y.size(); ++i) {
                  if (bias) y[i] += h[0][i % 9];
                  if (p > 0)
                    y[i] *= kernels::keep_hidden(key, ids[i / 9], static_cast<int64_t>(i % 9), threshold)
                                ? 1 / (1 - static_cast<double>(p))
                                : 0.0;
                  if (residual) y[i] += x[1][i];
                }
                return L{y};
              });
        }
}

TEST_CASE("jitter: backward draws the noise of forward") {
  const Vec<int64_t> ids = testing::dropout_rows(4);
  const PhiloxKey key = philox_key(3, purpose::router_jitter, 7);
  for (const DType type : kTypes)
    for (const float epsilon : {0.02f, 0.4f})
      check_op(
          "jitter", {.inputs = {random_value({4, 9}, 1)}, .type = type, .tolerance = tolerance(type)},
          [&](Tape& t, Vars x, const Handles&) {
            return Vars{
                ops::jitter(t, x[0], {epsilon, key, Tensor::from_host<int64_t>(t.device(), {4}, ids)})};
          },
          [&](const auto& x, const auto&) {
            using L = std::decay_t<decltype(x)>;
            auto y = x[0];
            for (size_t i = 0; i < y.size(); ++i) {
              const uint32_t word = philox4x32(key, static_cast<uint64_t>(ids[i / 9]), i % 9 / 4)[i % 9 % 4];
              y[i] *= 1 + static_cast<double>(epsilon) * (2 * (word >> 8) / 16777216.0 - 1);
            }
            return L{y};
          });
}

TEST_CASE(
    "linear_cross_entropy: chunks, padding columns, weights, capped logits; the gradient is made in the "
    "forward pass") {
  for (const DType type : kTypes)
    // The last is more than one chunk of the type; the reference takes a time of the square of the rows.
    for (const auto& [rows, cap] : {std::pair<int64_t, float>{5, 0},
                                    {7, 1.5f},
                                    {type == DType::f32 ? 1030 : 2060, type == DType::f16 ? 2.0f : 0.0f}}) {
      if (test::kSanitized && rows > 1000 && type != DType::f32) continue;
      const int64_t hidden = 3, columns = 10, vocab = 7;
      const auto chunk_rows = kernels::cpu_table().cross_entropy->chunk_rows;
      CHECK((rows < 1000) == (chunk_rows(rows, columns, type, true) >= rows));
      const Vec<int32_t> labels = testing::random_ints(rows, 5, vocab);
      Vec<double> weights = testing::random_values(rows, 6);
      for (double& w : weights) w = w < -0.5 ? 0 : static_cast<float>(w + 1);
      OpCase c{.inputs = {random_value({rows, hidden}, 1)},
               .parameters = {random_value({columns, hidden}, 2)},
               .type = type,
               .tolerance = tolerance(type),
               .output_gradients = {{1.0}}};
      check_op(
          "linear_cross_entropy", c,
          [&](Tape& t, Vars x, const Handles& p) {
            const auto r = ops::linear_cross_entropy(
                t, x[0], *p[0], Tensor::from_host<int32_t>(t.device(), {rows}, labels),
                upload(t.device(), {{rows}, weights}, DType::f32), vocab, {}, cap);
            CHECK(r.exact_sum.to_host<double>()[0] ==
                  doctest::Approx(r.sum.value.to_floats()[0]).epsilon(1e-6));
            return Vars{r.sum};
          },
          [&](const auto& x, const auto& p) {
            using L = std::decay_t<decltype(x)>;
            using V = typename L::value_type;
            V logits = linear_reference(x[0], p[0], V{}, static_cast<size_t>(rows),
                                        static_cast<size_t>(hidden), static_cast<size_t>(columns));
            for (auto& logit : logits) logit = reference::capped(logit, static_cast<double>(cap));
            const V losses = reference::cross_entropy(logits, labels, vocab, columns);
            return L{V{reference::contract(losses, weights)}};
          });
    }
}

TEST_CASE("linear_cross_entropy: the device's kernels choose the type of logits and the rows of a chunk") {
  kernels::CrossEntropy narrow = *kernels::cpu_table().cross_entropy;
  narrow.logits_type = [](DType compute) { return compute; };
  kernels::CrossEntropy short_chunks = *kernels::cpu_table().cross_entropy;
  short_chunks.chunk_rows = [](int64_t, int64_t, DType, bool) { return int64_t{7}; };
  const int64_t rows = 45, hidden = 3, columns = 10, vocab = 7;
  const Vec<int32_t> labels = testing::random_ints(rows, 5, vocab);
  const Vec<double> weights(static_cast<size_t>(rows), 0.5);
  for (const DType type : kTypes)
    for (const float cap : {0.0f, 1.5f}) {
      OpCase c{.inputs = {random_value({rows, hidden}, 1)},
               .parameters = {random_value({columns, hidden}, 2)},
               .type = type};
      c.inputs[0].values = rounded(c.inputs[0].values, type);
      const auto run = [&](const kernels::CrossEntropy& kernel) {
        kernels::Table table = kernels::cpu_table();
        table.cross_entropy = &kernel;
        const auto device = make_cpu_device(table, 2);
        const auto op = [&](Tape& t, Vars x, const Handles& p) {
          return Vars{ops::linear_cross_entropy(
                          t, x[0], *p[0], Tensor::from_host<int32_t>(t.device(), {rows}, labels),
                          upload(t.device(), {{rows}, weights}, DType::f32), vocab, {}, cap)
                          .sum};
        };
        return run_op(*device, c, op, Way::plain, {{1.0}});
      };
      const OpRun plain = run(*kernels::cpu_table().cross_entropy), with_narrow = run(narrow),
                  chunked = run(short_chunks);
      const auto near = [](const OpRun& a, const OpRun& b, double allowed) {
        CHECK(testing::error(a.outputs[0], b.outputs[0]) < allowed);
        CHECK(testing::error(a.input_gradients[0], b.input_gradients[0]) < allowed);
        CHECK(testing::error(a.parameter_gradients[0], b.parameter_gradients[0]) < allowed);
      };
      near(with_narrow, plain, 1e-2);
      CHECK((with_narrow == plain) == (type == DType::f32));  // bf16 logits are rounded
      near(chunked, plain, 1e-5);
      CHECK(chunked.parameter_gradients != plain.parameter_gradients);  // the sum of seven chunks
    }
}

TEST_CASE("cast and add") {
  check_op(
      "add", {.inputs = {random_value({3, 5}, 1), random_value({3, 5}, 2)}},
      [](Tape& t, Vars x, const Handles&) { return Vars{ops::add(t, std::move(x[0]), x[1])}; },
      [](const auto& x, const auto&) {
        auto y = x[0];
        for (size_t i = 0; i < y.size(); ++i) y[i] += x[1][i];
        return std::decay_t<decltype(x)>{y};
      });
  check_op(
      "cast", {.inputs = {random_value({3, 5}, 1)}, .tolerance = 1e-2},
      [](Tape& t, Vars x, const Handles&) { return Vars{ops::cast(t, x[0], DType::bf16)}; },
      [](const auto& x, const auto&) { return std::decay_t<decltype(x)>{x[0]}; });
}
