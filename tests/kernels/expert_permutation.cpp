// The order of tokens by expert, against a reference that searches.
#include "kernels/expert_permutation.hpp"

#include <numeric>

#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;
using kernels::DropPolicy;
using kernels::PermutationShape;

namespace {

const kernels::ExpertPermutation& permutation() {
  return *testing::table().expert_permutation;
}

struct Plan {
  Vec<int64_t> numbers;
  Vec<int32_t> row_of_slot, slot_of_row;
  bool operator==(const Plan&) const = default;
};

// topk different experts for each token; some experts are never chosen.
Vec<int32_t> random_choices(int64_t tokens, int64_t topk, int64_t experts, uint64_t seed) {
  Vec<int32_t> choices;
  const Vec<double> noise = random_values(tokens * experts, seed);
  for (int64_t t = 0; t < tokens; ++t) {
    Vec<int32_t> order(static_cast<size_t>(experts));
    std::iota(order.begin(), order.end(), 0);
    const auto value = [&](int32_t e) {
      // Unequal loads: lower experts are chosen more often, every third rarely.
      return noise[static_cast<size_t>(t * experts + e)] - 0.1 * e - (e % 3 == 2 ? 1.5 : 0);
    };
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return value(a) > value(b); });
    choices.insert(choices.end(), order.begin(), order.begin() + topk);
  }
  return choices;
}

Plan reference_plan(const PermutationShape& s, const Vec<int32_t>& experts, const Vec<double>& p) {
  Plan plan{Vec<int64_t>(static_cast<size_t>(1 + s.experts)), Vec<int32_t>(experts.size(), -1),
            Vec<int32_t>(static_cast<size_t>(s.rows()), -1)};
  int64_t row = 0;
  for (int64_t e = 0; e < s.experts; ++e) {
    Vec<size_t> slots;
    for (size_t i = 0; i < experts.size(); ++i)
      if (experts[i] == s.first + e) slots.push_back(i);
    if (s.capacity > 0 && static_cast<int64_t>(slots.size()) > s.capacity) {
      if (s.policy == DropPolicy::probability)
        std::stable_sort(slots.begin(), slots.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
      slots.resize(static_cast<size_t>(s.capacity));
      std::sort(slots.begin(), slots.end());
    }
    const int64_t size = s.pad ? s.capacity : static_cast<int64_t>(slots.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      const auto at = row + static_cast<int64_t>(i);
      plan.row_of_slot[slots[i]] = static_cast<int32_t>(at);
      plan.slot_of_row[static_cast<size_t>(at)] = static_cast<int32_t>(slots[i]);
    }
    plan.numbers[static_cast<size_t>(1 + e)] = size;
    row += size;
  }
  plan.numbers[0] = row;
  return plan;
}

// The plan of every launch is the expected one.
template <class Body>
void check_plan(const Plan& expected, Body&& body) {
  run_kernel({}, [&](kernels::Context& c, Vec<Array>&) {
    constexpr int32_t kCanary = -77;
    Plan plan{Vec<int64_t>(expected.numbers.size() + 1, kCanary),
              Vec<int32_t>(expected.row_of_slot.size() + 1, kCanary),
              Vec<int32_t>(expected.slot_of_row.size() + 1, kCanary)};
    body(c, plan);
    CHECK((plan.numbers.back() == kCanary && plan.row_of_slot.back() == kCanary &&
           plan.slot_of_row.back() == kCanary));
    plan.numbers.pop_back(), plan.row_of_slot.pop_back(), plan.slot_of_row.pop_back();
    CHECK(plan.numbers == expected.numbers);
    CHECK(plan.row_of_slot == expected.row_of_slot);
    CHECK(plan.slot_of_row == expected.slot_of_row);
  });
}

// The dropped slots are the choices of each expert beyond its capacity, added to an earlier count.
void check_dropped(const PermutationShape& s, const Vec<int32_t>& experts, Array& probabilities) {
  constexpr float kEarlier = 3;
  int64_t expected = 0;
  for (int64_t e = s.first; s.capacity > 0 && e < s.first + s.experts; ++e)
    expected += std::max<int64_t>(0, std::count(experts.begin(), experts.end(), e) - s.capacity);
  run_kernel({}, [&](kernels::Context& c, Vec<Array>&) {
    Plan plan{Vec<int64_t>(static_cast<size_t>(1 + s.experts)), Vec<int32_t>(experts.size()),
              Vec<int32_t>(static_cast<size_t>(s.rows()))};
    Vec<float> dropped{kEarlier};
    permutation().plan(c, s, experts.data(), probabilities.f32(), plan.numbers.data(),
                       plan.row_of_slot.data(), plan.slot_of_row.data());
    permutation().count_dropped(c, s, experts.data(), plan.row_of_slot.data(), dropped.data());
    CHECK(dropped[0] == kEarlier + static_cast<float>(expected));
  });
}

void check_shape(const PermutationShape& s, int64_t of_experts, uint64_t seed) {
  INFO(s.tokens, " tokens, ", s.topk, " of ", of_experts, ", experts ", s.first, " + ", s.experts,
       ", capacity ", s.capacity, ", by probability ", s.policy == DropPolicy::probability, ", pad ", s.pad);
  const Vec<int32_t> experts = random_choices(s.tokens, s.topk, of_experts, seed);
  Vec<double> p;
  // Few values: many are equal.
  for (const int32_t v : random_ints(s.slots(), seed + 1, 5)) p.push_back(v / 8.0);
  Array probabilities(DType::f32, p);
  check_plan(reference_plan(s, experts, p), [&](kernels::Context& c, Plan& plan) {
    permutation().plan(c, s, experts.data(), probabilities.f32(), plan.numbers.data(),
                       plan.row_of_slot.data(), plan.slot_of_row.data());
  });
  // Padding has no expert.
  Vec<int32_t> with_padding = experts;
  if (!with_padding.empty()) with_padding.back() = -1;
  check_dropped(s, with_padding, probabilities);
}

}  // namespace

