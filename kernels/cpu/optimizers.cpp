// Optimizer updates and gradient norms over range tables. Memory-bound: one pass, full vectors.
#include "kernels/optimizers.hpp"

#include <algorithm>

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/optimizers.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace capstan::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kUpdateBlock = 16384;     // elements to a tile
constexpr int64_t kReductionBlock = 32768;  // elements to a tile

// The tiles of a table: each lies within one range, so that what a tile computes depends on the table alone.
struct Tiles {
  const UpdateRange* ranges = nullptr;
  int64_t count = 0, block = 0;
  // The first tile of every range, and the number of tiles at the end: [count + 1].
  int64_t* first = nullptr;

  int64_t total() const { return first[count]; }
};
// scratch_values: the launch's own scratch memory after the tiles, one value for each.
Tiles tiles_of(Context& c, In table, int64_t count, int64_t block, bool counted_only, bool scratch_values) {
  Tiles tiles{table.as<UpdateRange>(), count, block};
  int64_t total = 0;
  const auto tiles_in = [&](const UpdateRange& range) {
    return counted_only && !range.counted ? 0 : ceil_div(range.count, block);
  };
  for (int64_t r = 0; r < count; ++r) total += tiles_in(tiles.ranges[r]);
  const int64_t words = count + 1 + (scratch_values ? total : 0);
  tiles.first = c.scratch_of<int64_t>(Context::kShared, static_cast<size_t>(words));
  tiles.first[0] = 0;
  for (int64_t r = 0; r < count; ++r) tiles.first[r + 1] = tiles.first[r] + tiles_in(tiles.ranges[r]);
  return tiles;
}

// body(range, begin, end, tile) for every tile.
template <class Body>
void parallel_tiles(Context& c, const Tiles& tiles, Body&& body) {
  c.pool->parallel_for(tiles.total(), [&](int64_t tile, int) {
    const int64_t r = std::upper_bound(tiles.first, tiles.first + tiles.count + 1, tile) - tiles.first - 1;
    const UpdateRange& range = tiles.ranges[r];
    const int64_t begin = range.begin + (tile - tiles.first[r]) * tiles.block;
    body(range, begin, std::min(begin + tiles.block, range.begin + range.count), tile);
  });
}

// The learning rate and weight decay of a range.
struct RangeScale {
  float lr, decay;
};
RangeScale scale_of(const StepScale& step, const UpdateRange& range) {
  const double lr = range.decoupled_lr ? step.decoupled_lr : step.lr;
  return {static_cast<float>(lr * range.lr_factor), range.weight_decay ? step.weight_decay : 0.0f};
}

struct AdamVectors {
  VF main, m, v;
};
HWY_INLINE AdamVectors adam_update(const AdamStep& s, RangeScale scale, VF g, AdamVectors a) {
  if (!s.scale.decoupled_decay) g = hn::MulAdd(splat(scale.decay), a.main, g);
  a.m = hn::MulAdd(splat(1.0f - s.beta1), g, hn::Mul(splat(s.beta1), a.m));
  a.v = hn::MulAdd(hn::Mul(splat(1.0f - s.beta2), g), g, hn::Mul(splat(s.beta2), a.v));
  const VF root = hn::Sqrt(hn::Mul(a.v, splat(1.0f / s.bias_correction2)));
  VF update = hn::Div(hn::Mul(a.m, splat(1.0f / s.bias_correction1)), hn::Add(root, splat(s.eps)));
  if (s.scale.decoupled_decay) update = hn::MulAdd(splat(scale.decay), a.main, update);
  a.main = hn::NegMulAdd(splat(scale.lr), update, a.main);
  return a;
}

void adam(Context& c, AdamStep s, In control, In ranges, int64_t range_count, const float* grad, float* main,
          float* m, float* v, Out model) {
  const StepControl step = *control.as<StepControl>();
  if (step.skip) return;
  const auto copy = array_of<Any>(model);
  const bool has_copy = static_cast<bool>(model);
  const Tiles tiles = tiles_of(c, ranges, range_count, kUpdateBlock, false, false);
  parallel_tiles(c, tiles, [=](const UpdateRange& range, int64_t begin, int64_t end, int64_t) HWY_ATTR {
    const RangeScale scale = scale_of(s.scale, range);
    const VF factor = splat(step.gradient);
    for_vectors(
        end - begin,
        [=](int64_t j) HWY_ATTR {
          const int64_t i = begin + j;
          fetch_after(grad + i);
          fetch_after(main + i);
          fetch_after(m + i);
          fetch_after(v + i);
          const AdamVectors a = adam_update(s, scale, hn::Mul(load(grad + i), factor),
                                            {load(main + i), load(m + i), load(v + i)});
          store(a.main, main + i);
          store(a.m, m + i);
          store(a.v, v + i);
          if (has_copy) copy.put(i, a.main);
        },
        [=](int64_t j, int64_t k) HWY_ATTR {
          const int64_t i = begin + j;
          const AdamVectors a =
              adam_update(s, scale, hn::Mul(load_part(grad + i, k), factor),
                          {load_part(main + i, k), load_part(m + i, k), load_part(v + i, k)});
          store_part(a.main, main + i, k);
          store_part(a.m, m + i, k);
          store_part(a.v, v + i, k);
          if (has_copy) copy.put_part(i, a.main, k);
        });
  });
}

