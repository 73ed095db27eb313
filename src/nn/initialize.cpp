#include "nn/initialize.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string_view>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/philox.hpp"

namespace capstan::nn {

namespace {

// normal_at for consecutive positions; uses both values of each block of the generator.
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

void initialize(const ParamSpec& spec, uint64_t seed, const Region& region, std::span<float> values,
                ThreadPool& pool) {
  CAPSTAN_ASSERT(fits(region, spec.shape) && static_cast<int64_t>(values.size()) == region.sizes.elements(),
                 "region " + region.text() + " of `" + spec.name + "` " + spec.shape.text());
  if (spec.init.kind == Init::Kind::zeros || spec.init.kind == Init::Kind::ones) {
    std::fill(values.begin(), values.end(), spec.init.kind == Init::Kind::ones ? 1.0f : 0.0f);
    return;
  }
  const PhiloxKey key = philox_key(seed, purpose::init, random_sequence_of(spec.name));
  // Runs of consecutive elements of the global tensor: the trailing dimensions that the region spans
  // completely, and the one before them. Threads take tiles of at most 16 Ki elements.
  // Number of dimensions before those of a run.
  size_t outer = spec.shape.size();
  int64_t run = 1;
  while (outer > 0) {
    run *= region.sizes[--outer];
    if (region.sizes[outer] != spec.shape[outer]) break;
  }
  const int64_t count = region.sizes.elements();
  if (count == 0) return;
  constexpr int64_t kTile = 1 << 14;
  const int64_t tiles_per_run = ceil_div(run, kTile);
  pool.parallel_for(count / run * tiles_per_run, [&](int64_t tile, int) {
    const int64_t r = tile / tiles_per_run, begin = tile % tiles_per_run * kTile;
    int64_t position = begin, stride = 1;
    for (int64_t d = spec.shape.rank() - 1, rest = r; d >= 0; --d) {
      int64_t index = region.offsets[d];
      if (static_cast<size_t>(d) < outer) {
        index += rest % region.sizes[d];
        rest /= region.sizes[d];
      }
      position += index * stride;
      stride *= spec.shape[d];
    }
    const auto fill = spec.init.kind == Init::Kind::normal ? normal_run : uniform_run;
    fill(key, spec.init.std, static_cast<uint64_t>(position),
         values.subspan(static_cast<size_t>(r * run + begin),
                        static_cast<size_t>(std::min(kTile, run - begin))));
  });
}

}  // namespace capstan::nn
