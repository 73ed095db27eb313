// The router: choices, probabilities and losses against the formulas in double, gradients by complex step.
#include "kernels/router.hpp"

#include "tests/kernels/router_reference.hpp"
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::RouterLoss;
using kernels::RouterScore;
using kernels::RouterShape;
using kernels::TokenSegments;

namespace {

const kernels::Router& router() {
  return *testing::table().router;
}

// A canary after the result finds a kernel that writes too much.
constexpr int32_t kCanary = -77;

// One token of four is padding, and the last one.
Vec<int32_t> some_padding(int64_t tokens) {
  Vec<int32_t> padding;
  for (int64_t t = 0; t < tokens; ++t) padding.push_back(t % 4 == 1 || t == tokens - 1 ? 1 : 0);
  return padding;
}
const int32_t* data_of(const Vec<int32_t>& padding) {
  return padding.empty() ? nullptr : padding.data();
}

// The choice of every launch, which all give.
Vec<int32_t> chosen(const RouterShape& r, kernels::In logits, Array bias, const Vec<int32_t>& padding = {}) {
  Vec<int32_t> first;
  run_kernel({}, [&](kernels::Context& c, Vec<Array>&) {
    Vec<int32_t> experts(static_cast<size_t>(r.tokens * r.topk + 1), kCanary);
    router().choose(c, r, logits, bias.f32(), data_of(padding), experts.data());
    CHECK(experts.back() == kCanary);
    experts.pop_back();
    if (first.empty()) first = experts;
    CHECK(experts == first);
  });
  return first;
}

struct RouterCase {
  RouterShape shape;
  bool biased;
  uint64_t seed;
};

// Logits in fp32, and in fp64 where the device has it.
struct Logits {
  Vec<double> exact;
  Array rounded;
  Logits(const Vec<double>& values, bool fp64) : exact(values), rounded(DType::f32, values), fp64_(fp64) {}
  kernels::In in() const {
    return fp64_ ? kernels::In{exact.data(), DType::f64} : static_cast<kernels::In>(rounded);
  }
  Vec<double> values() const { return fp64_ ? exact : rounded.rounded(); }

 private:
  bool fp64_;
};
std::vector<bool> precisions() {
  return router().logits ? std::vector<bool>{false, true} : std::vector<bool>{false};
}

void check_router(const RouterCase& c, bool fp64, const Vec<int32_t>& padding) {
  const RouterShape& r = c.shape;
  INFO("fp64 ", fp64, ", padding ", !padding.empty(), ", ", r.tokens, " tokens, ", r.topk, " of ", r.experts,
       " experts, sigmoid ", r.score == RouterScore::sigmoid, ", pre_softmax ", r.pre_softmax, ", normalize ",
       r.normalize, ", groups ", r.groups, ", bias ", c.biased);
  const Logits logits(random_values(r.tokens * r.experts, c.seed, 3), fp64);
  const Array bias(DType::f32, c.biased ? random_values(r.experts, c.seed + 1, 0.5) : Vec<double>{});
  const Vec<double> x = logits.values();
  const Vec<int32_t> experts = chosen(r, logits.in(), bias, padding);
  REQUIRE(experts == reference::choose(r, x, bias.rounded(), padding));

  Array dp(DType::f32, random_values(r.tokens * r.topk, c.seed + 2));
  const auto y = run_kernel(
      {Array::zeros(DType::f32, r.tokens * r.topk), Array::zeros(DType::f32, r.tokens * r.experts, 5)},
      [&](kernels::Context& context, Vec<Array>& out) {
        router().probabilities(context, r, logits.in(), experts.data(), out[0].f32());
        router().backward(context, r, logits.in(), experts.data(), dp.f32(), out[1].f32());
      });
  CHECK(error(y[0].rounded(), reference::router_probabilities(r, x, experts)) < (fp64 ? 3e-7 : 1e-5));
  for (int64_t t = 0; t < r.tokens; ++t)
    if (reference::is_padding(padding, t)) {
      for (const double p : reference::row_of(y[0].rounded(), t, r.topk)) CHECK(p == 0);
      for (const double d : reference::row_of(y[1].rounded(), t, r.experts)) CHECK(d == 0);
    }
  const auto gradient = reference::complex_step(x, [&](const auto& z) {
    return reference::contract(reference::router_probabilities(r, z, experts), dp.rounded());
  });
  if (r.normalize && r.topk == 1)
    // One expert has all of the probability: the gradient is 0, but for rounding.
    for (const double d : y[1].rounded()) CHECK(std::abs(d) < 1e-6);
  else
    CHECK(error(y[1].rounded(), gradient) < (fp64 ? 3e-7 : 2e-5));
}
void check_router(const RouterCase& c) {
  for (const bool fp64 : precisions())
    for (const Vec<int32_t>& padding : {Vec<int32_t>{}, some_padding(c.shape.tokens)})
      check_router(c, fp64, padding);
}

}  // namespace

