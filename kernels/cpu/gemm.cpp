// Matrix products: oneDNN, single-threaded on tiles that depend on the shape alone.
#include "kernels/gemm.hpp"

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>

#include <cstring>

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/serial_gemm.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kTileM = 512, kTileN = 768, kPanelK = 512;

void run(Context& c, GemmShape s, In a, In b, Out out, float alpha, float beta) {
  if (s.m <= 0 || s.n <= 0) return;
  const int64_t tile_m = std::min(kTileM, s.m), tile_n = std::min(kTileN, s.n);
  const int64_t across = blocks_of(s.n, tile_n), tiles = blocks_of(s.m, tile_m) * across;
  const bool wide_in = a.dtype == DType::f32, wide_out = out.dtype == DType::f32;
  const int64_t panel_k = std::min(kPanelK, std::max<int64_t>(s.k, 1));
  const auto panel_a = static_cast<size_t>(wide_in ? 0 : tile_m * panel_k);
  const auto panel_b = static_cast<size_t>(wide_in ? 0 : tile_n * panel_k);
  const auto panel_c = static_cast<size_t>(wide_out ? 0 : tile_m * tile_n);
  reserve_scratch(c, (panel_a + panel_b + panel_c) * sizeof(float));
  const auto cc = array_of<Any>(out);

  c.pool->parallel_for(tiles, [&](int64_t tile, int worker) HWY_ATTR {
    const int64_t m0 = tile / across * tile_m, n0 = tile % across * tile_n;
    const int64_t m = std::min(tile_m, s.m - m0), n = std::min(tile_n, s.n - n0);
    float* pa = c.scratch_of<float>(worker, panel_a + panel_b + panel_c);
    float* pb = pa + panel_a;
    float* pc = pb + panel_b;
    float* target = wide_out ? out.as<float>() + m0 * s.ldc + n0 : pc;
    const int64_t ldt = wide_out ? s.ldc : n;
    if (!wide_out && beta != 0)
      for (int64_t r = 0; r < m; ++r)
        for_vectors(n, [&](int64_t i) HWY_ATTR { store(cc.at((m0 + r) * s.ldc + n0 + i), pc + r * n + i); },
                    [&](int64_t i, int64_t k) HWY_ATTR {
                      store_part(cc.part((m0 + r) * s.ldc + n0 + i, k), pc + r * n + i, k);
                    });
    if (s.k <= 0) {
      for (int64_t r = 0; r < m; ++r)
        for (int64_t i = 0; i < n; ++i) target[r * ldt + i] = beta == 0 ? 0.0f : beta * target[r * ldt + i];
    } else if (wide_in) {
      const float* ta = a.as<float>() + (s.trans_a ? m0 : m0 * s.lda);
      const float* tb = b.as<float>() + (s.trans_b ? n0 * s.ldb : n0);
      serial_sgemm(s.trans_a, s.trans_b, m, n, s.k, alpha, ta, s.lda, tb, s.ldb, beta, target, ldt);
    } else {
      for (int64_t k0 = 0; k0 < s.k; k0 += panel_k) {
        const int64_t k = std::min(panel_k, s.k - k0);
        const bf16* ta = a.as<bf16>() + (s.trans_a ? k0 * s.lda + m0 : m0 * s.lda + k0);
        const bf16* tb = b.as<bf16>() + (s.trans_b ? n0 * s.ldb + k0 : k0 * s.ldb + n0);
        const int64_t a_rows = s.trans_a ? k : m, a_cols = s.trans_a ? m : k;
        const int64_t b_rows = s.trans_b ? n : k, b_cols = s.trans_b ? k : n;
        for (int64_t r = 0; r < a_rows; ++r) widen({ta + r * s.lda, DType::bf16}, pa + r * a_cols, a_cols);
        for (int64_t r = 0; r < b_rows; ++r) widen({tb + r * s.ldb, DType::bf16}, pb + r * b_cols, b_cols);
        serial_sgemm(s.trans_a, s.trans_b, m, n, k, alpha, pa, a_cols, pb, b_cols, k0 == 0 ? beta : 1.0f, target, ldt);
      }
    }
    if (!wide_out)
      for (int64_t r = 0; r < m; ++r)
        for_vectors(n, [&](int64_t i) HWY_ATTR { cc.put((m0 + r) * s.ldc + n0 + i, load(pc + r * n + i)); },
                    [&](int64_t i, int64_t k) HWY_ATTR {
                      cc.put_part((m0 + r) * s.ldc + n0 + i, load_part(pc + r * n + i, k), k);
                    });
  });
}

// At most 64 partial rows, whose number depends on the shape only, then their sum in order.
void column_sum(Context& c, In x_in, float* out, int64_t rows, int64_t cols, int64_t row_stride, bool accumulate) {
  if (cols <= 0) return;
  const int64_t block = std::max(rows_per_block(cols), blocks_of(std::max<int64_t>(rows, 1), 64));
  const int64_t blocks = blocks_of(rows, block);
  const int64_t width = (cols + kStep - 1) / kStep * kStep;
  float* partial = c.scratch_of<float>(Context::kShared, static_cast<size_t>(std::max<int64_t>(blocks, 1) * width));
  by_type({x_in}, [&](auto type) HWY_ATTR {
    const auto x = array_of<decltype(type)>(x_in);
    parallel_blocks(c, rows, block, [&](int64_t begin, int64_t end, int) HWY_ATTR {
      float* sum = partial + begin / block * width;
      std::memset(sum, 0, static_cast<size_t>(width) * sizeof(float));
      for (int64_t r = begin; r < end; ++r)
        for_vectors(cols, [&](int64_t i) HWY_ATTR { store(hn::Add(load(sum + i), x.at(r * row_stride + i)), sum + i); },
                    [&](int64_t i, int64_t n) HWY_ATTR {
                      store(hn::Add(load(sum + i), x.part(r * row_stride + i, n)), sum + i);
                    });
    });
  });
  parallel_blocks(c, cols, 4096, [&](int64_t begin, int64_t end, int) HWY_ATTR {
    for (int64_t i = begin; i < end; i += kStep) {
      const int64_t n = std::min(kStep, end - i);
      VF s = accumulate ? load_part(out + i, n) : hn::Zero(DF());
      for (int64_t b = 0; b < blocks; ++b) s = hn::Add(s, load(partial + b * width + i));
      store_part(s, out + i, n);
    }
  });
}

Gemm gemm_family() { return {run, column_sum}; }

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace capstan::kernels {

namespace {
// Debian's oneDNN shares work by OpenMP. Each of our threads tells OpenMP once that it wants one thread; without an OpenMP
// in the process there is nothing to tell.
void use_one_openmp_thread() {
  static const auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  thread_local bool done = false;
  if (!done && set) set(1);
  done = true;
}
}  // namespace

void serial_sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                  const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  use_one_openmp_thread();
  dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

HWY_EXPORT(gemm_family);
const Gemm& cpu_gemm() {
  static const Gemm family = HWY_DYNAMIC_DISPATCH(gemm_family)();
  return family;
}
}  // namespace capstan::kernels
#endif
