// Optimizer updates and gradient norms over range tables. Memory-bound: one pass, full vectors.
#include "kernels/optimizers.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/common/fp8_moment.hpp"
#include "kernels/common/update_ranges.hpp"
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

constexpr int64_t kUpdateBlock = 16384;     // elements per tile
constexpr int64_t kReductionBlock = 32768;  // elements per tile

// The tiles of a table: each lies within one range, so that what a tile computes depends on the table alone.
struct Tiles {
  const UpdateRange* ranges = nullptr;
  int64_t count = 0, block = 0;
  // The first tile of every range, and the number of tiles at the end: [count + 1].
  int64_t* first = nullptr;

  int64_t total() const { return first[count]; }

  Tiles(In table, int64_t range_count, int64_t block_size, bool counted_only, int64_t* first_tiles)
      : ranges(table.as<UpdateRange>()), count(range_count), block(block_size), first(first_tiles) {
    first[0] = 0;
    for (int64_t r = 0; r < count; ++r) {
      const bool left_out = counted_only && !ranges[r].counted;
      first[r + 1] = first[r] + (left_out ? 0 : ceil_div(ranges[r].count, block));
    }
  }
};
// The tiles, then one value for each; a range ends with a tile that need not be full.
WorkspaceSize reduction_workspace(int64_t range_count, int64_t elements) {
  static_assert(sizeof(double) == sizeof(int64_t));
  const int64_t tiles = range_count + elements / kReductionBlock;
  return {static_cast<size_t>(range_count + 1 + tiles) * sizeof(int64_t), 0};
}
int64_t counted_elements(In table, int64_t count) {
  int64_t elements = 0;
  for (int64_t r = 0; r < count; ++r)
    if (const UpdateRange& range = table.as<UpdateRange>()[r]; range.counted) elements += range.count;
  return elements;
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

// Elements of a tile that are widened to fp32 at a time.
constexpr int64_t kChunk = 16 * kMomentBlock;
static_assert(kUpdateBlock % kChunk == 0);

// Words for the elements [i, i + count) of the buffer, by their positions in the global parameter.
void rounding_words(PhiloxKey key, const UpdateRange& range, int64_t i, int64_t count, uint32_t* words) {
  constexpr int64_t kWords = 4 * kStep;
  HWY_ALIGN uint32_t drawn[4 * kLanes];
  int64_t offset = i - range.begin;
  while (count > 0) {
    int64_t position = range.origin + offset, length = count;
    if (range.columns > 0) {
      const int64_t j = range.column + offset, column = j % range.columns;
      position = range.origin + j / range.columns * range.row_stride + column;
      length = std::min(count, range.columns - column);
    }
    offset += length, count -= length;
    while (length > 0) {
      const int64_t first = position % kWords, n = std::min(length, kWords - first);
      philox_words(key, range.parameter, static_cast<uint64_t>(position / kWords * kStep), drawn);
      std::copy_n(drawn + first, n, words);
      words += n, position += n, length -= n;
    }
  }
}

void round_stochastically(const float* from, const uint32_t* words, bf16* to, int64_t count) {
  const DU du;
  const hn::Rebind<uint16_t, DF> d16;
  for_vectors(
      count,
      [=](int64_t i) HWY_ATTR {
        const VF v = load(from + i);
        const auto u = hn::BitCast(du, v), noise = hn::ShiftRight<16>(hn::LoadU(du, words + i));
        const auto bits = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Or(u, hn::Set(du, 0x400000)),
                                         hn::Add(u, noise));
        hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(bits)), d16, reinterpret_cast<uint16_t*>(to + i));
      },
      [=](int64_t i, int64_t n) {
        for (int64_t j = i; j < i + n; ++j) {
          const uint32_t u = std::bit_cast<uint32_t>(from[j]);
          const bool nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
          to[j].bits = static_cast<uint16_t>((nan ? u | 0x400000u : u + (words[j] >> 16)) >> 16);
        }
      });
}

// An array that an update reads and writes as fp32: it is that, or bf16, or an fp8 moment (u8 with scales).
class StateArray {
 public:
  StateArray(Out data, float* scales, bool root, const StochasticRounding& rounding, PhiloxKey key)
      : data_(data), scales_(scales), root_(root), stochastic_(rounding.enabled), key_(key) {}
  explicit StateArray(float* data) : StateArray({data, DType::f32}, nullptr, false, {}, {}) {}

