#include "kernels/adapter.hpp"

#include <cmath>
#include <cstring>

#include "kernels/common/nf4.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/adapter.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

// Blocks of columns, the unit of a sum over rows.
constexpr int64_t kColumns = 256;

template <class A>
HWY_INLINE double sum_of_products(A a, int64_t begin, int64_t n) {
  double total = 0;
  // Largest number of values in an fp32 sum.
  constexpr int64_t kRun = 2048;
  for (int64_t done = 0; done < n; done += kRun) {
    VF sum = splat(0);
    for_vectors(
        std::min(kRun, n - done),
        [&](int64_t i) HWY_ATTR {
          const VF v = a.at(begin + done + i);
          sum = hn::MulAdd(v, v, sum);
        },
        [&](int64_t i, int64_t k) HWY_ATTR {
          const VF v = a.part(begin + done + i, k);
          sum = hn::MulAdd(v, v, sum);
        });
    total += static_cast<double>(sum_lanes(sum));
  }
  return total;
}

WorkspaceSize row_lengths_workspace(int64_t rank) {
  return {0, static_cast<size_t>(rank) * sizeof(float)};
}
void row_lengths(Context& c, In w, const float* p, In b, const float* g, float s, float* n2, int64_t out,
                 int64_t in, int64_t rank) {
  const WorkspaceParts workspace(c, row_lengths_workspace(rank));
  if (!workspace) return;
  by_type({w}, [&](auto type) HWY_ATTR {
    const auto rows = array_of<decltype(type)>(w);
    parallel_blocks(c, out, rows_per_block(in), [&](int64_t begin, int64_t end, int worker) HWY_ATTR {
      auto* row = workspace.worker<float>(worker);
      for (int64_t j = begin; j < end; ++j) {
        double total = sum_of_products(rows, j * in, in);
        widen(b, j * rank, row, rank);
        double linear = 0, quadratic = 0;
        for (int64_t k = 0; k < rank; ++k) {
          linear += static_cast<double>(p[j * rank + k]) * row[k];
          double inner = 0;
          for (int64_t l = 0; l < rank; ++l) inner += static_cast<double>(g[k * rank + l]) * row[l];
          quadratic += inner * row[k];
        }
        total += 2.0 * s * linear + static_cast<double>(s) * s * quadratic;
        n2[j] = static_cast<float>(total);
      }
    });
  });
}

WorkspaceSize scale_columns_workspace(int64_t columns) {
  return {static_cast<size_t>(columns) * sizeof(float), 0};
}
void scale_columns(Context& c, In u, In m, const float* n2, Out y, int64_t rows, int64_t columns) {
  const WorkspaceParts workspace(c, scale_columns_workspace(columns));
  if (!workspace) return;
  auto* factors = workspace.shared<float>();
  widen(m, factors, columns);
  for (int64_t j = 0; j < columns; ++j) factors[j] /= std::sqrt(n2[j]);
  by_type({u, y}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto from = array_of<T>(u), to = array_of<T>(y);
    parallel_blocks(c, rows, rows_per_block(columns), [&](int64_t begin, int64_t end, int) HWY_ATTR {
      for (int64_t r = begin; r < end; ++r)
        for_vectors(
            columns,
            [&](int64_t j)
                HWY_ATTR { to.put(r * columns + j, hn::Mul(from.at(r * columns + j), load(factors + j))); },
            [&](int64_t j, int64_t k) HWY_ATTR {
              to.put_part(r * columns + j, hn::Mul(from.part(r * columns + j, k), load_part(factors + j, k)),
                          k);
            });
    });
  });
}

WorkspaceSize magnitude_gradient_workspace() {
  return {0, kColumns * (sizeof(float) + sizeof(double))};
}
void magnitude_gradient(Context& c, In dy, In u, const float* n2, float* dm, int64_t rows, int64_t columns) {
  const WorkspaceParts workspace(c, magnitude_gradient_workspace());
  if (!workspace) return;
  by_type({dy, u}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto a = array_of<T>(dy), b = array_of<T>(u);
    parallel_blocks(c, columns, kColumns, [&](int64_t begin, int64_t end, int worker) HWY_ATTR {
      const int64_t n = end - begin;
      auto* total = workspace.worker<double>(worker);
      float* part = reinterpret_cast<float*>(total + kColumns);
      std::fill(total, total + n, 0.0);
      // Number of rows that are summed in fp32.
      constexpr int64_t kRows = 64;
      for (int64_t first = 0; first < rows; first += kRows) {
        std::fill(part, part + n, 0.0f);
        for (int64_t r = first; r < std::min(rows, first + kRows); ++r)
          for_vectors(
              n,
              [&](int64_t j) HWY_ATTR {
                const int64_t i = r * columns + begin + j;
                store(hn::MulAdd(a.at_without_prefetch(i), b.at_without_prefetch(i), load(part + j)),
                      part + j);
              },
              [&](int64_t j, int64_t k) HWY_ATTR {
                const int64_t i = r * columns + begin + j;
                store_part(hn::MulAdd(a.part(i, k), b.part(i, k), load_part(part + j, k)), part + j, k);
              });
        for (int64_t j = 0; j < n; ++j) total[j] += static_cast<double>(part[j]);
      }
      for (int64_t j = 0; j < n; ++j)
        dm[begin + j] += static_cast<float>(total[j] / std::sqrt(static_cast<double>(n2[begin + j])));
    });
  });
}

