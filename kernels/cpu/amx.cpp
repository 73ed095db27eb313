#include "kernels/cpu/amx.hpp"

#include "kernels/cpu/parallel.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/cpu/amx_core.hpp"

namespace capstan::kernels {

bool runs_amx() {
  static const bool answer = [] {
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512bf16"))
      return false;
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    if ((d & kBf16) == 0 || (d & kTile) == 0) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return answer;
}

namespace {

using namespace amx;

// B is packed once, all threads together, in chunks of n and k; a tile is a block of rows times a block of columns. It packs its
// rows of A over the whole chunk of k, which stay in the second-level cache, and takes panel after panel of B, of which the part
// of one pass stays in the first-level cache while all rows use it. Sums of a panel wait between passes in `sums`.
constexpr int64_t kPackedValues = int64_t{1} << 22;
constexpr int64_t kMaxDepth = 1024, kPassSteps = 8;
constexpr int64_t kMaxRows = 256, kMinRows = 64, kMaxCols = 1024, kMinCols = 128;
constexpr int64_t kTileWork = int64_t{1} << 23;  // multiply-adds below which a tile is not worth a thread
constexpr int64_t kTiles = 32;

int64_t even(int64_t n, int64_t parts, int64_t unit) {  // the size of each of `parts`, in whole units
  return std::max(unit, ((n + parts - 1) / parts + unit - 1) / unit * unit);
}

struct Plan {
  int64_t chunk_k, chunk_n, rows, cols;
  explicit Plan(const GemmShape& s) {
    chunk_k = std::min(s.k, even(s.k, blocks_of(s.k, kMaxDepth), kDepth));
    chunk_n = std::min(s.n, even(s.n, blocks_of(s.n, kPackedValues / (steps_of(chunk_k) * kDepth)), kPanel));
    const double work = static_cast<double>(s.m) * static_cast<double>(chunk_n) * static_cast<double>(s.k);
    const auto wanted = static_cast<int64_t>(
        std::clamp(work / static_cast<double>(kTileWork), 1.0, static_cast<double>(kTiles)));
    // Rows are cut further only where columns do not give enough tiles: a panel of B is fetched once for all rows of a tile.
    int64_t down = blocks_of(s.m, kMaxRows);
    const int64_t across = std::max(blocks_of(chunk_n, kMaxCols),
                                    std::min(blocks_of(chunk_n, kMinCols), blocks_of(wanted, down)));
    down = std::max(down, std::min(blocks_of(s.m, kMinRows), blocks_of(wanted, 2 * across)));
    rows = even(s.m, down, kPanel);
    cols = even(chunk_n, across, kPanel);
  }
};

// What a worker's panels of A hold, in front of them: the next tile is often of the same rows.
struct alignas(64) Held {
  int64_t row, depth;  // the first ones; row < 0: nothing
};

struct Scratch {
  bool copy;  // bf16 results of several chunks of k are summed in a copy of C's columns
  size_t a, sums, b, c_copy;
  Scratch(const GemmShape& s, const Plan& p, DType out)
      : copy(out == DType::bf16 && p.chunk_k < s.k),
        a(static_cast<size_t>(p.rows * steps_of(p.chunk_k) * kDepth) * sizeof(bf16)),
        sums(static_cast<size_t>(p.rows * kPanel) * sizeof(float)),
        b(static_cast<size_t>(blocks_of(p.chunk_n, kPanel) * kPanel * steps_of(p.chunk_k) * kDepth) *
          sizeof(bf16)),
        c_copy(copy ? static_cast<size_t>(s.m * p.chunk_n) * sizeof(float) : 0) {}
  ScratchNeed need() const { return {b + c_copy, sizeof(Held) + a + sums}; }
};

// Columns [n0, n0 + n) and k [k0, k0 + k) of op(B), `stride` values from panel to panel.
CAPSTAN_AMX_CALLED void pack_columns(const GemmShape& s, const bf16* b, int64_t n0, int64_t n, int64_t k0,
                                     int64_t k, bf16* to, int64_t stride) {
  pack_panels(false, s.trans_b, b + (s.trans_b ? n0 * s.ldb + k0 : k0 * s.ldb + n0), s.ldb, n, k, to, stride);
}
// Rows [m0, m0 + m) of op(A).
CAPSTAN_AMX_CALLED void pack_rows(const GemmShape& s, const bf16* a, int64_t m0, int64_t m, int64_t k0,
                                  int64_t k, bf16* to) {
  pack_panels(true, !s.trans_a, a + (s.trans_a ? k0 * s.lda + m0 : m0 * s.lda + k0), s.lda, m, k, to,
              steps_of(k) * kStepValues);
}

// C[m, n] = sums[m, 32] + beta C for n <= 32.
CAPSTAN_AMX_CALLED void write(const float* sums, int64_t m, int64_t n, float beta, Out out, int64_t at,
                              int64_t ldc) {
  for (int64_t r = 0; r < m; ++r)
    for (int64_t j = 0; j < n; j += 16) {
      const __mmask16 mask = first16(n - j);
      __m512 v = _mm512_load_ps(sums + r * kPanel + j);
      const int64_t to = at + r * ldc + j;
      if (out.dtype == DType::f32) {
        float* c = out.as<float>() + to;
        if (beta != 0) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, c));
        _mm512_mask_storeu_ps(c, mask, v);
      } else {
        bf16* c = out.as<bf16>() + to;
        if (beta != 0) v = _mm512_add_ps(v, widen16(c, mask));
        _mm256_mask_storeu_epi16(c, mask, narrow(v));
      }
    }
}

// Where sums go: rows of `bytes` bytes, `stride` apart.
struct Target {
  std::byte* at;
  int64_t rows, bytes, stride;
};

// sums = rows of A (panels) times one panel of B. The lines that they go to are fetched meanwhile: stores that wait for theirs
// would hold up those of the next sums.
CAPSTAN_AMX_CALLED void multiply_rows(const bf16* a, const bf16* b, int64_t panels, int64_t steps,
                                      float* sums, const Target& target) {
  for (int64_t s = 0; s < steps; s += kPassSteps) {
    const int64_t count = std::min(kPassSteps, steps - s), lines = (32 + panels - 1) / panels;
    const bf16* next = b + (s + count) * kStepValues;  // of the next pass, or of the next panel
    for (int64_t i = 0; i < panels; ++i) {
      if (s + count == steps)
        for (int64_t r = i * kPanel; r < std::min(target.rows, (i + 1) * kPanel); ++r)
          for (int64_t q = 0; q < target.bytes; q += 64)
            __builtin_prefetch(target.at + r * target.stride + q, 1, 2);
      multiply(a + (i * steps + s) * kStepValues, b + s * kStepValues, count, s > 0,
               sums + i * kPanel * kPanel, kPanel, next + i * count * lines * 32, lines);
    }
  }
}
CAPSTAN_AMX_CALLED void begin_tiles() {
  configure();
}
CAPSTAN_AMX_CALLED void end_tiles() {
  release();
}

}  // namespace

