// Operations of mixture-of-experts layers against scalar references, values and gradients.
#include <doctest/doctest.h>

#include "ops/cast.hpp"
#include "ops/expert_permutation.hpp"
#include "ops/grouped_linear.hpp"
#include "ops/matmul.hpp"
#include "ops/router.hpp"
#include "tests/kernels/router_reference.hpp"
#include "tests/ops/op_check.hpp"

using namespace capstan;
using namespace capstan::test;

namespace {

kernels::RouterShape shape_of(int64_t tokens, int64_t experts, const ops::RouterOptions& o) {
  return {.tokens = tokens,
          .experts = experts,
          .topk = o.topk,
          .score = o.score,
          .pre_softmax = o.pre_softmax,
          .normalize = o.normalize,
          .scaling_factor = static_cast<float>(o.scaling_factor),
          .groups = std::max<int64_t>(o.groups, 1),
          .group_topk = std::max<int64_t>(o.group_topk, 1),
          .group_best = o.groups == 0      ? 1
                        : o.group_best > 0 ? o.group_best
                                           : o.topk / o.group_topk};
}

Vec<double> real_parts(const Vec<double>& x) {
  return x;
}
Vec<double> real_parts(const Vec<Complex>& x) {
  Vec<double> parts;
  for (const Complex& v : x) parts.push_back(v.real());
  return parts;
}

const ops::RouterOptions kRouters[] = {
    {.topk = 2},
    {.topk = 3, .pre_softmax = true},
    {.topk = 3, .pre_softmax = true, .normalize = true},
    {.topk = 2,
     .score = kernels::RouterScore::sigmoid,
     .normalize = true,
     .scaling_factor = 2.5,
     .groups = 3,
     .group_topk = 2},
    {.topk = 4, .pre_softmax = true, .scaling_factor = 16, .groups = 3, .group_topk = 2, .group_best = 1},
    {.topk = 1, .score = kernels::RouterScore::sigmoid},
};

struct LayerShape {
  int64_t tokens = 11, hidden = 5, inner = 7, experts = 6;
};

// The rows of W[e] times x, with the bias.
template <class S>
Vec<S> expert_linear(const Vec<S>& w, const Vec<S>& bias, const Vec<S>& x, size_t expert, size_t out) {
  Vec<S> y(out);
  for (size_t o = 0; o < out; ++o) {
    if (!bias.empty()) y[o] = bias[expert * out + o];
    for (size_t i = 0; i < x.size(); ++i) y[o] += w[(expert * out + o) * x.size() + i] * x[i];
  }
  return y;
}

// A layer of gated experts, token by token. kept: which slots are not dropped.
template <class S>
Vec<S> layer_reference(const LayerShape& l, const ops::RouterOptions& o, const Lists<S>& x, const Lists<S>& p,
                       bool biased, const std::vector<bool>& kept) {
  const kernels::RouterShape router = shape_of(l.tokens, l.experts, o);
  const Vec<int32_t> experts = reference::choose(router, real_parts(x[1]), {});
  const Vec<S> probabilities = reference::router_probabilities(router, x[1], experts);
  Vec<S> y(x[0].size());
  for (size_t slot = 0; slot < experts.size(); ++slot) {
    if (!kept.empty() && !kept[slot]) continue;
    const auto token = static_cast<int64_t>(slot) / o.topk;
    const auto e = static_cast<size_t>(experts[slot]), inner = static_cast<size_t>(l.inner),
               hidden = static_cast<size_t>(l.hidden);
    const Vec<S> up =
        expert_linear(p[0], biased ? p[2] : Vec<S>{}, reference::row_of(x[0], token, l.hidden), e, 2 * inner);
    const Vec<S> a = reference::activation(kernels::ActivationKind::silu, true, up, Vec<S>{}, 1, l.inner);
    const Vec<S> down = expert_linear(p[1], biased ? p[3] : Vec<S>{}, a, e, hidden);
    for (size_t i = 0; i < hidden; ++i)
      y[static_cast<size_t>(token) * hidden + i] += probabilities[slot] * down[i];
  }
  return y;
}

OpCase layer_case(const LayerShape& l, uint64_t seed, bool biased) {
  OpCase c{
      .inputs = {random_value({l.tokens, l.hidden}, seed), random_value({l.tokens, l.experts}, seed + 1, 2)},
      .parameters = {random_value({l.experts, 2 * l.inner, l.hidden}, seed + 2),
                     random_value({l.experts, l.hidden, l.inner}, seed + 3)},
      .tolerance = 5e-5};
  if (biased) {
    c.parameters.push_back(random_value({l.experts, 2 * l.inner}, seed + 4));
    c.parameters.push_back(random_value({l.experts, l.hidden}, seed + 5));
  }
  return c;
}

// The layer by operations. in_activation: Megatron's place of the probabilities, which is right without a
// bias after it.
Vars run_layer(Tape& t, const Vars& x, const Handles& p, const ops::RouterOptions& router,
               const ops::PermutationOptions& options, bool in_activation) {
  const ops::Routing r = ops::route(t, x[1], router);
  const auto plan = ops::plan_permutation(t, r.experts, r.probabilities.value, options);
  const bool biased = p.size() > 2;
  const Var rows = ops::permute(t, x[0], plan);
  const Var up = ops::grouped_linear(t, rows, plan.sizes(), *p[0], biased ? p[2] : nullptr);
  const Var weights = in_activation ? ops::permute_probabilities(t, r.probabilities, plan) : Var{};
  const Var a = ops::expert_activation(t, up, plan, {kernels::ActivationKind::silu}, weights);
  const Var down = ops::grouped_linear(t, a, plan.sizes(), *p[1], biased ? p[3] : nullptr);
  return {ops::unpermute(t, down, plan, in_activation ? Var{} : r.probabilities)};
}

}  // namespace

