// The order of tokens by expert. Bytes moved for R rows of C columns of e bytes: permute and unpermute
// 2 e R C, the gradient of the weights 2 e R C. The plan has a block for each expert, which reads 4 bytes of
// every slot twice (from the cache). Dropping by probability sorts the slots.
#include "kernels/expert_permutation.hpp"

#include "kernels/common/sort_key.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/sort.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

constexpr int kPlanThreads = 512;

// ---- dropping by probability: sorts keys (expert, descending probability, slot), of which no two are equal

// Bits of a key: the expert's, which are never all set as in padding, 31 of the probability, and what is left
// for the slot.
struct KeyBits {
  static constexpr int kProbability = 31;
  int slot;
  explicit KeyBits(int64_t experts)
      : slot(64 - kProbability - std::bit_width(static_cast<uint64_t>(experts))) {}
  __device__ int expert_shift() const { return slot + kProbability; }
};

WorkspaceSize plan_workspace(PermutationShape s) {
  if (!s.drops_by_probability() || s.slots() <= 0) return {};
  return {static_cast<size_t>(sorted_keys(s.slots())) * sizeof(SortKey), 0};
}

struct MakeSlotKeys {
  PermutationShape s;
  KeyBits bits;
  const int32_t* experts;
  const float* probabilities;
  SortKey* keys;
  __device__ void operator()(int64_t i, int64_t) const {
    const int64_t e = i < s.slots() ? s.index_of(experts[i]) : -1;
    keys[i] = kPaddingKey;
    if (e < 0) return;
    // Probabilities are not negative: the highest bit of their keys is 0.
    const SortKey falling = sort_key(probabilities[i], 0) >> 32;
    keys[i] = static_cast<SortKey>(e) << bits.expert_shift() | falling << bits.slot | static_cast<SortKey>(i);
  }
};
// A slot is dropped if `capacity` keys of the same expert come before it.
struct DropSlots {
  int64_t capacity;
  KeyBits bits;
  const SortKey* keys;
  int32_t* row_of_slot;
  __device__ void operator()(int64_t i, int64_t) const {
    const int shift = bits.expert_shift();
    if (keys[i] == kPaddingKey || i < capacity || keys[i - capacity] >> shift != keys[i] >> shift) return;
    row_of_slot[keys[i] & ((SortKey{1} << bits.slot) - 1)] = -1;
  }
};

// ---- the plan: a block for each expert

// Writes the number of rows of each expert. row_of_slot: -1 where the expert has no rows, else 0.
__global__ void plan_sizes_kernel(PermutationShape s, const int32_t* experts, int64_t* numbers,
                                  int32_t* row_of_slot) {
  const int64_t e = block_index();
  int64_t count = 0;
  for (int64_t slot = thread_index(); slot < s.slots(); slot += block_threads()) {
    const int64_t chosen = s.index_of(experts[slot]);
    if (chosen == e) row_of_slot[slot] = 0, ++count;
    if (chosen < 0 && e == 0) row_of_slot[slot] = -1;
  }
  count = block_sum(count);
  if (thread_index() == 0) numbers[1 + e] = s.rows_of(count);
}

// The sum of sizes[0, count); the same in all threads.
__device__ int64_t sum_of_sizes(const int64_t* sizes, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = thread_index(); i < count; i += block_threads()) sum += sizes[i];
  return block_sum(sum);
}

// The number of threads before this one whose flag is set, and of all threads.
struct FlagCount {
  int before, all;
};
__device__ FlagCount count_flags(bool flag) {
  CAPSTAN_SHARED(int, of_warps, kWarp);
  const uint32_t set = ballot(flag), lower = set & ((1u << lane_index()) - 1);
  if (lane_index() == 0) of_warps[warp_index()] = std::popcount(set);
  sync_threads();
  FlagCount count{std::popcount(lower), 0};
  for (int w = 0; w < block_threads() / kWarp; ++w) {
    if (w < warp_index()) count.before += of_warps[w];
    count.all += of_warps[w];
  }
  // Before the next call writes its counts.
  sync_threads();
  return count;
}