ScratchNeed amx_scratch(const GemmShape& s, DType out) {
  return Scratch(s, Plan(s), out).need();
}

void amx_product(Context& c, const GemmShape& s, In a_in, In b_in, Out out, float beta) {
  const Plan p(s);
  const Scratch scratch(s, p, out.dtype);
  const bf16 *a = a_in.as<bf16>(), *b = b_in.as<bf16>();
  std::byte* shared = reserve_scratch(c, scratch.need());
  auto* packed_b = reinterpret_cast<bf16*>(shared);
  auto* c_copy = reinterpret_cast<float*>(shared + scratch.b);
  for (int worker = 0; worker < c.pool->size(); ++worker)
    reinterpret_cast<Held*>(c.scratch(worker, scratch.need().each_worker))->row = -1;

  for (int64_t n0 = 0; n0 < s.n; n0 += p.chunk_n)
    for (int64_t k0 = 0; k0 < s.k; k0 += p.chunk_k) {
      const int64_t n = std::min(p.chunk_n, s.n - n0), k = std::min(p.chunk_k, s.k - k0), steps = steps_of(k);
      const bool last = k0 + k == s.k;
      constexpr int64_t kSlab = 8 * kDepth, kGroup = 8 * kPanel;
      const int64_t slabs = blocks_of(k, kSlab);
      c.pool->parallel_for(blocks_of(n, kGroup) * slabs, [&](int64_t tile, int) {
        const int64_t j = tile / slabs * kGroup, from = tile % slabs * kSlab;
        pack_columns(s, b, n0 + j, std::min(kGroup, n - j), k0 + from, std::min(kSlab, k - from),
                     packed_b + (j * steps + from) * kDepth, steps * kStepValues);
      });
      const int64_t across = blocks_of(n, p.cols), down = blocks_of(s.m, p.rows);
      c.pool->parallel_for(across * down, [&](int64_t tile, int worker) {
        const int64_t i0 = tile / across * p.rows, j0 = tile % across * p.cols;
        const int64_t rows = std::min(p.rows, s.m - i0), cols = std::min(p.cols, n - j0);
        std::byte* own = c.scratch(worker, scratch.need().each_worker);
        Held& held = *reinterpret_cast<Held*>(own);
        auto* packed_a = reinterpret_cast<bf16*>(own + sizeof(Held));
        auto* sums = reinterpret_cast<float*>(own + sizeof(Held) + scratch.a);
        if (held.row != i0 || held.depth != k0) {
          pack_rows(s, a, i0, rows, k0, k, packed_a);
          held = {i0, k0};
        }
        begin_tiles();
        for (int64_t j = j0; j < j0 + cols; j += kPanel) {
          const int64_t width = std::min(kPanel, n - j), size = size_of(out.dtype);
          const Target target{out.as<std::byte>() + (i0 * s.ldc + n0 + j) * size, rows, width * size,
                              s.ldc * size};
          multiply_rows(packed_a, packed_b + j * steps * kDepth, blocks_of(rows, kPanel), steps, sums,
                        target);
          float* copy = c_copy + i0 * n + j;
          if (scratch.copy) {
            if (k0 > 0)
              write(sums, rows, width, 1, {copy, DType::f32}, 0, n);
            else
              write(sums, rows, width, 0, {copy, DType::f32}, 0, n);
            if (!last) continue;
            for (int64_t r = 0; r < rows; ++r) std::copy_n(copy + r * n, width, sums + r * kPanel);
          }
          write(sums, rows, width, k0 == 0 || scratch.copy ? beta : 1.0f, out, i0 * s.ldc + n0 + j, s.ldc);
        }
        end_tiles();
      });
    }
}

}  // namespace capstan::kernels

#else

namespace capstan::kernels {
bool runs_amx() {
  return false;
}
ScratchNeed amx_scratch(const GemmShape&, DType) {
  return {};
}
void amx_product(Context&, const GemmShape&, In, In, Out, float) {}
}  // namespace capstan::kernels

#endif
