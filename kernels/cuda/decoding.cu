// Positions and token sampling of generation. Bytes moved to sample one token from n logits with k candidates
// (top-k):
//   4 n             the check for NaN and infinity, and the argmax, which is the token at temperature 0
//   4 n             k up to 2048: each block of 4096 logits keeps its k largest
//   16 n per step   larger k: a sort in global memory, with b (b + 3) / 2 + 1 steps for 2^b blocks
//   32 k            weights and their sums
#include "kernels/decoding.hpp"

#include "base/philox.hpp"
#include "kernels/common/sort_key.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/sort.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

struct Positions {
  const int32_t* past;
  int64_t tokens;
  int32_t* out;
  __device__ void operator()(int64_t i, int64_t) const { out[i] = *past + narrow<int32_t>(i % tokens); }
};
void positions(Context& c, const int32_t* past, int64_t batch, int64_t tokens, int32_t* out) {
  map<1>(c, batch * tokens, Positions{past, tokens, out});
}

__global__ void advance_kernel(int32_t* past, int32_t tokens) {
  if (thread_index() == 0) *past += tokens;
}
void advance(Context& c, int32_t* past, int64_t tokens) {
  launch(c, {1, kWarp}, advance_kernel, past, narrow<int32_t>(tokens));
}

// ---- candidates: logits with their token ids, by sort_key

// Smaller than the key of every finite logit.
constexpr SortKey kNotFinite = 0;

__device__ int32_t token_id(SortKey key) {
  return narrow<int32_t>(index_of_key(key));
}

struct LogitRows {
  Array<float> x;
  int64_t cols, row_stride;
  __device__ SortKey key(int64_t row, int64_t i) const {
    return i < cols ? sort_key(x.at(row * row_stride + i), i) : kPaddingKey;
  }
};

// tokens[r] = the most likely token of row r; -1 if a logit of the row is not finite.
__global__ void argmax_kernel(LogitRows logits, int32_t* tokens) {
  constexpr int kSize = kGroup<float>;
  SortKey first = kPaddingKey;
  for (int64_t i = int64_t{thread_index()} * kSize; i < logits.cols; i += block_threads() * kSize) {
    const auto group = logits.x.load(block_index() * logits.row_stride + i, logits.cols - i);
    for (int k = 0; k < kSize && i + k < logits.cols; ++k) {
      const bool finite = std::fabs(group[k]) < INFINITY;
      first = Min<SortKey>()(finite ? sort_key(group[k], i + k) : kNotFinite, first);
    }
  }
  first = block_reduce(first, kPaddingKey, Min<SortKey>());
  if (thread_index() == 0) tokens[block_index()] = first == kNotFinite ? -1 : token_id(first);
}

struct MakeCandidates {
  LogitRows logits;
  int64_t row_keys;
  SortKey* keys;
  __device__ void operator()(int64_t i, int64_t) const {
    keys[i] = logits.key(i / row_keys, i & (row_keys - 1));
  }
};

// Input of a later round: the keys that the blocks of the round before have kept.
struct KeptCandidates {
  const SortKey* keys;
  int64_t cols;
  __device__ SortKey key(int64_t row, int64_t i) const {
    return i < cols ? keys[row * cols + i] : kPaddingKey;
  }
};
// Sorts each `count` candidates of a row and keeps the first `kept`.
template <class From>
__global__ void keep_first_kernel(From from, int count, int64_t blocks, int64_t kept, SortKey* to) {
  CAPSTAN_SHARED(SortKey, own, kBlockKeys);
  const int64_t row = block_index() / blocks, block = block_index() % blocks;
  for (int i = thread_index(); i < count; i += block_threads()) own[i] = from.key(row, block * count + i);
  sync_threads();
  sort_shared(own, count, 0, 2, count);
  for (int64_t i = thread_index(); i < kept; i += block_threads()) to[block_index() * kept + i] = own[i];
}

// ---- weights of the candidates, and sampling

// Number of candidates whose weights a thread adds. The candidates of a block are a tile.
constexpr int kSumEach = 4;