TEST_CASE("route: probabilities and gradients of every router") {
  for (const ops::RouterOptions& o : kRouters)
    for (const uint64_t seed : {1, 2, 3}) {
      const int64_t tokens = 9, experts = 12;
      const OpCase c{.inputs = {random_value({tokens, experts}, seed, 3)}};
      check_op(
          "route", c,
          [&](Tape& t, Vars x, const Handles&) { return Vars{ops::route(t, x[0], o).probabilities}; },
          [&](const auto& x, const auto&) {
            using L = std::decay_t<decltype(x)>;
            const kernels::RouterShape r = shape_of(tokens, experts, o);
            return L{reference::router_probabilities(r, x[0], reference::choose(r, real_parts(x[0]), {}))};
          });
    }
}

TEST_CASE("losses of the router, attached to a value that passes") {
  const int64_t tokens = 12, experts = 10, topk = 3;
  for (const auto score : {kernels::RouterScore::softmax, kernels::RouterScore::sigmoid})
    for (const kernels::TokenSegments segments : {ops::one_segment(tokens), {3, 4, 0}, {2, 10, 5}}) {
      OpCase c{.inputs = {random_value({tokens, experts}, 4, 3), random_value({tokens, 2}, 5)}};
      c.output_gradients = {rounded(testing::random_values(2 * tokens, 6), DType::f32)};
      c.output_gradients[0][0] = 1;
      const double factor = 0.125;
      const std::vector<int32_t> padding = {0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 0, 1};
      check_op(
          "losses", c,
          [&](Tape& t, Vars x, const Handles&) {
            const Tensor mask = Tensor::from_host<int32_t>(t.device(), {tokens}, padding);
            const Tensor choices = ops::choose_experts(t, x[0].value, {.topk = topk, .score = score}, mask);
            const Tensor counts = ops::count_choices(t, choices, experts, segments);
            const Var balance = ops::balance_loss(t, x[0], counts, score, segments, factor, mask);
            const Var z = ops::z_loss(t, x[0], 1e-2, mask);
            const Tensor three = Tensor::from_host<float>(t.device(), {1}, std::vector<float>{3});
            return Vars{ops::attach_loss(t, ops::attach_loss(t, x[1], balance), z, three)};
          },
          [&](const auto& x, const auto&) {
            using L = std::decay_t<decltype(x)>;
            using S = typename L::value_type::value_type;
            const auto choices =
                reference::choose({.tokens = tokens, .experts = experts, .topk = topk, .score = score},
                                  real_parts(x[0]), {}, padding);
            const Vec<double> counts = reference::choice_counts(choices, topk, segments, experts);
            const auto sum = [&](kernels::RouterLoss::Kind kind, double by) {
              S total{};
              for (const S& v : reference::router_loss({.kind = kind,
                                .score = score,
                                .tokens = tokens,
                                .experts = experts,
                                .segments = segments},
                                                       x[0], counts, padding))
                total += v * by;
              return total;
            };
            // The losses change gradients, and no value: only their imaginary part is added to an element
            // whose output gradient is 1.
            L y{x[1]};
            const S losses = sum(kernels::RouterLoss::Kind::balance, factor) +
                             3.0 * sum(kernels::RouterLoss::Kind::z, 1e-2);
            if constexpr (std::is_same_v<S, Complex>) y[0][0] += Complex{0, losses.imag()};
            return y;
          });
    }
}

