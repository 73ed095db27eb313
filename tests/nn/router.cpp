// What the router of a layer of experts does in training: load balancing over micro-batches, sequences and
// the global batch, and jitter of its input, against the formulas in double. Every rank has tokens of its
// own, as with data parallelism.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/philox.hpp"
#include "kernels/table.hpp"
#include "nn/moe.hpp"
#include "nn/param_list.hpp"
#include "tests/kernels/router_reference.hpp"
#include "tests/kernels/support.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/simple_store.hpp"
#include "tests/support/worlds.hpp"

using namespace capstan;
using reference::Complex;
using reference::Vec;
using test::world;

namespace {

using Floats = std::vector<float>;
using Scope = nn::Moe::BalanceLoss::Scope;
constexpr int64_t kHidden = 6, kExperts = 5, kTopk = 2, kSequences = 3, kLength = 3,
                  kTokens = kSequences * kLength;
constexpr int kMicroBatches = 3;
constexpr uint64_t kSeed = 11, kLayer = 3;

struct Case {
  kernels::RouterScore score = kernels::RouterScore::softmax;
  std::vector<nn::Moe::BalanceLoss> balance{{Scope::global_batch, 0.25}};
  double jitter = 0;
  bool recomputes = false, training = true, fp64 = false;
  // The last tokens of each sequence, a different number of each, are padding.
  bool padded = false;
};

std::vector<int32_t> padding_of(const Case& c) {
  static_assert(kSequences == 3 && kLength == 3);
  return c.padded ? std::vector<int32_t>{0, 0, 0, 0, 0, 1, 0, 1, 1} : std::vector<int32_t>{};
}
// The tokens of a micro-batch that are none.
int64_t tokens_in_use(const Case& c) {
  const auto padding = padding_of(c);
  return kTokens - std::count(padding.begin(), padding.end(), 1);
}

// The tokens of a micro-batch of a rank.
Floats tokens_of(int rank, int micro_batch) {
  const uint64_t seed = 100 + static_cast<uint64_t>(kMicroBatches * rank + micro_batch);
  const Vec<double> values = testing::random_values(kTokens * kHidden, seed, 1.5);
  return {values.begin(), values.end()};
}
int64_t dropout_row(int rank, int micro_batch, int64_t token) {
  return ((int64_t{micro_batch} << 20) + rank) * kTokens + token;
}
Floats router_weight() {
  const Vec<double> values = testing::random_values(kExperts * kHidden, 5);
  return {values.begin(), values.end()};
}

struct Result {
  // Of each micro-batch.
  std::vector<Floats> y, dx;
  Floats router_gradient, statistics;
  bool operator==(const Result&) const = default;
};

// Two steps, of which the second counts anew: their forward passes, then their backward passes, with zeros as
// the gradients of the layer's output, so that the losses of the router are all that gives gradients.
Result run(Device& device, const Case& c) {
  nn::Parallel parallel;
  parallel.data = &world().communicator();
  nn::ParamList list(parallel);
  nn::Moe::Options o;
  o.hidden = kHidden, o.experts = kExperts, o.ffn = 8;
  o.router = {.topk = kTopk, .score = c.score, .normalize = c.score == kernels::RouterScore::sigmoid};
  o.router_in_fp64 = c.fp64;
  o.balance = c.balance;
  o.input_jitter = c.jitter;
  o.init = o.output_init = {Init::Kind::normal, 0.5};
  const nn::Moe layer(list, {"layer", kLayer, "layer 3"}, o);
  const auto parameters = list.take();
  test::SimpleStore store(device, parameters, DType::f32, /*gathered=*/true);
  store.initialize(parameters, 3);
  const Parameter& router = *parameters.front();
  REQUIRE(router.name() == "layer.router.weight");
  store.set(router, router_weight());
  StepContext context{device, store};
  nn::RouterStatistics statistics(device, {kLayer}, kExperts, std::ssize(c.balance), true);
  Result result;
  for (int step = 0; step < 2; ++step) {
    store.begin();
    statistics.clear();
    result = {};
    std::vector<std::unique_ptr<Tape>> tapes;
    for (int m = 0; m < kMicroBatches; ++m) {
      std::vector<int64_t> rows;
      for (int64_t t = 0; t < kTokens; ++t) rows.push_back(dropout_row(world().rank(), m, t));
      nn::TokenContext tokens;
      tokens.batch = kSequences, tokens.seq = kLength;
      tokens.training = c.training, tokens.seed = kSeed;
      tokens.tokens = tokens_in_use(c);
      if (c.padded) tokens.padding = Tensor::from_host<int32_t>(device, {kTokens}, padding_of(c));
      tokens.router_statistics = &statistics;
      tokens.hidden_dropout_rows = Tensor::from_host<int64_t>(device, {kTokens}, rows);
      Tape& tape = *tapes.emplace_back(std::make_unique<Tape>(context));
      const Var x = tape.input(
          "x", Tensor::from_host<float>(device, {kTokens, kHidden}, tokens_of(world().rank(), m)), true);
      const auto forward = [&layer, tokens](Tape& on, std::span<const Var> inputs) {
        return std::vector<Var>{layer.forward(on, inputs[0], tokens)};
      };
      const Var y = c.recomputes ? tape.recompute("moe", {x}, forward)[0] : forward(tape, {&x, 1})[0];
      result.y.push_back(y.value.to_floats());
      tape.output("y", y);
    }
    for (const auto& tape : tapes) {
      tape->backward({{"y", Tensor::zeros(device, {kTokens, kHidden})}});
      result.dx.push_back(tape->input_gradient("x").to_floats());
    }
  }
  result.router_gradient = store.gradient(router).to_floats();
  result.statistics = statistics.sums().to_floats();
  return result;
}

double noise(double epsilon, int64_t row, int64_t column) {
  const uint32_t word =
      philox4x32(philox_key(kSeed, purpose::router_jitter, kLayer), static_cast<uint64_t>(row),
                 static_cast<uint64_t>(column / 4))[static_cast<size_t>(column % 4)];
  return 1 + epsilon * (2 * (word >> 8) / 16777216.0 - 1);
}

template <class S>
Vec<S> logits_of(const Vec<S>& x, const Vec<S>& weight, const Case& c, int rank, int micro_batch) {
  Vec<S> logits;
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t e = 0; e < kExperts; ++e) {
      S sum{};
      for (int64_t i = 0; i < kHidden; ++i)
        sum += x[static_cast<size_t>(t * kHidden + i)] *
               noise(c.jitter, dropout_row(rank, micro_batch, t), i) *
               weight[static_cast<size_t>(e * kHidden + i)];
      logits.push_back(sum);
    }
  return logits;
}