// A block gives the slots of its expert their rows, in the order of slots; row_of_slot is -1 for those that
// are dropped by probability. The last block also sets the rows beyond those in use.
__global__ void plan_rows_kernel(PermutationShape s, const int32_t* experts, int64_t* numbers,
                                 int32_t* row_of_slot, int32_t* slot_of_row) {
  const int64_t e = block_index(), size = numbers[1 + e];
  const int64_t begin = sum_of_sizes(numbers + 1, e);
  int64_t placed = 0;
  for (int64_t tile = 0; tile < s.slots(); tile += block_threads()) {
    const int64_t slot = tile + thread_index();
    const bool mine = slot < s.slots() && experts[slot] == s.first + e && row_of_slot[slot] >= 0;
    const FlagCount count = count_flags(mine);
    const int64_t place = placed + count.before;
    const bool kept = s.capacity <= 0 || place < s.capacity;
    if (mine) row_of_slot[slot] = kept ? narrow<int32_t>(begin + place) : -1;
    if (mine && kept) slot_of_row[begin + place] = narrow<int32_t>(slot);
    placed += count.all;
  }
  const bool last = e == s.experts - 1;
  if (last && thread_index() == 0) numbers[0] = begin + size;
  const int64_t end = last ? s.rows() : begin + size;
  for (int64_t row = begin + s.kept_of(placed) + thread_index(); row < end; row += block_threads())
    slot_of_row[row] = -1;
}

void plan(Context& c, PermutationShape s, const int32_t* experts, const float* probabilities,
          int64_t* numbers, int32_t* row_of_slot, int32_t* slot_of_row) {
  const int64_t slots = s.slots();
  const KeyBits bits(s.experts);
  SortKey* keys = nullptr;
  // Refuses unsupported shapes before writing anything.
  if (const WorkspaceSize need = plan_workspace(s); need.shared > 0) {
    if (slots >= int64_t{1} << bits.slot)
      return refuse(c, "dropping by probability has too many slots for its sort keys");
    keys = workspace_of<SortKey>(c, need);
    if (!keys) return;
  }
  const Grid grid{s.experts, threads_for(slots, 1, kPlanThreads)};
  launch(c, grid, plan_sizes_kernel, s, experts, numbers, row_of_slot);
  if (keys) {
    const int64_t count = sorted_keys(slots);
    map<1>(c, count, MakeSlotKeys{s, bits, experts, probabilities, keys});
    sort_keys(c, keys, 1, count);
    map<1>(c, count, DropSlots{s.capacity, bits, keys, row_of_slot});
  }
  launch(c, grid, plan_rows_kernel, s, experts, numbers, row_of_slot, slot_of_row);
}

// ---- chunks of several ranks

struct Chunks {
  const int64_t* counts;
  int64_t ranks, experts;
};
// A block for each chunk, in the order of rows. All blocks set what lies beyond the rows in use, of which
// there are as many as slots.
__global__ void regroup_kernel(Chunks x, int64_t most, int64_t* numbers, int32_t* row_of_slot,
                               int32_t* slot_of_row) {
  const int64_t expert = block_index() / x.ranks, rank = block_index() % x.ranks;
  const int64_t own = rank * x.experts + expert, size = x.counts[own];
  int64_t slots = 0, rows = 0, all = 0, of_expert = 0;
  for (int64_t i = thread_index(); i < x.ranks * x.experts; i += block_threads()) {
    const int64_t e = i % x.experts, r = i / x.experts, n = x.counts[i];
    all += n;
    if (i < own) slots += n;
    if (e < expert || (e == expert && r < rank)) rows += n;
    if (e == expert) of_expert += n;
  }
  slots = block_sum(slots), rows = block_sum(rows), all = block_sum(all), of_expert = block_sum(of_expert);
  for (int64_t i = thread_index(); i < size; i += block_threads()) {
    row_of_slot[slots + i] = narrow<int32_t>(rows + i);
    slot_of_row[rows + i] = narrow<int32_t>(slots + i);
  }
  for (int64_t i = all + global_thread(); i < most; i += x.ranks * x.experts * block_threads())
    row_of_slot[i] = slot_of_row[i] = -1;
  if (thread_index() != 0 || rank != 0) return;
  numbers[1 + expert] = of_expert;
  if (expert == 0) numbers[0] = all;
}
void regroup(Context& c, const int64_t* counts, int64_t ranks, int64_t experts, int64_t rows,
             int64_t* numbers, int32_t* row_of_slot, int32_t* slot_of_row) {
  launch(c, {ranks * experts, 128}, regroup_kernel, Chunks{counts, ranks, experts}, rows, numbers,
         row_of_slot, slot_of_row);
}

