// Attention: the families, and the small kernels around those of attention_forward.hpp and
// attention_backward.hpp. Bytes moved, for e-byte elements and T tokens: the sums of dout * out read
// 2 e T heads * v_dim and write 4 T heads, the bounds of queries 8 T; a step of decode copies 2 e
// groups * (qk_dim + v_dim) of each new token, and with split-KV (S > 1 splits of the cache) writes
// and reads 4 S heads * (v_dim + 1) of it.
#include "kernels/attention.hpp"

#include "kernels/context_attention.hpp"
#include "kernels/cuda/attention_by_cudnn.hpp"
#include "kernels/cuda/attention_rows.hpp"
#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

// ---- what is supported

// Returns whether the call is supported; otherwise reports the reason in the context's error slot.
bool supports(Context& c, const AttentionShape& s, std::initializer_list<In> of_one_type) {
  const DType type = of_one_type.begin()->dtype;
  const auto same = [&](const In& x) { return x.dtype == type; };
  if (!std::all_of(of_one_type.begin(), of_one_type.end(), same)) {
    refuse(c, "attention needs q, k and v of one type");
    return false;
  }
  if (std::max(s.qk_dim, s.v_dim) > kMaxHeadSize) {
    refuse(c, "attention with heads of more than 256 elements");
    return false;
  }
  return true;
}
// body(T{}) for the type of queries.
template <class Body>
void by_query_type(DType type, const Body& body) {
  if (type == DType::f32) body(float{});
  if (type == DType::bf16) body(bf16{});
  if (type == DType::f16) body(f16{});
}
// Segments that cover all rows of a sequence.
AttentionBlock full_block(const AttentionShape& s) {
  AttentionBlock block;
  block.shape = s;
  block.queries.segments[0] = block.keys.segments[0] = {0, s.seq};
  return block;
}

// ---- forward

void forward(Context& c, AttentionShape s, HeadsIn q, HeadsIn k, HeadsIn v, Documents documents,
             const int64_t* dropout_rows, HeadsOut out, float* lse) {
  if (!supports(c, s, {q.data, k.data, v.data})) return;
  if (run_by_cudnn(c, AttentionPass::forward, s, documents, {q, k, v, out}, lse)) return;
  ForwardCall f{.c = call_of(full_block(s), q, k, v, documents, dropout_rows), .out = out, .lse = lse};
  by_query_type(q.data.dtype, [&](auto type) { launch_forward<decltype(type)>(c, f); });
}
void context_forward(Context& c, AttentionBlock a, HeadsIn q, HeadsIn k, HeadsIn v, Documents documents,
                     const int64_t* dropout_rows, bool accumulate, HeadsOut out, float* lse) {
  if (!supports(c, a.shape, {q.data, k.data, v.data})) return;
  ForwardCall f{
      .c = call_of(a, q, k, v, documents, dropout_rows), .out = out, .lse = lse, .accumulate = accumulate};
  by_query_type(q.data.dtype, [&](auto type) { launch_forward<decltype(type)>(c, f); });
}
WorkspaceSize forward_workspace(AttentionShape s, DType type, int64_t documents) {
  return attention_workspace(AttentionPass::forward, s, type, documents, 0);
}
WorkspaceSize context_forward_workspace(AttentionBlock, int64_t) {
  return {};
}

// ---- backward

// The sums of dout * out of each query, by `lanes` lanes each.
template <class T>
struct QueryDots {
  Array<T> out, dout;
  HeadStrides out_strides, dout_strides;
  int64_t groups, heads_per_group, rows, queries, width;
  int lanes;
  float* dots;
};
template <class T>
__global__ void query_dots_kernel(QueryDots<T> d) {
  const int64_t i = global_thread() / d.lanes, heads = d.groups * d.heads_per_group;
  const int lane = thread_index() % d.lanes;
  const int64_t token = i / heads, head = i % heads, group = head / d.heads_per_group,
                head_in_group = head % d.heads_per_group;
  float sum = 0;
  if (i < d.queries) {
    const int64_t out = d.out_strides.at(token, group, head_in_group),
                  dout = d.dout_strides.at(token, group, head_in_group);
    for (int64_t first = int64_t{lane} * kGroup<T>; first < d.width; first += d.lanes * kGroup<T>) {
      const auto x = d.out.load(out + first, d.width - first), y = d.dout.load(dout + first, d.width - first);
      for (int k = 0; k < kGroup<T>; ++k) sum += x[k] * y[k];
    }
  }
  sum = warp_reduce(sum, Sum(), d.lanes);
  if (i < d.queries && lane == 0) d.dots[(token / d.rows * heads + head) * d.rows + token % d.rows] = sum;
}
void launch_query_dots(Context& c, const AttentionCall& call, const HeadsIn& out, const HeadsIn& dout,
                       float* dots) {
  by_type({out.data, dout.data}, [&](auto type) {
    using T = decltype(type);
    int lanes = 1;
    while (lanes < kWarp && lanes * kGroup<T> < call.v_dim) lanes *= 2;
    const int64_t rows = call.queries.rows(), queries = call.batch * rows * call.heads();
    const QueryDots<T> d{array_of<T>(out.data),
                         array_of<T>(dout.data),
                         out.strides,
                         dout.strides,
                         call.groups,
                         call.heads_per_group,
                         rows,
                         queries,
                         call.v_dim,
                         lanes,
                         dots};
    launch(c, {ceil_div(queries * lanes, int64_t{256}), 256}, query_dots_kernel<T>, d);
  });
}