TEST_CASE("a loss by its own output") {
  const OpCase c{.inputs = {random_value({7, 5}, 6, 2)}};
  check_op(
      "z_loss", c, [](Tape& t, Vars x, const Handles&) { return Vars{ops::z_loss(t, x[0], 0.25)}; },
      [](const auto& x, const auto&) {
        using L = std::decay_t<decltype(x)>;
        typename L::value_type sum(1);
        for (const auto& v : reference::router_loss(
                 {.kind = kernels::RouterLoss::Kind::z, .tokens = 7, .experts = 5, .factor = 0.25f}, x[0],
                 {}))
          sum[0] += v;
        return L{sum};
      });
}

TEST_CASE("grouped_linear: values and gradients of input, weights and bias, with empty experts") {
  const std::vector<int64_t> of_experts[] = {{3, 0, 5, 1}, {0, 9, 0, 0}, {0, 0, 0, 0}};
  for (const DType type : kTypes)
    for (const bool bias : {false, true})
      for (const auto& sizes : of_experts) {
        const int64_t rows = 9, in = 7, out = 5, experts = 4;
        OpCase c{.inputs = {random_value({rows, in}, 1)},
                 .parameters = {random_value({experts, out, in}, 2)},
                 .type = type,
                 .tolerance = tolerance(type)};
        if (bias) c.parameters.push_back(random_value({experts, out}, 3));
        // Rows in the order of experts are those of a permutation, whose other rows are 0.
        check_op(
            "grouped_linear", c,
            [&](Tape& t, Vars x, const Handles& p) {
              Vec<int32_t> choices;
              for (size_t e = 0; e < sizes.size(); ++e)
                choices.insert(choices.end(), static_cast<size_t>(sizes[e]), static_cast<int32_t>(e));
              choices.resize(static_cast<size_t>(rows), 99);
              const auto plan = ops::plan_permutation(
                  t, Tensor::from_host<int32_t>(t.device(), {rows, 1}, choices), {}, {.experts = experts});
              return Vars{ops::unpermute(t,
                                         ops::grouped_linear(t, ops::permute(t, x[0], plan), plan.sizes(),
                                                             *p[0], bias ? p[1] : nullptr),
                                         plan)};
            },
            [&](const auto& x, const auto& p) {
              using L = std::decay_t<decltype(x)>;
              typename L::value_type y(static_cast<size_t>(rows * out));
              int64_t row = 0;
              for (size_t e = 0; e < sizes.size(); ++e)
                for (int64_t i = 0; i < sizes[e]; ++i, ++row) {
                  const auto values =
                      expert_linear(p[0], bias ? p[1] : typename L::value_type{},
                                    reference::row_of(x[0], row, in), e, static_cast<size_t>(out));
                  std::copy(values.begin(), values.end(), y.begin() + row * out);
                }
              return L{y};
            });
      }
}

