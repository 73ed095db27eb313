#include "planner/kernels.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.hpp"

namespace capstan::planner {

namespace {

// A tile size relative to the cluster's, and its rate: smaller tiles load more bytes per FLOP (assumed).
struct TileChoice {
  double rows, columns, rate;
};
constexpr TileChoice kTiles[] = {{1, 1, 1.0}, {1, 0.5, 0.93}, {0.5, 0.5, 0.8}};

double operand_bytes(GemmFormat format) {
  switch (format) {
    case GemmFormat::fp32:
    case GemmFormat::tf32:
      return 4;
    case GemmFormat::bf16:
      return 2;
    case GemmFormat::fp8:
      return 1;
    case GemmFormat::fp4:
      break;
  }
  return 0.5;
}

double efficiency(const Cluster& c, GemmFormat format) {
  if (format == GemmFormat::fp8) return c.fp8_gemm_efficiency.value_or(c.gemm_efficiency);
  if (format == GemmFormat::fp4) return c.fp4_gemm_efficiency.value_or(c.gemm_efficiency);
  return c.gemm_efficiency;
}

}  // namespace

double peak_flops(const Cluster& c, GemmFormat format) {
  std::optional<double> tflops;
  const char* field = "bf16_tflops";
  switch (format) {
    case GemmFormat::fp32:
      tflops = c.fp32_tflops, field = "fp32_tflops";
      break;
    case GemmFormat::tf32:
      tflops = c.tf32_tflops, field = "tf32_tflops";
      break;
    case GemmFormat::bf16:
      tflops = c.bf16_tflops;
      break;
    case GemmFormat::fp8:
      tflops = c.fp8_tflops, field = "fp8_tflops";
      break;
    case GemmFormat::fp4:
      tflops = c.fp4_tflops, field = "fp4_tflops";
      break;
  }
  if (!tflops)
    fail(ErrorCode::config,
         "the recipe computes in a format for which the cluster " + c.name + " has no `" + field + "`",
         "choose another cluster or another mixed_precision; `" + std::string(field) +
             "` can be set in a cluster file");
  return 1e12 * *tflops;
}

double gemm_seconds(const Cluster& c, GemmFormat format, double rows, double columns, double inner,
                    double count) {
  if (rows <= 0 || columns <= 0 || inner <= 0 || count <= 0) return 0;
  const auto multiprocessors = static_cast<double>(c.multiprocessors);
  const double rate = peak_flops(c, format) * efficiency(c, format) * inner / (inner + c.gemm_fill_length) *
                      (count > 1 ? c.grouped_gemm_efficiency : 1);
  double best = std::numeric_limits<double>::infinity();
  for (const TileChoice& choice : kTiles) {
    const double tile_rows = static_cast<double>(c.gemm_tile_rows) * choice.rows,
                 tile_columns = static_cast<double>(c.gemm_tile_columns) * choice.columns;
    const double tiles = count * std::ceil(rows / tile_rows) * std::ceil(columns / tile_columns);
    const double waves = std::ceil(tiles / multiprocessors);
    best =
        std::min(best, waves * multiprocessors * 2 * tile_rows * tile_columns * inner / (rate * choice.rate));
  }
  const double bytes = count * (operand_bytes(format) * (rows + columns) * inner + 2 * rows * columns);
  const double loads = bytes / (1e9 * c.memory_bandwidth * c.memory_efficiency);
  return std::max(best, loads) + 1e-6 * c.kernel_latency;
}

double attention_rate(const Cluster& c, double length) {
  constexpr double kMeasured = 4096;
  const auto filled = [&](double tokens) { return tokens / (tokens + c.attention_fill_length); };
  return filled(length) / filled(kMeasured);
}

double memory_seconds(const Cluster& c, double bytes, double kernels) {
  if (bytes <= 0) return 0;
  return bytes / (1e9 * c.memory_bandwidth * c.memory_efficiency) + 1e-6 * kernels * c.kernel_latency;
}

}  // namespace capstan::planner