// ---- counts

__global__ void count_dropped_kernel(PermutationShape s, const int32_t* experts, const int32_t* row_of_slot,
                                     float* dropped) {
  int64_t count = 0;
  for (int64_t slot = thread_index(); slot < s.slots(); slot += block_threads())
    count += s.index_of(experts[slot]) >= 0 && row_of_slot[slot] < 0;
  count = block_sum(count);
  if (thread_index() == 0) *dropped += static_cast<float>(count);
}
void count_dropped(Context& c, PermutationShape s, const int32_t* experts, const int32_t* row_of_slot,
                   float* dropped) {
  launch(c, {1, threads_for(s.slots(), 1, kPlanThreads)}, count_dropped_kernel, s, experts, row_of_slot,
         dropped);
}

// ---- rows

// One column: a thread for each row.
template <class T>
struct PermuteColumn {
  Array<T> x;
  const int32_t* slot_of_row;
  const float* weights;
  Array<T> y;
  int64_t topk;
  __device__ void operator()(int64_t row, int64_t) const {
    const int64_t slot = slot_of_row[row];
    const float weight = slot >= 0 && weights ? weights[slot] : 1.0f;
    y.put(row, slot >= 0 ? x.at(slot / topk) * weight : 0.0f);
  }
};
template <class T>
__global__ void permute_kernel(Array<T> x, const int32_t* slot_of_row, const float* weights, Array<T> y,
                               int64_t topk, int64_t cols) {
  constexpr int kSize = kGroup<T>;
  const int64_t row = block_index(), slot = slot_of_row[row], from = slot / topk * cols;
  const float weight = slot >= 0 && weights ? weights[slot] : 1.0f;
  for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize) {
    Group<kSize> group = {};
    if (slot >= 0) {
      group = x.load(from + i, cols - i);
      for (int k = 0; k < kSize; ++k) group[k] *= weight;
    }
    y.store(row * cols + i, cols - i, group);
  }
}
void permute(Context& c, In x, const int32_t* slot_of_row, const float* weights, Out y, int64_t rows,
             int64_t topk, int64_t cols) {
  by_type({x, y}, [&](auto type) {
    using T = decltype(type);
    if (cols == 1)
      return map<1>(c, rows, PermuteColumn<T>{array_of<T>(x), slot_of_row, weights, array_of<T>(y), topk});
    launch(c, {rows, threads_for(cols, kGroup<T>)}, permute_kernel<T>, array_of<T>(x), slot_of_row, weights,
           array_of<T>(y), topk, cols);
  });
}

template <class T>
struct UnpermuteColumn {
  Array<T> x;
  const int32_t* row_of_slot;
  const float* weights;
  Array<T> y;
  int64_t topk;
  __device__ void operator()(int64_t token, int64_t) const {
    float sum = 0;
    for (int64_t slot = token * topk; slot < (token + 1) * topk; ++slot)
      if (row_of_slot[slot] >= 0) sum += x.at(row_of_slot[slot]) * (weights ? weights[slot] : 1.0f);
    y.put(token, sum);
  }
};
template <class T>
__global__ void unpermute_kernel(Array<T> x, const int32_t* row_of_slot, const float* weights, Array<T> y,
                                 int64_t topk, int64_t cols) {
  constexpr int kSize = kGroup<T>;
  const int64_t token = block_index();
  for (int64_t i = int64_t{thread_index()} * kSize; i < cols; i += block_threads() * kSize) {
    Group<kSize> sum = {};
    for (int64_t slot = token * topk; slot < (token + 1) * topk; ++slot) {
      const int64_t row = row_of_slot[slot];
      if (row < 0) continue;
      const auto group = x.load(row * cols + i, cols - i);
      const float weight = weights ? weights[slot] : 1.0f;
      for (int k = 0; k < kSize; ++k) sum[k] += group[k] * weight;
    }
    y.store(token * cols + i, cols - i, sum);
  }
}
void unpermute(Context& c, In x, const int32_t* row_of_slot, const float* weights, Out y, int64_t tokens,
               int64_t topk, int64_t cols) {
  by_type({x, y}, [&](auto type) {
    using T = decltype(type);
    if (cols == 1)
      return map<1>(c, tokens,
                    UnpermuteColumn<T>{array_of<T>(x), row_of_slot, weights, array_of<T>(y), topk});
    launch(c, {tokens, threads_for(cols, kGroup<T>)}, unpermute_kernel<T>, array_of<T>(x), row_of_slot,
           weights, array_of<T>(y), topk, cols);
  });
}