TEST_CASE("grouped_low_rank_add: adapters of experts give what merged weights do, values and gradients") {
  const std::vector<int64_t> of_experts[] = {{3, 0, 5, 1}, {0, 9, 0, 0}, {0, 0, 0, 0}, {2, 1, 0, 4}};
  // The columns of y that have the update.
  struct Columns {
    int64_t first, count;
  };
  for (const DType type : kTypes)
    for (const Columns columns : {Columns{0, 10}, Columns{0, 5}, Columns{5, 5}, Columns{3, 4}})
      for (const auto& sizes : of_experts) {
        const int64_t rows = 9, in = 7, out = 10, experts = 4, rank = 3;
        const float scale = 0.5f;
        const OpCase c{
            .inputs = {random_value({rows, in}, 1)},
            .parameters = {random_value({experts, out, in}, 2), random_value({experts, rank, in}, 3),
                           random_value({experts, columns.count, rank}, 4)},
            .type = type,
            .tolerance = tolerance(type)};
        check_op(
            "grouped_low_rank_add", c,
            [&](Tape& t, Vars x, const Handles& p) {
              Vec<int32_t> choices;
              for (size_t e = 0; e < sizes.size(); ++e)
                choices.insert(choices.end(), static_cast<size_t>(sizes[e]), static_cast<int32_t>(e));
              choices.resize(static_cast<size_t>(rows), 99);
              const auto plan = ops::plan_permutation(
                  t, Tensor::from_host<int32_t>(t.device(), {rows, 1}, choices), {}, {.experts = experts});
              const Var of_rows = ops::permute(t, x[0], plan);
              Var y = ops::grouped_linear(t, of_rows, plan.sizes(), *p[0]);
              const Var low = ops::grouped_linear(t, of_rows, plan.sizes(), *p[1]);
              y = ops::grouped_low_rank_add(t, std::move(y), low, plan.sizes(), *p[2], scale, columns.first);
              return Vars{ops::unpermute(t, y, plan)};
            },
            [&](const auto& x, const auto& p) {
              using L = std::decay_t<decltype(x)>;
              typename L::value_type y(static_cast<size_t>(rows * out)), merged = p[0];
              for (int64_t e = 0; e < experts; ++e)
                for (int64_t o = 0; o < columns.count; ++o)
                  for (int64_t r = 0; r < rank; ++r)
                    for (int64_t i = 0; i < in; ++i)
                      merged[static_cast<size_t>((e * out + columns.first + o) * in + i)] +=
                          p[2][static_cast<size_t>((e * columns.count + o) * rank + r)] *
                          p[1][static_cast<size_t>((e * rank + r) * in + i)] * static_cast<double>(scale);
              int64_t row = 0;
              for (size_t e = 0; e < sizes.size(); ++e)
                for (int64_t i = 0; i < sizes[e]; ++i, ++row) {
                  const auto values = expert_linear(merged, {}, reference::row_of(x[0], row, in), e,
                                                    static_cast<size_t>(out));
                  std::copy(values.begin(), values.end(), y.begin() + row * out);
                }
              return L{y};
            });
      }
}

TEST_CASE("a layer of experts: every router, probabilities in either place") {
  const LayerShape l;
  uint64_t seed = 20;
  for (const ops::RouterOptions& o : kRouters)
    for (const bool biased : {false, true})
      for (const bool in_activation : {false, true}) {
        if (biased && in_activation) continue;
        check_op(
            "experts", layer_case(l, seed += 10, biased),
            [&](Tape& t, const Vars& x, const Handles& p) {
              return run_layer(t, x, p, o, {.experts = l.experts}, in_activation);
            },
            [&](const auto& x, const auto& p) {
              using L = std::decay_t<decltype(x)>;
              return L{layer_reference(l, o, x, p, biased, {})};
            });
      }
}

