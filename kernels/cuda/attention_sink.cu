#include "kernels/attention_sink.hpp"

#include <cmath>

#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

// The heads of outputs, whose elements `lanes` neighboring threads load in groups.
struct SinkShape {
  Array<Any> logits;
  int64_t groups, heads_per_group, seq, queries, width;
  int lanes;

  __host__ __device__ int64_t heads() const { return groups * heads_per_group; }
  __device__ float logit(int64_t head) const { return logits ? logits.at(head) : 0.0f; }
  __device__ int64_t at(const HeadStrides& strides, int64_t token, int64_t head) const {
    return strides.at(token, head / heads_per_group, head % heads_per_group);
  }
  // Index of the statistic of a query.
  __device__ int64_t statistic(int64_t token, int64_t head) const {
    return (token / seq * heads() + head) * seq + token % seq;
  }
};
template <class T>
SinkShape shape_of(const AttentionShape& s, const In& logits) {
  int lanes = 1;
  while (lanes < kWarp && lanes * kGroup<T> < s.v_dim) lanes *= 2;
  return {
      array_of<Any>(logits), s.groups, s.heads_per_group, s.seq, s.batch * s.seq * s.heads(), s.v_dim, lanes};
}

template <class T>
__global__ void attention_sink_forward_kernel(SinkShape s, Array<T> out, HeadStrides strides, float* lse) {
  const int64_t i = global_thread() / s.lanes, token = i / s.heads(), head = i % s.heads();
  const bool is_query = i < s.queries;
  const int64_t at = is_query ? s.statistic(token, head) : 0;
  const float before = is_query ? lse[at] : 0.0f;
  // Orders the reads of lse above before the writes below.
  sync_warp();
  if (!is_query) return;
  const float logit = s.logit(head), above = logit - before, factor = 1.0f / (1.0f + std::exp(above));
  const int lane = thread_index() % s.lanes;
  if (lane == 0) lse[at] = (above > 0 ? logit : before) + std::log1p(std::exp(-std::fabs(above)));
  const int64_t row = s.at(strides, token, head);
  for (int64_t first = int64_t{lane} * kGroup<T>; first < s.width; first += s.lanes * kGroup<T>) {
    auto group = out.load(row + first, s.width - first);
    for (int k = 0; k < kGroup<T>; ++k) group[k] *= factor;
    out.store(row + first, s.width - first, group);
  }
}

template <class T>
struct SinkBackward {
  Array<T> out, dout;
  HeadStrides out_strides, dout_strides;
  const float* lse;
  float* dlogits;
};
// One block for each head.
template <class T>
__global__ void attention_sink_backward_kernel(SinkShape s, SinkBackward<T> b) {
  const int64_t head = block_index(), tokens = s.queries / s.heads();
  const int lane = thread_index() % s.lanes;
  const float logit = s.logit(head);
  float sum = 0;
  for (int64_t token = thread_index() / s.lanes; token < tokens; token += block_threads() / s.lanes) {
    const int64_t x = s.at(b.out_strides, token, head), y = s.at(b.dout_strides, token, head);
    float dot = 0;
    for (int64_t first = int64_t{lane} * kGroup<T>; first < s.width; first += s.lanes * kGroup<T>) {
      const auto value = b.out.load(x + first, s.width - first),
                 gradient = b.dout.load(y + first, s.width - first);
      for (int k = 0; k < kGroup<T>; ++k) dot += value[k] * gradient[k];
    }
    sum += std::exp(logit - b.lse[s.statistic(token, head)]) * dot;
  }
  sum = block_sum(sum);
  if (thread_index() == 0) b.dlogits[head] -= sum;
}

void forward(Context& c, AttentionShape s, In logits, HeadsOut out, float* lse) {
  by_type({out.data}, [&](auto type) {
    using T = decltype(type);
    const SinkShape shape = shape_of<T>(s, logits);
    launch(c, {ceil_div(shape.queries * shape.lanes, int64_t{256}), 256}, attention_sink_forward_kernel<T>,
           shape, array_of<T>(out.data), out.strides, lse);
  });
}
void backward(Context& c, AttentionShape s, In logits, HeadsIn out, const float* lse, HeadsIn dout,
              float* dlogits) {
  by_type({out.data, dout.data}, [&](auto type) {
    using T = decltype(type);
    const SinkBackward<T> arrays{
        array_of<T>(out.data), array_of<T>(dout.data), out.strides, dout.strides, lse, dlogits};
    launch(c, {s.heads(), 512}, attention_sink_backward_kernel<T>, shape_of<T>(s, logits), arrays);
  });
}

}  // namespace

const AttentionSink& attention_sink_family() {
  static const AttentionSink family{.forward = forward, .backward = backward};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
