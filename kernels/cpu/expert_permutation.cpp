// The order of tokens by expert. Bytes moved for R rows of C columns of e bytes: permute and unpermute
// 2 e R C, the gradient of the weights 2 e R C; the plan reads and writes 4 bytes for each slot and row.
#include "kernels/expert_permutation.hpp"

#include <cstring>
#include <numeric>

#include "kernels/common/sort_key.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/expert_permutation.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

// For each expert the number of slots that chose it, its next row and the end of its rows; then keys of the
// slots.
size_t keys_at(const PermutationShape& s) {
  return WorkspaceSize::aligned(static_cast<size_t>(3 * s.experts) * sizeof(int64_t));
}
WorkspaceSize plan_workspace(PermutationShape s) {
  return {keys_at(s) + (s.drops_by_probability() ? static_cast<size_t>(s.slots()) * sizeof(uint64_t) : 0), 0};
}

// Sets row_of_slot to -1 for the slots of each expert beyond its capacity. counts [experts]: the slots that
// chose an expert; end [experts]: scratch.
void drop_least(Context& c, const PermutationShape& s, const int32_t* experts, const float* probabilities,
                const int64_t* counts, int64_t* end, uint64_t* keys, int32_t* row_of_slot) {
  for (int64_t e = 0, begin = 0; e < s.experts; begin += counts[e++]) end[e] = begin;
  for (int64_t slot = 0; slot < s.slots(); ++slot) {
    if (row_of_slot[slot] < 0) continue;
    keys[end[experts[slot] - s.first]++] = sort_key(probabilities[slot], slot);
  }
  parallel_blocks(c, s.experts, 1, [&](int64_t first, int64_t last, int) {
    for (int64_t e = first; e < last; ++e) {
      if (counts[e] <= s.capacity) continue;
      uint64_t* const of_expert = keys + end[e] - counts[e];
      std::nth_element(of_expert, of_expert + s.capacity, of_expert + counts[e]);
      for (int64_t i = s.capacity; i < counts[e]; ++i) row_of_slot[index_of_key(of_expert[i])] = -1;
    }
  });
}

void plan(Context& c, PermutationShape s, const int32_t* experts, const float* probabilities,
          int64_t* numbers, int32_t* row_of_slot, int32_t* slot_of_row) {
  const WorkspaceParts workspace(c, plan_workspace(s));
  if (!workspace) return;
  auto* counts = workspace.shared<int64_t>();
  int64_t *next = counts + s.experts, *end = next + s.experts;
  auto* keys = reinterpret_cast<uint64_t*>(workspace.shared<std::byte>() + keys_at(s));
  std::fill(counts, counts + s.experts, 0);
  for (int64_t slot = 0; slot < s.slots(); ++slot) {
    const int64_t e = s.index_of(experts[slot]);
    row_of_slot[slot] = e >= 0 ? 0 : -1;
    if (e >= 0) ++counts[e];
  }
  if (s.drops_by_probability() && *std::max_element(counts, counts + s.experts) > s.capacity)
    drop_least(c, s, experts, probabilities, counts, end, keys, row_of_slot);
  int64_t row = 0, *const sizes = numbers + 1;
  for (int64_t e = 0; e < s.experts; row += sizes[e++]) {
    sizes[e] = s.rows_of(counts[e]);
    next[e] = row;
    end[e] = row + s.kept_of(counts[e]);
  }
  numbers[0] = row;
  std::fill(slot_of_row, slot_of_row + s.rows(), -1);
  for (int64_t slot = 0; slot < s.slots(); ++slot) {
    if (row_of_slot[slot] < 0) continue;
    const int64_t e = experts[slot] - s.first;
    row_of_slot[slot] = next[e] < end[e] ? static_cast<int32_t>(next[e]) : -1;
    if (next[e] < end[e]) slot_of_row[next[e]++] = static_cast<int32_t>(slot);
  }
}

void regroup(Context&, const int64_t* counts, int64_t ranks, int64_t experts, int64_t rows, int64_t* numbers,
             int32_t* row_of_slot, int32_t* slot_of_row) {
  int64_t row = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t begin = row;
    for (int64_t r = 0; r < ranks; ++r) {
      int64_t slot = 0;
      for (int64_t i = 0; i < r * experts + e; ++i) slot += counts[i];
      for (int64_t i = 0; i < counts[r * experts + e]; ++i, ++row, ++slot) {
        row_of_slot[slot] = static_cast<int32_t>(row);
        slot_of_row[row] = static_cast<int32_t>(slot);
      }
    }
    numbers[1 + e] = row - begin;
  }
  numbers[0] = row;
  // As many slots as rows are in use.
  std::fill(row_of_slot + row, row_of_slot + rows, -1);
  std::fill(slot_of_row + row, slot_of_row + rows, -1);
}

void count_dropped(Context&, PermutationShape s, const int32_t* experts, const int32_t* row_of_slot,
                   float* dropped) {
  int64_t count = 0;
  for (int64_t slot = 0; slot < s.slots(); ++slot)
    count += s.index_of(experts[slot]) >= 0 && row_of_slot[slot] < 0;
  *dropped += static_cast<float>(count);
}