struct Candidates {
  // [rows, row_keys]; the first `count` keys of a row are its candidates.
  const SortKey* keys;
  int64_t row_keys, count, tiles;
  // Weights [rows, count], and their sums by tile [rows, tiles].
  double *weights, *sums;
  // The first candidate of this thread in a tile, and the end of the tile.
  __device__ int64_t first_in(int64_t tile) const {
    return (tile * block_threads() + thread_index()) * kSumEach;
  }
  __device__ int64_t end_of(int64_t tile) const {
    const int64_t end = (tile + 1) * block_threads() * kSumEach;
    return count < end ? count : end;
  }
};
__global__ void weights_kernel(Candidates c, double temperature) {
  const int64_t row = block_index() / c.tiles, tile = block_index() % c.tiles;
  const SortKey* keys = c.keys + row * c.row_keys;
  const auto top = static_cast<double>(number_of_key(keys[0]));
  double sum = 0;
  for (int k = 0; k < kSumEach; ++k) {
    const int64_t i = c.first_in(tile) + k;
    if (i >= c.count) break;
    const double weight = std::exp((static_cast<double>(number_of_key(keys[i])) - top) / temperature);
    c.weights[row * c.count + i] = weight;
    sum += weight;
  }
  sum = block_sum(sum);
  if (thread_index() == 0) c.sums[row * c.tiles + tile] = sum;
}

// Exclusive prefix sum over the threads of the block.
__device__ double block_prefix(double value) {
  CAPSTAN_SHARED(double, of_warps, kWarp);
  double inclusive = value;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const double other = shuffle_up(inclusive, distance);
    if (lane_index() >= distance) inclusive += other;
  }
  double before = shuffle_up(inclusive, 1);
  if (lane_index() == 0) before = 0;
  if (lane_index() == kWarp - 1) of_warps[warp_index()] = inclusive;
  sync_threads();
  double earlier = 0;
  for (int warp = 0; warp < warp_index(); ++warp) earlier += of_warps[warp];
  // The next call overwrites of_warps.
  sync_threads();
  return earlier + before;
}

// The shortest prefix of the candidates whose sum of weights is above `limit` (`reaches`: at least `limit`):
// its last candidate and its sum; all candidates if there is none. All threads of the block call
// find_prefix() together.
struct Prefix {
  int64_t candidate;
  double sum;
};
__device__ Prefix find_prefix(const Candidates& c, int64_t row, double limit, bool reaches) {
  CAPSTAN_SHARED(double, sum_there, 1);
  const auto enough = [&](double sum) { return reaches ? sum >= limit : sum > limit; };
  const double* sums = c.sums + row * c.tiles;
  int64_t tile = 0;
  double before = 0;
  while (tile + 1 < c.tiles && !enough(before + sums[tile])) before += sums[tile++];

  const int64_t first = c.first_in(tile), end = c.end_of(tile);
  double weights[kSumEach] = {}, own = 0;
  for (int k = 0; k < kSumEach; ++k) {
    if (first + k < end) weights[k] = c.weights[row * c.count + first + k];
    own += weights[k];
  }
  const double earlier = before + block_prefix(own);
  const auto sum_with = [&](int64_t k) {
    double sum = earlier;
    for (int i = 0; i < kSumEach; ++i) sum += i <= k ? weights[i] : 0.0;
    return sum;
  };
  SortKey found = kPaddingKey;
  for (int k = kSumEach - 1; k >= 0; --k)
    if (first + k < end && enough(sum_with(k))) found = static_cast<SortKey>(first + k);
  found = block_reduce(found, kPaddingKey, Min<SortKey>());
  // Rounding may leave the sum of the tile below the limit; then its last candidate is taken.
  const int64_t candidate = found == kPaddingKey ? end - 1 : static_cast<int64_t>(found);
  if (candidate / kSumEach == first / kSumEach) sum_there[0] = sum_with(candidate % kSumEach);
  sync_threads();
  const double sum = sum_there[0];
  // The next call overwrites sum_there.
  sync_threads();
  return {candidate, sum};
}

__global__ void sample_kernel(Candidates c, SamplingOptions options, const int32_t* position,
                              int32_t* tokens) {
  const int64_t row = block_index();
  // argmax_kernel() has found a logit that is not finite.
  if (tokens[row] < 0) return;
  double total = 0;
  for (int64_t tile = 0; tile < c.tiles; ++tile) total += c.sums[row * c.tiles + tile];
  Prefix last{c.count - 1, total};
  if (options.top_p < 1.0) last = find_prefix(c, row, options.top_p * total, true);
  const PhiloxKey key = philox_key(options.seed, purpose::sampling, static_cast<uint64_t>(*position));
  const double limit = uniform_at(key, static_cast<uint64_t>(row)) * last.sum;
  const int64_t sampled = find_prefix(c, row, limit, false).candidate;
  if (thread_index() == 0)
    tokens[row] = token_id(c.keys[row * c.row_keys + (sampled < last.candidate ? sampled : last.candidate)]);
}

