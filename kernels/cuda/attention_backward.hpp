// FlashAttention-2, backward, as two kernels, so that no two blocks add to the same sums: one for the
// gradients of queries, one block per tile of queries, and one for those of keys and values, one block per
// tile of keys of a group, which visits the queries of all heads of the group. The order of every sum is that
// of keys, or of heads and queries. With the sums of dout * out of each query (D, attention.cu):
//
//   P = exp(scale q k^T - lse); with dropout M (0 or 1/(1-p)): dV = (P M)^T dO, dP = (dO V^T) M,
//   dS = P (dP - D), dQ = scale dS K, dK = scale dS^T Q; with capped logits L = c tanh(scale q k^T / c) in
//   place of scale q k^T, dS also times 1 - (L / c)^2
//
// Both kernels compute P and dP: seven matrix products instead of five.
// Bytes moved: kernels/attention.hpp, and keys and values once for each tile of queries, queries and dout
// once for each tile of keys, mostly from the L2 cache.
//
// In the second kernel keys are the rows of P^T and dS^T, so that these stay in registers as A fragments.
#pragma once

#include "kernels/cuda/attention_queries.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

// The tiles of the two kernels for heads padded to kHead elements; ForwardTiles says why. Two blocks of
// kSharedBytes fit into a multiprocessor of sm_90.
template <class T, int kHead>
struct QueryGradientTiles {
  using Element = T;
  static constexpr int kTerms = Terms<T>::kCount, kHeadSize = kHead, kRowBytes = kHead * 2 * kTerms;
  static constexpr int kM = kTerms == 1 && kHead <= 128 ? 2 : 1;
  static constexpr int kWarps = kRowBytes > 1024 ? 1 : kRowBytes > 512 ? 2 : 4;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kQueries = 16 * kM * kWarps;
  static constexpr int kKeys = kRowBytes == 512 || kRowBytes > 1024 ? 16 : 32;
  static constexpr int kN = kKeys / 8;
  static constexpr int kStages = kTerms == 1 ? 2 : 1;
  using Queries = OperandTile<T, kQueries, kHead>;
  using Keys = OperandTile<T, kKeys, kHead>;
  // In shared memory: queries, dout, then keys and values of each stage.
  static constexpr int kDoutAt = Queries::kSize, kKeysAt = 2 * Queries::kSize;
  static constexpr size_t kSharedBytes =
      16 * (size_t{2} * Queries::kSize + size_t{kStages} * 2 * Keys::kSize);
  static_assert(kSharedBytes <= size_t{98} << 10);
};
template <class T, int kHead>
struct KeyGradientTiles {
  using Element = T;
  static constexpr int kTerms = Terms<T>::kCount, kHeadSize = kHead, kRowBytes = kHead * 2 * kTerms;
  static constexpr int kM = kTerms == 1 && kHead <= 64 ? 2 : 1;
  static constexpr int kWarps = kRowBytes > 1024 ? 1 : kRowBytes > 512 ? 2 : 4;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kKeys = 16 * kM * kWarps;
  // As many as the registers hold scores of beside the gradients, without spills in the loop. A larger tile
  // has fewer barriers, and reads the keys from shared memory less often.
  static constexpr int kQueries = kRowBytes >= 512 ? 16 : kTerms == 1 && kHead == 128 ? 64 : 32;
  static constexpr int kN = kQueries / 8;
  static constexpr int kStages = kTerms == 1 ? 2 : 1;
  // For larger heads the gradients of keys and of values do not both fit into registers; separate blocks
  // compute them.
  static constexpr int kResults = kHead <= 128 ? 2 : 1, kBlocks = 2 / kResults;
  using Keys = OperandTile<T, kKeys, kHead>;
  using Queries = OperandTile<T, kQueries, kHead>;
  // In shared memory: keys, values, then queries and dout of each stage.
  static constexpr int kValuesAt = Keys::kSize, kQueriesAt = 2 * Keys::kSize;
  static constexpr size_t kSharedBytes =
      16 * (size_t{2} * Keys::kSize + size_t{kStages} * 2 * Queries::kSize);
  // Leaves 3 KiB for the statistics of the queries.
  static_assert(kSharedBytes <= size_t{96} << 10);
};