TEST_CASE("routers: choices, probabilities and their gradients") {
  uint64_t seed = 1;
  for (const auto [experts, topk] :
       {std::array<int64_t, 2>{1, 1}, {5, 1}, {8, 2}, {37, 4}, {70, 8}, {90, 67}})
    for (const bool sigmoid : {false, true})
      for (const bool pre_softmax : {false, true})
        for (const bool normalize : {false, true})
          for (const bool biased : {false, true}) {
            if (sigmoid && pre_softmax) continue;
            check_router({{.tokens = 7,
                           .experts = experts,
                           .topk = topk,
                           .score = sigmoid ? RouterScore::sigmoid : RouterScore::softmax,
                           .pre_softmax = pre_softmax,
                           .normalize = normalize,
                           .scaling_factor = normalize ? 2.5f : 1.0f},
                          biased,
                          seed += 10});
          }
}

TEST_CASE("experts are chosen from the best groups") {
  uint64_t seed = 500;
  for (const auto [experts, groups, of_groups, topk] :
       {std::array<int64_t, 4>{8, 4, 2, 3}, {24, 8, 4, 6}, {160, 8, 3, 6}, {70, 35, 33, 8}})
    for (const int64_t best : {1, 2})
      for (const bool sigmoid : {false, true})
        for (const bool biased : {false, true})
          check_router({{.tokens = 9,
                         .experts = experts,
                         .topk = topk,
                         .score = sigmoid ? RouterScore::sigmoid : RouterScore::softmax,
                         .pre_softmax = !sigmoid,
                         .normalize = sigmoid,
                         .scaling_factor = 16,
                         .groups = groups,
                         .group_topk = of_groups,
                         .group_best = best},
                        biased,
                        seed += 10});
}

TEST_CASE("of equal scores the lower expert is chosen, also below zero and at negative zero") {
  const int64_t tokens = 40, experts = 45;
  Vec<double> values;
  for (const int32_t v : random_ints(tokens * experts, 3, 4))
    values.push_back(v == 0 ? -0.0 : v == 1 ? 0.0 : v - 3);
  const Array logits(DType::f32, values);
  for (const int64_t topk : {1, 6, 45}) {
    const RouterShape r{.tokens = tokens, .experts = experts, .topk = topk};
    CHECK(chosen(r, logits, {}) == reference::choose(r, values, {}));
    const RouterShape groups{.tokens = tokens,
                             .experts = experts,
                             .topk = std::min<int64_t>(topk, 15),
                             .groups = 9,
                             .group_topk = 3,
                             .group_best = 2};
    CHECK(chosen(groups, logits, {}) == reference::choose(groups, values, {}));
  }
}

TEST_CASE("an expert whose score is NaN is chosen first, whatever the sign of the NaN") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Array logits(DType::f32, {1, INFINITY, nan, 2, -INFINITY, -nan, 0, 3});
  const RouterShape r{.tokens = 1, .experts = 8, .topk = 4};
  CHECK(chosen(r, logits, {}) == Vec<int32_t>{2, 5, 1, 7});
}