void permute(Context& c, In x_in, const int32_t* slot_of_row, const float* weights, Out y_out, int64_t rows,
             int64_t topk, int64_t cols) {
  by_type({x_in, y_out}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto x = array_of<T>(x_in), y = array_of<T>(y_out);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t slot = slot_of_row[r], to = r * cols, from = slot / topk * cols;
        const VF weight = splat(slot >= 0 && weights ? weights[slot] : 1.0f);
        for_vectors(
            cols,
            [&](int64_t i) HWY_ATTR {
              y.put(to + i, slot >= 0 ? hn::Mul(x.at_without_prefetch(from + i), weight) : hn::Zero(DF()));
            },
            [&](int64_t i, int64_t n) HWY_ATTR {
              y.put_part(to + i, slot >= 0 ? hn::Mul(x.part(from + i, n), weight) : hn::Zero(DF()), n);
            });
      }
    });
  });
}

void unpermute(Context& c, In x_in, const int32_t* row_of_slot, const float* weights, Out y_out,
               int64_t tokens, int64_t topk, int64_t cols) {
  by_type({x_in, y_out}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto x = array_of<T>(x_in), y = array_of<T>(y_out);
    parallel_blocks(c, tokens, rows_per_block(topk * cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t t = begin; t < end; ++t) {
        const auto sum = [&](auto&& values) HWY_ATTR {
          VF total = hn::Zero(DF());
          for (int64_t slot = t * topk; slot < (t + 1) * topk; ++slot)
            if (row_of_slot[slot] >= 0)
              total =
                  hn::MulAdd(values(row_of_slot[slot] * cols), splat(weights ? weights[slot] : 1.0f), total);
          return total;
        };
        for_vectors(
            cols,
            [&](int64_t i) HWY_ATTR {
              y.put(t * cols + i, sum([&](int64_t row) HWY_ATTR { return x.at_without_prefetch(row + i); }));
            },
            [&](int64_t i, int64_t n) HWY_ATTR {
              y.put_part(t * cols + i, sum([&](int64_t row) HWY_ATTR { return x.part(row + i, n); }), n);
            });
      }
    });
  });
}

void unpermute_backward_weights(Context& c, In dy_in, In x_in, const int32_t* row_of_slot, float* dweights,
                                int64_t tokens, int64_t topk, int64_t cols) {
  by_type({dy_in, x_in}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto dy = array_of<T>(dy_in), x = array_of<T>(x_in);
    parallel_blocks(c, tokens * topk, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t slot = begin; slot < end; ++slot) {
        VF sum = hn::Zero(DF());
        const int64_t row = row_of_slot[slot], at = row * cols, token = slot / topk * cols;
        if (row >= 0)
          for_vectors(
              cols,
              [&](int64_t i) HWY_ATTR {
                sum = hn::MulAdd(dy.at_without_prefetch(token + i), x.at_without_prefetch(at + i), sum);
              },
              [&](int64_t i, int64_t n)
                  HWY_ATTR { sum = hn::MulAdd(dy.part(token + i, n), x.part(at + i, n), sum); });
        dweights[slot] = sum_lanes(sum);
      }
    });
  });
}

constexpr int64_t kSumCols = 64;

void sum_rows(Context& c, In x_in, const int64_t* sizes, int64_t experts, int64_t cols, float* sums) {
  by_type({x_in}, [&](auto type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(x_in);
    parallel_blocks(c, cols, kSumCols, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t i = begin; i < end; i += kStep) {
        const int64_t n = std::min(kStep, end - i);
        for (int64_t e = 0, first = 0; e < experts; first += sizes[e++]) {
          VF sum = load_lanes(sums + e * cols + i, n);
          for (int64_t r = first; r < first + sizes[e]; r += kSumRows) {
            VF part = hn::Zero(DF());
            for (int64_t row = r; row < std::min(first + sizes[e], r + kSumRows); ++row)
              part = hn::Add(part, x.lanes(row * cols + i, n));
            sum = hn::Add(sum, part);
          }
          store_lanes(sum, sums + e * cols + i, n);
        }
      }
    });
  });
}

void clear_unused(Context& c, Out x, const int64_t* sizes, int64_t experts, int64_t rows, int64_t cols) {
  const int64_t used = std::accumulate(sizes, sizes + experts, int64_t{0}), row = cols * size_of(x.dtype);
  auto* const first = x.as<std::byte>() + used * row;
  parallel_blocks(c, rows - used, rows_per_block(cols), [&](int64_t begin, int64_t end, int) {
    std::memset(first + begin * row, 0, static_cast<size_t>((end - begin) * row));
  });
}

ExpertPermutation expert_permutation_family() {
  return {.plan = plan,
          .plan_workspace = plan_workspace,
          .regroup = regroup,
          .count_dropped = count_dropped,
          .permute = permute,
          .unpermute = unpermute,
          .unpermute_backward_weights = unpermute_backward_weights,
          .sum_rows = sum_rows,
          .clear_unused = clear_unused};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(ExpertPermutation, expert_permutation)
#endif