TEST_CASE("a layer whose experts have a capacity: dropped slots have no output and no gradient") {
  const LayerShape l;
  const ops::RouterOptions o{.topk = 2};
  for (const auto policy : {kernels::DropPolicy::probability, kernels::DropPolicy::position})
    for (const auto& [pad, in_activation] : {std::pair(false, false), {true, false}, {true, true}}) {
      const int64_t capacity = ops::expert_capacity(l.tokens, o.topk, l.experts, 0.75);
      CHECK(capacity == 3);  // 11 * 2 / 6 * 0.75 = 2.75
      const bool biased = !in_activation;
      const OpCase c = layer_case(l, 300, biased);
      // Which slots stay, from the double values.
      const auto router = shape_of(l.tokens, l.experts, o);
      const Vec<double> logits = rounded(c.inputs[1].values, DType::f32);
      const auto experts = reference::choose(router, logits, {});
      const auto probabilities = reference::router_probabilities(router, logits, experts);
      std::vector<bool> kept(experts.size(), true);
      for (size_t slot = 0; slot < experts.size(); ++slot) {
        int64_t before = 0;
        for (size_t other = 0; other < experts.size(); ++other)
          if (experts[other] == experts[slot] &&
              (policy == kernels::DropPolicy::position ? other < slot
                                                       : probabilities[other] > probabilities[slot]))
            ++before;
        kept[slot] = before < capacity;
      }
      CHECK(std::count(kept.begin(), kept.end(), false) > 0);
      check_op(
          "experts with a capacity", c,
          [&, in_activation = in_activation, pad = pad](Tape& t, const Vars& x, const Handles& p) {
            return run_layer(
                t, x, p, o,
                {.experts = l.experts, .capacity = capacity, .policy = policy, .pad_to_capacity = pad},
                in_activation);
          },
          [&](const auto& x, const auto& p) {
            using L = std::decay_t<decltype(x)>;
            return L{layer_reference(l, o, x, p, biased, kept)};
          });
    }
}

TEST_CASE_TEMPLATE("parts of the experts add up to the layer, and regrouped rows to those of one plan", D,
                   EVERY_DEVICE) {
  const auto device = D::make(2);
  const int64_t tokens = 13, cols = 6, experts = 4;
  SimpleStore store(*device);
  StepContext context{*device, store};
  Tape tape(context, Tape::Mode::inference);
  const Var x{upload(*device, random_value({tokens, cols}, 1), DType::f32)},
      logits{upload(*device, random_value({tokens, experts}, 2), DType::f32)};
  const ops::Routing r = ops::route(tape, logits, {.topk = 2});
  const auto all = ops::plan_permutation(tape, r.experts, {}, {.experts = experts});
  const Vec<double> full = as_doubles(ops::unpermute(tape, ops::permute(tape, x, all), all).value);
  Vec<double> sum(full.size());
  std::vector<int64_t> counts;
  for (const int64_t first : {0, 2}) {
    const auto part = ops::plan_permutation(tape, r.experts, {}, {.first_expert = first, .experts = 2});
    CHECK(part.rows == 2 * tokens);
    const Vec<double> own = as_doubles(ops::unpermute(tape, ops::permute(tape, x, part), part).value);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += own[i];
    const auto sizes = part.sizes().to_host<int64_t>(), before = all.sizes().to_host<int64_t>();
    CHECK(sizes == std::vector<int64_t>(before.begin() + first, before.begin() + first + 2));
    counts.insert(counts.end(), sizes.begin(), sizes.end());
  }
  CHECK(testing::error(sum, full) < 1e-6);

  // Two ranks that send their tokens by expert: the first all, the second again.
  const Var rows = ops::permute(tape, x, all);
  const Tensor both = Tensor::empty(*device, {4 * tokens, cols});
  ops::copy_matrix(rows.value, both.slice(0, 0, 2 * tokens));
  ops::copy_matrix(rows.value, both.slice(0, 2 * tokens, 2 * tokens));
  std::vector<int64_t> of_ranks = counts;
  of_ranks.insert(of_ranks.end(), counts.begin(), counts.end());
  const auto regrouped =
      ops::regroup_permutation(tape, Tensor::from_host<int64_t>(*device, {2, experts}, of_ranks), 4 * tokens);
  const Var sorted = ops::permute(tape, Var{both}, regrouped);
  const Vec<double> one = as_doubles(rows.value), two = as_doubles(sorted.value);
  size_t row = 0, from = 0;
  for (int64_t e = 0; e < experts; from += static_cast<size_t>(counts[static_cast<size_t>(e++)]))
    for (int rank = 0; rank < 2; ++rank)
      for (int64_t i = 0; i < counts[static_cast<size_t>(e)]; ++i, ++row)
        for (int64_t col = 0; col < cols; ++col)
          CHECK(two[row * cols + static_cast<size_t>(col)] ==
                one[(from + static_cast<size_t>(i)) * cols + static_cast<size_t>(col)]);
  CHECK(as_doubles(ops::unpermute(tape, sorted, regrouped).value) == as_doubles(both));
}

