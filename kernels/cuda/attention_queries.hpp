// A tile of queries and the rows of it that a lane has: for the kernels whose sums have queries as rows.
#pragma once

#include "kernels/cuda/attention_rows.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

// The queries of a block.
struct QueryBlock {
  int b, group, head_in_group, split;
  // Position and row of the first token of the segment, and its rows of queries.
  int position, first_token, rows;
  // The first row of the block.
  int first;
};
// heads_of_row: heads of a token that are rows of one tile, 1 or all of the group.
__host__ __device__ inline int query_tiles(const Segments& queries, int heads_of_row, int tile_rows,
                                           int segment) {
  return (queries.count(segment) * heads_of_row + tile_rows - 1) / tile_rows;
}
inline int64_t query_blocks(const AttentionCall& c, int heads_of_row, int tile_rows) {
  return int64_t{c.batch} * c.groups * (c.heads_per_group / heads_of_row) *
         (query_tiles(c.queries, heads_of_row, tile_rows, 0) +
          query_tiles(c.queries, heads_of_row, tile_rows, 1));
}
// Heads change first from block to block, because those of a group share keys; later queries, which see more
// keys, run first.
__device__ inline QueryBlock query_block(const AttentionCall& c, int heads_of_row, int tile_rows) {
  const int before = query_tiles(c.queries, heads_of_row, tile_rows, 0),
            tiles = before + query_tiles(c.queries, heads_of_row, tile_rows, 1);
  const int units = c.heads_per_group / heads_of_row;
  auto i = static_cast<int>(block_index());
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
  return {static_cast<const T*>(x.data) + x.strides.at(token, block.group, block.head_in_group),
          x.strides.token,
          block.first,
          block.rows,
          width,
          x.aligned,
          x.strides.head,
          heads_of_row};
}
template <class T>
__device__ __forceinline__ HeadRows<T> rows_of_keys(const AttentionCall& c, const HeadsArray& x, int width,
                                                    int b, int group, const KeyTile& tile) {
  return {static_cast<const T*>(x.data) + x.strides.at(b * c.key_stride + tile.first_row, group),
          x.strides.token,
          tile.position - tile.begin,
          tile.end - tile.begin,
          width,
          x.aligned};
}

// The row of a block that a lane has sums of; i is 0 or 1.
template <int kM>
__device__ __forceinline__ int row_of_lane(int m, int i) {
  return 16 * (warp_index() * kM + m) + 8 * i + lane_row();
}

// The keys that the queries of a lane see: [m][i] is the query of row_of_lane(m, i).
template <int kM>
struct LaneQueries {
  KeyInterval keys[kM][2];
  // Bounds over all queries of the warp, and of the block.
  KeyBounds warp, block;

  template <int kWarps>
  __device__ __forceinline__ void init(const AttentionCall& c, const QueryBlock& q, int heads_of_row,
                                       const Shared<int>& of_warps) {
    CAPSTAN_UNROLL
    for (int m = 0; m < kM; ++m) {
      CAPSTAN_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = q.first + row_of_lane<kM>(m, i);
        keys[m][i] = {0, 0};
        if (row >= q.rows) continue;
        const int token = heads_of_row == 1 ? row : row / heads_of_row;
        keys[m][i] = visible_keys(c, q.b, q.first_token + token, q.position + token);
        warp.add(keys[m][i]);
      }
    }
    block = warp = join_lanes(warp);
    if constexpr (kWarps > 1) {
      if (lane_index() == 0) {
        of_warps[warp_index() * 2] = warp.min_begin;
        of_warps[warp_index() * 2 + 1] = warp.max_end;
      }
      sync_threads();
      for (int i = 0; i < kWarps; ++i) {
        const int begin = of_warps[2 * i], end = of_warps[2 * i + 1];
        if (begin < block.min_begin) block.min_begin = begin;
        if (end > block.max_end) block.max_end = end;
      }
    }
  }
  // Whether all queries of the warp see all keys of the tile.
  template <int kKeys>
  __device__ bool see_all(const KeyTile& tile) const {
    return tile.position >= tile.begin && tile.position + kKeys <= tile.end &&
           warp.sees_all(tile.position, tile.position + kKeys);
  }
  // Replaces the sums of pairs that do not see each other.
  template <int kN>
  __device__ __forceinline__ void hide(const KeyTile& tile, float value, float (&sums)[kM][kN][4]) const {
    KeyInterval visible[kM][2];
    CAPSTAN_UNROLL
    for (int row = 0; row < 2 * kM; ++row) {
      const KeyInterval& of_row = keys[row / 2][row % 2];
      visible[row / 2][row % 2] = {of_row.begin > tile.begin ? of_row.begin : tile.begin,
                                   of_row.end < tile.end ? of_row.end : tile.end};
    }
    for_sums<kM, kN>([&](int m, int n, int i) {
      const int key = tile.position + 8 * n + lane_column() + i % 2;
      const KeyInterval& seen = visible[m][i / 2];
      if (key < seen.begin || key >= seen.end) sums[m][n][i] = value;
    });
  }
};

// The pairs that dropout keeps of the sums of a lane.
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
