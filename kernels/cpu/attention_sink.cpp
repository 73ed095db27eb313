#include "kernels/attention_sink.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_sink.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

HWY_INLINE float logit_of_sink(In logits, int64_t head) {
  float logit = 0;
  if (logits) widen(logits, head, &logit, 1);
  return logit;
}

// Index of the statistic of a query in lse [batch, heads, seq].
HWY_INLINE int64_t index_of_query(const AttentionShape& a, int64_t token, int64_t head) {
  return (token / a.seq * a.heads() + head) * a.seq + token % a.seq;
}

void forward(Context& c, AttentionShape a, In logits, HeadsOut out_heads, float* lse) {
  const int64_t heads = a.heads(), cols = a.v_dim;
  by_type({out_heads.data}, [&](auto type) HWY_ATTR {
    const auto out = array_of<decltype(type)>(out_heads.data);
    parallel_blocks(c, a.batch * a.seq * heads, rows_per_block(cols),
                    [&](int64_t begin, int64_t end, int) HWY_ATTR {
                      for (int64_t i = begin; i < end; ++i) {
                        const int64_t token = i / heads, head = i % heads;
                        float& sum = lse[index_of_query(a, token, head)];
                        const float logit = logit_of_sink(logits, head), above = logit - sum,
                                    factor = 1.0f / (1.0f + std::exp(above));
                        sum = std::max(logit, sum) + std::log1p(std::exp(-std::fabs(above)));
                        const int64_t at =
                            out_heads.strides.at(token, head / a.heads_per_group, head % a.heads_per_group);
                        const VF by = splat(factor);
                        for_vectors(
                            cols, [&](int64_t j) HWY_ATTR { out.put(at + j, hn::Mul(out.at(at + j), by)); },
                            [&](int64_t j, int64_t n)
                                HWY_ATTR { out.put_part(at + j, hn::Mul(out.part(at + j, n), by), n); });
                      }
                    });
  });
}

// One tile sums over the queries of one head, in their order.
void backward(Context& c, AttentionShape a, In logits, HeadsIn out_heads, const float* lse,
              HeadsIn dout_heads, float* dlogits) {
  const int64_t heads = a.heads(), cols = a.v_dim;
  by_type({out_heads.data, dout_heads.data}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto out = array_of<T>(out_heads.data), dout = array_of<T>(dout_heads.data);
    c.pool->parallel_for(heads, [&](int64_t head, int) HWY_ATTR {
      const int64_t group = head / a.heads_per_group, in_group = head % a.heads_per_group;
      const float logit = logit_of_sink(logits, head);
      double total = 0;
      for (int64_t token = 0; token < a.batch * a.seq; ++token) {
        const int64_t x = out_heads.strides.at(token, group, in_group),
                      y = dout_heads.strides.at(token, group, in_group);
        VF sum = hn::Zero(DF());
        for_vectors(
            cols, [&](int64_t j) HWY_ATTR { sum = hn::MulAdd(out.at(x + j), dout.at(y + j), sum); },
            [&](int64_t j, int64_t n)
                HWY_ATTR { sum = hn::MulAdd(out.part(x + j, n), dout.part(y + j, n), sum); });
        const float probability = std::exp(logit - lse[index_of_query(a, token, head)]);
        total += static_cast<double>(probability) * static_cast<double>(sum_lanes(sum));
      }
      dlogits[head] -= static_cast<float>(total);
    });
  });
}

AttentionSink attention_sink_family() {
  return {.forward = forward, .backward = backward};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(AttentionSink, attention_sink)
#endif
