// FlashAttention-2, forward (Dao, arXiv:2307.08691). A block of threads holds a tile of queries in shared
// memory and visits the tiles of keys and values to which any of them attends; the next tile is copied while
// the current one is multiplied. A warp holds the scores and the outputs of its rows in registers, with the
// maximum and the sum of the exponentials so far. Sums are in the order of the keys. The weights are rounded
// to the type of 16-bit heads, which is an operand of the tensor cores. Bytes moved: kernels/attention.hpp,
// and keys and values once for each tile of queries, mostly from the L2 cache.
//
// The same kernel serves generation (Flash-Decoding): the query heads of a group are rows of one tile, so
// that they share the keys that a block reads, and several blocks divide the keys of a tile (`splits`).
#pragma once

#include "kernels/cuda/attention_queries.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

// Tile sizes of the kernel for heads padded to kHead elements. kFew: one warp, for at most kFewQueries rows.
template <class T, int kHead, bool kFew>
struct ForwardTiles {
  using Element = T;
  static constexpr int kTerms = Terms<T>::kCount, kHeadSize = kHead, kRowBytes = kHead * 2 * kTerms;
  // Number of 16-row fragments of a warp. Two share the keys and values in registers, where these suffice.
  static constexpr int kM = !kFew && kTerms == 1 && kHead <= 128 ? 2 : 1;
  static constexpr int kWarps = kFew ? 1 : kRowBytes > 1024 ? 2 : 4;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kQueries = 16 * kM * kWarps;
  // Kernels with few queries are bound by memory latency; smaller tiles let more blocks run at a time.
  static constexpr int kKeys = kRowBytes <= (kFew ? 128 : 256)   ? 64
                               : kRowBytes <= (kFew ? 384 : 768) ? 32
                                                                 : 16;
  static constexpr int kN = kKeys / 8;
  // Pipeline stages of keys and values: one is copied while the other is multiplied. fp32 has one stage,
  // because its bf16 terms are computed while the tile is stored.
  static constexpr int kStages = kTerms == 1 ? 2 : 1;
  using Queries = OperandTile<T, kQueries, kHead>;
  using Keys = OperandTile<T, kKeys, kHead>;
  // In shared memory: queries, then keys and values of each stage.
  static constexpr int kKeysAt = Queries::kSize;
  static constexpr size_t kSharedBytes = 16 * (size_t{Queries::kSize} + size_t{kStages} * 2 * Keys::kSize);
  // A block may have 99 KiB on sm_86 and sm_89, of which 1 KiB is left for small arrays. The shared memory of
  // a multiprocessor holds one block of this size on sm_80 (164 KiB), two on sm_90 (228 KiB).
  static_assert(kSharedBytes <= size_t{98} << 10);
  static_assert(!kFew || kQueries == kFewQueries);
};

// ---- the state of a warp

template <class C>
struct ForwardState {
  static constexpr int kM = C::kM, kColumns = C::kHeadSize / 8;
  // Output sums, not yet divided by the sum of the exponentials.
  float out[kM][kColumns][4] = {};
  // Largest score of each row so far, and this lane's part of the sum of the exponentials.
  float max[kM][2], sum[kM][2];

  __device__ __forceinline__ ForwardState() {
    CAPSTAN_UNROLL
    for (int row = 0; row < 2 * kM; ++row) {
      max[row / 2][row % 2] = -INFINITY;
      sum[row / 2][row % 2] = 0;
    }
  }
  // Online softmax: replaces scores by exp(factor * (score - max)), with the largest score so far, and
  // rescales the sums of earlier tiles.
  __device__ __forceinline__ void add_exponentials(float factor, float (&scores)[kM][C::kN][4]) {
    const float factor2 = factor * kLog2E;
    float top[2 * kM];
    CAPSTAN_UNROLL
    for (int row = 0; row < 2 * kM; ++row) top[row] = max[row / 2][row % 2];
    for_accumulators<kM, C::kN>([&](int m, int n, int i) {
      float& of_row = top[2 * m + i / 2];
      of_row = Max()(scores[m][n][i], of_row);
    });
    reduce_lanes(top, Max(), 4);
    float base[2 * kM], correction[2 * kM];
    CAPSTAN_UNROLL
    for (int row = 0; row < 2 * kM; ++row) {
      float &before = max[row / 2][row % 2], &total = sum[row / 2][row % 2];
      // The base is 0 for rows that have attended to no key yet. Both products are rounded, so that a row
      // keeps its sums exactly where its maximum stays: nvcc would contract the second product and the
      // difference to a fused multiply-add, and the factor 2^(rounding error of the base) of every tile would
      // add up over a long sequence. The simulation contracts nothing and cannot show that.
      base[row] = top[row] == -INFINITY ? 0.0f : rounded_product(top[row], factor2);
      correction[row] = exp2_fast(rounded_product(before, factor2) - base[row]);
      before = top[row];
      total *= correction[row];
    }
    for_accumulators<kM, C::kN>([&](int m, int n, int i) {
      float& score = scores[m][n][i];
      score = exp2_fast(score * factor2 - base[2 * m + i / 2]);
      sum[m][i / 2] += score;
    });
    for_accumulators<kM, kColumns>([&](int m, int n, int i) { out[m][n][i] *= correction[2 * m + i / 2]; });
  }
};