// Rules with one state array at most. update(w, g, state) changes w and state in place.
template <class Update>
void update_ranges(Context& c, const StepScale& step, In control, In ranges, int64_t range_count,
                   const float* grad, float* main, float* state, Out model, Update&& update) {
  const StepControl applied = *control.as<StepControl>();
  if (applied.skip) return;
  const auto copy = array_of<Any>(model);
  const bool has_copy = static_cast<bool>(model);
  const Tiles tiles = tiles_of(c, ranges, range_count, kUpdateBlock, false, false);
  parallel_tiles(c, tiles, [&](const UpdateRange& range, int64_t begin, int64_t end, int64_t) HWY_ATTR {
    const RangeScale scale = scale_of(step, range);
    for (int64_t i = begin; i < end; i += kStep) {
      const int64_t k = std::min(kStep, end - i);
      const bool full = k == kStep;
      VF w = full ? load(main + i) : load_part(main + i, k);
      VF g = hn::Mul(splat(applied.gradient), full ? load(grad + i) : load_part(grad + i, k));
      if (step.decoupled_decay)
        w = hn::Mul(splat(1.0f - scale.lr * scale.decay), w);
      else
        g = hn::MulAdd(splat(scale.decay), w, g);
      VF kept = hn::Zero(DF());
      if (state) kept = full ? load(state + i) : load_part(state + i, k);
      update(scale.lr, w, g, kept);
      if (state) full ? store(kept, state + i) : store_part(kept, state + i, k);
      full ? store(w, main + i) : store_part(w, main + i, k);
      if (has_copy) full ? copy.put(i, w) : copy.put_part(i, w, k);
    }
  });
}

void sgd(Context& c, SgdStep s, In control, In ranges, int64_t range_count, const float* grad, float* main,
         float* buffer, Out model) {
  update_ranges(c, s.scale, control, ranges, range_count, grad, main, s.momentum != 0 ? buffer : nullptr,
                model, [&](float lr, VF& w, VF g, VF& kept) HWY_ATTR {
                  kept = hn::MulAdd(splat(s.momentum), kept, g);
                  const VF update = s.nesterov ? hn::MulAdd(splat(s.momentum), kept, g) : kept;
                  w = hn::NegMulAdd(splat(lr), update, w);
                });
}

void lion(Context& c, LionStep s, In control, In ranges, int64_t range_count, const float* grad, float* main,
          float* m, Out model) {
  update_ranges(c, s.scale, control, ranges, range_count, grad, main, m, model,
                [&](float lr, VF& w, VF g, VF& kept) HWY_ATTR {
                  const VF direction = hn::MulAdd(splat(s.beta1), kept, hn::Mul(splat(1.0f - s.beta1), g));
                  const VF sign = hn::IfThenElseZero(hn::Ne(direction, hn::Zero(DF())),
                                                     hn::CopySign(splat(1.0f), direction));
                  w = hn::NegMulAdd(splat(lr), sign, w);
                  kept = hn::MulAdd(splat(s.beta2), kept, hn::Mul(splat(1.0f - s.beta2), g));
                });
}

void sum_of_squares(Context& c, In ranges, int64_t range_count, const float* x, double* out,
                    bool accumulate) {
  using Half = hn::Half<DF>;
  using Wide = hn::Rebind<double, Half>;
  const Tiles tiles = tiles_of(c, ranges, range_count, kReductionBlock, true, true);
  auto* partial = reinterpret_cast<double*>(tiles.first + tiles.count + 1);
  parallel_tiles(c, tiles, [&](const UpdateRange&, int64_t begin, int64_t end, int64_t tile) HWY_ATTR {
    auto lower = hn::Zero(Wide()), upper = lower;
    const auto add = [&](VF v) HWY_ATTR {
      const auto low = hn::PromoteTo(Wide(), hn::LowerHalf(v)),
                 high = hn::PromoteTo(Wide(), hn::UpperHalf(Half(), v));
      lower = hn::MulAdd(low, low, lower);
      upper = hn::MulAdd(high, high, upper);
    };
    for_vectors(
        end - begin,
        [&](int64_t i) HWY_ATTR {
          fetch_after(x + begin + i);
          add(load(x + begin + i));
        },
        [&](int64_t i, int64_t k) HWY_ATTR { add(load_part(x + begin + i, k)); });
    partial[tile] = hn::GetLane(hn::SumOfLanes(Wide(), hn::Add(lower, upper)));
  });
  double total = accumulate ? *out : 0;
  for (int64_t t = 0; t < tiles.total(); ++t) total += partial[t];
  *out = total;
}

void count_zeros(Context& c, In ranges, int64_t range_count, const float* x, int64_t* out, bool accumulate) {
  const Tiles tiles = tiles_of(c, ranges, range_count, kReductionBlock, true, true);
  int64_t* partial = tiles.first + tiles.count + 1;
  parallel_tiles(c, tiles, [&](const UpdateRange&, int64_t begin, int64_t end, int64_t tile) {
    partial[tile] = std::count(x + begin, x + end, 0.0f);
  });
  int64_t total = accumulate ? *out : 0;
  for (int64_t t = 0; t < tiles.total(); ++t) total += partial[t];
  *out = total;
}

Optimizers optimizers_family() {
  return {
      .adam = adam, .sgd = sgd, .lion = lion, .sum_of_squares = sum_of_squares, .count_zeros = count_zeros};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(Optimizers, optimizers)
#endif
