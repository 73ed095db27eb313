// Positions and sampling of generation.
#include "kernels/decoding.hpp"

#include <algorithm>

#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::SamplingOptions;

namespace {
const kernels::Decoding& decoding() {
  return *testing::table().decoding;
}

// The tokens sampled from rows of logits with the same bits on any number of threads.
Vec<int32_t> sampled(const Vec<double>& logits, int64_t rows, int64_t cols, const SamplingOptions& options,
                     int32_t position) {
  Array x(DType::f32, logits);
  Vec<int32_t> first;
  for (int threads = 1; threads <= 3; ++threads) {
    prepare_launch(threads - 1);
    Launch launch(threads, decoding().sample_workspace(options, rows, cols).total(threads));
    Vec<int32_t> tokens(static_cast<size_t>(rows), -7);
    decoding().sample(launch.context(), options, x.f32(), rows, cols,
                      static_cast<int64_t>(logits.size()) / rows, &position, tokens.data());
    if (threads == 1) first = tokens;
    CHECK(tokens == first);
  }
  return first;
}
int32_t sampled_token(const Vec<double>& logits, const SamplingOptions& options, int32_t position) {
  return sampled(logits, 1, static_cast<int64_t>(logits.size()), options, position)[0];
}

Vec<double> logits_of(int64_t n, uint64_t seed) {
  return Array(DType::f32, random_values(n, seed, 5)).rounded();
}
}  // namespace

TEST_CASE("a sampled token is that of the sorted distribution: temperature, top-k, top-p") {
  uint64_t seed = 1;
  for (const int64_t cols : {1, 2, 17, 300, 1001})
    for (const double temperature : {0.0, 0.3, 1.0, 2.5})
      for (const int64_t top_k : {0, 1, 5, 2000})
        for (const double top_p : {1.0, 0.9, 0.05}) {
          if (!runs_case(seed / 3, test::kSanitized ? 3 : 1)) {
            seed += 3;
            continue;
          }
          const SamplingOptions options{temperature, top_k, top_p, seed};
          for (int32_t position : {0, 3, 1 << 20}) {
            const auto logits = logits_of(cols, seed++);
            INFO("cols=", cols, " temperature=", temperature, " top_k=", top_k, " top_p=", top_p);
            CHECK(sampled_token(logits, options, position) ==
                  reference::sampled_token(logits, options, position));
          }
        }
}

TEST_CASE("large vocabularies: candidates of several blocks, with equal logits in all of them") {
  const int64_t cols = 9001;
  const auto full = logits_of(cols, 8);
  // Zeros of both signs, and no more than 41 different values.
  Vec<double> few;
  for (int64_t i = 0; i < cols; ++i)
    few.push_back(i % 5 == 0 ? -0.0 : static_cast<double>((i * i) % 41 - 30) * 0.5);
  for (const auto& logits : {full, few})
    for (const int64_t top_k : {0, 50, 2000, 5000}) {
      if (test::kSanitized && top_k != 0 && top_k != 2000) continue;
      INFO("top_k=", top_k);
      const SamplingOptions options{.top_k = top_k, .top_p = top_k == 0 ? 0.9 : 1.0, .seed = 3};
      CHECK(sampled_token(logits, options, 11) == reference::sampled_token(logits, options, 11));
    }
}

TEST_CASE("equal logits: the first token, and top-k keeps the first ones") {
  const Vec<double> logits(9, 0.5);
  CHECK(sampled_token(logits, {.temperature = 0}, 4) == 0);
  for (int32_t position = 0; position < 50; ++position)
    CHECK(sampled_token(logits, {.top_k = 3}, position) < 3);
}

TEST_CASE("sampled tokens follow the softmax, and rows have random numbers of their own") {
  const Vec<double> one{1.0, -0.5, 2.0, 0.0};
  const int64_t rows = 4000;
  Vec<double> logits, counts(4), expected;
  for (int64_t r = 0; r < rows; ++r) logits.insert(logits.end(), one.begin(), one.end());
  for (const int32_t id : sampled(logits, rows, 4, {.temperature = 1.5, .seed = 9}, 77))
    counts[static_cast<size_t>(id)] += 1.0 / static_cast<double>(rows);
  double sum = 0;
  for (const double l : one) sum += expected.emplace_back(std::exp(l / 1.5));
  for (size_t i = 0; i < 4; ++i) CHECK(counts[i] == doctest::Approx(expected[i] / sum).epsilon(0.06));
}

TEST_CASE("columns beyond `cols` are not read; logits that are no numbers give -1") {
  Vec<double> logits = logits_of(60, 3);
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t i = 15; i < 20; ++i) logits[static_cast<size_t>(r * 20 + i)] = NAN;
  for (const double temperature : {0.0, 1.0}) {
    auto ids = sampled(logits, 3, 15, {.temperature = temperature}, 5);
    CHECK(*std::min_element(ids.begin(), ids.end()) >= 0);
    CHECK(*std::max_element(ids.begin(), ids.end()) < 15);
    auto broken = logits;
    broken[20] = temperature == 0 ? NAN : INFINITY;
    const auto now = sampled(broken, 3, 15, {.temperature = temperature}, 5);
    CHECK(now == Vec<int32_t>{ids[0], -1, ids[2]});
  }
}

TEST_CASE("positions follow the cached tokens, whose count advances") {
  const Launch launch(2);
  int32_t past = 7;
  Vec<int32_t> positions(6, -1);
  decoding().positions(launch.context(), &past, 2, 3, positions.data());
  CHECK(positions == Vec<int32_t>{7, 8, 9, 7, 8, 9});
  decoding().advance(launch.context(), &past, 3);
  CHECK(past == 10);
}
