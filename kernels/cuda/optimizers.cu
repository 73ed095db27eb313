// Updates and statistics over tables of ranges. Bytes moved for an element with fp32 gradient, main parameter
// and moments: adam 28 (and 2 for a bf16 copy), sgd 20, lion 20, muon_momentum 20, muon_update 12, normalize
// 8, sums 4. The table lies in device memory: a first kernel divides its ranges into tiles, over which a grid
// of fixed size then loops.
#include "kernels/optimizers.hpp"

#include "kernels/common/fp8_moment.hpp"
#include "kernels/common/update_ranges.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/cuda/families.hpp"

namespace capstan::kernels::CAPSTAN_GPU {

namespace {

constexpr int kThreads = 256;
// Elements of a thread at a time; 8 lanes share the scale of an fp8 moment.
constexpr int kEach = 8;
constexpr int kMomentLanes = static_cast<int>(kMomentBlock) / kEach;
// Elements of a tile, which lies within one range.
constexpr int64_t kTile = int64_t{2} * kThreads * kEach;
static_assert(kTile % kMomentBlock == 0);
// Blocks of an update: three times the three (kUpdateBlocks) that each of 132 multiprocessors runs at once.
inline int64_t update_blocks() {
  return looping_blocks(132 * 3 * 3);
}
// Blocks of a sum on this device, and those for which every device's workspace has room, as estimates for a
// GPU without one take it: four for each of 132 multiprocessors, so that enough loads are on their way. Each
// writes a partial result, so the number determines the order of summation.
constexpr int64_t kMostSumBlocks = 132 * 4;
inline int64_t sum_blocks() {
  return looping_blocks(kMostSumBlocks);
}

// ---- tiles

struct Tiles {
  const UpdateRange* ranges;
  int64_t count;
  // The first tile of every range, and their number at the end: [count + 1].
  int64_t* first;
};
// The elements of one tile.
struct RangeTile {
  UpdateRange range;
  int64_t begin, end;
};

__device__ RangeTile tile_at(const Tiles& tiles, int64_t tile) {
  int64_t low = 0, high = tiles.count;
  // The last range whose first tile is at or before `tile`; ranges without tiles precede it.
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (tiles.first[middle + 1] <= tile)
      low = middle + 1;
    else
      high = middle;
  }
  const UpdateRange range = tiles.ranges[low];
  const int64_t begin = range.begin + (tile - tiles.first[low]) * kTile, end = range.begin + range.count;
  return {range, begin, end < begin + kTile ? end : begin + kTile};
}

// One block: each thread adds the tiles of consecutive ranges, and the threads' sums are added in turn.
__global__ void first_tiles_kernel(Tiles tiles, bool counted_only) {
  CAPSTAN_SHARED(int64_t, sums, kThreads);
  const int thread = thread_index();
  const int64_t each = ceil_div(tiles.count, kThreads), begin = thread * each;
  const int64_t end = tiles.count < begin + each ? tiles.count : begin + each;
  const auto tiles_of = [&](int64_t r) {
    const UpdateRange& range = tiles.ranges[r];
    return counted_only && range.counted == 0 ? 0 : ceil_div(range.count, kTile);
  };
  int64_t own = 0;
  for (int64_t r = begin; r < end; ++r) own += tiles_of(r);
  sums[thread] = own;
  sync_threads();
  for (int distance = 1; distance < kThreads; distance *= 2) {
    int64_t before = 0;
    if (thread >= distance) before = sums[thread - distance];
    sync_threads();
    sums[thread] += before;
    sync_threads();
  }
  int64_t tile = sums[thread] - own;
  for (int64_t r = begin; r < end; ++r) {
    tiles.first[r] = tile;
    tile += tiles_of(r);
  }
  if (thread == kThreads - 1) tiles.first[tiles.count] = sums[kThreads - 1];
}

WorkspaceSize sum_workspace(int64_t range_count, int64_t) {
  static_assert(sizeof(double) == sizeof(int64_t));
  return {static_cast<size_t>(range_count + 1 + kMostSumBlocks) * sizeof(int64_t), 0};
}
Tiles make_tiles(Context& c, In ranges, int64_t count, bool counted_only, int64_t* first) {
  const Tiles tiles{ranges.as<UpdateRange>(), count, first};
  launch(c, {1, kThreads}, first_tiles_kernel, tiles, counted_only);
  return tiles;
}

// ---- arrays that an update reads and writes as fp32

// Random words for the elements of a range, by their positions in the global parameter.
struct RoundingWords {
  PhiloxKey key;
  uint64_t parameter;
  RandomBlock last = {};

