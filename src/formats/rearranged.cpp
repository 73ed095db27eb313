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
      target.segments.push_back({name, segment.source_begin, segment.begin, segment.count});
    }
  }
  for (auto& [name, target] : result.targets)
    std::sort(target.segments.begin(), target.segments.end(),
              [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
  return result;
}

RearrangedSource::RearrangedSource(checkpoint::TensorSource& source, ArrangementTable table)
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
             " not what the model's sizes ask for:\n    " + join_some(problems, "\n    ", 8));
  }
  for (auto& [name, target] : table.targets) {
    CAPSTAN_ASSERT(!target.shape.empty() && target.shape.size() <= 3 &&
                       (target.shape.size() < 3 || (target.dimension == 0 && target.add == 0)),
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

// Transposes source [columns, rows] (row-major) to target [rows, columns], whose rows are `stride` elements
// apart.
template <class T>
void transpose(const std::byte* source, int64_t rows, int64_t columns, std::byte* target, int64_t stride) {
  constexpr int64_t kTile = 32;
  for (int64_t r0 = 0; r0 < rows; r0 += kTile)
    for (int64_t c0 = 0; c0 < columns; c0 += kTile)
      for (int64_t r = r0; r < std::min(r0 + kTile, rows); ++r)
        for (int64_t c = c0; c < std::min(c0 + kTile, columns); ++c)
          std::memcpy(target + (r * stride + c) * static_cast<int64_t>(sizeof(T)),
                      source + (c * rows + r) * static_cast<int64_t>(sizeof(T)), sizeof(T));
}

void transpose(DType type, const std::byte* source, int64_t rows, int64_t columns, std::byte* target,
               int64_t stride) {
  switch (size_of(type)) {
    case 1:
      return transpose<uint8_t>(source, rows, columns, target, stride);
    case 2:
      return transpose<uint16_t>(source, rows, columns, target, stride);
    case 4:
      return transpose<uint32_t>(source, rows, columns, target, stride);
    default:
      return transpose<uint64_t>(source, rows, columns, target, stride);
  }
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
      const int64_t first_row = (wanted.offsets[0] + i) * target.shape[1] + wanted.offsets[1];
      read_segments(target, dtype, {{first_row, wanted.offsets[2]}, {wanted.sizes[1], wanted.sizes[2]}},
                    out.subspan(static_cast<size_t>(i) * bytes, bytes));
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

void RearrangedSource::read_source(const std::string& name, DType dtype, const Region& wanted,
                                   std::span<std::byte> out) {
  const Shape& shape = source_.at(name).shape;
  if (shape.size() < 3) return source_.read(name, dtype, wanted, out);
  const int64_t matrix = wanted.offsets[0] / shape[1], row = wanted.offsets[0] % shape[1];
  CAPSTAN_ASSERT(row + wanted.sizes[0] <= shape[1], "a segment in two matrices of " + name);
  source_.read(name, dtype, {{matrix, row, wanted.offsets[1]}, {1, wanted.sizes[0], wanted.sizes[1]}}, out);
}

void RearrangedSource::read_segments(const Arrangement& target, DType dtype, const Region& wanted,
                                     std::span<std::byte> out) {
  const int64_t element = size_of(dtype);
  const size_t along = target.dimension, across = 1 - along;
  const bool flat = wanted.sizes.size() == 1;
  const int64_t first = wanted.offsets[along], last = first + wanted.sizes[along];
  const int64_t columns = flat ? 1 : wanted.sizes[1];

  int64_t covered = 0;
  for (const Segment& segment : target.segments)
    covered +=
        std::max<int64_t>(0, std::min(last, segment.begin + segment.count) - std::max(first, segment.begin));
  if (covered < wanted.sizes[along]) std::memset(out.data(), 0, out.size());

  for (const Segment& segment : target.segments) {
    const int64_t begin = std::max(first, segment.begin), end = std::min(last, segment.begin + segment.count);
    if (begin >= end) continue;
    Region source_region = wanted;
    source_region.offsets[target.source_dimension] = begin - segment.begin + segment.source_begin;
    source_region.sizes[target.source_dimension] = end - begin;
    if (along == target.source_dimension) {
      CAPSTAN_ASSERT(along == 0, "segments along columns of " + segment.source);
      read_source(segment.source, dtype, source_region,
                  out.subspan(static_cast<size_t>((begin - first) * columns * element),
                              static_cast<size_t>((end - begin) * columns * element)));
      continue;
    }
    source_region.offsets[along] = wanted.offsets[across];
    source_region.sizes[along] = wanted.sizes[across];
    slice_.resize(static_cast<size_t>(source_region.sizes.elements() * element));
    read_source(segment.source, dtype, source_region, slice_);
    const int64_t offset_of_run = along == 0 ? (begin - first) * columns : begin - first;
    transpose(dtype, slice_.data(), source_region.sizes[1], source_region.sizes[0],
              out.data() + offset_of_run * element, columns);
  }
}

}  // namespace capstan::formats
