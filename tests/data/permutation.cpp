#include "data/permutation.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <vector>

#include "data/numpy_random.hpp"

using namespace capstan;
using namespace capstan::data;

namespace {
PhiloxKey key(uint64_t seed) {
  return philox_key(seed, purpose::test, 7);
}
}  // namespace

TEST_CASE("every position has its own image") {
  for (const int64_t n : {1, 2, 3, 4, 5, 7, 8, 9, 10, 16, 17, 100, 101, 1000, 4096, 65537, 100003})
    for (uint64_t seed = 0; seed < 3; ++seed) {
      const Permutation permute(n, key(seed));
      std::vector<char> seen(static_cast<size_t>(n), 0);
      bool good = true;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t image = permute(i);
        good = good && image >= 0 && image < n && !seen[static_cast<size_t>(image)];
        if (image >= 0 && image < n) seen[static_cast<size_t>(image)] = 1;
      }
      CAPTURE(n);
      CHECK(good);
    }
  const Permutation huge((int64_t{1} << 60) + 12345, key(1));
  for (int64_t i = 0; i < 1000; ++i) CHECK(huge(i) < huge.size());
}

// Chi-square of `counts` against equal shares; its mean is (bins - 1) and its deviation sqrt(2 (bins - 1)).
static double chi_square(const std::vector<int64_t>& counts, int64_t draws) {
  const double expected = static_cast<double>(draws) / static_cast<double>(counts.size());
  double sum = 0;
  for (const int64_t count : counts)
    sum += (static_cast<double>(count) - expected) * (static_cast<double>(count) - expected) / expected;
  return sum;
}
static bool plausible(double chi, size_t bins) {
  const double mean = static_cast<double>(bins - 1), deviation = std::sqrt(2 * mean);
  return std::abs(chi - mean) < 5 * deviation;
}

TEST_CASE("all orders of few elements are equally likely over seeds") {
  for (const int64_t n : {2, 3, 4, 5}) {
    std::map<std::vector<int64_t>, int64_t> orders;
    const int64_t draws = 60000;
    for (int64_t seed = 0; seed < draws; ++seed) {
      const Permutation permute(n, key(static_cast<uint64_t>(seed)));
      std::vector<int64_t> order;
      for (int64_t i = 0; i < n; ++i) order.push_back(permute(i));
      ++orders[order];
    }
    size_t factorial = 1;
    for (int64_t i = 2; i <= n; ++i) factorial *= static_cast<size_t>(i);
    std::vector<int64_t> counts;
    for (const auto& [order, count] : orders) counts.push_back(count);
    CAPTURE(n);
    CHECK(orders.size() == factorial);
    const double chi = chi_square(counts, draws);
    CAPTURE(chi);
    CHECK(plausible(chi, factorial));
  }
}

TEST_CASE("images and distances of neighbors are uniform") {
  // Measures the images of positions 0, 1 and n/2 over many seeds, and the distance of neighbors within one
  // permutation.
  for (const int64_t n : {12, 50, 97}) {
    for (const int64_t position : {int64_t{0}, int64_t{1}, n / 2}) {
      std::vector<int64_t> counts(static_cast<size_t>(n), 0);
      const int64_t draws = 40000;
      for (int64_t seed = 0; seed < draws; ++seed)
        ++counts[static_cast<size_t>(Permutation(n, key(static_cast<uint64_t>(seed)))(position))];
      const double chi = chi_square(counts, draws);
      CAPTURE(n);
      CAPTURE(position);
      CAPTURE(chi);
      CHECK(plausible(chi, counts.size()));
    }
  }
  for (uint64_t seed = 0; seed < 5; ++seed) {
    const int64_t n = 200003;
    const Permutation permute(n, key(seed));
    std::vector<int64_t> distances(64, 0), places(64, 0);
    for (int64_t i = 0; i + 1 < n; ++i) {
      const int64_t distance = (permute(i + 1) - permute(i) + n) % n;
      ++distances[static_cast<size_t>(distance * 64 / n)];
      ++places[static_cast<size_t>((permute(i) * 8 / n) * 8 + i * 8 / n)];
    }
    CHECK(plausible(chi_square(distances, n - 1), 64));
    // A bijection may be more even than random draws.
    CHECK(chi_square(places, n - 1) < 64 + 5 * std::sqrt(128.0));
  }
}

TEST_CASE("permutations of different keys have no more in common than chance") {
  const int64_t n = 10000;
  int64_t fixed = 0, equal = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Permutation first(n, key(seed)), second(n, key(seed + 1));
    for (int64_t i = 0; i < n; ++i) {
      fixed += first(i) == i;
      equal += first(i) == second(i);
    }
  }
  CHECK(fixed < 50);  // 20 expected, deviation sqrt(20)
  CHECK(equal < 50);
}

TEST_CASE("the order of seed 1234 stays what it is") {
  // A change here would change the data order of every run: resumes would read other samples.
  const Permutation permute(10, philox_key(1234, purpose::data_shuffle, 0));
  std::vector<int64_t> order;
  for (int64_t i = 0; i < 10; ++i) order.push_back(permute(i));
  CHECK(order == std::vector<int64_t>{8, 2, 7, 5, 1, 4, 6, 3, 0, 9});
  const Permutation large(10'000'000, philox_key(1234, purpose::data_shuffle, 1));
  CHECK(std::vector<int64_t>{large(0), large(1), large(9'999'999)} ==
        std::vector<int64_t>{9'289'094, 3'007'242, 8'848'888});
}

TEST_CASE("numpy's generator: the golden values of seed 1234") {
  NumpyRandomState words(1234);
  CHECK(words.next32() == 822569775);
  CHECK(words.next32() == 2137449171);
  CHECK(words.next32() == 2671936806);
  NumpyRandomState random(1234);
  std::vector<int32_t> ten{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, seven{0, 1, 2, 3, 4, 5, 6};
  random.shuffle(ten);
  CHECK(ten == std::vector<int32_t>{7, 2, 9, 1, 0, 8, 4, 5, 6, 3});
  random.shuffle(seven);
  CHECK(seven == std::vector<int32_t>{6, 4, 0, 5, 3, 2, 1});
}