  __device__ uint32_t at(const UpdateRange& range, int64_t i) {
    const int64_t offset = i - range.begin, j = range.column + offset;
    const int64_t position = range.columns == 0
                                 ? range.origin + offset
                                 : range.origin + j / range.columns * range.row_stride + j % range.columns;
    return last.word_of(static_cast<uint64_t>(position),
                        [&](uint64_t block) { return philox4x32(key, parameter, block); });
  }
};

__device__ bf16 round_stochastically(float value, uint32_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  bf16 result;
  result.bits = static_cast<uint16_t>((value != value ? bits | 0x400000u : bits + (random >> 16)) >> 16);
  return result;
}

// The arrays of an update. All lanes of a warp load and store together, with a `count` that may be 0 or
// negative.
struct FloatArray {
  float* data;

  __device__ Group<kEach> load(const UpdateRange&, int64_t i, int64_t count) const {
    const Array<float> values{data};
    const auto lower = values.load(i, count), upper = values.load(i + 4, count - 4);
    Group<kEach> result;
    for (int k = 0; k < 4; ++k) result[k] = lower[k], result[4 + k] = upper[k];
    return result;
  }
  __device__ void store(const UpdateRange&, int64_t i, int64_t count, const Group<kEach>& group) const {
    const Array<float> values{data};
    Group<4> lower, upper;
    for (int k = 0; k < 4; ++k) lower[k] = group[k], upper[k] = group[4 + k];
    values.store(i, count, lower);
    values.store(i + 4, count - 4, upper);
  }
};
// fp32, bf16 or fp16.
struct ModelArray {
  void* data;
  DType dtype;

  __device__ Group<kEach> load(const UpdateRange& range, int64_t i, int64_t count) const {
    if (dtype == DType::bf16) return Array<bf16>{static_cast<bf16*>(data)}.load(i, count);
    if (dtype == DType::f16) return Array<f16>{static_cast<f16*>(data)}.load(i, count);
    return FloatArray{static_cast<float*>(data)}.load(range, i, count);
  }
  __device__ void store(const UpdateRange& range, int64_t i, int64_t count, const Group<kEach>& group) const {
    if (dtype == DType::bf16)
      Array<bf16>{static_cast<bf16*>(data)}.store(i, count, group);
    else if (dtype == DType::f16)
      Array<f16>{static_cast<f16*>(data)}.store(i, count, group);
    else
      FloatArray{static_cast<float*>(data)}.store(range, i, count, group);
  }
};
// fp32, bf16, fp16, or an fp8 moment (u8 with scales).
struct StateArray {
  void* data;
  DType dtype;
  float* scales;
  bool root, stochastic;
  PhiloxKey key;

  __device__ Group<kEach> load(const UpdateRange& range, int64_t i, int64_t count) const {
    if (dtype == DType::u8) return decode(range, i, count);
    return ModelArray{data, dtype}.load(range, i, count);
  }
  __device__ void store(const UpdateRange& range, int64_t i, int64_t count, const Group<kEach>& group) const {
    if (dtype == DType::u8) return encode(range, i, count, group);
    if (dtype != DType::bf16 || !stochastic) return ModelArray{data, dtype}.store(range, i, count, group);
    auto* to = static_cast<bf16*>(data);
    RoundingWords words{key, range.parameter};
    for (int k = 0; k < kEach && k < count; ++k)
      to[i + k] = round_stochastically(group[k], words.at(range, i + k));
  }