// Adds the attention over one tile of keys to the state of a warp.
template <class C>
__device__ __forceinline__ void attend(const ForwardCall& f, const QueryBlock& q,
                                       const VisibleKeys<C::kM>& visible, const SharedQueries& shared,
                                       const Shared<Bytes16>& memory, int keys_at, const KeyTile& tile,
                                       ForwardState<C>& state) {
  using T = typename C::Element;
  const AttentionCall& c = f.c;
  const Logits logits(c);
  float scores[C::kM][C::kN][4] = {};
  multiply_rows<typename C::Queries, typename C::Keys>(memory, 0, warp_index() * 16 * C::kM, keys_at, scores);
  cap_logits<T>(logits, scores);
  if (!visible.template attends_to_all<C::kKeys>(tile))
    mask_scores(c, q, f.heads_of_row, shared, tile, -INFINITY, scores);
  state.add_exponentials(logits.factor, scores);
  if (c.dropout > 0) {
    const Dropout dropout(c, q.group * c.heads_per_group + q.head_in_group);
    const KeptPairs<C::kM, C::kN> kept(c, q, dropout, tile.position);
    for_accumulators<C::kM, C::kN>([&](int m, int n, int i) {
      if (!kept(m, n, i)) scores[m][n][i] = 0;
    });
  }
  const AFragments<T, C::kM, C::kN> weights(scores);
  multiply_columns<typename C::Keys>(memory, keys_at + C::Keys::kSize, weights, state.out);
}

// ---- results

// Offsets of the output and lse of a query.
struct QueryOffsets {
  int64_t out, lse;
};
__device__ __forceinline__ QueryOffsets offsets_of(const ForwardCall& f, const QueryBlock& q, int row) {
  const AttentionCall& c = f.c;
  const int token = row / f.heads_of_row, head = q.head_in_group + row % f.heads_of_row;
  const int rows = c.queries.rows(), of_sequence = q.first_token + token;
  return {q.split * f.out_split + f.out.strides.at(int64_t{q.b} * rows + of_sequence, q.group, head),
          q.split * f.lse_split + (int64_t{q.b} * c.heads() + q.group * c.heads_per_group + head) * rows +
              of_sequence};
}

// Factors of a row of outputs: new value = sums * mine + old value * before.
struct RowFactors {
  float mine = 0, before = 0, lse = -INFINITY;
  bool writes = true;
};
__device__ __forceinline__ RowFactors row_factors(float max, float sum, float factor, float keep) {
  RowFactors row;
  if (max == -INFINITY) return row;
  row.mine = keep / sum;
  row.lse = max * factor + std::log(sum);
  return row;
}
__device__ __forceinline__ void combine(RowFactors& row, float lse_before) {
  row.writes = row.lse != -INFINITY;
  if (!row.writes) return;
  const float high = Max()(row.lse, lse_before), mine = std::exp(row.lse - high),
              before = std::exp(lse_before - high), total = mine + before;
  row.mine *= mine / total;
  row.before = before / total;
  row.lse = high + std::log(total);
}

template <class C>
__device__ __forceinline__ void store_rows(const ForwardCall& f, const QueryBlock& q,
                                           ForwardState<C>& state) {
  const AttentionCall& c = f.c;
  const Logits logits(c);
  const float keep = keep_factor(c.dropout);
  float sums[2 * C::kM], before[2 * C::kM];
  CAPSTAN_UNROLL
  for (int i = 0; i < 2 * C::kM; ++i) {
    sums[i] = state.sum[i / 2][i % 2];
    const int row = q.first + row_of_lane<C::kM>(i / 2, i % 2);
    before[i] = f.accumulate && row < q.rows ? f.lse[offsets_of(f, q, row).lse] : -INFINITY;
  }
  reduce_lanes(sums, Sum(), 4);
  // Orders the reads of lse above before the writes below.
  sync_warp();
  CAPSTAN_UNROLL
  for (int i = 0; i < 2 * C::kM; ++i) {
    const int m = i / 2, half = i % 2, row = q.first + row_of_lane<C::kM>(m, half);
    if (row >= q.rows) continue;
    RowFactors factors = row_factors(state.max[m][half], sums[i], logits.factor, keep);
    if (f.accumulate) combine(factors, before[i]);
    if (!factors.writes) continue;
    const QueryOffsets offsets = offsets_of(f, q, row);
    if (f.lse && lane_index() % 4 == 0) f.lse[offsets.lse] = factors.lse;
    const auto value = [&](int n, int element) { return state.out[m][n][2 * half + element] * factors.mine; };
    if (f.accumulate)
      add_to_row<ForwardState<C>::kColumns>(static_cast<float*>(f.out.data.data) + offsets.out, c.v_dim,
                                            factors.before, value);
    else
      put_row<ForwardState<C>::kColumns>(f.out.data, offsets.out, c.v_dim, value);
  }
}

