// Arguments of the attention kernels (attention_forward.hpp, attention_backward.hpp).
// Positions are those in the full sequence; the rows of a call are up to two segments of them.
#pragma once

#include "kernels/context_attention.hpp"
#include "kernels/cuda/device.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

// PositionSegments for a GPU: the first positions and the rows of two segments.
struct Segments {
  int begin0 = 0, count0 = 0, begin1 = 0, count1 = 0;
  __host__ __device__ int begin(int i) const { return i == 0 ? begin0 : begin1; }
  __host__ __device__ int count(int i) const { return i == 0 ? count0 : count1; }
  __host__ __device__ int first_row(int i) const { return i == 0 ? 0 : count0; }
  __host__ __device__ int rows() const { return count0 + count1; }
};
inline Segments segments_of(const PositionSegments& s) {
  return {static_cast<int>(s.segments[0].begin), static_cast<int>(s.segments[0].count),
          static_cast<int>(s.segments[1].begin), static_cast<int>(s.segments[1].count)};
}

// Heads that kernels read in tiles.
struct HeadsArray {
  const void* data = nullptr;
  HeadStrides strides;
  // Each head begins at a multiple of 16 bytes.
  bool aligned = false;
  HeadsArray() = default;
  explicit HeadsArray(const HeadsIn& heads) : data(heads.data.data), strides(heads.strides) {
    const auto bytes = static_cast<int64_t>(heads.data.dtype == DType::f32 ? 4 : 2);
    const auto fits = [&](int64_t stride) { return stride * bytes % 16 == 0; };
    aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 && fits(strides.token) && fits(strides.group) &&
              fits(strides.head);
  }
};

// One call of a kernel.
struct AttentionCall {
  int batch, groups, heads_per_group, qk_dim, v_dim;
  Segments queries, keys;
  // Tokens from one sequence to the next in the arrays of keys.
  int64_t key_stride;
  float scale, softcap, dropout;
  int window;
  bool causal;
  PhiloxKey dropout_key;
  int64_t head_offset;
  const int64_t* dropout_rows;
  Documents documents;
  HeadsArray q, k, v;

  __host__ __device__ int heads() const { return groups * heads_per_group; }
};
inline AttentionCall call_of(const AttentionBlock& a, const HeadsIn& q, const HeadsIn& k, const HeadsIn& v,
                             const Documents& documents, const int64_t* dropout_rows) {
  const AttentionShape& s = a.shape;
  return {.batch = static_cast<int>(s.batch),
          .groups = static_cast<int>(s.groups),
          .heads_per_group = static_cast<int>(s.heads_per_group),
          .qk_dim = static_cast<int>(s.qk_dim),
          .v_dim = static_cast<int>(s.v_dim),
          .queries = segments_of(a.queries),
          .keys = segments_of(a.keys),
          .key_stride = a.keys.rows(),
          .scale = s.scale,
          .softcap = s.softcap,
          .dropout = s.dropout,
          .window = static_cast<int>(std::min<int64_t>(s.window, INT32_MAX)),
          .causal = s.causal,
          .dropout_key = s.dropout_key,
          .head_offset = s.head_offset,
          .dropout_rows = dropout_rows,
          .documents = documents,
          .q = HeadsArray(q),
          .k = HeadsArray(k),
          .v = HeadsArray(v)};
}

// The largest padded head.
inline constexpr int64_t kMostHeadSize = 256;

struct ForwardCall {
  AttentionCall c;
  // Heads of a token that are rows of one tile: 1, or all of the group.
  int heads_of_row = 1;
  // Few rows of queries: tiles for one warp.
  bool few = false;
  // Blocks that share the keys of a tile of queries. Of more than one, each has its own output and lse.
  int splits = 1;
  // New tokens follow *past cached ones; null: positions are those of the segments.
  const int32_t* past = nullptr;
  HeadsOut out;
  float* lse = nullptr;
  // Elements from one split to the next.
  int64_t out_split = 0, lse_split = 0;
  // Combines with what `out`, in fp32, and `lse` hold.
  bool accumulate = false;
};
// The rows of a tile of few queries.
inline constexpr int kFewQueries = 16;

// Statistics that the backward pass computes first, in its workspace.
struct KeyBounds;
struct QueryStatistics {
  // [batch, heads, rows]: the sum of dout * out of each query.
  float* dots;
  // [batch, rows]: the first visible key.
  int32_t* begins;
  // [batch, tiles of queries].
  KeyBounds* tiles;
};
struct BackwardCall {
  AttentionCall c;
  HeadsArray dout;
  const float* lse;
  QueryStatistics statistics;
  HeadsOut dq, dk, dv;
  // Adds to dq, in fp32.
  bool add_dq;
};

// T: the type of queries, keys, values and dout. The backward pass finds the dots in the statistics, and
// computes the rest of them.
template <class T>
void launch_forward(Context& context, const ForwardCall& call);
template <class T>
void launch_backward(Context& context, const BackwardCall& call);
// The first visible key of each query, and the bounds of each tile of tile_rows of them (attention.cu).
void launch_query_bounds(Context& context, const AttentionCall& c, int tile_rows,
                         const QueryStatistics& statistics);

}  // namespace capstan::kernels::CAPSTAN_GPU