// Derivative of the logit soft cap, computed from the probability p: the capped logit in units of log2 is
// log2(p) + lse2.
__device__ __forceinline__ float capped_slope(float p, float lse2, float factor2) {
  const float x = (std::log2(p) + lse2) / factor2;
  return p > 0 ? 1.0f - x * x : 0.0f;
}

// ---- the gradient of queries

template <int kM>
struct LaneStatistics {
  // Log-sum-exp of the lane's rows, in units of log2.
  float lse2[kM][2];
  float dots[kM][2];
  __device__ __forceinline__ LaneStatistics(const BackwardCall& b, const QueryBlock& q) {
    const AttentionCall& c = b.c;
    const int rows = c.queries.rows();
    const int64_t head =
        (int64_t{q.b} * c.heads() + q.group * c.heads_per_group + q.head_in_group) * rows + q.first_token;
    CAPSTAN_UNROLL
    for (int m = 0; m < kM; ++m) {
      CAPSTAN_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = q.first + row_of_lane<kM>(m, i);
        lse2[m][i] = row < q.rows ? b.lse[head + row] * kLog2E : 0.0f;
        dots[m][i] = row < q.rows ? b.statistics.dots[head + row] : 0.0f;
      }
    }
  }
};

// Adds the contribution of one tile of keys to the query gradients of a warp.
template <class C, int kColumns>
__device__ __forceinline__ void add_query_gradients(const BackwardCall& b, const QueryBlock& q,
                                                    const VisibleKeys<C::kM>& visible,
                                                    const SharedQueries& shared,
                                                    const LaneStatistics<C::kM>& statistics,
                                                    const Shared<Bytes16>& memory, int keys_at,
                                                    const KeyTile& tile, float (&dq)[C::kM][kColumns][4]) {
  using T = typename C::Element;
  constexpr int kM = C::kM, kN = C::kN;
  const AttentionCall& c = b.c;
  const Logits logits(c);
  const float factor2 = logits.factor * kLog2E;
  const int first_row = warp_index() * 16 * kM;
  float p[kM][kN][4] = {}, ds[kM][kN][4] = {};
  multiply_rows<typename C::Queries, typename C::Keys>(memory, 0, first_row, keys_at, p);
  cap_logits<T>(logits, p);
  for_accumulators<kM, kN>(
      [&](int m, int n, int i) { p[m][n][i] = exp2_fast(p[m][n][i] * factor2 - statistics.lse2[m][i / 2]); });
  if (!visible.template attends_to_all<C::kKeys>(tile)) mask_scores(c, q, 1, shared, tile, 0.0f, p);
  multiply_rows<typename C::Queries, typename C::Keys>(memory, C::kDoutAt, first_row,
                                                       keys_at + C::Keys::kSize, ds);
  if (c.dropout > 0) {
    const Dropout dropout(c, q.group * c.heads_per_group + q.head_in_group);
    const KeptPairs<kM, kN> kept(c, q, dropout, tile.position);
    const float keep = keep_factor(c.dropout);
    for_accumulators<kM, kN>(
        [&](int m, int n, int i) { ds[m][n][i] = kept(m, n, i) ? ds[m][n][i] * keep : 0.0f; });
  }
  for_accumulators<kM, kN>(
      [&](int m, int n, int i) { ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - statistics.dots[m][i / 2]); });
  if (logits.capped)
    for_accumulators<kM, kN>([&](int m, int n, int i) {
      ds[m][n][i] *= capped_slope(p[m][n][i], statistics.lse2[m][i / 2], factor2);
    });
  const AFragments<T, kM, kN> weights(ds);
  multiply_columns<typename C::Keys>(memory, keys_at, weights, dq);
}

