#include "data/blend.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <thread>

#include "base/json.hpp"
#include "dataset_helpers.hpp"

using namespace capstan;
using namespace capstan::data;
using namespace capstan::data::testing;

TEST_CASE("splits are those of megatron-core") {
  const auto fixtures = capstan::json_of(read_file(fixture("megatron.json")));
  for (const auto& test : fixtures["splits"]) {
    const auto shares = parse_split(test["split"].get<std::string>());
    const int64_t count = test["count"];
    CAPTURE(capstan::dump_json(test));
    for (size_t i = 0; i < 3; ++i) {
      REQUIRE(shares[i].has_value() == !test["ranges"][i].is_null());
      if (!shares[i]) continue;
      const auto [begin, end] = split_range(*shares[i], count);
      CHECK(begin == test["ranges"][i][0].get<int64_t>());
      CHECK(end == test["ranges"][i][1].get<int64_t>());
    }
  }
}

TEST_CASE("malformed splits are refused") {
  for (const char* text :
       {"", "a", "1,,1", "1,-1", "0,0,0", "1,1,1,1", "nan", "inf,1", "1e308,1e308", "0x1", "969;30;1"}) {
    CAPTURE(text);
    CHECK(error_of([&] { parse_split(text); }).starts_with("config: "));
  }
  CHECK(parse_split(" 969 , 30 , 1 ")[2].has_value());
}

TEST_CASE("the greedy order is megatron-core's, from any position") {
  const auto fixtures = capstan::json_of(read_file(fixture("megatron.json")));
  for (const auto& test : fixtures["blends"]) {
    const BlendOrder order(test["weights"].get<std::vector<double>>());
    const std::string expected = test["dataset"];
    CAPTURE(capstan::dump_json(test["weights"]));
    std::string found;
    for (size_t k = 0; k < expected.size(); ++k)
      found += std::to_string(order.at(static_cast<int64_t>(k)).dataset);
    CHECK(found == expected);
    CHECK(order.at(static_cast<int64_t>(expected.size()) - 1).sample == test["last_sample"].get<int64_t>());
  }
}

TEST_CASE("a blend far from its start equals the definition, whatever was asked before") {
  const std::vector<double> weights = {0.17, 0.05, 0.41, 0.37};
  constexpr int64_t kLength = 600'000;
  std::vector<BlendOrder::Choice> expected;
  std::vector<int64_t> counts(weights.size(), 0);
  double sum = 0;
  for (const double weight : weights) sum += weight;
  for (int64_t k = 0; k < kLength; ++k) {
    size_t best = 0;
    for (size_t i = 1; i < weights.size(); ++i) {
      const auto behind = [&](size_t j) {
        return weights[j] / sum * std::max(static_cast<double>(k), 1.0) - static_cast<double>(counts[j]);
      };
      if (behind(i) > behind(best)) best = i;
    }
    expected.push_back({static_cast<int32_t>(best), counts[best]++});
  }
  const BlendOrder order(weights);
  bool equal = true;
  for (const int64_t k : {599'999, 0, 300'000, 262'143, 262'144, 5, 4095, 4096, 599'998, 100'000}) {
    const auto choice = order.at(k);
    equal = equal && choice.dataset == expected[static_cast<size_t>(k)].dataset &&
            choice.sample == expected[static_cast<size_t>(k)].sample;
  }
  CHECK(equal);
  for (int64_t k = 0; k < kLength; k += 7)
    equal = equal && order.at(k).sample == expected[static_cast<size_t>(k)].sample;
  CHECK(equal);
  // At every prefix each dataset's share is exact to within one sample.
  for (size_t i = 0; i < weights.size(); ++i)
    CHECK(std::abs(static_cast<double>(counts[i]) - weights[i] / sum * kLength) < 2);

  std::vector<std::thread> threads;
  std::vector<char> good(4, 1);
  for (size_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int64_t i = 0; i < 20000; ++i) {
        const int64_t k = i + static_cast<int64_t>(t) * 150'000;
        good[t] = good[t] && order.at(k).dataset == expected[static_cast<size_t>(k)].dataset;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(good == std::vector<char>(4, 1));
}

TEST_CASE("weights that make no sense are refused") {
  for (const auto& weights : std::vector<std::vector<double>>{{}, {0, 0}, {-1, 2}, {NAN}, {INFINITY}}) {
    CHECK(error_of([&] { BlendOrder order(weights); }).starts_with("config: "));
  }
}