  // The elements [i, i + count) of the buffer: themselves, or in `local`.
  float* begin(const UpdateRange& range, int64_t i, int64_t count, float* local) const {
    if (data_.dtype == DType::f32) return data_.as<float>() + i;
    if (data_.dtype == DType::bf16)
      widen({data_.as<bf16>() + i, DType::bf16}, local, count);
    else
      decode(range, i, count, local);
    return local;
  }
  // Stores what begin() returned.
  void end(const UpdateRange& range, int64_t i, int64_t count, const float* values) const {
    if (data_.dtype == DType::f32) return;
    uint32_t words[kChunk];
    if (stochastic_) rounding_words(key_, range, i, count, words);
    if (data_.dtype == DType::u8) return encode(range, i, count, values, stochastic_ ? words : nullptr);
    if (stochastic_) return round_stochastically(values, words, data_.as<bf16>() + i, count);
    const Array<bf16> to{data_.as<bf16>() + i};
    for_vectors(
        count, [=](int64_t j) HWY_ATTR { to.put(j, load(values + j)); },
        [=](int64_t j, int64_t n) HWY_ATTR { to.put_part(j, load_part(values + j, n), n); });
  }

  void decode(const UpdateRange& range, int64_t i, int64_t count, float* values) const {
    const uint8_t* codes = data_.as<uint8_t>() + i;
    for (int64_t j = 0; j < count; ++j) {
      const float value = capstan::decode<kE4m3>(codes[j]) * scales_[moment_block(range, i + j)];
      values[j] = root_ ? value * value : value;
    }
  }
  // i: the beginning of a block.
  void encode(const UpdateRange& range, int64_t i, int64_t count, const float* values,
              const uint32_t* words) const {
    float block[kMomentBlock];
    for (int64_t first = 0; first < count; first += kMomentBlock) {
      const int64_t n = std::min(kMomentBlock, count - first);
      float largest = 0;
      for (int64_t j = 0; j < n; ++j) {
        block[j] = root_ ? std::sqrt(values[first + j]) : values[first + j];
        const float magnitude = std::abs(block[j]);
        largest = magnitude <= largest ? largest : magnitude;
        if (std::isnan(magnitude)) break;
      }
      const float scale = fp8_scale(largest);
      scales_[moment_block(range, i + first)] = scale;
      uint8_t* codes = data_.as<uint8_t>() + i + first;
      for (int64_t j = 0; j < n; ++j) {
        const float x = scale > 0 ? block[j] / scale : 0.0f;
        codes[j] = static_cast<uint8_t>(words ? capstan::encode_stochastic<kE4m3>(x, words[first + j])
                                              : capstan::encode<kE4m3>(x));
      }
    }
  }

 private:
  Out data_;
  float* scales_;
  bool root_, stochastic_;
  PhiloxKey key_;
};

// The values of an element that an update rule reads and changes: gradient, main parameter and state.
struct Element {
  VF g, w, m, v;
};
struct UpdateArrays {
  In gradient;  // fp32 or bf16
  StateArray main, m, v;
  Out model;
};
// The elements [i, i + count) of the gradient: themselves, or in `local`.
const float* gradient_at(const UpdateArrays& arrays, int64_t i, int64_t count, float* local) {
  if (arrays.gradient.dtype == DType::f32) return arrays.gradient.as<float>() + i;
  widen(arrays.gradient, i, local, count);
  return local;
}
// Applies update(scale, element) to the elements of all ranges. kStates: the number of moments, m and v.
template <int kStates, class Update>
void update_ranges(Context& c, const StepScale& step, StepControl control, In ranges, int64_t range_count,
                   const UpdateArrays& arrays, Update&& update) {
  if (control.skip) return;
  const WorkspaceParts workspace(c, update_workspace(range_count));
  if (!workspace) return;
  const Tiles tiles(ranges, range_count, kUpdateBlock, false, workspace.shared<int64_t>());
  parallel_tiles(c, tiles, [&](const UpdateRange& range, int64_t begin, int64_t end, int64_t) HWY_ATTR {
    const RangeScale scale = scale_of(step, range);
    const float factor = control.gradient;
    const auto copy = array_of<Any>(arrays.model);
    const bool has_copy = static_cast<bool>(arrays.model);
    float local[4][kChunk];
    for (int64_t i = begin; i < end; i += kChunk) {
      const int64_t count = std::min(kChunk, end - i);
      const float* const g = gradient_at(arrays, i, count, local[3]);
      float* const w = arrays.main.begin(range, i, count, local[0]);
      float* const m = kStates > 0 ? arrays.m.begin(range, i, count, local[1]) : nullptr;
      float* const v = kStates > 1 ? arrays.v.begin(range, i, count, local[2]) : nullptr;
      for_vectors(
          count,
          [=, &update](int64_t j) HWY_ATTR {
            fetch_after(g + j);
            fetch_after(w + j);
            Element e{hn::Mul(load(g + j), splat(factor)), load(w + j), hn::Zero(DF()), hn::Zero(DF())};
            if constexpr (kStates > 0) fetch_after(m + j), e.m = load(m + j);
            if constexpr (kStates > 1) fetch_after(v + j), e.v = load(v + j);
            update(scale, e);
            store(e.w, w + j);
            if constexpr (kStates > 0) store(e.m, m + j);
            if constexpr (kStates > 1) store(e.v, v + j);
            if (has_copy) copy.put(i + j, e.w);
          },
          [=, &update](int64_t j, int64_t n) HWY_ATTR {
            Element e{hn::Mul(load_part(g + j, n), splat(factor)), load_part(w + j, n), hn::Zero(DF()),
                      hn::Zero(DF())};
            if constexpr (kStates > 0) e.m = load_part(m + j, n);
            if constexpr (kStates > 1) e.v = load_part(v + j, n);
            update(scale, e);
            store_part(e.w, w + j, n);
            if constexpr (kStates > 0) store_part(e.m, m + j, n);
            if constexpr (kStates > 1) store_part(e.v, v + j, n);
            if (has_copy) copy.put_part(i + j, e.w, n);
          });
      arrays.main.end(range, i, count, w);
      if constexpr (kStates > 0) arrays.m.end(range, i, count, m);
      if constexpr (kStates > 1) arrays.v.end(range, i, count, v);
    }
  });
}