template <class C>
__global__ void CAPSTAN_LAUNCH_BOUNDS(C::kThreads, 1)
    attention_query_gradient_kernel(const CAPSTAN_KERNEL_PARAMETER BackwardCall b) {
  using T = typename C::Element;
  using Keys = typename C::Keys;
  constexpr int kColumns = C::kHeadSize / 8;
  CAPSTAN_DYNAMIC_SHARED(Bytes16, memory);
  CAPSTAN_SHARED(int, begins, C::kQueries);
  CAPSTAN_SHARED(int, of_warps, 2 * C::kWarps);
  const SharedQueries shared{begins, of_warps};
  const AttentionCall& c = b.c;
  const QueryBlock q = query_block(c, 1, C::kQueries);
  VisibleKeys<C::kM> visible;
  visible.template init<C::kWarps>(c, q, 1, shared);
  const LaneStatistics<C::kM> statistics(b, q);
  const KeyTiles<C::kKeys> tiles(c.keys, visible.block.min_begin, visible.block.max_end);
  const int count = tiles.count();

  const auto stage_of = [&](int i) { return C::kKeysAt + i % C::kStages * 2 * Keys::kSize; };
  const auto load_keys = [&](int i) {
    const KeyTile tile = tiles.at(i);
    load_tile<Keys, C::kThreads>(memory, stage_of(i), rows_of_keys<T>(c, c.k, c.qk_dim, q.b, q.group, tile));
    load_tile<Keys, C::kThreads>(memory, stage_of(i) + Keys::kSize,
                                 rows_of_keys<T>(c, c.v, c.v_dim, q.b, q.group, tile));
    commit_copies();
  };
  if (count > 0) {
    using Queries = typename C::Queries;
    load_tile<Queries, C::kThreads, true>(memory, 0, rows_of_queries<T>(c, c.q, c.qk_dim, q, 1));
    load_tile<Queries, C::kThreads, true>(memory, C::kDoutAt, rows_of_queries<T>(c, b.dout, c.v_dim, q, 1));
    if (C::kStages > 1) load_keys(0);
  }
  float dq[C::kM][kColumns][4] = {};
  for (int i = 0; i < count; ++i) {
    // The load overwrites the stage, so all warps must have finished multiplying its previous tile.
    if constexpr (C::kStages == 1) {
      sync_threads();
      load_keys(i);
    }
    wait_for_copies<0>();
    sync_threads();
    if (C::kStages > 1 && i + 1 < count) load_keys(i + 1);
    const KeyTile tile = tiles.at(i);
    if (visible.warp.attends_to_any(tile.position, tile.position + C::kKeys))
      add_query_gradients<C>(b, q, visible, shared, statistics, memory, stage_of(i), tile, dq);
  }
  // Nothing to add.
  if (b.add_dq && count == 0) return;
  CAPSTAN_UNROLL
  for (int row = 0; row < 2 * C::kM; ++row) {
    const int m = row / 2, half = row % 2, in_segment = q.first + row_of_lane<C::kM>(m, half);
    if (in_segment >= q.rows) continue;
    const int64_t token = int64_t{q.b} * c.queries.rows() + q.first_token + in_segment,
                  at = b.dq.strides.at(token, q.group, q.head_in_group);
    const auto value = [&](int n, int i) { return dq[m][n][2 * half + i] * c.scale; };
    if (b.add_dq)
      add_to_row<kColumns>(static_cast<float*>(b.dq.data.data) + at, c.qk_dim, 1.0f, value);
    else
      put_row<kColumns>(b.dq.data, at, c.qk_dim, value);
  }
}

// ---- the gradients of keys and values

// A tile of query rows, the same for each sequence.
struct QueryTile {
  // Rows of the segment, first row of the tile, and position and row of the first query of the segment.
  int rows, first, position, first_token;
};
template <int kRows>
__device__ __forceinline__ QueryTile query_tile(const Segments& queries, int tile) {
  const int before = query_tiles(queries, 1, kRows, 0), segment = tile < before ? 0 : 1;
  return {queries.count(segment), (segment == 0 ? tile : tile - before) * kRows, queries.begin(segment),
          queries.first_row(segment)};
}

