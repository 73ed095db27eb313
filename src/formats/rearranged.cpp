#include "formats/rearranged.hpp"

#include <algorithm>
#include <cstring>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/text.hpp"

namespace capstan::formats {

using checkpoint::TensorInfo;

ArrangementTable inverted(const ArrangementTable& table) {
  ArrangementTable result;
  for (const auto& [name, shape] : table.sources) result.targets[name].shape = shape;
  for (const auto& [name, arrangement] : table.targets) {
    result.sources[name] = arrangement.shape;
    for (const Segment& segment : arrangement.segments) {
      Arrangement& target = result.targets.at(segment.source);
      target.dimension = arrangement.source_dimension;
      target.source_dimension = arrangement.dimension;
      target.add = -arrangement.add;
      target.segments.push_back(
          {name, segment.source_begin, segment.begin, segment.count, segment.source_step, segment.step});
    }
  }
  for (auto& [name, target] : result.targets)
    std::sort(target.segments.begin(), target.segments.end(),
              [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
  return result;
}

RearrangedSource::RearrangedSource(checkpoint::TensorSource& source, ArrangementTable table,
                                   const std::string& help)
    : source_(source) {
  std::vector<std::string> problems;
  for (const auto& [name, shape] : table.sources) {
    const TensorInfo* tensor = source_.find(name);
    if (!tensor)
      problems.push_back(in_quotes(name) + " is missing");
    else if (tensor->shape != shape)
      problems.push_back(in_quotes(name) + " is " + tensor->shape.text() + " and should be " + shape.text());
  }
  if (!problems.empty()) {
    const size_t count = problems.size();
    fail(ErrorCode::format,
         source_.description() + ": " + std::to_string(count) + (count == 1 ? " tensor is" : " tensors are") +
             " not what the model's sizes ask for:\n    " + join_some(problems, "\n    ", 8),
         help);
  }
  for (auto& [name, target] : table.targets) {
    CAPSTAN_ASSERT(
        !target.shape.empty() && target.shape.size() <= 3 && (target.shape.size() < 3 || target.add == 0),
        "an arrangement of " + name);
    RearrangedTensor info{{DType::f32, target.shape}, {}};
    if (!target.segments.empty()) info.dtype = source_.at(target.segments.front().source).dtype;
    for (const Segment& segment : target.segments)
      if (source_.at(segment.source).dtype != info.dtype || target.add != 0) info.dtype = DType::f32;
    info.arrangement = std::move(target);
    tensors_.emplace(name, std::move(info));
  }
}

namespace {

// Distances of neighbors in a matrix, in elements: along the slices, and along a slice.
struct SliceStrides {
  int64_t slice, element;
};

template <class T>
void copy_slices(const std::byte* source, SliceStrides from, int64_t slices, int64_t length,
                 std::byte* target, SliceStrides to) {
  constexpr int64_t kTile = 32;
  for (int64_t s0 = 0; s0 < slices; s0 += kTile)
    for (int64_t e0 = 0; e0 < length; e0 += kTile)
      for (int64_t s = s0; s < std::min(s0 + kTile, slices); ++s)
        for (int64_t e = e0; e < std::min(e0 + kTile, length); ++e)
          std::memcpy(target + (s * to.slice + e * to.element) * static_cast<int64_t>(sizeof(T)),
                      source + (s * from.slice + e * from.element) * static_cast<int64_t>(sizeof(T)),
                      sizeof(T));
}

// Copies `slices` slices of `length` elements.
void copy_slices(DType type, const std::byte* source, SliceStrides from, int64_t slices, int64_t length,
                 std::byte* target, SliceStrides to) {
  switch (size_of(type)) {
    case 1:
      return copy_slices<uint8_t>(source, from, slices, length, target, to);
    case 2:
      return copy_slices<uint16_t>(source, from, slices, length, target, to);
    case 4:
      return copy_slices<uint32_t>(source, from, slices, length, target, to);
    default:
      return copy_slices<uint64_t>(source, from, slices, length, target, to);
  }
}

// The slices of a segment that lie in [first, last) of the target, as indices within the segment.
struct SliceRange {
  int64_t begin, end;
};
SliceRange slices_within(const Segment& segment, int64_t first, int64_t last) {
  const auto before = [&](int64_t end) {
    return std::clamp<int64_t>(ceil_div(std::max<int64_t>(0, end - segment.begin), segment.step), 0,
                               segment.count);
  };
  return {before(first), before(last)};
}

}  // namespace

void RearrangedSource::read(std::string_view name, DType dtype, const Region& wanted,
                            std::span<std::byte> out) {
  const Arrangement& target = entry(name).arrangement;
  if (!fits(wanted, target.shape))
    fail(ErrorCode::failed, "tensor " + in_quotes(name) + " has shape " + target.shape.text() + " in " +
                                description() + ", but region " + wanted.text() + " was requested");
  const int64_t element = size_of(dtype);
  CAPSTAN_ASSERT(static_cast<int64_t>(out.size()) == wanted.sizes.elements() * element,
                 "size of the destination");
  if (target.shape.size() == 3) {
    const auto bytes = static_cast<size_t>(wanted.sizes[1] * wanted.sizes[2] * element);
    for (int64_t i = 0; i < wanted.sizes[0]; ++i) {
      Region of_matrix{{wanted.offsets[1], wanted.offsets[2]}, {wanted.sizes[1], wanted.sizes[2]}};
      of_matrix.offsets[target.dimension] +=
          (wanted.offsets[0] + i) * target.shape[static_cast<int>(target.dimension) + 1];
      read_segments(target, dtype, of_matrix, out.subspan(static_cast<size_t>(i) * bytes, bytes));
    }
    return;
  }
  if (target.add == 0) return read_segments(target, dtype, wanted, out);
  // Adds in fp32, because 1 + w in a narrower type loses nearly all bits of a small w.
  if (!can_convert(DType::f32, dtype))
    fail(ErrorCode::unsupported, description() + ": " + in_quotes(name) +
                                     " is a sum in fp32 and cannot be read as " +
                                     std::string(name_of(dtype)));
  std::vector<float> values(static_cast<size_t>(wanted.sizes.elements()));
  read_segments(target, DType::f32, wanted, std::as_writable_bytes(std::span(values)));
  for (float& value : values) value = static_cast<float>(static_cast<double>(value) + target.add);
  copy_region(wanted, wanted, reinterpret_cast<const std::byte*>(values.data()), DType::f32, wanted,
              out.data(), dtype);
}

void RearrangedSource::read_source(const std::string& name, size_t dimension, DType dtype,
                                   const Region& wanted, std::span<std::byte> out) {
  const Shape& shape = source_.at(name).shape;
  if (shape.size() < 3) return source_.read(name, dtype, wanted, out);
  const int64_t slices = shape[static_cast<int>(dimension) + 1], matrix = wanted.offsets[dimension] / slices;
  Region of_matrix{{matrix, wanted.offsets[0], wanted.offsets[1]}, {1, wanted.sizes[0], wanted.sizes[1]}};
  of_matrix.offsets[dimension + 1] %= slices;
  CAPSTAN_ASSERT(of_matrix.offsets[dimension + 1] + wanted.sizes[dimension] <= slices,
                 "a segment in two matrices of " + name);
  source_.read(name, dtype, of_matrix, out);
}

void RearrangedSource::read_segments(const Arrangement& target, DType dtype, const Region& wanted,
                                     std::span<std::byte> out) {
  const int64_t first = wanted.offsets[target.dimension], last = first + wanted.sizes[target.dimension];
  int64_t covered = 0;
  for (const Segment& segment : target.segments) {
    const SliceRange slices = slices_within(segment, first, last);
    covered += slices.end - slices.begin;
  }
  if (covered < wanted.sizes[target.dimension]) std::memset(out.data(), 0, out.size());
  for (const Segment& segment : target.segments) read_segment(target, segment, dtype, wanted, out);
}

void RearrangedSource::read_segment(const Arrangement& target, const Segment& segment, DType dtype,
                                    const Region& wanted, std::span<std::byte> out) {
  const size_t along = target.dimension, source_along = target.source_dimension;
  const int64_t first = wanted.offsets[along], element = size_of(dtype),
                columns = wanted.sizes.size() == 1 ? 1 : wanted.sizes[1];
  const SliceRange slices = slices_within(segment, first, first + wanted.sizes[along]);
  const int64_t count = slices.end - slices.begin;
  if (count == 0) return;
  Region source = wanted;
  if (along != source_along) {
    source.offsets[along] = wanted.offsets[1 - along];
    source.sizes[along] = wanted.sizes[1 - along];
  }
  source.offsets[source_along] = segment.source_begin + slices.begin * segment.source_step;
  source.sizes[source_along] = (count - 1) * segment.source_step + 1;
  const int64_t begin = segment.begin + slices.begin * segment.step - first;
  if (along == 0 && source_along == 0 && segment.step == 1 && segment.source_step == 1)
    return read_source(segment.source, 0, dtype, source,
                       out.subspan(static_cast<size_t>(begin * columns * element),
                                   static_cast<size_t>(count * columns * element)));
  slice_.resize(static_cast<size_t>(source.sizes.elements() * element));
  read_source(segment.source, source_along, dtype, source, slice_);
  const auto strides = [](size_t dimension, int64_t row, int64_t step) {
    return dimension == 0 ? SliceStrides{row * step, 1} : SliceStrides{step, row};
  };
  const int64_t source_columns = source.sizes.size() == 1 ? 1 : source.sizes[1];
  const SliceStrides to = strides(along, columns, 1);
  copy_slices(dtype, slice_.data(), strides(source_along, source_columns, segment.source_step), count,
              wanted.sizes.size() == 1 ? 1 : wanted.sizes[1 - along], out.data() + begin * to.slice * element,
              strides(along, columns, segment.step));
}

}  // namespace capstan::formats