// One warp for each tile of queries.
__global__ void query_bounds_kernel(AttentionCall c, int tile_rows, QueryStatistics statistics) {
  const int before = narrow<int>(ceil_div(c.queries.count0, tile_rows)),
            tiles = before + narrow<int>(ceil_div(c.queries.count1, tile_rows));
  const auto index = narrow<int>(block_index());
  const int b = index / tiles, tile = index % tiles, segment = tile < before ? 0 : 1;
  const int first = (segment == 0 ? tile : tile - before) * tile_rows;
  KeyBounds bounds;
  for (int i = lane_index(); i < tile_rows; i += kWarp) {
    if (first + i >= c.queries.count(segment)) continue;
    const int row = c.queries.first_row(segment) + first + i;
    const KeyInterval keys = visible_keys(c, b, row, c.queries.begin(segment) + first + i);
    statistics.begins[int64_t{b} * c.queries.rows() + row] = keys.begin;
    bounds.add(keys);
  }
  bounds = join_lanes(bounds);
  if (lane_index() == 0) statistics.tiles[index] = bounds;
}

// Byte offsets of the statistics, multiples of 64.
struct StatisticsBytes {
  size_t dots, begins, tiles;
  explicit StatisticsBytes(const AttentionBlock& a) {
    // Query rows of the smallest tile.
    constexpr int64_t kTileRows = 16;
    int64_t count = 0;
    for (const PositionSegment& segment : a.queries.segments) count += ceil_div(segment.count, kTileRows);
    const auto tokens = static_cast<size_t>(a.shape.batch * a.queries.rows());
    dots = WorkspaceSize::aligned(tokens * static_cast<size_t>(a.shape.heads()) * sizeof(float));
    begins = WorkspaceSize::aligned(tokens * sizeof(int32_t));
    tiles = static_cast<size_t>(a.shape.batch * count) * sizeof(KeyBounds);
  }
  WorkspaceSize workspace() const { return {dots + begins + tiles, 0}; }
};

void backward_of(Context& c, const AttentionBlock& a, const HeadsIn& q, const HeadsIn& k, const HeadsIn& v,
                 const HeadsIn& out, const float* lse, const HeadsIn& dout, const Documents& documents,
                 const int64_t* dropout_rows, bool add_dq, const HeadsOut& dq, const HeadsOut& dk,
                 const HeadsOut& dv, std::byte* memory) {
  const StatisticsBytes bytes(a);
  const QueryStatistics statistics{reinterpret_cast<float*>(memory),
                                   reinterpret_cast<int32_t*>(memory + bytes.dots),
                                   reinterpret_cast<KeyBounds*>(memory + bytes.dots + bytes.begins)};
  const BackwardCall b{.c = call_of(a, q, k, v, documents, dropout_rows),
                       .dout = HeadsArray(dout),
                       .lse = lse,
                       .statistics = statistics,
                       .dq = dq,
                       .dk = dk,
                       .dv = dv,
                       .add_dq = add_dq};
  launch_query_dots(c, b.c, out, dout, statistics.dots);
  by_query_type(q.data.dtype, [&](auto type) { launch_backward<decltype(type)>(c, b); });
}
WorkspaceSize backward_workspace(AttentionShape s, DType type, int64_t documents) {
  const size_t own = StatisticsBytes(full_block(s)).workspace().shared;
  return attention_workspace(AttentionPass::backward, s, type, documents, own);
}
void backward(Context& c, AttentionShape s, HeadsIn q, HeadsIn k, HeadsIn v, HeadsIn out, const float* lse,
              HeadsIn dout, Documents documents, const int64_t* dropout_rows, HeadsOut dq, HeadsOut dk,
              HeadsOut dv) {
  if (!supports(c, s, {q.data, k.data, v.data, dout.data})) return;
  auto* const memory = workspace_of<std::byte>(c, backward_workspace(s, q.data.dtype, documents.count));
  if (!memory) return;
  if (run_by_cudnn(c, AttentionPass::backward, s, documents, {q, k, v, out, dout, dq, dk, dv}, lse)) return;
  backward_of(c, full_block(s), q, k, v, out, lse, dout, documents, dropout_rows, false, dq, dk, dv, memory);
}
WorkspaceSize context_backward_workspace(AttentionBlock a, int64_t) {
  return StatisticsBytes(a).workspace();
}
void context_backward(Context& c, AttentionBlock a, HeadsIn q, HeadsIn k, HeadsIn v, HeadsIn out,
                      const float* lse, HeadsIn dout, Documents documents, const int64_t* dropout_rows,
                      HeadsOut dq, HeadsOut dk, HeadsOut dv) {
  if (!supports(c, a.shape, {q.data, k.data, v.data, dout.data})) return;
  auto* const memory = workspace_of<std::byte>(c, context_backward_workspace(a, documents.count));
  if (!memory) return;
  backward_of(c, a, q, k, v, out, lse, dout, documents, dropout_rows, true, dq, dk, dv, memory);
}