// The key tile of a block of threads.
struct KeyBlock {
  int b, group, part;
  KeyTile tile;
};
template <int kKeys, int kParts>
__device__ __forceinline__ KeyBlock key_block(const AttentionCall& c) {
  const int before = tiles_of_segment<kKeys>(c.keys, 0), tiles = before + tiles_of_segment<kKeys>(c.keys, 1);
  auto i = narrow<int>(block_index());
  KeyBlock block;
  block.part = i % kParts;
  i /= kParts;
  block.group = i % c.groups;
  i /= c.groups;
  // Earlier keys, to which more queries attend, run first.
  const int tile = i % tiles, segment = tile < before ? 0 : 1, begin = c.keys.begin(segment);
  block.b = i / tiles;
  block.tile = {(begin & ~3) + (segment == 0 ? tile : tile - before) * kKeys, begin,
                begin + c.keys.count(segment), c.keys.first_row(segment)};
  return block;
}

// Query tiles that a block visits for each head: those from `first` to `last` that attend to any of its keys.
struct QueryRange {
  int first, last;
};
// The keys of a warp to which a tile of queries attends: none; some queries to some keys; all to all.
enum class Visible { none, some, all };
// A tile of queries of one head.
struct QueryStep {
  int head, tile;
  Visible visible;
};
__device__ __forceinline__ KeyBounds bounds_of(const BackwardCall& b, const KeyBlock& k, int tiles,
                                               int tile) {
  return std::bit_cast<KeyBounds>(load_16(&b.statistics.tiles[k.b * tiles + tile]));
}
template <int kKeys>
__device__ __forceinline__ bool attends_to_block(const KeyBounds& queries, const KeyBlock& k) {
  const KeyTile& keys = k.tile;
  return queries.attends_to_any(keys.position > keys.begin ? keys.position : keys.begin,
                                keys.position + kKeys < keys.end ? keys.position + kKeys : keys.end);
}
// Called by all threads of the block, which search together.
template <class C>
__device__ __forceinline__ QueryRange query_range(const BackwardCall& b, const KeyBlock& k, int tiles,
                                                  const Shared<int>& of_warps) {
  int range[2] = {-tiles, -1};
  for (int i = thread_index(); i < tiles; i += C::kThreads)
    if (attends_to_block<C::kKeys>(bounds_of(b, k, tiles, i), k)) {
      range[0] = Max<int>()(range[0], -i);
      range[1] = i;
    }
  reduce_lanes(range, Max<int>(), kWarp);
  if (C::kWarps > 1) {
    if (lane_index() == 0) {
      of_warps[2 * warp_index()] = range[0];
      of_warps[2 * warp_index() + 1] = range[1];
    }
    sync_threads();
    for (int i = 0; i < C::kWarps; ++i) {
      range[0] = Max<int>()(range[0], of_warps[2 * i]);
      range[1] = Max<int>()(range[1], of_warps[2 * i + 1]);
    }
  }
  return {-range[0], range[1]};
}
template <class C>
__device__ __forceinline__ QueryStep next_step(const BackwardCall& b, const KeyBlock& k, int tiles,
                                               const QueryRange& range, QueryStep step) {
  KeyBounds bounds;
  do {
    if (++step.tile > range.last) {
      step.tile = range.first;
      if (++step.head == b.c.heads_per_group) break;
    }
    bounds = bounds_of(b, k, tiles, step.tile);
  } while (!attends_to_block<C::kKeys>(bounds, k));
  const int first_key = k.tile.position + warp_index() * 16 * C::kM, last_key = first_key + 16 * C::kM;
  step.visible = Visible::some;
  if (!bounds.attends_to_any(first_key, last_key) || first_key >= k.tile.end)
    step.visible = Visible::none;
  else if (first_key >= k.tile.begin && last_key <= k.tile.end && bounds.attends_to_all(first_key, last_key))
    step.visible = Visible::all;
  return step;
}

