// Query tiles of the attention kernels whose accumulators have queries as rows, and the rows of a lane.
#pragma once

#include "kernels/cuda/attention_rows.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

// The query tile of a block of threads.
struct QueryBlock {
  int b, group, head_in_group, split;
  // Position and row of the first token of the segment, and number of query rows of the segment.
  int position, first_token, rows;
  // The first row of the block.
  int first;
};
// heads_of_row: query heads of one token that share a tile, 1 or all heads of the key/value group.
__host__ __device__ inline int query_tiles(const Segments& queries, int heads_of_row, int tile_rows,
                                           int segment) {
  return narrow<int>(ceil_div(queries.count(segment) * heads_of_row, tile_rows));
}
inline int64_t query_blocks(const AttentionCall& c, int heads_of_row, int tile_rows) {
  return int64_t{c.batch} * c.groups * (c.heads_per_group / heads_of_row) *
         (query_tiles(c.queries, heads_of_row, tile_rows, 0) +
          query_tiles(c.queries, heads_of_row, tile_rows, 1));
}
// Consecutive blocks have different heads, because the heads of a group share keys. Later queries, which
// attend to more keys, run first.
__device__ inline QueryBlock query_block(const AttentionCall& c, int heads_of_row, int tile_rows) {
  const int before = query_tiles(c.queries, heads_of_row, tile_rows, 0),
            tiles = before + query_tiles(c.queries, heads_of_row, tile_rows, 1);
  const int units = c.heads_per_group / heads_of_row;
  auto i = narrow<int>(block_index());
  QueryBlock block;
  block.head_in_group = i % units;
  i /= units;
  block.group = i % c.groups;
  i /= c.groups;
  const int tile = tiles - 1 - i % tiles, segment = tile < before ? 0 : 1;
  i /= tiles;
  block.b = i % c.batch;
  block.split = i / c.batch;
  block.position = c.queries.begin(segment);
  block.first_token = c.queries.first_row(segment);
  block.rows = c.queries.count(segment) * heads_of_row;
  block.first = (segment == 0 ? tile : tile - before) * tile_rows;
  return block;
}

template <class T>
__device__ __forceinline__ HeadRows<T> rows_of_queries(const AttentionCall& c, const HeadsArray& x, int width,
                                                       const QueryBlock& block, int heads_of_row) {
  const int64_t token = int64_t{block.b} * c.queries.rows() + block.first_token;
  return {static_cast<const T*>(x.data) + x.strides.at(0, block.group, block.head_in_group),
          x.strides.token,
          block.first,
          block.rows,
          width,
          x.aligned,
          token,
          x.strides.head,
          heads_of_row};
}
template <class T>
__device__ __forceinline__ HeadRows<T> rows_of_keys(const AttentionCall& c, const HeadsArray& x, int width,
                                                    int b, int group, const KeyTile& tile) {
  return {static_cast<const T*>(x.data) + x.strides.at(0, group),
          x.strides.token,
          tile.position - tile.begin,
          tile.end - tile.begin,
          width,
          x.aligned,
          b * c.key_stride + tile.first_row};
}

// Row i (0 or 1) of this lane's accumulators within the query tile.
template <int kM>
__device__ __forceinline__ int row_of_lane(int m, int i) {
  return 16 * (warp_index() * kM + m) + 8 * i + lane_row();
}

// Key intervals of the queries of a block. The first key of each query is in shared memory, because only
// tiles that need a mask read it.
struct SharedQueries {
  Shared<int> begins;
  // Smallest begin and largest end of each warp's queries.
  Shared<int> of_warps;
};
template <int kM>
struct VisibleKeys {
  // Bounds over all queries of the warp, and of the block.
  KeyBounds warp, block;

  template <int kWarps>
  __device__ __forceinline__ void init(const AttentionCall& c, const QueryBlock& q, int heads_of_row,
                                       const SharedQueries& shared) {
    CAPSTAN_UNROLL
    for (int m = 0; m < kM; ++m) {
      CAPSTAN_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int of_block = row_of_lane<kM>(m, i), row = q.first + of_block;
        KeyInterval keys{kNoKey, 0};
        if (row < q.rows) {
          const int token = heads_of_row == 1 ? row : row / heads_of_row;
          keys = visible_keys(c, q.b, q.first_token + token, q.position + token);
          warp.add(keys);
        }
        if (lane_index() % 4 == 0) shared.begins[of_block] = keys.begin;
      }
    }
    block = warp = join_lanes(warp);
    if (kWarps == 1) {
      sync_warp();
      return;
    }
    if (lane_index() == 0) {
      shared.of_warps[warp_index() * 2] = warp.min_begin;
      shared.of_warps[warp_index() * 2 + 1] = warp.max_end;
    }
    sync_threads();
    for (int i = 0; i < kWarps; ++i) {
      const int begin = shared.of_warps[2 * i], end = shared.of_warps[2 * i + 1];
      if (begin < block.min_begin) block.min_begin = begin;
      if (end > block.max_end) block.max_end = end;
    }
  }
  // True if all queries of the warp attend to all keys of the tile, so that no mask is needed.
  template <int kKeys>
  __device__ bool attends_to_all(const KeyTile& tile) const {
    return tile.position >= tile.begin && tile.position + kKeys <= tile.end &&
           warp.attends_to_all(tile.position, tile.position + kKeys);
  }
};
// Masks scores: writes `value` where the query does not attend to the key.
template <int kM, int kN>
__device__ __forceinline__ void mask_scores(const AttentionCall& c, const QueryBlock& q, int heads_of_row,
                                            const SharedQueries& shared, const KeyTile& tile, float value,
                                            float (&scores)[kM][kN][4]) {
  CAPSTAN_UNROLL
  for (int row = 0; row < 2 * kM; ++row) {
    const int m = row / 2, half = row % 2, of_block = row_of_lane<kM>(m, half);
    const int token = heads_of_row == 1 ? q.first + of_block : (q.first + of_block) / heads_of_row;
    int begin = shared.begins[of_block], end = end_of_keys(c, q.position + token);
    begin = begin > tile.begin ? begin : tile.begin;
    end = end < tile.end ? end : tile.end;
    CAPSTAN_UNROLL
    for (int i = 0; i < 2 * kN; ++i) {
      const int key = tile.position + 8 * (i / 2) + lane_column() + i % 2;
      if (key < begin || key >= end) scores[m][i / 2][2 * half + i % 2] = value;
    }
  }
}

// Dropout mask of the scores of a lane.
template <int kM, int kN>
struct KeptPairs {
  KeptKeys<kN> of_block[kM];
  __device__ __forceinline__ KeptPairs(const AttentionCall& c, const QueryBlock& q, const Dropout& dropout,
                                       int first_key) {
    CAPSTAN_UNROLL
    for (int m = 0; m < kM; ++m) {
      int64_t rows[2];
      CAPSTAN_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = q.first + row_of_lane<kM>(m, i);
        rows[i] = row < q.rows ? c.dropout_rows[int64_t{q.b} * c.queries.rows() + q.first_token + row] : 0;
      }
      of_block[m].init(dropout, rows, first_key);
    }
  }
  __device__ __forceinline__ bool operator()(int m, int n, int i) const { return of_block[m](n, i); }
};

}  // namespace capstan::kernels::CAPSTAN_GPU