void nf4_quantize(Context& c, const float* x, int64_t n, int64_t block, uint8_t* codes, float* scales) {
  static constexpr std::array<float, 15> kLimits = nf4_limits();
  parallel_blocks(c, ceil_div(n, block), 256, [&](int64_t begin, int64_t end, int) HWY_ATTR {
    HWY_ALIGN float found[64 + 1];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t last = std::min(n, (i + 1) * block);
      float largest = 0;
      for (int64_t j = i * block; j < last; ++j) largest = std::max(largest, std::abs(x[j]));
      scales[i] = largest;
      // The maximum avoids a division by 0 for a block of zeros.
      const VF inverse = splat(1.0f / std::max(largest, 1e-38f));
      const auto code_of = [&](VF value) HWY_ATTR {
        const VF fraction = hn::Mul(value, inverse);
        VF code = splat(0);
        for (const float limit : kLimits)
          code = hn::Add(code, hn::IfThenElseZero(hn::Gt(fraction, splat(limit)), splat(1)));
        return code;
      };
      for (int64_t at = i * block; at < last; at += 64) {
        const int64_t count = std::min<int64_t>(64, last - at);
        for_vectors(
            count, [&](int64_t j) HWY_ATTR { store(code_of(load(x + at + j)), found + j); },
            [&](int64_t j, int64_t k)
                HWY_ATTR { store_part(code_of(load_part(x + at + j, k)), found + j, k); });
        // Code 7 is zero; it pads an odd count.
        found[count] = 7;
        for (int64_t j = 0; j < count; j += 2)
          codes[(at + j) / 2] =
              static_cast<uint8_t>(static_cast<int>(found[j]) << 4 | static_cast<int>(found[j + 1]));
      }
    }
  });
}

// The two values of a byte.
struct Nf4Pairs {
  float of[256][2];
};
constexpr Nf4Pairs nf4_pairs() {
  Nf4Pairs pairs{};
  for (int byte = 0; byte < 256; ++byte)
    pairs.of[byte][0] = kNf4Values[byte >> 4], pairs.of[byte][1] = kNf4Values[byte & 15];
  return pairs;
}

void nf4_dequantize(Context& c, Region region, int64_t matrix_columns, int64_t block, const uint8_t* codes,
                    const float* scales, const uint8_t* scale_codes, const float* nested, const float* map,
                    const float* offset, Out y) {
  static constexpr Nf4Pairs kPairs = nf4_pairs();
  const auto to = array_of<Any>(y);
  const int64_t columns = region.sizes[1], n = region.sizes[0] * columns;
  const int64_t first_row = region.offsets[0], first_column = region.offsets[1];
  // In a region of full rows a block may continue in the next row; otherwise each row consists of full
  // blocks.
  const bool full_rows = columns == matrix_columns;
  const int64_t first = first_row * matrix_columns / block;
  parallel_blocks(c, ceil_div(n, block), 256, [&](int64_t begin, int64_t end, int) HWY_ATTR {
    HWY_ALIGN float values[64];
    for (int64_t i = begin; i < end; ++i) {
      float scale = 0;
      if (scales) {
        scale = scales[i];
      } else {
        const int64_t row = i * block / columns, column = i * block % columns;
        const int64_t k =
            full_rows ? first + i : ((first_row + row) * matrix_columns + first_column + column) / block;
        scale = map[scale_codes[i]] * nested[k / kNf4NestedBlock] + *offset;
      }
      const int64_t last = std::min(n, (i + 1) * block);
      for (int64_t at = i * block; at < last; at += 64) {
        const int64_t count = std::min<int64_t>(64, last - at);
        const uint8_t* const pairs = codes + at / 2;
        for (int64_t j = 0; j < count; j += 2)
          std::memcpy(values + j, kPairs.of[pairs[j / 2]], 2 * sizeof(float));
        for_vectors(
            count, [&](int64_t j) HWY_ATTR { to.put(at + j, hn::Mul(load(values + j), splat(scale))); },
            [&](int64_t j, int64_t k)
                HWY_ATTR { to.put_part(at + j, hn::Mul(load_part(values + j, k), splat(scale)), k); });
      }
    }
  });
}

Adapter adapter_family() {
  return {.row_lengths = row_lengths,
          .scale_columns = scale_columns,
          .magnitude_gradient = magnitude_gradient,
          .nf4_quantize = nf4_quantize,
          .nf4_dequantize = nf4_dequantize,
          .row_lengths_workspace = row_lengths_workspace,
          .scale_columns_workspace = scale_columns_workspace,
          .magnitude_gradient_workspace = magnitude_gradient_workspace};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(Adapter, adapter)
#endif