// A warp for each slot.
template <class T>
__global__ void unpermute_backward_weights_kernel(Array<T> dy, Array<T> x, const int32_t* row_of_slot,
                                                  float* dweights, int64_t slots, int64_t topk,
                                                  int64_t cols) {
  constexpr int kSize = kGroup<T>;
  const int64_t slot = global_thread() / kWarp;
  if (slot >= slots) return;
  const int64_t row = row_of_slot[slot], token = slot / topk;
  float sum = 0;
  for (int64_t i = int64_t{lane_index()} * kSize; row >= 0 && i < cols; i += kWarp * kSize) {
    const auto a = dy.load(token * cols + i, cols - i), b = x.load(row * cols + i, cols - i);
    for (int k = 0; k < kSize; ++k) sum += a[k] * b[k];
  }
  sum = warp_sum(sum);
  if (lane_index() == 0) dweights[slot] = sum;
}
void unpermute_backward_weights(Context& c, In dy, In x, const int32_t* row_of_slot, float* dweights,
                                int64_t tokens, int64_t topk, int64_t cols) {
  constexpr int kThreads = 128;
  by_type({dy, x}, [&](auto type) {
    using T = decltype(type);
    launch(c, {ceil_div(tokens * topk * kWarp, int64_t{kThreads}), kThreads},
           unpermute_backward_weights_kernel<T>, array_of<T>(dy), array_of<T>(x), row_of_slot, dweights,
           tokens * topk, topk, cols);
  });
}

// A block for each expert and slice of columns, a thread for each column.
template <class T>
__global__ void sum_rows_kernel(Array<T> x, const int64_t* sizes, int64_t slices, int64_t cols, float* sums) {
  const int64_t expert = block_index() / slices, slice = block_index() % slices;
  const int64_t begin = sum_of_sizes(sizes, expert), end = begin + sizes[expert];
  const int64_t col = slice * block_threads() + thread_index();
  if (col >= cols) return;
  float sum = sums[expert * cols + col];
  for (int64_t first = begin; first < end; first += kSumRows) {
    float part = 0;
    for (int64_t row = first; row < first + kSumRows && row < end; ++row) part += x.at(row * cols + col);
    sum += part;
  }
  sums[expert * cols + col] = sum;
}
void sum_rows(Context& c, In x, const int64_t* sizes, int64_t experts, int64_t cols, float* sums) {
  by_type({x}, [&](auto type) {
    using T = decltype(type);
    const int threads = threads_for(cols, 1, 128);
    const int64_t slices = ceil_div(cols, int64_t{threads});
    launch(c, {experts * slices, threads}, sum_rows_kernel<T>, array_of<T>(x), sizes, slices, cols, sums);
  });
}

// A block for each row.
template <class T>
__global__ void clear_unused_kernel(Array<T> x, const int64_t* sizes, int64_t experts, int64_t cols) {
  const int64_t row = block_index();
  if (row < sum_of_sizes(sizes, experts)) return;
  for (int64_t col = thread_index(); col < cols; col += block_threads()) x.put(row * cols + col, 0);
}
void clear_unused(Context& c, Out x, const int64_t* sizes, int64_t experts, int64_t rows, int64_t cols) {
  by_type({x}, [&](auto type) {
    using T = decltype(type);
    launch(c, {rows, threads_for(cols, 1, 128)}, clear_unused_kernel<T>, array_of<T>(x), sizes, experts,
           cols);
  });
}

}  // namespace

const ExpertPermutation& expert_permutation_family() {
  static const ExpertPermutation family{.plan = plan,
                                        .plan_workspace = plan_workspace,
                                        .regroup = regroup,
                                        .count_dropped = count_dropped,
                                        .permute = permute,
                                        .unpermute = unpermute,
                                        .unpermute_backward_weights = unpermute_backward_weights,
                                        .sum_rows = sum_rows,
                                        .clear_unused = clear_unused};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