 private:
  __device__ Group<kEach> decode(const UpdateRange& range, int64_t i, int64_t count) const {
    const auto* codes = static_cast<const uint8_t*>(data);
    Group<kEach> result = {};
    for (int k = 0; k < kEach && k < count; ++k) {
      const float value = capstan::decode<kE4m3>(codes[i + k]) * scales[moment_block(range, i + k)];
      result[k] = root ? value * value : value;
    }
    return result;
  }
  // i - range.begin is a multiple of kEach.
  __device__ void encode(const UpdateRange& range, int64_t i, int64_t count, Group<kEach> group) const {
    auto* codes = static_cast<uint8_t*>(data);
    float largest = 0;
    for (int k = 0; k < kEach && k < count; ++k) {
      if (root) group[k] = std::sqrt(group[k]);
      largest = Max()(std::fabs(group[k]), largest);
    }
    largest = warp_reduce(largest, Max(), kMomentLanes);
    if (count <= 0) return;
    const float scale = fp8_scale(largest);
    if ((i - range.begin) % kMomentBlock == 0) scales[moment_block(range, i)] = scale;
    RoundingWords words{key, range.parameter};
    for (int k = 0; k < kEach && k < count; ++k) {
      const float x = scale > 0 ? group[k] / scale : 0.0f;
      codes[i + k] = static_cast<uint8_t>(stochastic ? encode_stochastic<kE4m3>(x, words.at(range, i + k))
                                                     : capstan::encode<kE4m3>(x));
    }
  }
};
StateArray state_array(Out data, float* scales, bool root, const StochasticRounding& rounding,
                       PhiloxKey key) {
  return {data.data, data.dtype, scales, root, rounding.enabled, key};
}

// ---- updates

// The values of an element that an update rule reads and changes: gradient, main parameter and state.
struct Element {
  float g, w, m, v;
};
// State: of main parameters and moments. Where they are of several types, the gradient may be bf16 too.
template <class State>
struct UpdateArrays {
  std::conditional_t<std::is_same_v<State, FloatArray>, FloatArray, ModelArray> gradient;
  State main, m, v;
  ModelArray model;
};
// Decoupled weight decay of the weight, or that of L2 regularization in the gradient.
__device__ void decay(const StepScale& step, const RangeScale& scale, Element& e) {
  if (step.decoupled_decay)
    e.w = (1.0f - scale.lr * scale.decay) * e.w;
  else
    e.g = scale.decay * e.w + e.g;
}

struct AdamRule {
  using State = StateArray;
  static constexpr int kStates = 2;
  AdamStep s;
  __device__ void operator()(const RangeScale& scale, Element& e) const {
    if (!s.scale.decoupled_decay) e.g = scale.decay * e.w + e.g;
    e.m = (1.0f - s.beta1) * e.g + s.beta1 * e.m;
    e.v = (1.0f - s.beta2) * e.g * e.g + s.beta2 * e.v;
    const float root = std::sqrt(e.v * (1.0f / s.bias_correction2));
    float update = e.m * (1.0f / s.bias_correction1) / (root + s.eps);
    if (s.scale.decoupled_decay) update = scale.decay * e.w + update;
    e.w = e.w - scale.lr * update;
  }
};
template <bool kMomentum>
struct SgdRule {
  using State = FloatArray;
  static constexpr int kStates = kMomentum ? 1 : 0;
  SgdStep s;
  __device__ void operator()(const RangeScale& scale, Element& e) const {
    decay(s.scale, scale, e);
    e.m = s.momentum * e.m + e.g;
    e.w = e.w - scale.lr * e.m;
  }
};
struct LionRule {
  using State = FloatArray;
  static constexpr int kStates = 1;
  LionStep s;
  __device__ void operator()(const RangeScale& scale, Element& e) const {
    decay(s.scale, scale, e);
    const float direction = s.beta1 * e.m + (1.0f - s.beta1) * e.g;
    const float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction;
    e.w = e.w - scale.lr * sign;
    e.m = s.beta2 * e.m + (1.0f - s.beta2) * e.g;
  }
};
struct MuonUpdateRule {
  using State = FloatArray;
  static constexpr int kStates = 0;
  StepScale scale_of_step;
  __device__ void operator()(const RangeScale& scale, Element& e) const {
    if (scale_of_step.decoupled_decay) e.w = (1.0f - scale.lr * scale.decay) * e.w;
    e.w = e.w - scale.lr * e.g;
  }
};

// Blocks that a multiprocessor runs at once; more of them would leave too few registers. The host has no use
// for it.
template <class Rule>
[[maybe_unused]] constexpr int kUpdateBlocks = std::is_same_v<Rule, AdamRule> ? 3 : 5;

// scaled: the gradient is multiplied by that of the control.
template <class Rule>
__global__ void CAPSTAN_LAUNCH_BOUNDS(kThreads, kUpdateBlocks<Rule>)
    update_kernel(Rule rule, StepScale step, const StepControl* control, bool scaled, Tiles tiles,
                  UpdateArrays<typename Rule::State> arrays) {
  if (control->skip != 0) return;
  const float factor = scaled ? control->gradient : 1.0f;
  for (int64_t t = block_index(); t < tiles.first[tiles.count]; t += grid_blocks()) {
    const RangeTile tile = tile_at(tiles, t);
    const RangeScale scale = scale_of(step, tile.range);
    for (int64_t base = tile.begin; base < tile.end; base += kThreads * kEach) {
      const int64_t i = base + thread_index() * kEach, count = tile.end - i;
      const auto g = arrays.gradient.load(tile.range, i, count);
      auto w = arrays.main.load(tile.range, i, count);
      Group<kEach> m = {}, v = {};
      if constexpr (Rule::kStates > 0) m = arrays.m.load(tile.range, i, count);
      if constexpr (Rule::kStates > 1) v = arrays.v.load(tile.range, i, count);
      for (int k = 0; k < kEach; ++k) {
        Element e{g[k] * factor, w[k], m[k], v[k]};
        rule(scale, e);
        w[k] = e.w, m[k] = e.m, v[k] = e.v;
      }
      arrays.main.store(tile.range, i, count, w);
      if constexpr (Rule::kStates > 0) arrays.m.store(tile.range, i, count, m);
      if constexpr (Rule::kStates > 1) arrays.v.store(tile.range, i, count, v);
      if (arrays.model.data) arrays.model.store(tile.range, i, count, w);
    }
  }
}
template <class Rule>
void update_ranges(Context& c, const Rule& rule, const StepScale& step, In control, bool scaled, In ranges,
                   int64_t range_count, const UpdateArrays<typename Rule::State>& arrays) {
  auto* first = workspace_of<int64_t>(c, update_workspace(range_count));
  if (!first) return;
  const Tiles tiles = make_tiles(c, ranges, range_count, false, first);
  launch(c, {update_blocks(), kThreads}, update_kernel<Rule>, rule, step, control.as<StepControl>(), scaled,
         tiles, arrays);
}

void adam(Context& c, AdamStep s, In control, In ranges, int64_t range_count, In gradient, Out main, Out m,
          float* m_scales, Out v, float* v_scales, Out model) {
  const StochasticRounding& r = s.rounding;
  const UpdateArrays<StateArray> arrays{{const_cast<void*>(gradient.data), gradient.dtype},
                                        state_array(main, nullptr, false, r, r.main),
                                        state_array(m, m_scales, false, r, r.exp_avg),
                                        state_array(v, v_scales, true, r, r.exp_avg_sq),
                                        {model.data, model.dtype}};
  update_ranges(c, AdamRule{s}, s.scale, control, true, ranges, range_count, arrays);
}
// With the fp32 arrays of the other rules.
UpdateArrays<FloatArray> update_arrays(const float* gradient, float* main, float* m, Out model) {
  return {{const_cast<float*>(gradient)}, {main}, {m}, {nullptr}, {model.data, model.dtype}};
}
void sgd(Context& c, SgdStep s, In control, In ranges, int64_t range_count, const float* gradient,
         float* main, float* buffer, Out model) {
  const UpdateArrays<FloatArray> arrays = update_arrays(gradient, main, buffer, model);
  if (s.momentum != 0)
    update_ranges(c, SgdRule<true>{s}, s.scale, control, true, ranges, range_count, arrays);
  else
    update_ranges(c, SgdRule<false>{s}, s.scale, control, true, ranges, range_count, arrays);
}
void lion(Context& c, LionStep s, In control, In ranges, int64_t range_count, const float* gradient,
          float* main, float* m, Out model) {
  update_ranges(c, LionRule{s}, s.scale, control, true, ranges, range_count,
                update_arrays(gradient, main, m, model));
}
// The scale of the gradients is in the update already.
void muon_update(Context& c, StepScale step, In control, In ranges, int64_t range_count, const float* update,
                 float* main, Out model) {
  update_ranges(c, MuonUpdateRule{step}, step, control, false, ranges, range_count,
                update_arrays(update, main, nullptr, model));
}

__global__ void muon_momentum_kernel(MuonStep s, const StepControl* control, Tiles tiles, float* gradient,
                                     const float* main, float* buffer) {
  if (control->skip != 0) return;
  const float factor = control->gradient;
  const Array<float> to{gradient}, weights{const_cast<float*>(main)}, momenta{buffer};
  constexpr int kSize = kGroup<float>;
  for (int64_t t = block_index(); t < tiles.first[tiles.count]; t += grid_blocks()) {
    const RangeTile tile = tile_at(tiles, t);
    const float decay = s.scale.decoupled_decay ? 0.0f : scale_of(s.scale, tile.range).decay;
    for (int64_t i = tile.begin + thread_index() * kSize; i < tile.end; i += kThreads * kSize) {
      auto g = to.load(i, tile.end - i), m = momenta.load(i, tile.end - i);
      const auto w = weights.load(i, tile.end - i);
      for (int k = 0; k < kSize; ++k) {
        g[k] = decay * w[k] + g[k] * factor;
        m[k] = (1.0f - s.momentum) * (g[k] - m[k]) + m[k];
        g[k] = s.nesterov ? s.momentum * (m[k] - g[k]) + g[k] : m[k];
      }
      to.store(i, tile.end - i, g);
      momenta.store(i, tile.end - i, m);
    }
  }
}
void muon_momentum(Context& c, MuonStep s, In control, In ranges, int64_t range_count, float* gradient,
                   const float* main, float* buffer) {
  auto* first = workspace_of<int64_t>(c, update_workspace(range_count));
  if (!first) return;
  const Tiles tiles = make_tiles(c, ranges, range_count, false, first);
  launch(c, {update_blocks(), kThreads}, muon_momentum_kernel, s, control.as<StepControl>(), tiles, gradient,
         main, buffer);
}

struct Normalize {
  const double* squares;
  double eps;
  Array<float> x;
  __device__ void operator()(int64_t i, int64_t count) const {
    const double norm = std::sqrt(*squares);
    const auto factor = static_cast<float>(1.0 / (norm > eps ? norm : eps));
    auto group = x.load(i, count);
    for (int k = 0; k < kGroup<float>; ++k) group[k] *= factor;
    x.store(i, count, group);
  }
};
void normalize(Context& c, const double* squares, float eps, float* x, int64_t n) {
  map<kGroup<float>>(c, n, Normalize{squares, static_cast<double>(eps), {x}});
}

// ---- fp8 moments alone: a thread to each element, found in the table

// The range of element i, or null: it is padding.
__device__ const UpdateRange* range_of(const UpdateRange* ranges, int64_t count, int64_t i) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (ranges[middle].begin <= i)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == 0 || i >= ranges[low - 1].begin + ranges[low - 1].count) return nullptr;
  return ranges + low - 1;
}