Vec<double> doubles(const Floats& x) {
  return {x.begin(), x.end()};
}

// How often the tokens of each segment of a micro-batch of a rank chose each expert.
Vec<double> counts_of(const Case& c, int rank, int micro_batch,
                      kernels::TokenSegments segments = {1, kTokens, 0}) {
  const auto logits =
      logits_of(doubles(tokens_of(rank, micro_batch)), doubles(router_weight()), c, rank, micro_batch);
  const auto experts = reference::choose(
      {.tokens = kTokens, .experts = kExperts, .topk = kTopk, .score = c.score}, logits, {}, padding_of(c));
  return reference::choice_counts(experts, kTopk, segments, kExperts);
}

// The loss of a micro-batch of this rank: coefficient * experts * the mean over its tokens of the sum over
// the experts of f q, with f, the fractions of the choices, over the token's segment or over the
// micro-batches up to this one of all ranks.
template <class S>
S loss_of(const Vec<S>& x, const Vec<S>& weight, const Case& c, const nn::Moe::BalanceLoss& balance,
          int micro_batch) {
  const kernels::TokenSegments segments = balance.scope == Scope::sequence
                                              ? kernels::TokenSegments{kSequences, kLength, 0}
                                              : kernels::TokenSegments{1, kTokens, 0};
  Vec<double> counts = counts_of(c, world().rank(), micro_batch, segments);
  if (balance.scope == Scope::global_batch) {
    counts.assign(kExperts, 0);
    for (int m = 0; m <= micro_batch; ++m)
      for (int rank = 0; rank < world().size(); ++rank) {
        const Vec<double> more = counts_of(c, rank, m);
        for (size_t e = 0; e < counts.size(); ++e) counts[e] += more[e];
      }
  }
  S loss{};
  for (const S& value :
       reference::router_loss({.kind = kernels::RouterLoss::Kind::balance,
       .score = c.score,
       .tokens = kTokens,
       .experts = kExperts,
       .segments = segments},
                              logits_of(x, weight, c, world().rank(), micro_batch), counts, padding_of(c)))
    loss += value * (balance.coefficient * kExperts / static_cast<double>(tokens_in_use(c)));
  return loss;
}

template <class S>
S sum_of_losses(const Vec<S>& x, const Vec<S>& weight, const Case& c, int micro_batch) {
  S sum{};
  for (const nn::Moe::BalanceLoss& balance : c.balance) sum += loss_of(x, weight, c, balance, micro_batch);
  return sum;
}

