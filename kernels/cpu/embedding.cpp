// Token and position embedding.
#include "kernels/embedding.hpp"

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/embedding.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

void forward(Context& c, In table_in, const int32_t* ids, In position_in, const int32_t* positions,
             Out out_out, int64_t rows, int64_t cols, int64_t first_row, int64_t rows_here) {
  by_type({table_in, position_in, out_out}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto table = array_of<T>(table_in), position = array_of<T>(position_in), out = array_of<T>(out_out);
    parallel_blocks(c, rows, rows_per_block(cols), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t id = ids[r] - first_row;
        const bool here = id >= 0 && id < rows_here;
        const int64_t from = id * cols, with = position_in ? int64_t{positions[r]} * cols : 0, to = r * cols;
        for_vectors(
            cols,
            [&](int64_t i) HWY_ATTR {
              VF v = here ? table.at_without_prefetch(from + i) : hn::Zero(DF());
              if (position_in) v = hn::Add(v, position.at(with + i));
              out.put(to + i, v);
            },
            [&](int64_t i, int64_t n) HWY_ATTR {
              VF v = here ? table.part(from + i, n) : hn::Zero(DF());
              if (position_in) v = hn::Add(v, position.part(with + i, n));
              out.put_part(to + i, v, n);
            });
      }
    });
  });
}

// Every tile owns a range of columns and walks over all rows in order: equal ids are added in the order of r,
// without atomics.
void backward(Context& c, In dout_in, const int32_t* ids, float* dtable, int64_t rows, int64_t cols,
              int64_t first_row, int64_t rows_here) {
  by_type({dout_in}, [&](auto type) HWY_ATTR {
    const auto dout = array_of<decltype(type)>(dout_in);
    parallel_blocks(c, cols, 64, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t id = ids[r] - first_row;
        if (id < 0 || id >= rows_here) continue;
        float* to = dtable + id * cols + begin;
        const int64_t from = r * cols + begin;
        for_vectors(
            end - begin,
            [&](int64_t i)
                HWY_ATTR { store(hn::Add(load(to + i), dout.at_without_prefetch(from + i)), to + i); },
            [&](int64_t i, int64_t n)
                HWY_ATTR { store_part(hn::Add(load_part(to + i, n), dout.part(from + i, n)), to + i, n); });
      }
    });
  });
}

// No workspace: the threads divide the columns, so that the ids need no sorting.
WorkspaceSize embedding_backward_workspace(int64_t, int64_t, int64_t) {
  return {};
}

Embedding embedding_family() {
  return {.forward = forward, .backward = backward, .backward_workspace = embedding_backward_workspace};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(Embedding, embedding)
#endif