struct DecodeMoment {
  const UpdateRange* ranges;
  int64_t range_count, begin;
  StateArray moment;
  float* values;
  __device__ void operator()(int64_t i, int64_t) const {
    if (const UpdateRange* range = range_of(ranges, range_count, begin + i))
      values[i] = moment.load(*range, begin + i, 1)[0];
  }
};
void decode_moment(Context& c, In ranges, int64_t range_count, bool root, const uint8_t* moment,
                   const float* scales, int64_t begin, int64_t count, float* values) {
  const StateArray state{
      const_cast<uint8_t*>(moment), DType::u8, const_cast<float*>(scales), root, false, {}};
  map<1>(c, count, DecodeMoment{ranges.as<UpdateRange>(), range_count, begin, state, values});
}

// The thread of a block's first element encodes the block.
struct EncodeMoment {
  const UpdateRange* ranges;
  int64_t range_count, begin;
  bool root;
  const float* values;
  uint8_t* codes;
  float* scales;
  __device__ void operator()(int64_t i, int64_t) const {
    const UpdateRange* range = range_of(ranges, range_count, begin + i);
    if (!range) return;
    const int64_t offset = begin + i - range->begin, rest = range->count - offset;
    if (offset % kMomentBlock != 0) return;
    const int64_t n = rest < kMomentBlock ? rest : kMomentBlock;
    float largest = 0;
    for (int64_t k = 0; k < n; ++k) largest = Max()(std::fabs(value(i + k)), largest);
    const float scale = fp8_scale(largest);
    scales[range->first_block + offset / kMomentBlock] = scale;
    for (int64_t k = 0; k < n; ++k)
      codes[begin + i + k] =
          static_cast<uint8_t>(capstan::encode<kE4m3>(scale > 0 ? value(i + k) / scale : 0.0f));
  }
  __device__ float value(int64_t i) const { return root ? std::sqrt(values[i]) : values[i]; }
};
void encode_moment(Context& c, In ranges, int64_t range_count, bool root, const float* values, int64_t begin,
                   int64_t count, uint8_t* moment, float* scales) {
  map<1>(c, count, EncodeMoment{ranges.as<UpdateRange>(), range_count, begin, root, values, moment, scales});
}