TEST_CASE_TEMPLATE("a recomputed region keeps the choice of its first pass", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  const int64_t tokens = 5, experts = 8;
  SimpleStore store(*device);
  StepContext context{*device, store};
  const ops::RouterOptions o{.topk = 2, .pre_softmax = true};
  const Value logits = random_value({tokens, experts}, 3, 2), upstream = random_value({tokens, 2}, 4);
  Tape tape(context);
  const Var x = tape.input("x", upload(*device, logits, DType::f32), true);
  // A bias that the step changes before the backward pass, as the balancing of experts does.
  const Tensor bias = Tensor::zeros(*device, {experts});
  const auto y = tape.recompute("region", {x}, [&](Tape& inner, std::span<const Var> arguments) {
    return Vars{ops::route(inner, arguments[0], o, bias).probabilities};
  });
  std::vector<float> other(static_cast<size_t>(experts), 0.0f);
  other[3] = other[6] = 100;
  bias.copy_from_host_bytes(std::as_bytes(std::span<const float>(other)));
  tape.output("y", y[0]);
  tape.backward({{"y", upload(*device, upstream, DType::f32)}});
  const auto shape = shape_of(tokens, experts, o);
  const Vec<double> values = rounded(logits.values, DType::f32);
  const auto choice = reference::choose(shape, values, {});
  const auto expected = reference::complex_step(values, [&](const auto& z) {
    return reference::contract(reference::router_probabilities(shape, z, choice),
                               rounded(upstream.values, DType::f32));
  });
  CHECK(testing::error(as_doubles(tape.input_gradient("x")), expected) < 2e-5);
}

TEST_CASE("impossible routers and permutations are refused") {
  const auto device = Cpu::make(1);
  SimpleStore store(*device);
  StepContext context{*device, store};
  Tape tape(context);
  const Var logits{Tensor::zeros(*device, {3, 8})};
  CHECK_THROWS(ops::route(tape, logits, {.topk = 9}));
  CHECK_THROWS(ops::route(tape, logits, {.topk = 2, .groups = 3, .group_topk = 1}));
  CHECK_THROWS(ops::route(tape, logits, {.topk = 5, .groups = 4, .group_topk = 2}));
  CHECK_THROWS(ops::route(tape, {Tensor::zeros(*device, {3, 8}, DType::bf16)}, {}));
  CHECK_THROWS(ops::route(tape, logits, {.topk = 2}, Tensor::zeros(*device, {7})));
  CHECK_THROWS(ops::route(tape, logits, {.topk = 2}, {}, Tensor::zeros(*device, {4}, DType::i32)));
  CHECK_THROWS(ops::z_loss(tape, logits, 1, Tensor::zeros(*device, {2}, DType::i32)));
  const Tensor experts = ops::route(tape, logits, {.topk = 2}).experts;
  CHECK_THROWS(ops::count_choices(tape, experts, 8, {1, 2, 0}));
  CHECK_THROWS(ops::plan_permutation(tape, experts, {}, {.experts = 8, .pad_to_capacity = true}));
  CHECK_THROWS(ops::plan_permutation(tape, experts, {}, {.experts = 0}));
  CHECK_THROWS(ops::plan_permutation(tape, experts, {}, {.experts = 8, .capacity = 1}));
}
