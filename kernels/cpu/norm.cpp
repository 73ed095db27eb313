// LayerNorm and RMSNorm. Each row is read into fp32 workspace (L1) once, so that later passes cost no memory
// traffic. Bytes in fp32: forward 8 rows cols (16 with the residual), backward 12 (16 when accumulating).
#include "kernels/norm.hpp"

#include <cmath>
#include <cstring>

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/quantize.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/norm.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

// Rows in the workspace are padded with zeros to full vectors, so that sums need no tail.
HWY_INLINE int64_t padded(int64_t cols) {
  return round_up(cols, kStep);
}

template <class T>
HWY_INLINE void read_row(const Array<T>& x, int64_t at, int64_t cols, float* to) {
  int64_t i = 0;
  for (; i + kStep <= cols; i += kStep) store(x.at(at + i), to + i);
  if (i < cols) store(x.part(at + i, cols - i), to + i);
}

WorkspaceSize forward_workspace(NormRows rows) {
  const auto row = static_cast<size_t>(padded(rows.cols)) * sizeof(float);
  return {2 * row, row};
}
void forward(Context& c, bool rms, NormRows rows, In x_in, In residual_in, Out sum_out, In gamma,
             float gamma_offset, In beta, float eps, Out y_out, float* mean_out, float* rstd_out,
             QuantizedOutput quantized) {
  const int64_t cols = rows.cols, width = padded(cols);
  const bool has_beta = static_cast<bool>(beta);
  const WorkspaceParts workspace(c, forward_workspace(rows));
  if (!workspace) return;
  auto* g = workspace.shared<float>();
  float* b = g + width;
  std::memset(g, 0, static_cast<size_t>(2 * width) * sizeof(float));
  widen(gamma, g, cols);
  for (int64_t i = 0; i < cols; ++i) g[i] += gamma_offset;
  if (has_beta) widen(beta, b, cols);

  by_type({x_in, residual_in, sum_out, y_out}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto x = array_of<T>(x_in), residual = array_of<T>(residual_in), total = array_of<T>(sum_out),
               y = array_of<T>(y_out);
    const int64_t block = quantized ? kQuantizedRows : rows_per_block(cols);
    parallel_blocks(c, rows.rows, block, [&](int64_t begin, int64_t end, int worker) HWY_ATTR {
      auto* row = workspace.worker<float>(worker);
      const float inverse_cols = 1.0f / static_cast<float>(cols);
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = rows.start(r);
        read_row(x, at, cols, row);
        if (residual_in) {
          // Normalize the sum as stored (rounded), because the backward pass reads it.
          for_vectors(
              cols,
              [&](int64_t i) HWY_ATTR {
                total.put(at + i, hn::Add(load(row + i), residual.at(at + i)));
                store(total.at(at + i), row + i);
              },
              [&](int64_t i, int64_t n) HWY_ATTR {
                total.put_part(at + i, hn::Add(load(row + i), residual.part(at + i, n)), n);
                store(total.part(at + i, n), row + i);
              });
        }
        float mean = 0;
        if (!rms) {
          VF s = hn::Zero(DF());
          for (int64_t i = 0; i < width; i += kStep) s = hn::Add(s, load(row + i));
          mean = sum_lanes(s) * inverse_cols;
        }
        const VF vmean = splat(mean);
        VF squares = hn::Zero(DF());
        for (int64_t i = 0; i + kStep <= cols; i += kStep) {
          const VF v = hn::Sub(load(row + i), vmean);
          squares = hn::MulAdd(v, v, squares);
        }
        float total_squares = sum_lanes(squares);
        for (int64_t i = cols / kStep * kStep; i < cols; ++i)
          total_squares += (row[i] - mean) * (row[i] - mean);
        const float rstd = 1.0f / std::sqrt(total_squares * inverse_cols + eps);
        if (!rms) mean_out[r] = mean;
        rstd_out[r] = rstd;
        const VF vrstd = splat(rstd);
        auto value = [&](int64_t i) HWY_ATTR {
          const VF v = hn::Mul(hn::Mul(hn::Sub(load(row + i), vmean), vrstd), load(g + i));
          return has_beta ? hn::Add(v, load(b + i)) : v;
        };
        for_vectors(
            cols, [&](int64_t i) HWY_ATTR { y.put(at + i, value(i)); },
            [&](int64_t i, int64_t n) HWY_ATTR { y.put_part(at + i, value(i), n); });
      }
      if (quantized) quantize_rows(quantized, y_out, rows.rows, cols, begin, end);
    });
  });
}

// Parameter gradients have at most 64 partial rows, whose number depends on the shape only.
int64_t gradient_block(const NormRows& rows) {
  return std::max(rows_per_block(rows.cols), ceil_div(rows.rows, 64));
}
WorkspaceSize backward_workspace(NormRows rows, bool parameter_gradients) {
  if (rows.rows <= 0) return {};
  const auto row = static_cast<size_t>(padded(rows.cols)) * sizeof(float);
  const int64_t blocks = parameter_gradients ? ceil_div(rows.rows, gradient_block(rows)) : 0;
  return {row * static_cast<size_t>(1 + 2 * blocks), 2 * row};
}