TEST_CASE("logits in fp64 tell experts apart that fp32 does not") {
  if (!router().logits) return;
  const int64_t tokens = 19, experts = 21, hidden = 300;
  for (const DType type : kTypes) {
    const Array x(type, random_values(tokens * hidden, 1)), weight(type, random_values(experts * hidden, 2)),
        bias(type, random_values(experts, 3));
    const Vec<double> xs = x.rounded(), ws = weight.rounded();
    Vec<double> first;
    run_kernel({}, [&](kernels::Context& c, Vec<Array>&) {
      Vec<double> logits(static_cast<size_t>(tokens * experts), 7);
      router().logits(c, x, weight, {}, tokens, experts, hidden, logits.data());
      if (first.empty()) first = logits;
      CHECK(logits == first);
      router().logits(c, x, weight, bias, tokens, experts, hidden, logits.data());
      for (size_t i = 0; i < logits.size(); ++i)
        logits[i] -= bias.rounded()[i % static_cast<size_t>(experts)];
      CHECK(error(logits, first) < 1e-14);
    });
    const Vec<double> expected = reference::gemm({.trans_b = true,
                                                  .m = tokens,
                                                  .n = experts,
                                                  .k = hidden,
                                                  .lda = hidden,
                                                  .ldb = hidden,
                                                  .ldc = experts},
                                                 xs, ws, Vec<double>(first.size()), 1, 0);
    CHECK(error(first, expected) < 1e-14);
  }
  for (const int64_t groups : {1, 3}) {
    const Vec<double> close = {1, 1 + 1e-12, 1 - 1e-12, 1 + 3e-12, 1 + 2e-12, 0};
    const RouterShape r{.tokens = 1, .experts = 6, .topk = 3, .groups = groups, .group_topk = 3};
    CHECK(chosen(r, {close.data(), DType::f64}, {}) == Vec<int32_t>{3, 4, 1});
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Vec<double> values{1, INFINITY, nan, 2, -INFINITY, -nan, 0, 3};
  CHECK(chosen({.tokens = 1, .experts = 8, .topk = 4}, {values.data(), DType::f64}, {}) ==
        Vec<int32_t>{2, 5, 1, 7});
}

TEST_CASE("counts of choices in segments, and losses with their gradients") {
  const int64_t tokens = 23, experts = 37, topk = 3;
  for (const bool fp64 : precisions())
    for (const TokenSegments segments :
         {TokenSegments{1, 23, 0}, {3, 9, 0}, {4, 8, 5}, {1, 64, 30}, {23, 1, 0}}) {
      INFO(segments.count, " segments of ", segments.rows, " from ", segments.first_row);
      const Logits logits(random_values(tokens * experts, 7, 4), fp64);
      const Vec<double> x = logits.values();
      // Segments of one token: some are all padding, and have no counts.
      const Vec<int32_t> padding = segments.first_row == 0 ? some_padding(tokens) : Vec<int32_t>{};
      const Vec<int32_t> choices =
          reference::choose({.tokens = tokens, .experts = experts, .topk = topk}, x, {}, padding);
      const Vec<double> counted = reference::choice_counts(choices, topk, segments, experts);
      const auto counts = run_kernel(
          {Array::zeros(DType::f32, segments.count * experts, 9)}, [&](kernels::Context& c, Vec<Array>& out) {
            router().count(c, choices.data(), tokens, topk, segments, experts, out[0].f32());
          });
      CHECK(counts[0].rounded() == counted);
      for (const auto kind : {RouterLoss::Kind::balance, RouterLoss::Kind::z})
        for (const auto score : {RouterScore::softmax, RouterScore::sigmoid}) {
          const RouterLoss l{kind, score, tokens, experts, segments, 0.25f};
          Array start(DType::f32, {1.5}), given = counts[0];
          const auto y =
              run_kernel({Array::zeros(DType::f32, tokens), Array::zeros(DType::f32, tokens * experts, 5)},
                         [&](kernels::Context& c, Vec<Array>& out) {
                           router().loss(c, l, logits.in(), given.f32(), data_of(padding), out[0].f32());
                           router().loss_backward(c, l, logits.in(), given.f32(), data_of(padding),
                                                  start.f32(), out[1].f32());
                         });
          CHECK(error(y[0].rounded(), reference::router_loss(l, x, counted, padding)) < (fp64 ? 3e-7 : 1e-5));
          const auto gradient = reference::complex_step(x, [&](const auto& z) {
            const auto values = reference::router_loss(l, z, counted, padding);
            return 1.5 * std::accumulate(values.begin(), values.end(), reference::Complex{});
          });
          CHECK(error(y[1].rounded(), gradient) < (fp64 ? 3e-7 : 2e-5));
        }
    }
}

TEST_CASE("the bias of experts moves towards those with few tokens") {
  for (const int64_t experts : {1, 5, 64, 300, 1024})
    for (const int spread : {1, 3, 1000}) {
      CAPTURE(experts);
      CAPTURE(spread);
      // With a spread of 1 all loads are equal; with few values some are the mean.
      Vec<double> loads;
      for (const int32_t v : random_ints(experts, 8, spread)) loads.push_back(4000 + v);
      if (experts == 5 && spread == 3) loads = {7, 9, 8, 8, 8};
      const Array bias(DType::f32, random_values(experts, 9, 0.25));
      Array counts(DType::f32, loads);
      for (const bool skip : {false, true}) {
        kernels::StepControl control;
        control.skip = skip ? 1 : 0;
        const auto updated = run_kernel({bias}, [&](kernels::Context& c, Vec<Array>& out) {
          router().update_bias(c, counts.f32(), experts, 0.125f, {&control, DType::u8}, out[0].f32());
        });
        const Vec<double> before = bias.rounded();
        const Vec<double> expected = skip ? before : reference::updated_bias(before, loads, 0.125);
        CHECK(error(updated[0].rounded(), expected) < 1e-7);
        for (size_t e = 0; e < expected.size(); ++e)
          CHECK((updated[0].rounded()[e] == before[e]) == (expected[e] == before[e]));
      }
    }
}