// ---- the kernel

template <class C>
__global__ void CAPSTAN_LAUNCH_BOUNDS(C::kThreads, 1)
    attention_forward_kernel(const CAPSTAN_KERNEL_PARAMETER ForwardCall f) {
  using T = typename C::Element;
  using Keys = typename C::Keys;
  CAPSTAN_DYNAMIC_SHARED(Bytes16, memory);
  CAPSTAN_SHARED(int, begins, C::kQueries);
  CAPSTAN_SHARED(int, of_warps, 2 * C::kWarps);
  const SharedQueries shared{begins, of_warps};
  const AttentionCall& c = f.c;
  QueryBlock q = query_block(c, f.heads_of_row, C::kQueries);
  Segments keys = c.keys;
  if (f.past) {
    q.position = *f.past;
    keys.count0 = q.position + c.queries.count0;
  }
  VisibleKeys<C::kM> visible;
  visible.template init<C::kWarps>(c, q, f.heads_of_row, shared);
  const KeyTiles<C::kKeys> tiles(keys, visible.block.min_begin, visible.block.max_end);
  const auto first = narrow<int>(int64_t{tiles.count()} * q.split / f.splits),
             last = narrow<int>(int64_t{tiles.count()} * (q.split + 1) / f.splits);

  const auto stage_of = [&](int i) { return C::kKeysAt + i % C::kStages * 2 * Keys::kSize; };
  const auto load_keys = [&](int i) {
    const KeyTile tile = tiles.at(i);
    load_tile<Keys, C::kThreads>(memory, stage_of(i), rows_of_keys<T>(c, c.k, c.qk_dim, q.b, q.group, tile));
    load_tile<Keys, C::kThreads>(memory, stage_of(i) + Keys::kSize,
                                 rows_of_keys<T>(c, c.v, c.v_dim, q.b, q.group, tile));
    commit_copies();
  };
  if (first < last) {
    load_tile<typename C::Queries, C::kThreads, true>(
        memory, 0, rows_of_queries<T>(c, c.q, c.qk_dim, q, f.heads_of_row));
    if (C::kStages > 1) load_keys(first);
  }
  ForwardState<C> state;
  for (int i = first; i < last; ++i) {
    // The load overwrites the stage, so all warps must have finished multiplying its previous tile.
    if constexpr (C::kStages == 1) {
      sync_threads();
      load_keys(i);
    }
    wait_for_copies<0>();
    sync_threads();
    if (C::kStages > 1 && i + 1 < last) load_keys(i + 1);
    const KeyTile tile = tiles.at(i);
    if (visible.warp.attends_to_any(tile.position, tile.position + C::kKeys))
      attend<C>(f, q, visible, shared, memory, stage_of(i), tile, state);
  }
  store_rows<C>(f, q, state);
}

template <class C>
void launch_forward_tiles(Context& context, const ForwardCall& f) {
  launch(context, {query_blocks(f.c, f.heads_of_row, C::kQueries) * f.splits, C::kThreads, C::kSharedBytes},
         attention_forward_kernel<C>, f);
}
template <class T>
void launch_forward(Context& context, const ForwardCall& f) {
  by_head_size<T>(f.c.qk_dim, f.c.v_dim, [&](auto head) {
    constexpr int kHead = decltype(head)::value;
    // With few queries the kernel is bound by memory, so that padded head sizes cost nothing.
    constexpr int kFewHead = kHead <= 64 ? 64 : kHead <= 128 ? 128 : 256;
    if (f.few)
      launch_forward_tiles<ForwardTiles<T, kFewHead, true>>(context, f);
    else
      launch_forward_tiles<ForwardTiles<T, kHead, false>>(context, f);
  });
}

}  // namespace capstan::kernels::CAPSTAN_GPU