// Decoupled weight decay of the weight, or that of L2 regularization in the gradient.
HWY_INLINE void decay(const StepScale& step, RangeScale scale, Element& e) {
  if (step.decoupled_decay)
    e.w = hn::Mul(splat(1.0f - scale.lr * scale.decay), e.w);
  else
    e.g = hn::MulAdd(splat(scale.decay), e.w, e.g);
}

void adam(Context& c, AdamStep s, In control, In ranges, int64_t range_count, In grad, Out main, Out m,
          float* m_scales, Out v, float* v_scales, Out model) {
  const StochasticRounding& r = s.rounding;
  const UpdateArrays arrays{grad,
                            {main, nullptr, false, r, r.main},
                            {m, m_scales, false, r, r.exp_avg},
                            {v, v_scales, true, r, r.exp_avg_sq},
                            model};
  update_ranges<2>(c, s.scale, *control.as<StepControl>(), ranges, range_count, arrays,
                   [s](RangeScale scale, Element& e) HWY_ATTR {
                     if (!s.scale.decoupled_decay) e.g = hn::MulAdd(splat(scale.decay), e.w, e.g);
                     e.m = hn::MulAdd(splat(1.0f - s.beta1), e.g, hn::Mul(splat(s.beta1), e.m));
                     e.v = hn::MulAdd(hn::Mul(splat(1.0f - s.beta2), e.g), e.g, hn::Mul(splat(s.beta2), e.v));
                     const VF root = hn::Sqrt(hn::Mul(e.v, splat(1.0f / s.bias_correction2)));
                     VF update =
                         hn::Div(hn::Mul(e.m, splat(1.0f / s.bias_correction1)), hn::Add(root, splat(s.eps)));
                     if (s.scale.decoupled_decay) update = hn::MulAdd(splat(scale.decay), e.w, update);
                     e.w = hn::NegMulAdd(splat(scale.lr), update, e.w);
                   });
}

void sgd(Context& c, SgdStep s, In control, In ranges, int64_t range_count, const float* grad, float* main,
         float* buffer, Out model) {
  const UpdateArrays arrays{
      {grad, DType::f32}, StateArray(main), StateArray(buffer), StateArray(nullptr), model};
  const auto update = [s](RangeScale scale, Element& e) HWY_ATTR {
    decay(s.scale, scale, e);
    e.m = hn::MulAdd(splat(s.momentum), e.m, e.g);
    e.w = hn::NegMulAdd(splat(scale.lr), e.m, e.w);
  };
  if (s.momentum != 0)
    update_ranges<1>(c, s.scale, *control.as<StepControl>(), ranges, range_count, arrays, update);
  else
    update_ranges<0>(c, s.scale, *control.as<StepControl>(), ranges, range_count, arrays, update);
}

