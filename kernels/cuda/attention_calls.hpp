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
  return {narrow<int>(s.segments[0].begin), narrow<int>(s.segments[0].count),
          narrow<int>(s.segments[1].begin), narrow<int>(s.segments[1].count)};
}

// A tensor of heads (q, k, v or dout) that the kernels load in tiles.
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

// Arguments of the forward and the backward kernels.
struct AttentionCall {
  int batch, groups, heads_per_group, qk_dim, v_dim;
  Segments queries, keys;
  // Distance of two sequences in the arrays of keys, in tokens.
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
  return {.batch = narrow<int>(s.batch),
          .groups = narrow<int>(s.groups),
          .heads_per_group = narrow<int>(s.heads_per_group),
          .qk_dim = narrow<int>(s.qk_dim),
          .v_dim = narrow<int>(s.v_dim),
          .queries = segments_of(a.queries),
          .keys = segments_of(a.keys),
          .key_stride = a.keys.rows(),
          .scale = s.scale,
          .softcap = s.softcap,
          .dropout = s.dropout,
          .window = narrow<int>(std::min<int64_t>(s.window, INT32_MAX)),
          .causal = s.causal,
          .dropout_key = s.dropout_key,
          .head_offset = s.head_offset,
          .dropout_rows = dropout_rows,
          .documents = documents,
          .q = HeadsArray(q),
          .k = HeadsArray(k),
          .v = HeadsArray(v)};
}

// Largest supported head size.
inline constexpr int64_t kMaxHeadSize = 256;

struct ForwardCall {
  AttentionCall c;
  // Query heads of one token that share a tile of queries: 1, or all heads of the key/value group.
  int heads_of_row = 1;
  // True for few query rows, as in generation: a tile has the rows of one warp.
  bool few = false;
  // Number of blocks among which the keys of a query tile are divided (split-KV, Flash-Decoding). With more
  // than one split, each has its own output and lse.
  int splits = 1;
  // Generation: number of cached tokens before the new ones. Null: the segments give the positions.
  const int32_t* past = nullptr;
  HeadsOut out;
  float* lse = nullptr;
  // Elements from one split to the next.
  int64_t out_split = 0, lse_split = 0;
  // Combines the result with the fp32 values that `out` and `lse` hold.
  bool accumulate = false;
};
// Rows of a query tile if ForwardCall::few is set.
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
  // Adds to dq, which is fp32, instead of overwriting it.
  bool add_dq;
};

// T: the type of queries, keys, values and dout. launch_backward() reads QueryStatistics::dots, which the
// caller has computed, and computes the other statistics.
template <class T>
void launch_forward(Context& context, const ForwardCall& call);
template <class T>
void launch_backward(Context& context, const BackwardCall& call);
// Computes the first visible key of each query, and the key bounds of each tile of tile_rows queries
// (attention.cu).
void launch_query_bounds(Context& context, const AttentionCall& c, int tile_rows,
                         const QueryStatistics& statistics);

}  // namespace capstan::kernels::CAPSTAN_GPU