// ---- sums over the counted ranges

struct SquareOf {
  Array<Any> x;
  __device__ double operator()(int64_t i, int64_t count) const {
    const auto group = x.group<kEach>(i, count);
    double sum = 0;
    for (int k = 0; k < kEach; ++k) sum += static_cast<double>(group[k]) * static_cast<double>(group[k]);
    return sum;
  }
};
struct ZerosOf {
  Array<Any> x;
  __device__ int64_t operator()(int64_t i, int64_t count) const {
    const auto group = x.group<kEach>(i, count);
    int64_t zeros = 0;
    for (int k = 0; k < kEach && k < count; ++k) zeros += group[k] == 0 ? 1 : 0;
    return zeros;
  }
};
template <class Number, class Value>
__global__ void sum_kernel(Value value, Tiles tiles, Number* partial) {
  Number sum = 0;
  for (int64_t t = block_index(); t < tiles.first[tiles.count]; t += grid_blocks()) {
    const RangeTile tile = tile_at(tiles, t);
    for (int64_t i = tile.begin + thread_index() * kEach; i < tile.end; i += kThreads * kEach)
      sum += value(i, tile.end - i);
  }
  sum = block_sum(sum);
  if (thread_index() == 0) partial[block_index()] = sum;
}
template <class Number, class Value>
void sum_ranges(Context& c, const Value& value, In ranges, int64_t range_count, Number* out,
                bool accumulate) {
  auto* first = workspace_of<int64_t>(c, sum_workspace(range_count, 0));
  if (!first) return;
  const Tiles tiles = make_tiles(c, ranges, range_count, true, first);
  auto* partial = reinterpret_cast<Number*>(first + range_count + 1);
  launch(c, {sum_blocks(), kThreads}, sum_kernel<Number, Value>, value, tiles, partial);
  add_partials(c, partial, sum_blocks(), out, accumulate);
}
void sum_of_squares(Context& c, In ranges, int64_t range_count, In x, double* out, bool accumulate) {
  sum_ranges(c, SquareOf{array_of<Any>(x)}, ranges, range_count, out, accumulate);
}
void count_zeros(Context& c, In ranges, int64_t range_count, In x, int64_t* out, bool accumulate) {
  sum_ranges(c, ZerosOf{array_of<Any>(x)}, ranges, range_count, out, accumulate);
}

}  // namespace

const Optimizers& optimizers_family() {
  static const Optimizers family{.adam = adam,
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
                                 .sum_of_squares_workspace = sum_workspace,
                                 .count_zeros_workspace = sum_workspace};
  return family;
}

}  // namespace capstan::kernels::CAPSTAN_GPU