void lion(Context& c, LionStep s, In control, In ranges, int64_t range_count, const float* grad, float* main,
          float* m, Out model) {
  const UpdateArrays arrays{{grad, DType::f32}, StateArray(main), StateArray(m), StateArray(nullptr), model};
  update_ranges<1>(c, s.scale, *control.as<StepControl>(), ranges, range_count, arrays,
                   [s](RangeScale scale, Element& e) HWY_ATTR {
                     decay(s.scale, scale, e);
                     const VF direction =
                         hn::MulAdd(splat(s.beta1), e.m, hn::Mul(splat(1.0f - s.beta1), e.g));
                     const VF sign = hn::IfThenElseZero(hn::Ne(direction, hn::Zero(DF())),
                                                        hn::CopySign(splat(1.0f), direction));
                     e.w = hn::NegMulAdd(splat(scale.lr), sign, e.w);
                     e.m = hn::MulAdd(splat(s.beta2), e.m, hn::Mul(splat(1.0f - s.beta2), e.g));
                   });
}

void muon_momentum(Context& c, MuonStep s, In control, In ranges, int64_t range_count, float* gradient,
                   const float* main, float* buffer) {
  const StepControl step = *control.as<StepControl>();
  if (step.skip) return;
  const WorkspaceParts workspace(c, update_workspace(range_count));
  if (!workspace) return;
  const Tiles tiles(ranges, range_count, kUpdateBlock, false, workspace.shared<int64_t>());
  parallel_tiles(c, tiles, [=](const UpdateRange& range, int64_t begin, int64_t end, int64_t) HWY_ATTR {
    const VF factor = splat(step.gradient),
             decay = splat(s.scale.decoupled_decay ? 0.0f : scale_of(s.scale, range).decay);
    const auto momentum = [=](VF g, VF w, VF& m) HWY_ATTR {
      g = hn::MulAdd(decay, w, hn::Mul(g, factor));
      m = hn::MulAdd(splat(1.0f - s.momentum), hn::Sub(g, m), m);
      return s.nesterov ? hn::MulAdd(splat(s.momentum), hn::Sub(m, g), g) : m;
    };
    for_vectors(
        end - begin,
        [=](int64_t j) HWY_ATTR {
          const int64_t i = begin + j;
          VF m = load(buffer + i);
          store(momentum(load(gradient + i), load(main + i), m), gradient + i);
          store(m, buffer + i);
        },
        [=](int64_t j, int64_t n) HWY_ATTR {
          const int64_t i = begin + j;
          VF m = load_part(buffer + i, n);
          store_part(momentum(load_part(gradient + i, n), load_part(main + i, n), m), gradient + i, n);
          store_part(m, buffer + i, n);
        });
  });
}

void muon_update(Context& c, StepScale step, In control, In ranges, int64_t range_count, const float* update,
                 float* main, Out model) {
  const bool decoupled = step.decoupled_decay;
  // The scale of the gradients is in the update already.
  const StepControl applied{.gradient = 1, .skip = control.as<StepControl>()->skip};
  const UpdateArrays arrays{
      {update, DType::f32}, StateArray(main), StateArray(nullptr), StateArray(nullptr), model};
  update_ranges<0>(c, step, applied, ranges, range_count, arrays, [=](RangeScale scale, Element& e) HWY_ATTR {
    if (decoupled) e.w = hn::Mul(splat(1.0f - scale.lr * scale.decay), e.w);
    e.w = hn::NegMulAdd(splat(scale.lr), e.g, e.w);
  });
}

void normalize(Context& c, const double* squares, float eps, float* x, int64_t n) {
  const float factor = static_cast<float>(1.0 / std::max(std::sqrt(*squares), static_cast<double>(eps)));
  parallel_blocks(c, n, kUpdateBlock, [=](int64_t begin, int64_t end, int) HWY_ATTR {
    for_vectors(
        end - begin,
        [=](int64_t i) HWY_ATTR { store(hn::Mul(load(x + begin + i), splat(factor)), x + begin + i); },
        [=](int64_t i, int64_t k)
            HWY_ATTR { store_part(hn::Mul(load_part(x + begin + i, k), splat(factor)), x + begin + i, k); });
  });
}

// Calls body(range, first, last) for the intersection of [begin, begin + count) with each range, in complete
// blocks of moments from `first`.
template <class Body>
void for_moment_blocks(Context& c, In table, int64_t range_count, int64_t begin, int64_t count, Body&& body) {
  constexpr int64_t kBlocks = kUpdateBlock / kMomentBlock;
  for (int64_t r = 0; r < range_count; ++r) {
    const UpdateRange& range = table.as<UpdateRange>()[r];
    const int64_t first = std::max(begin, range.begin),
                  last = std::min(begin + count, range.begin + range.count);
    if (first >= last) continue;
    const int64_t first_block = (first - range.begin) / kMomentBlock,
                  last_block = ceil_div(last - range.begin, kMomentBlock);
    parallel_blocks(c, last_block - first_block, kBlocks, [&](int64_t from, int64_t to, int) {
      body(range, std::max(first, range.begin + (first_block + from) * kMomentBlock),
           std::min(last, range.begin + (first_block + to) * kMomentBlock));
    });
  }
}