// Statistics of the queries of each pipeline stage, in shared memory.
struct SharedStatistics {
  Shared<float> lse, dots;
  Shared<int> begins;
};

template <class C>
struct KeyGradients {
  static constexpr int kColumns = C::kHeadSize / 8;
  // Accumulators of the gradients of values, then of keys; or of one of the two.
  float accumulators[C::kResults][C::kM][kColumns][4] = {};
};

// Masks scores whose rows are keys and whose columns are queries.
template <class C>
__device__ __forceinline__ void mask_transposed_scores(const AttentionCall& c, const QueryTile& queries,
                                                       const KeyTile& keys, int first_key,
                                                       const Shared<int>& begins, int stage,
                                                       float (&p)[C::kM][C::kN][4]) {
  for_accumulators<C::kM, C::kN>([&](int m, int n, int i) {
    const int query = 8 * n + lane_column() + i % 2, key = first_key + 16 * m + 8 * (i / 2) + lane_row();
    const int begin = begins[stage + query], end = end_of_keys(c, queries.position + queries.first + query);
    if (key < begin || key >= end || key < keys.begin || key >= keys.end) p[m][n][i] = 0;
  });
}

// Adds the contribution of one query tile to the gradients of a warp's keys and values. stage: pipeline stage
// of the statistics.
template <class C>
__device__ __forceinline__ void add_key_gradients(const BackwardCall& b, const KeyBlock& k,
                                                  const QueryStep& step, const Shared<Bytes16>& memory,
                                                  int queries_at, const SharedStatistics& statistics,
                                                  int stage, KeyGradients<C>& gradients) {
  using T = typename C::Element;
  using Keys = typename C::Keys;
  using Queries = typename C::Queries;
  constexpr int kM = C::kM, kN = C::kN;
  const AttentionCall& c = b.c;
  const int first_row = warp_index() * 16 * kM, first_key = k.tile.position + first_row;
  if (step.visible == Visible::none) return;

  const QueryTile queries = query_tile<C::kQueries>(c.queries, step.tile);
  const Logits logits(c);
  const float factor2 = logits.factor * kLog2E;
  const auto lse2_of = [&](int n, int i) {
    return statistics.lse[stage + 8 * n + lane_column() + i % 2] * kLog2E;
  };
  float p[kM][kN][4] = {};
  multiply_rows<Keys, Queries>(memory, 0, first_row, queries_at, p);
  cap_logits<T>(logits, p);
  for_accumulators<kM, kN>(
      [&](int m, int n, int i) { p[m][n][i] = exp2_fast(p[m][n][i] * factor2 - lse2_of(n, i)); });
  if (step.visible != Visible::all)
    mask_transposed_scores<C>(c, queries, k.tile, first_key, statistics.begins, stage, p);

  const bool drops = c.dropout > 0;
  KeptQueries<kN> kept[kM];
  if (drops) {
    const Dropout dropout(c, k.group * c.heads_per_group + step.head);
    const int64_t* const rows =
        c.dropout_rows + int64_t{k.b} * c.queries.rows() + queries.first_token + queries.first;
    const auto row_of = [&](int query) { return queries.first + query < queries.rows ? rows[query] : 0; };
    CAPSTAN_UNROLL
    for (int m = 0; m < kM; ++m) kept[m].init(dropout, row_of, first_key + 16 * m);
  }
  if (C::kResults == 2 || k.part == 0) {
    float weights[kM][kN][4];
    for_accumulators<kM, kN>([&](int m, int n, int i) { weights[m][n][i] = p[m][n][i]; });
    if (drops)
      for_accumulators<kM, kN>([&](int m, int n, int i) {
        if (!kept[m](n, i)) weights[m][n][i] = 0;
      });
    const AFragments<T, kM, kN> a(weights);
    multiply_columns<Queries>(memory, queries_at + Queries::kSize, a, gradients.accumulators[0]);
  }
  if (C::kResults == 1 && k.part == 0) return;
  float ds[kM][kN][4] = {};
  multiply_rows<Keys, Queries>(memory, C::kValuesAt, first_row, queries_at + Queries::kSize, ds);
  if (drops) {
    const float keep = keep_factor(c.dropout);
    for_accumulators<kM, kN>(
        [&](int m, int n, int i) { ds[m][n][i] = kept[m](n, i) ? ds[m][n][i] * keep : 0.0f; });
  }
  for_accumulators<kM, kN>([&](int m, int n, int i) {
    ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - statistics.dots[stage + 8 * n + lane_column() + i % 2]);
  });
  if (logits.capped)
    for_accumulators<kM, kN>(
        [&](int m, int n, int i) { ds[m][n][i] *= capped_slope(p[m][n][i], lse2_of(n, i), factor2); });
  const AFragments<T, kM, kN> a(ds);
  multiply_columns<Queries>(memory, queries_at, a, gradients.accumulators[C::kResults - 1]);
}