// With xhat = (x - mean) rstd and h = dy g:  dx = rstd (h - mean(h) - xhat mean(h xhat)); RMSNorm lacks
// mean(h).
void backward(Context& c, bool rms, NormRows rows, In dy_in, In x_in, In gamma, float gamma_offset,
              const float* mean_in, const float* rstd_in, Out dx_out, bool accumulate, float* dgamma,
              float* dbeta) {
  const int64_t cols = rows.cols, width = padded(cols);
  if (rows.rows <= 0) return;
  const int64_t block = gradient_block(rows);
  const int64_t blocks = ceil_div(rows.rows, block);
  const bool partials = dgamma || dbeta;
  const WorkspaceParts workspace(c, backward_workspace(rows, partials));
  if (!workspace) return;
  auto* g = workspace.shared<float>();
  float* partial = g + width;
  std::memset(g, 0, static_cast<size_t>(width) * sizeof(float));
  widen(gamma, g, cols);
  for (int64_t i = 0; i < cols; ++i) g[i] += gamma_offset;

  by_type({dy_in, x_in, dx_out}, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const auto dy = array_of<T>(dy_in), x = array_of<T>(x_in), dx = array_of<T>(dx_out);
    parallel_blocks(c, rows.rows, block, [&](int64_t begin, int64_t end, int worker) HWY_ATTR {
      auto* h = workspace.worker<float>(worker);
      float* xhat = h + width;
      float* my_dgamma = partial + begin / block * 2 * width;
      float* my_dbeta = my_dgamma + width;
      if (partials) std::memset(my_dgamma, 0, static_cast<size_t>(2 * width) * sizeof(float));
      const float inverse_cols = 1.0f / static_cast<float>(cols);
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = rows.start(r);
        const VF vmean = splat(rms ? 0.0f : mean_in[r]), vrstd = splat(rstd_in[r]);
        VF sum_h = hn::Zero(DF()), sum_hx = sum_h;
        auto first = [&](int64_t i, VF d, VF xv) HWY_ATTR {
          const VF hat = hn::Mul(hn::Sub(xv, vmean), vrstd);
          const VF hv = hn::Mul(d, load(g + i));
          sum_h = hn::Add(sum_h, hv);
          // Lanes beyond cols add nothing, because d is 0 there.
          sum_hx = hn::MulAdd(hv, hat, sum_hx);
          store(hv, h + i);
          store(hat, xhat + i);
          if (partials) {
            store(hn::MulAdd(d, hat, load(my_dgamma + i)), my_dgamma + i);
            store(hn::Add(d, load(my_dbeta + i)), my_dbeta + i);
          }
        };
        for_vectors(
            cols, [&](int64_t i) HWY_ATTR { first(i, dy.at(at + i), x.at(at + i)); },
            [&](int64_t i, int64_t n) HWY_ATTR { first(i, dy.part(at + i, n), x.part(at + i, n)); });
        const VF mean_h = splat(rms ? 0.0f : sum_lanes(sum_h) * inverse_cols);
        const VF mean_hx = splat(sum_lanes(sum_hx) * inverse_cols);
        auto value = [&](int64_t i) HWY_ATTR {
          return hn::Mul(vrstd, hn::NegMulAdd(load(xhat + i), mean_hx, hn::Sub(load(h + i), mean_h)));
        };
        if (accumulate)
          for_vectors(
              cols, [&](int64_t i) HWY_ATTR { dx.put(at + i, hn::Add(dx.at(at + i), value(i))); },
              [&](int64_t i, int64_t n)
                  HWY_ATTR { dx.put_part(at + i, hn::Add(dx.part(at + i, n), value(i)), n); });
        else
          for_vectors(
              cols, [&](int64_t i) HWY_ATTR { dx.put(at + i, value(i)); },
              [&](int64_t i, int64_t n) HWY_ATTR { dx.put_part(at + i, value(i), n); });
      }
    });
  });
  if (!partials) return;
  parallel_blocks(c, width, 1024, [&](int64_t begin, int64_t end, int) HWY_ATTR {
    for (int64_t i = begin; i < end; i += kStep) {
      VF sg = hn::Zero(DF()), sb = sg;
      for (int64_t b = 0; b < blocks; ++b) {
        sg = hn::Add(sg, load(partial + b * 2 * width + i));
        sb = hn::Add(sb, load(partial + b * 2 * width + width + i));
      }
      const int64_t n = std::min(kStep, cols - i);
      if (dgamma) store_part(hn::Add(load_part(dgamma + i, n), sg), dgamma + i, n);
      if (dbeta) store_part(hn::Add(load_part(dbeta + i, n), sb), dbeta + i, n);
    }
  });
}

Norm norm_family() {
  return {.forward = forward,
          .backward = backward,
          .forward_workspace = forward_workspace,
          .backward_workspace = backward_workspace};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(Norm, norm)
#endif