TEST_CASE("slots are sorted by expert, those of an expert by token") {
  for (const auto [tokens, topk, experts] :
       {std::array<int64_t, 3>{0, 2, 4}, {1, 1, 1}, {7, 2, 5}, {100, 3, 8}, {700, 2, 37}}) {
    check_shape({.tokens = tokens, .topk = topk, .experts = experts}, experts, 11);
    // Experts of one rank.
    if (experts > 3) check_shape({.tokens = tokens, .topk = topk, .first = 2, .experts = 2}, experts, 12);
  }
}

TEST_CASE("slots beyond the capacity are dropped by probability or position, and rows padded") {
  for (const auto [tokens, topk, experts] :
       {std::array<int64_t, 3>{7, 2, 5}, {100, 3, 8}, {600, 2, 9}, {50, 1, 1}})
    for (const int64_t capacity : {int64_t{1}, tokens / 4 + 1, tokens + 3})
      for (const auto policy : {DropPolicy::probability, DropPolicy::position})
        for (const bool pad : {false, true}) {
          check_shape({tokens, topk, 0, experts, capacity, policy, pad}, experts, 21);
          // Experts of one rank, of which it may have one.
          if (experts > 3)
            for (const int64_t here : {1, 2})
              check_shape({tokens, topk, 2, here, capacity, policy, pad}, experts, 22);
        }
}

TEST_CASE("all tokens go to one expert") {
  const PermutationShape s{.tokens = 300, .topk = 1, .experts = 6};
  const Vec<int32_t> experts(300, 4);
  check_plan(reference_plan(s, experts, {}), [&](kernels::Context& c, Plan& plan) {
    permutation().plan(c, s, experts.data(), nullptr, plan.numbers.data(), plan.row_of_slot.data(),
                       plan.slot_of_row.data());
  });
}