// Starts to load a tile of queries and dout with their statistics.
template <class C>
__device__ __forceinline__ void load_queries(const BackwardCall& b, const KeyBlock& k, const QueryStep& step,
                                             const Shared<Bytes16>& memory, int queries_at,
                                             const SharedStatistics& statistics, int stage) {
  using T = typename C::Element;
  using Queries = typename C::Queries;
  const AttentionCall& c = b.c;
  const QueryTile tile = query_tile<C::kQueries>(c.queries, step.tile);
  const int rows = c.queries.rows();
  const QueryBlock q{k.b, k.group, step.head, 0, tile.position, tile.first_token, tile.rows, tile.first};
  load_tile<Queries, C::kThreads>(memory, queries_at, rows_of_queries<T>(c, c.q, c.qk_dim, q, 1));
  load_tile<Queries, C::kThreads>(memory, queries_at + Queries::kSize,
                                  rows_of_queries<T>(c, b.dout, c.v_dim, q, 1));
  const int64_t of_token = int64_t{k.b} * rows + tile.first_token,
                of_head = (int64_t{k.b} * c.heads() + k.group * c.heads_per_group + step.head) * rows +
                          tile.first_token;
  for (int i = thread_index(); i < C::kQueries; i += C::kThreads) {
    const bool there = tile.first + i < tile.rows;
    const int row = there ? tile.first + i : 0, bytes = there ? 4 : 0;
    copy_part_async<4>(statistics.lse, stage + i, b.lse + of_head + row, bytes);
    copy_part_async<4>(statistics.dots, stage + i, b.statistics.dots + of_head + row, bytes);
    copy_part_async<4>(statistics.begins, stage + i, b.statistics.begins + of_token + row, bytes);
  }
  commit_copies();
}

template <class C>
__device__ __forceinline__ void store_key_gradients(const BackwardCall& b, const KeyBlock& k,
                                                    const KeyGradients<C>& gradients) {
  const AttentionCall& c = b.c;
  CAPSTAN_UNROLL
  for (int row = 0; row < 2 * C::kM; ++row) {
    const int m = row / 2, half = row % 2, key = k.tile.position + row_of_lane<C::kM>(m, half);
    if (key < k.tile.begin || key >= k.tile.end) continue;
    const int64_t token = int64_t{k.b} * c.keys.rows() + k.tile.first_row + key - k.tile.begin;
    constexpr int kColumns = KeyGradients<C>::kColumns;
    const float keep = keep_factor(c.dropout);
    if (C::kResults == 2 || k.part == 0)
      put_row<kColumns>(b.dv.data, b.dv.strides.at(token, k.group), c.v_dim,
                        [&](int n, int i) { return gradients.accumulators[0][m][n][2 * half + i] * keep; });
    if (C::kResults == 2 || k.part == 1)
      put_row<kColumns>(b.dk.data, b.dk.strides.at(token, k.group), c.qk_dim, [&](int n, int i) {
        return gradients.accumulators[C::kResults - 1][m][n][2 * half + i] * c.scale;
      });
  }
}

