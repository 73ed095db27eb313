#include "train/records/expert_loads.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>

#include "base/json.hpp"
#include "records_helpers.hpp"

using namespace capstan;
using namespace capstan::records;
using namespace capstan::records::test;

namespace {

// Expert e of layer l has the fraction (l + e) / sum over e of the choices at every step.
ReadRow row_of(int64_t step, int64_t layers, int64_t experts) {
  ReadRow row;
  row.step = step;
  for (int64_t layer = 1; layer <= layers; ++layer) {
    auto& loads =
        row.lists.emplace_back("expert_load_layer_" + std::to_string(layer), std::vector<double>()).second;
    double sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += static_cast<double>(layer + e);
    for (int64_t e = 0; e < experts; ++e) loads.push_back(static_cast<double>(layer + e) / sum);
  }
  // The order of names, in which a row of metrics.jsonl is read.
  std::sort(row.lists.begin(), row.lists.end());
  return row;
}

Json loads_of(size_t most, int64_t steps, int64_t layers, int64_t experts) {
  ExpertLoads loads(most);
  for (int64_t step = 1; step <= steps; ++step) loads.add(row_of(step, layers, experts));
  const std::string text = loads.json();
  return text.empty() ? Json() : json_of(text);
}

}  // namespace

TEST_CASE("loads of experts are relative to an equal load, layers in the order of their numbers") {
  const Json drawn = loads_of(1000, 2, 11, 3);
  CHECK(drawn["layers"] == Json{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  CHECK(drawn["experts"] == 3);
  CHECK(drawn["steps"] == Json{1, 2});
  for (const Json& matrix : drawn["loads"]) {
    REQUIRE(matrix.size() == 33);
    // (l + e) / (3 l + 3) x 3 = (l + e) / (l + 1)
    for (size_t i = 0; i < 33; ++i) {
      const auto layer = static_cast<double>(i / 3 + 1), expert = static_cast<double>(i % 3);
      CHECK(matrix[i].get<double>() == doctest::Approx((layer + expert) / (layer + 1)).epsilon(6e-3));
    }
  }
}

TEST_CASE("the map of a long run or a large model is bounded, and has the last step") {
  for (const int64_t steps : {1, 2, 59, 60, 61, 1000, 1023}) {
    CAPTURE(steps);
    const Json drawn = loads_of(1'000'000, steps, 2, 4);
    const auto shown = drawn["steps"].get<std::vector<int64_t>>();
    CHECK(shown.size() == drawn["loads"].size());
    CHECK(shown.size() <= 60);
    CHECK(static_cast<int64_t>(shown.size()) >= std::min<int64_t>(steps, 30));
    CHECK(shown.back() == steps);
    // Evenly spaced, but for the last one.
    for (size_t i = 2; i + 1 < shown.size(); ++i) CHECK(shown[i] - shown[i - 1] == shown[1] - shown[0]);
  }
  // 61 layers of 256 experts are 15616 loads.
  for (const auto& [most, matrices] :
       {std::pair<size_t, size_t>{15615, 0}, {15616, 1}, {40000, 2}, {70000, 4}}) {
    CAPTURE(most);
    const Json drawn = loads_of(most, 9, 61, 256);
    if (matrices == 0) {
      CHECK(drawn.is_null());
      continue;
    }
    CHECK(drawn["loads"].size() <= matrices);
    CHECK(drawn["steps"].back() == 9);
  }
  CHECK(ExpertLoads(100).json().empty());
}

TEST_CASE("rows with other experts, and loads that are not numbers") {
  ExpertLoads loads(1000);
  loads.add(row_of(1, 1, 2));
  loads.add(row_of(2, 1, 3));
  loads.add(row_of(3, 2, 2));
  ReadRow bad = row_of(4, 1, 2);
  bad.lists[0].second[0] = std::numeric_limits<double>::quiet_NaN();
  loads.add(bad);
  ReadRow none;
  none.step = 5;
  loads.add(none);
  CHECK(json_of(loads.json())["steps"] == Json{1, 4});
  CHECK(json_of(loads.json())["loads"][1][0].is_null());
}

TEST_CASE("the last logged step is found behind rows of 61 layers with 256 experts") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "metrics.jsonl";
  {
    MetricsWriter metrics(path);
    for (int64_t step = 1; step <= 3; ++step) {
      MetricsRow row(step);
      for (int64_t layer = 1; layer <= 61; ++layer)
        row.numbers("expert_load_layer_" + std::to_string(layer), std::vector<double>(256, 1.0 / 257));
      metrics.write(row);
    }
  }
  CHECK(fs::file_size(path) > 3 * (size_t{256} << 10));
  REQUIRE(last_logged_step(path));
  CHECK(last_logged_step(path)->step == 3);
  REQUIRE(last_recorded_step(path));
  CHECK(last_recorded_step(path)->step == 3);
}