TEST_CASE("rows of several ranks are regrouped by expert") {
  for (const auto& [ranks, experts] : {std::array<int64_t, 2>{1, 3}, {4, 1}, {3, 5}}) {
    Vec<int64_t> counts;
    for (const int32_t n : random_ints(ranks * experts, 5, 40)) counts.push_back(n % 3 == 0 ? 0 : n);
    const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    for (const int64_t rows : {sum, sum + 9}) {
      Plan expected{Vec<int64_t>(static_cast<size_t>(1 + experts)),
                    Vec<int32_t>(static_cast<size_t>(rows), -1), Vec<int32_t>(static_cast<size_t>(rows), -1)};
      int32_t row = 0;
      for (int64_t e = 0; e < experts; ++e)
        for (int64_t r = 0, slot = 0; r < ranks; ++r)
          for (int64_t other = 0; other < experts; ++other) {
            const int64_t n = counts[static_cast<size_t>(r * experts + other)];
            for (int64_t i = 0; i < n; ++i, ++slot) {
              if (other != e) continue;
              expected.row_of_slot[static_cast<size_t>(slot)] = row;
              expected.slot_of_row[static_cast<size_t>(row++)] = static_cast<int32_t>(slot);
              ++expected.numbers[static_cast<size_t>(1 + e)];
              ++expected.numbers[0];
            }
          }
      check_plan(expected, [&](kernels::Context& c, Plan& plan) {
        permutation().regroup(c, counts.data(), ranks, experts, rows, plan.numbers.data(),
                              plan.row_of_slot.data(), plan.slot_of_row.data());
      });
    }
  }
}

TEST_CASE("rows in the order of experts and back, with weights and their gradient") {
  const PermutationShape s{
      .tokens = 19, .topk = 3, .experts = 6, .capacity = 8, .policy = DropPolicy::position, .pad = true};
  const Plan plan = reference_plan(s, random_choices(s.tokens, s.topk, s.experts, 31), {});
  const int64_t rows = s.rows(), slots = s.slots();
  for (const DType type : kTypes)
    for (const int64_t cols : {1, 5, 37, 264})
      for (const bool weighted : {false, true}) {
        const Array x(type, random_values(s.tokens * cols, 32)), z(type, random_values(rows * cols, 33));
        Array weights(DType::f32, random_values(weighted ? slots : 0, 34));
        const auto y = run_kernel(
            {Array::zeros(type, rows * cols, 5), Array::zeros(type, s.tokens * cols, 5),
             Array::zeros(DType::f32, slots, 5)},
            [&](kernels::Context& c, Vec<Array>& out) {
              const float* w = weights.f32();
              permutation().permute(c, x, plan.slot_of_row.data(), w, out[0].out(), rows, s.topk, cols);
              permutation().unpermute(c, z, plan.row_of_slot.data(), w, out[1].out(), s.tokens, s.topk, cols);
              permutation().unpermute_backward_weights(c, x, z, plan.row_of_slot.data(), out[2].f32(),
                                                       s.tokens, s.topk, cols);
            });
        const auto xs = x.rounded(), zs = z.rounded(), ws = weights.rounded();
        Vec<double> permuted(static_cast<size_t>(rows * cols)), sums(static_cast<size_t>(s.tokens * cols)),
            products(static_cast<size_t>(slots));
        for (int64_t slot = 0; slot < slots; ++slot) {
          const int64_t row = plan.row_of_slot[static_cast<size_t>(slot)], token = slot / s.topk;
          if (row < 0) continue;
          const double w = weighted ? ws[static_cast<size_t>(slot)] : 1;
          for (int64_t i = 0; i < cols; ++i) {
            const auto of_row = static_cast<size_t>(row * cols + i),
                       of_token = static_cast<size_t>(token * cols + i);
            permuted[of_row] = xs[of_token] * w;
            sums[of_token] += zs[of_row] * w;
            products[static_cast<size_t>(slot)] += xs[of_token] * zs[of_row];
          }
        }
        CHECK(error(y[0].rounded(), permuted) < tolerance(type));
        CHECK(error(y[1].rounded(), sums) < tolerance(type));
        CHECK(error(y[2].rounded(), products) < 1e-5);
      }
}