template <class C>
__global__ void CAPSTAN_LAUNCH_BOUNDS(C::kThreads, 1)
    attention_key_gradient_kernel(const CAPSTAN_KERNEL_PARAMETER BackwardCall b) {
  using T = typename C::Element;
  CAPSTAN_DYNAMIC_SHARED(Bytes16, memory);
  CAPSTAN_SHARED(int, of_warps, 2 * C::kWarps);
  CAPSTAN_SHARED(float, lse, C::kStages* C::kQueries);
  CAPSTAN_SHARED(float, dots, C::kStages* C::kQueries);
  CAPSTAN_SHARED(int, begins, C::kStages* C::kQueries);
  const SharedStatistics statistics{lse, dots, begins};
  const AttentionCall& c = b.c;
  const KeyBlock k = key_block<C::kKeys, C::kBlocks>(c);
  const int tiles = query_tiles(c.queries, 1, C::kQueries, 0) + query_tiles(c.queries, 1, C::kQueries, 1);
  const QueryRange range = query_range<C>(b, k, tiles, of_warps);

  const auto stage_of = [&](int i) { return C::kQueriesAt + i % C::kStages * 2 * C::Queries::kSize; };
  const auto load = [&](const QueryStep& step, int i) {
    load_queries<C>(b, k, step, memory, stage_of(i), statistics, i % C::kStages * C::kQueries);
  };
  const auto is_step = [&](const QueryStep& step) { return step.head < c.heads_per_group; };
  QueryStep step{c.heads_per_group, 0, {}};
  if (range.first <= range.last) step = next_step<C>(b, k, tiles, range, {0, range.first - 1, {}});
  if (is_step(step)) {
    using Keys = typename C::Keys;
    load_tile<Keys, C::kThreads, true>(memory, 0, rows_of_keys<T>(c, c.k, c.qk_dim, k.b, k.group, k.tile));
    load_tile<Keys, C::kThreads, true>(memory, C::kValuesAt,
                                       rows_of_keys<T>(c, c.v, c.v_dim, k.b, k.group, k.tile));
    if (C::kStages > 1) load(step, 0);
  }
  KeyGradients<C> gradients;
  for (int i = 0; is_step(step); ++i) {
    const QueryStep next = next_step<C>(b, k, tiles, range, step);
    // The load overwrites the stage, so all warps must have finished multiplying its previous tile.
    if constexpr (C::kStages == 1) {
      sync_threads();
      load(step, i);
    }
    wait_for_copies<0>();
    sync_threads();
    if (C::kStages > 1 && is_step(next)) load(next, i + 1);
    add_key_gradients<C>(b, k, step, memory, stage_of(i), statistics, i % C::kStages * C::kQueries,
                         gradients);
    step = next;
  }
  store_key_gradients<C>(b, k, gradients);
}

// ---- launches

template <class C>
void launch_key_gradients(Context& context, const BackwardCall& b) {
  const AttentionCall& c = b.c;
  const int64_t tiles = tiles_of_segment<C::kKeys>(c.keys, 0) + tiles_of_segment<C::kKeys>(c.keys, 1);
  launch_query_bounds(context, c, C::kQueries, b.statistics);
  launch(context, {c.batch * tiles * c.groups * C::kBlocks, C::kThreads, C::kSharedBytes},
         attention_key_gradient_kernel<C>, b);
}
template <class C>
void launch_query_gradients(Context& context, const BackwardCall& b) {
  launch(context, {query_blocks(b.c, 1, C::kQueries), C::kThreads, C::kSharedBytes},
         attention_query_gradient_kernel<C>, b);
}
template <class T>
void launch_backward(Context& context, const BackwardCall& b) {
  by_head_size<T>(b.c.qk_dim, b.c.v_dim, [&](auto head) {
    launch_key_gradients<KeyGradientTiles<T, decltype(head)::value>>(context, b);
    launch_query_gradients<QueryGradientTiles<T, decltype(head)::value>>(context, b);
  });
}

}  // namespace capstan::kernels::CAPSTAN_GPU
