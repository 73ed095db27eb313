#include "nn/rope_table.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numbers>
#include <span>

#include "base/error.hpp"

namespace capstan::nn {

namespace {

void scale_llama3(std::vector<double>& frequencies, const RopeScaling& s) {
  const auto original = static_cast<double>(s.original_positions);
  const double longest_kept = original / s.high_freq_factor, shortest_scaled = original / s.low_freq_factor;
  for (double& f : frequencies) {
    const double wavelength = 2 * std::numbers::pi / f;
    if (wavelength < longest_kept) continue;
    if (wavelength > shortest_scaled) {
      f /= s.factor;
    } else {
      const double smooth =
          (original / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
      f = (1 - smooth) * f / s.factor + smooth * f;
    }
  }
}

void scale_yarn(std::vector<double>& frequencies, const RopeOptions& options) {
  const RopeScaling& s = *options.scaling;
  const auto width = static_cast<double>(options.rotary_dim);
  // The (fractional) index of the pair with this number of rotations over the original length.
  const auto pair_of = [&](double turns) {
    return width * std::log(static_cast<double>(s.original_positions) / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(options.base));
  };
  double low = pair_of(s.beta_fast), high = pair_of(s.beta_slow);
  if (s.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, width - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double stretched = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] *= stretched / s.factor + 1 - stretched;
  }
}

// True where sequences of this length use the long factors.
bool is_long(const RopeOptions& options, int64_t positions) {
  return options.scaling && options.scaling->kind == RopeScaling::Kind::longrope &&
         positions > options.scaling->original_positions;
}

}  // namespace

std::vector<double> rope_frequencies(const RopeOptions& options, int64_t positions) {
  std::vector<double> frequencies(static_cast<size_t>(options.rotary_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i)
    frequencies[i] =
        std::pow(options.base, -2.0 * static_cast<double>(i) / static_cast<double>(options.rotary_dim));
  if (!options.scaling) return frequencies;
  const RopeScaling& s = *options.scaling;
  switch (s.kind) {
    case RopeScaling::Kind::llama3:
      scale_llama3(frequencies, s);
      break;
    case RopeScaling::Kind::linear:
      for (double& f : frequencies) f /= s.factor;
      break;
    case RopeScaling::Kind::yarn:
      scale_yarn(frequencies, options);
      break;
    case RopeScaling::Kind::longrope: {
      const std::vector<double>& factors = is_long(options, positions) ? s.long_factors : s.short_factors;
      CAPSTAN_ASSERT(factors.size() == frequencies.size(), "longrope: one factor for each pair");
      for (size_t i = 0; i < frequencies.size(); ++i) frequencies[i] /= factors[i];
      break;
    }
  }
  return frequencies;
}

RopeTables::RopeTables(const RopeOptions& options)
    : options_(options), key_([] {
        static std::atomic<uint64_t> next{0};
        return next.fetch_add(2);
      }()) {}

ops::RopeTable RopeTables::in(StepContext& context, int64_t positions) {
  std::vector<Tensor>& rows = context.constants[key_ + (is_long(options_, positions) ? 1 : 0)];
  if (rows.empty() || rows[0].size(0) < positions) {
    const ops::RopeTable table = on(context.device, positions);
    rows = {table.cos, table.sin};
  }
  return {rows[0].slice(0, 0, positions), rows[1].slice(0, 0, positions)};
}

int64_t RopeTables::valid_cache_length(int64_t length, int64_t capacity) const {
  if (is_long(options_, length) || !is_long(options_, capacity)) return capacity;
  return options_.scaling->original_positions;
}

ops::RopeTable RopeTables::on(Device& device, int64_t positions) {
  CategoryScope scope(MemoryCategory::workspace);
  const Shape shape{positions, options_.rotary_dim / 2};
  const ops::RopeTable table{Tensor::empty(device, shape), Tensor::empty(device, shape)};
  if (device.is_meta()) {
    // Counts the bytes; the rows are not needed.
    for (const Tensor& rows : {table.cos, table.sin})
      device.copy_to_device(rows.address(), nullptr, rows.bytes());
    return table;
  }
  std::lock_guard lock(mutex_);
  const auto wanted = static_cast<size_t>(shape.elements());
  Rows& rows = is_long(options_, positions) ? long_rows_ : rows_;
  if (rows.cos.size() < wanted) {
    const std::vector<double> frequencies = rope_frequencies(options_, positions);
    const double length = options_.scaling ? options_.scaling->attention_factor : 1.0;
    rows.cos.reserve(wanted);
    rows.sin.reserve(wanted);
    for (auto p = static_cast<int64_t>(rows.cos.size()) / shape[1]; p < positions; ++p)
      for (const double f : frequencies) {
        const double angle = static_cast<double>(p) * f;
        rows.cos.push_back(static_cast<float>(length * std::cos(angle)));
        rows.sin.push_back(static_cast<float>(length * std::sin(angle)));
      }
  }
  table.cos.copy_from_host_bytes(std::as_bytes(std::span(rows.cos).first(wanted)));
  table.sin.copy_from_host_bytes(std::as_bytes(std::span(rows.sin).first(wanted)));
  return table;
}

}  // namespace capstan::nn
