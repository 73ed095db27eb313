#include "nn/initialize.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string_view>

#include "base/error.hpp"
#include "base/philox.hpp"

namespace capstan::nn {

// FNV-1a: it only has to tell names apart, and to stay the same for ever.
uint64_t random_stream_of(std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

namespace {

// normal_at for a run of positions: both values of each block of the generator are used.
void normal_run(PhiloxKey key, double std, uint64_t begin, std::span<float> out) {
  const uint64_t end = begin + out.size();
  for (uint64_t block = begin / 2; block * 2 < end; ++block) {
    const auto w = philox4x32(key, block, 0);
    const double u1 = (static_cast<double>((uint64_t{w[0]} << 32 | w[1]) >> 11) + 0.5) * 0x1p-53;
    const double u2 = static_cast<double>((uint64_t{w[2]} << 32 | w[3]) >> 11) * 0x1p-53;
    const double radius = std::sqrt(-2.0 * std::log(u1)), angle = 2.0 * std::numbers::pi * u2;
    const uint64_t first = block * 2;
    if (first >= begin) out[first - begin] = static_cast<float>(std * (radius * std::cos(angle)));
    if (first + 1 < end) out[first + 1 - begin] = static_cast<float>(std * (radius * std::sin(angle)));
  }
}

void uniform_run(PhiloxKey key, double bound, uint64_t begin, std::span<float> out) {
  const uint64_t end = begin + out.size();
  for (uint64_t block = begin / 2; block * 2 < end; ++block) {
    const auto w = philox4x32(key, block, 0);
    for (uint64_t i = 0; i < 2; ++i) {
      const uint64_t at = block * 2 + i;
      if (at < begin || at >= end) continue;
      const double u = static_cast<double>((uint64_t{w[2 * i]} << 32 | w[2 * i + 1]) >> 11) * 0x1p-53;
      out[at - begin] = static_cast<float>(bound * (2 * u - 1));
    }
  }
}

}  // namespace

InitRegion InitRegion::full(const Shape& shape) {
  if (shape.rank() == 0) return {0, 1, 0, 1};
  return {0, shape[0], 0, shape[0] == 0 ? 0 : shape.elements() / shape[0]};
}

void initialize(const ParamSpec& spec, uint64_t seed, const InitRegion& part, std::span<float> values,
                ThreadPool& pool) {
  const InitRegion full = InitRegion::full(spec.shape);
  CAPSTAN_ASSERT(part.row >= 0 && part.row + part.rows <= full.rows && part.column >= 0 &&
                     part.column + part.columns <= full.columns &&
                     static_cast<int64_t>(values.size()) == part.rows * part.columns,
                 "a part of `" + spec.name + "` " + spec.shape.text());
  if (spec.init.kind == Init::Kind::zeros || spec.init.kind == Init::Kind::ones) {
    std::fill(values.begin(), values.end(), spec.init.kind == Init::Kind::ones ? 1.0f : 0.0f);
    return;
  }
  const PhiloxKey key = philox_key(seed, purpose::init, random_stream_of(spec.name));
  // Runs of consecutive elements: all at once when the rows are whole, else row by row; tiles of about 16 Ki.
  const bool whole_rows = part.columns == full.columns;
  const int64_t run = whole_rows ? part.rows * part.columns : part.columns, runs = whole_rows ? 1 : part.rows;
  constexpr int64_t kTile = 1 << 14;
  if (run == 0 || runs == 0) return;
  const int64_t tiles_per_run = (run + kTile - 1) / kTile;
  pool.parallel_for(runs * tiles_per_run, [&](int64_t tile, int) {
    const int64_t r = tile / tiles_per_run, begin = tile % tiles_per_run * kTile,
                  count = std::min(kTile, run - begin);
    const int64_t position = (part.row + r) * full.columns + part.column + begin;
    const auto fill = spec.init.kind == Init::Kind::normal ? normal_run : uniform_run;
    fill(key, spec.init.std, static_cast<uint64_t>(position),
         values.subspan(static_cast<size_t>(r * run + begin), static_cast<size_t>(count)));
  });
}

}  // namespace capstan::nn