// ---- generation

// Copies head rows to the cache from row *past on.
template <class T>
struct Append {
  Array<T> from;
  HeadStrides strides;
  Array<T> cache;
  const int32_t* past;
  int64_t groups, tokens, capacity, width;
  __device__ void operator()(int64_t i, int64_t) const {
    // Groups of elements of a row, whose last one is shorter.
    const int64_t of_row = ceil_div(width, kGroup<T>), row = i / kGroup<T> / of_row,
                  column = i / kGroup<T> % of_row * kGroup<T>, token = row / groups, group = row % groups,
                  b = token / tokens, to = (b * groups + group) * capacity + *past + token % tokens;
    const auto values = from.load(strides.at(token, group) + column, width - column);
    cache.store(to * width + column, width - column, values);
  }
};
template <class T>
void append(Context& c, const HeadsIn& from, const Out& cache, const int32_t* past, const AttentionShape& s,
            int64_t capacity, int64_t width) {
  const int64_t rows = s.batch * s.seq * s.groups;
  map<kGroup<T>>(c, rows * ceil_div(width, int64_t{kGroup<T>}) * kGroup<T>,
                 Append<T>{array_of<T>(from.data), from.strides, array_of<T>(cache), past, s.groups, s.seq,
                           capacity, width});
}

// Combines the outputs of the splits by their lse. One warp for each query.
template <class T>
struct CombineSplits {
  // [splits, tokens, heads, width] and [splits, batch, heads, seq]
  const float *outs, *lses;
  Array<T> out;
  // [batch, heads, seq], or null.
  float* lse;
  HeadStrides strides;
  int64_t splits, groups, heads_per_group, seq, queries, width;
};
template <class T>
__global__ void combine_splits_kernel(CombineSplits<T> j) {
  const int64_t i = global_thread() / kWarp, heads = j.groups * j.heads_per_group;
  if (i >= j.queries) return;
  const int64_t token = i / heads, head = i % heads,
                of_query = (token / j.seq * heads + head) * j.seq + token % j.seq;
  float high = -INFINITY, total = 0;
  for (int64_t split = 0; split < j.splits; ++split) high = Max()(j.lses[split * j.queries + of_query], high);
  const auto weight = [&](int64_t split) {
    return high == -INFINITY ? 0.0f : std::exp(j.lses[split * j.queries + of_query] - high);
  };
  for (int64_t split = 0; split < j.splits; ++split) total += weight(split);
  const float factor = total > 0 ? 1.0f / total : 0.0f;
  if (j.lse && lane_index() == 0) j.lse[of_query] = total > 0 ? high + std::log(total) : -INFINITY;
  const int64_t to = j.strides.at(token, head / j.heads_per_group, head % j.heads_per_group);
  for (int64_t column = lane_index(); column < j.width; column += kWarp) {
    float sum = 0;
    for (int64_t split = 0; split < j.splits; ++split)
      sum += weight(split) * j.outs[(split * j.queries + i) * j.width + column];
    j.out.put(to + column, sum * factor);
  }
}