void check_losses(const Case& c, const Result& got) {
  CAPTURE(c.fp64);
  CAPTURE(c.jitter);
  CAPTURE(c.score == kernels::RouterScore::sigmoid);
  const Vec<double> weight = doubles(router_weight());
  Vec<double> router_gradient(weight.size()), counts(kExperts);
  Vec<double> losses(c.balance.size());
  for (int m = 0; m < kMicroBatches; ++m) {
    const Vec<double> x = doubles(tokens_of(world().rank(), m));
    const auto gradient = [&](const auto& of, auto&& value) { return reference::complex_step(of, value); };
    const Vec<double> dx = gradient(x, [&](const Vec<Complex>& z) {
      return sum_of_losses(z, Vec<Complex>(weight.begin(), weight.end()), c, m);
    });
    CHECK(testing::error(doubles(got.dx[static_cast<size_t>(m)]), dx) < 2e-5);
    const Vec<double> dw = gradient(weight, [&](const Vec<Complex>& z) {
      return sum_of_losses(Vec<Complex>(x.begin(), x.end()), z, c, m);
    });
    const Vec<double> own = counts_of(c, world().rank(), m);
    for (size_t i = 0; i < dw.size(); ++i) router_gradient[i] += dw[i];
    for (size_t e = 0; e < own.size(); ++e) counts[e] += own[e];
    for (size_t i = 0; i < losses.size(); ++i) losses[i] += loss_of(x, weight, c, c.balance[i], m);
  }
  CHECK(testing::error(doubles(got.router_gradient), router_gradient) < 2e-5);
  // Each rank's own choices, and its part of each loss.
  CHECK(Vec<double>(got.statistics.begin(), got.statistics.begin() + kExperts) == counts);
  REQUIRE(got.statistics.size() == kExperts + losses.size() + 2);
  for (size_t i = 0; i < losses.size(); ++i)
    CHECK(static_cast<double>(got.statistics[kExperts + i]) == doctest::Approx(losses[i]).epsilon(1e-5));
}

}  // namespace

TEST_CASE_TEMPLATE("the load of all ranks and of the step's micro-batches so far balances each micro-batch",
                   D, EVERY_DEVICE) {
  const auto device = D::make(2);
  for (const auto score : {kernels::RouterScore::softmax, kernels::RouterScore::sigmoid})
    for (const double jitter : {0.0, 0.3})
      for (const bool fp64 : {false, true}) {
        Case c{.score = score, .jitter = jitter, .fp64 = fp64};
        if (fp64 && !device->table().router->logits) {
          CHECK_THROWS_WITH_AS(run(*device, c), doctest::Contains("a router in fp64"), Error);
          continue;
        }
        const Result plain = run(*device, c);
        check_losses(c, plain);
        // Recomputed layers count once, and use the load of their first pass.
        c.recomputes = true;
        CHECK((run(*device, c) == plain));
      }
}

TEST_CASE_TEMPLATE("losses over several scopes are added, and counted by themselves", D, EVERY_DEVICE) {
  const auto device = D::make(2);
  for (Case c :
       {Case{.balance = {{Scope::micro_batch, 0.25}, {Scope::sequence, 0.5}}},
        Case{.balance = {{Scope::sequence, 0.5}, {Scope::global_batch, 0.1}, {Scope::micro_batch, 1}}},
        Case{.balance = {{Scope::sequence, 0.5}, {Scope::global_batch, 0.1}, {Scope::micro_batch, 1}},
        .padded = true}}) {
    const Result plain = run(*device, c);
    check_losses(c, plain);
    // Padding gets nothing from the experts, and has no gradient.
    const auto padding = padding_of(c);
    for (size_t t = 0; t < padding.size(); ++t)
      for (size_t i = 0; padding[t] != 0 && i < kHidden; ++i)
        for (size_t m = 0; m < kMicroBatches; ++m)
          CHECK((plain.y[m][t * kHidden + i] == 0 && plain.dx[m][t * kHidden + i] == 0));
    c.recomputes = true;
    CHECK((run(*device, c) == plain));
  }
}

TEST_CASE_TEMPLATE("jitter changes the router's input in training and nothing in evaluation", D,
                   EVERY_DEVICE) {
  const auto device = D::make(1);
  const Case plain{.balance = {}};
  Case noisy = plain;
  noisy.jitter = 0.3;
  CHECK(run(*device, plain).y != run(*device, noisy).y);
  Case evaluation = plain, noisy_evaluation = noisy;
  evaluation.training = noisy_evaluation.training = false;
  CHECK(run(*device, evaluation).y == run(*device, noisy_evaluation).y);
  CHECK(run(*device, evaluation).y == run(*device, plain).y);
}