TEST_CASE("rows without weights keep the bits of finite numbers") {
  const PermutationShape s{.tokens = 7, .topk = 2, .experts = 3};
  const Plan plan = reference_plan(s, random_choices(s.tokens, s.topk, s.experts, 35), {});
  for (const int64_t cols : {1, 2, 19}) {
    Array x(DType::f32, Vec<double>(static_cast<size_t>(s.tokens * cols)));
    // The largest, numbers below the smallest normal one, and -0.
    const uint32_t bits[] = {0x7f7fffff, 0x00012345, 0x00000001, 0x807fffff, 0x80000000};
    const auto of_element = [&](int64_t i) { return bits[i % 5]; };
    for (int64_t i = 0; i < s.tokens * cols; ++i) {
      const uint32_t value = of_element(i);
      std::memcpy(x.f32() + i, &value, sizeof value);
    }
    const auto y =
        run_kernel({Array::zeros(DType::f32, s.rows() * cols, 5)}, [&](kernels::Context& c, Vec<Array>& out) {
          permutation().permute(c, x, plan.slot_of_row.data(), nullptr, out[0].out(), s.rows(), s.topk, cols);
        });
    Array rows = y[0];
    for (int64_t row = 0; row < s.rows(); ++row)
      for (int64_t i = 0; i < cols; ++i) {
        uint32_t value = 0;
        std::memcpy(&value, rows.f32() + row * cols + i, sizeof value);
        const int64_t token = plan.slot_of_row[static_cast<size_t>(row)] / s.topk;
        CHECK(value == of_element(token * cols + i));
      }
  }
}

TEST_CASE("rows behind those of all experts become 0") {
  for (const auto& sizes : {Vec<int64_t>{3, 0, 70, 1}, {0, 0}, {5}})
    for (const DType type : kTypes)
      for (const int64_t cols : {1, 37, 200}) {
        const auto experts = static_cast<int64_t>(sizes.size()),
                   used = std::accumulate(sizes.begin(), sizes.end(), int64_t{0}), rows = used + 9;
        const Array x(type, random_values(rows * cols, 41));
        const auto y = run_kernel({x}, [&](kernels::Context& c, Vec<Array>& out) {
          permutation().clear_unused(c, out[0].out(), sizes.data(), experts, rows, cols);
        });
        Vec<double> expected = x.rounded();
        std::fill(expected.begin() + used * cols, expected.end(), 0.0);
        CHECK((y[0].rounded() == expected));
      }
}

TEST_CASE("rows of each expert are added to its sums") {
  for (const auto& sizes : {Vec<int64_t>{3, 0, 700, 1}, {5}, {0, 0, 2}})
    for (const DType type : kTypes)
      for (const int64_t cols : {1, 37, 200}) {
        const auto experts = static_cast<int64_t>(sizes.size()),
                   rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
        const Array x(type, random_values((rows + 2) * cols, 41)),
            start(DType::f32, random_values(experts * cols, 42));
        const auto y = run_kernel({start}, [&](kernels::Context& c, Vec<Array>& out) {
          permutation().sum_rows(c, x, sizes.data(), experts, cols, out[0].f32());
        });
        Vec<double> expected = start.rounded();
        const auto xs = x.rounded();
        size_t row = 0;
        for (int64_t e = 0; e < experts; ++e)
          for (int64_t i = 0; i < sizes[static_cast<size_t>(e)]; ++i, ++row)
            for (int64_t col = 0; col < cols; ++col)
              expected[static_cast<size_t>(e * cols + col)] +=
                  xs[row * static_cast<size_t>(cols) + static_cast<size_t>(col)];
        CHECK(error(y[0].rounded(), expected) < 1e-5);
      }
}