// Number of splits: enough blocks to fill a large GPU, with at least this many keys of a full cache each. It
// depends on the shape alone.
constexpr int64_t kDecodeBlocks = 512, kFewestKeysOfSplit = 64;
// Returns whether the step uses tiles for few queries: it has at most four such tiles for a group of heads.
bool decodes_few(const AttentionShape& s) {
  return s.seq * s.heads_per_group <= 4 * kFewQueries;
}
int64_t decode_splits(const AttentionShape& s, int64_t capacity) {
  const int64_t tile_rows = decodes_few(s) ? kFewQueries : 128,
                blocks = s.batch * s.groups * ceil_div(s.seq * s.heads_per_group, tile_rows);
  return std::clamp<int64_t>(kDecodeBlocks / std::max<int64_t>(1, blocks), 1,
                             std::max<int64_t>(1, capacity / kFewestKeysOfSplit));
}
// The lse of each split of each query, after its outputs.
WorkspaceSize decode_workspace(AttentionShape s, DType, int64_t capacity) {
  const int64_t splits = decode_splits(s, capacity);
  if (splits == 1) return {};
  return {static_cast<size_t>(splits * s.batch * s.seq * s.heads() * (s.v_dim + 1)) * sizeof(float), 0};
}
template <class T>
void decode_with(Context& c, const AttentionShape& s, ForwardCall f, const HeadsOut& out, float* lse,
                 float* partials) {
  if (f.splits == 1) return launch_forward<T>(c, f);
  const int64_t queries = s.batch * s.seq * s.heads();
  float* const lses = partials + f.splits * queries * s.v_dim;
  f.out = {{partials, DType::f32}, {s.heads() * s.v_dim, s.heads_per_group * s.v_dim, s.v_dim}};
  f.lse = lses;
  f.out_split = queries * s.v_dim;
  f.lse_split = queries;
  launch_forward<T>(c, f);
  const CombineSplits<T> combine{partials, lses,     array_of<T>(out.data), lse,   out.strides,
                                 f.splits, s.groups, s.heads_per_group,     s.seq, queries,
                                 s.v_dim};
  launch(c, {ceil_div(queries * kWarp, int64_t{128}), 128}, combine_splits_kernel<T>, combine);
}
void decode(Context& c, AttentionShape s, HeadsIn q, HeadsIn k, HeadsIn v, Out k_cache, Out v_cache,
            const int32_t* past, int64_t capacity, HeadsOut out, float* lse) {
  if (!supports(c, s, {q.data, k.data, v.data, k_cache, v_cache, out.data})) return;
  const WorkspaceSize need = decode_workspace(s, q.data.dtype, capacity);
  auto* const partials = need.shared > 0 ? workspace_of<float>(c, need) : nullptr;
  if (need.shared > 0 && !partials) return;
  s.dropout = 0;
  // The rows of a sequence's cache are those of all groups.
  const HeadsIn keys{k_cache, {s.qk_dim, capacity * s.qk_dim, 0}},
      values{v_cache, {s.v_dim, capacity * s.v_dim, 0}};
  ForwardCall f{.c = call_of(full_block(s), q, keys, values, {}, nullptr),
                .heads_of_row = narrow<int>(s.heads_per_group),
                .few = decodes_few(s),
                .splits = narrow<int>(decode_splits(s, capacity)),
                .past = past,
                .out = out,
                .lse = lse};
  f.c.key_stride = s.groups * capacity;
  by_query_type(q.data.dtype, [&](auto type) {
    using T = decltype(type);
    append<T>(c, k, k_cache, past, s, capacity, s.qk_dim);
    append<T>(c, v, v_cache, past, s, capacity, s.v_dim);
    decode_with<T>(c, s, f, out, lse, partials);
  });
}

}  // namespace

void launch_query_bounds(Context& context, const AttentionCall& c, int tile_rows,
                         const QueryStatistics& statistics) {
  const int64_t tiles = ceil_div(c.queries.count0, tile_rows) + ceil_div(c.queries.count1, tile_rows);
  launch(context, {c.batch * tiles, kWarp}, query_bounds_kernel, c, tile_rows, statistics);
}

const Attention& attention_family() {
  static const Attention family{.forward = forward,
                                .backward = backward,
                                .decode = decode,
                                .forward_workspace = forward_workspace,
                                .backward_workspace = backward_workspace,
                                .decode_workspace = decode_workspace};
  return family;
}
const ContextAttention& context_attention_family() {
  static const ContextAttention family{.forward = context_forward,
                                       .backward = context_backward,
                                       .forward_workspace = context_forward_workspace,
                                       .backward_workspace = context_backward_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