// ---- the steps of sampling

// Sizes of one row.
struct SamplePlan {
  int64_t kept;
  int threads;
  int64_t tiles;
  // True: one sort of all candidates. False: rounds in which each block keeps its first `kept`.
  bool sorts;
  // Number of keys after the sort or the first round, and after the second round.
  int64_t keys, later_keys;

  SamplePlan(const SamplingOptions& options, int64_t cols)
      : kept(options.top_k > 0 ? std::min(options.top_k, cols) : cols),
        threads(threads_for(kept, kSumEach)),
        tiles(ceil_div(kept, int64_t{threads} * kSumEach)),
        sorts(kept > kBlockKeys / 2),
        keys(sorts ? sorted_keys(cols) : after_round(cols)),
        later_keys(sorts || keys == kept ? 0 : after_round(keys)) {}
  int64_t after_round(int64_t candidates) const { return ceil_div(candidates, int64_t{kBlockKeys}) * kept; }
  size_t bytes() const {
    return static_cast<size_t>(keys + later_keys) * sizeof(SortKey) +
           static_cast<size_t>(kept + tiles) * sizeof(double);
  }
};
WorkspaceSize sample_workspace(SamplingOptions options, int64_t rows, int64_t cols) {
  if (options.temperature <= 0 || rows <= 0 || cols <= 0) return {};
  return {static_cast<size_t>(rows) * SamplePlan(options, cols).bytes(), 0};
}

template <class From>
void keep_first(Context& c, const From& from, int64_t rows, int64_t kept, SortKey* to) {
  const int count = static_cast<int>(std::min<int64_t>(kBlockKeys, sorted_keys(from.cols)));
  const int64_t blocks = ceil_div(from.cols, int64_t{kBlockKeys});
  launch(c, {rows * blocks, sort_threads(count)}, keep_first_kernel<From>, from, count, blocks, kept, to);
}
// Returns the keys [rows, row_keys] whose first ones are the candidates in order.
const SortKey* order_candidates(Context& c, const LogitRows& logits, int64_t rows, const SamplePlan& plan,
                                SortKey* keys, int64_t& row_keys) {
  if (plan.sorts) {
    row_keys = plan.keys;
    map<1>(c, rows * row_keys, MakeCandidates{logits, row_keys, keys});
    sort_keys(c, keys, rows, row_keys);
    return keys;
  }
  keep_first(c, logits, rows, plan.kept, keys);
  SortKey* other = keys + rows * plan.keys;
  for (row_keys = plan.keys; row_keys > plan.kept; row_keys = plan.after_round(row_keys)) {
    keep_first(c, KeptCandidates{keys, row_keys}, rows, plan.kept, other);
    std::swap(keys, other);
  }
  return keys;
}

void sample(Context& c, SamplingOptions options, const float* logits, int64_t rows, int64_t cols,
            int64_t row_stride, const int32_t* position, int32_t* tokens) {
  if (rows <= 0 || cols <= 0) return;
  const bool samples = options.temperature > 0;
  auto* workspace = samples ? workspace_of<SortKey>(c, sample_workspace(options, rows, cols)) : nullptr;
  if (samples && !workspace) return;
  const LogitRows all{array_of<float>(In{logits, DType::f32}), cols, row_stride};
  launch(c, {rows, threads_for(cols, kGroup<float>, 1024)}, argmax_kernel, all, tokens);
  if (!samples) return;
  const SamplePlan plan(options, cols);
  Candidates candidates;
  candidates.count = plan.kept;
  candidates.tiles = plan.tiles;
  candidates.keys = order_candidates(c, all, rows, plan, workspace, candidates.row_keys);
  candidates.weights = reinterpret_cast<double*>(workspace + rows * (plan.keys + plan.later_keys));
  candidates.sums = candidates.weights + rows * plan.kept;
  launch(c, {rows * plan.tiles, plan.threads}, weights_kernel, candidates, options.temperature);
  launch(c, {rows, plan.threads}, sample_kernel, candidates, options, position, tokens);
}

}  // namespace

const Decoding& decoding_family() {
  static const Decoding family{
      .positions = positions, .advance = advance, .sample = sample, .sample_workspace = sample_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