void decode_moment(Context& c, In ranges, int64_t range_count, bool root, const uint8_t* moment,
                   const float* scales, int64_t begin, int64_t count, float* values) {
  const StateArray state({const_cast<uint8_t*>(moment), DType::u8}, const_cast<float*>(scales), root, {}, {});
  for_moment_blocks(c, ranges, range_count, begin, count,
                    [&](const UpdateRange& range, int64_t first, int64_t last) {
                      state.decode(range, first, last - first, values + (first - begin));
                    });
}

void encode_moment(Context& c, In ranges, int64_t range_count, bool root, const float* values, int64_t begin,
                   int64_t count, uint8_t* moment, float* scales) {
  const StateArray state({moment, DType::u8}, scales, root, {}, {});
  for_moment_blocks(c, ranges, range_count, begin, count,
                    [&](const UpdateRange& range, int64_t first, int64_t last) {
                      state.encode(range, first, last - first, values + (first - begin), nullptr);
                    });
}

void sum_of_squares(Context& c, In ranges, int64_t range_count, In x, double* out, bool accumulate) {
  using Half = hn::Half<DF>;
  using Wide = hn::Rebind<double, Half>;
  const WorkspaceParts workspace(c, reduction_workspace(range_count, counted_elements(ranges, range_count)));
  if (!workspace) return;
  const Tiles tiles(ranges, range_count, kReductionBlock, true, workspace.shared<int64_t>());
  auto* partial = reinterpret_cast<double*>(tiles.first + tiles.count + 1);
  const auto sum = [&](auto values) HWY_ATTR {
    parallel_tiles(c, tiles, [&](const UpdateRange&, int64_t begin, int64_t end, int64_t tile) HWY_ATTR {
      auto lower = hn::Zero(Wide()), upper = lower;
      const auto add = [&](VF v) HWY_ATTR {
        const auto low = hn::PromoteTo(Wide(), hn::LowerHalf(v)),
                   high = hn::PromoteTo(Wide(), hn::UpperHalf(Half(), v));
        lower = hn::MulAdd(low, low, lower);
        upper = hn::MulAdd(high, high, upper);
      };
      for_vectors(
          end - begin, [&](int64_t i) HWY_ATTR { add(values.at(begin + i)); },
          [&](int64_t i, int64_t k) HWY_ATTR { add(values.part(begin + i, k)); });
      partial[tile] = hn::GetLane(hn::SumOfLanes(Wide(), hn::Add(lower, upper)));
    });
  };
  at_element(x, 0, [&]<class T>(const T*) { sum(array_of<T>(x)); });
  double total = accumulate ? *out : 0;
  for (int64_t t = 0; t < tiles.total(); ++t) total += partial[t];
  *out = total;
}

void count_zeros(Context& c, In ranges, int64_t range_count, In x, int64_t* out, bool accumulate) {
  const WorkspaceParts workspace(c, reduction_workspace(range_count, counted_elements(ranges, range_count)));
  if (!workspace) return;
  const Tiles tiles(ranges, range_count, kReductionBlock, true, workspace.shared<int64_t>());
  int64_t* partial = tiles.first + tiles.count + 1;
  at_element(x, 0, [&](const auto* values) {
    parallel_tiles(c, tiles, [&](const UpdateRange&, int64_t begin, int64_t end, int64_t tile) {
      partial[tile] = std::count_if(values + begin, values + end,
                                    [](auto value) { return static_cast<float>(value) == 0.0f; });
    });
  });
  int64_t total = accumulate ? *out : 0;
  for (int64_t t = 0; t < tiles.total(); ++t) total += partial[t];
  *out = total;
}

Optimizers optimizers_family() {
  return {.adam = adam,
          .sgd = sgd,
          .lion = lion,
          .muon_momentum = muon_momentum,
          .muon_update = muon_update,
          .normalize = normalize,
          .decode_moment = decode_moment,
          .encode_moment = encode_moment,
          .sum_of_squares = sum_of_squares,
          .count_zeros = count_zeros,
          .update_workspace = update_workspace,
          .sum_of_squares_workspace = reduction_workspace,
          .count_zeros_workspace = reduction_workspace};
}

}  // namespace HWY_NAMESPACE
}  // namespace capstan::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
CAPSTAN_FAMILY(Optimizers, optimizers)
#endif
