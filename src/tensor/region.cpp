#include "tensor/region.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace capstan {

Shape::Shape(std::initializer_list<int64_t> sizes) : Shape(std::span(sizes.begin(), sizes.size())) {}
Shape::Shape(std::span<const int64_t> sizes) : rank_(static_cast<int>(sizes.size())) {
  CAPSTAN_ASSERT(sizes.size() <= static_cast<size_t>(kMaxRank), "a shape has at most six dimensions");
  for (size_t i = 0; i < sizes.size(); ++i) {
    CAPSTAN_ASSERT(sizes[i] >= 0, "negative size in a shape");
    sizes_[i] = sizes[i];
  }
}

Shape Shape::filled(size_t rank, int64_t value) {
  Shape result;
  while (result.size() < rank) result.push_back(value);
  return result;
}

void Shape::push_back(int64_t size) {
  CAPSTAN_ASSERT(rank_ < kMaxRank, "a shape has at most six dimensions");
  sizes_[static_cast<size_t>(rank_++)] = size;
}

std::optional<int64_t> Shape::try_elements() const {
  int64_t count = 1;
  bool empty = false;
  for (const int64_t size : sizes()) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      empty = true;
    } else {
      const auto product = try_mul(count, size);
      if (!product) return std::nullopt;
      count = *product;
    }
  }
  return empty ? 0 : count;
}

int64_t Shape::elements() const {
  if (const auto count = try_elements()) return *count;
  fail(ErrorCode::format, "shape " + text() + " has a negative size or more than 2^63 elements");
}

std::string Shape::text() const {
  std::string text = "[";
  for (size_t d = 0; d < size(); ++d) text += (d ? "," : "") + std::to_string(sizes_[d]);
  return text + "]";
}

std::strong_ordering Shape::operator<=>(const Shape& other) const {
  return std::lexicographical_compare_three_way(begin(), end(), other.begin(), other.end());
}

Region full_region(const Shape& shape) {
  return {Shape::filled(shape.size(), 0), shape};
}

bool fits(const Region& region, const Shape& shape) {
  if (region.offsets.size() != shape.size() || region.sizes.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (region.offsets[d] < 0 || region.sizes[d] < 0) return false;
    const auto end = try_add(region.offsets[d], region.sizes[d]);
    if (!end || *end > shape[d]) return false;
  }
  return true;
}

std::optional<Region> intersect(const Region& a, const Region& b) {
  if (a.sizes.size() != b.sizes.size()) return std::nullopt;
  Region result = a;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (end <= begin) return std::nullopt;
    result.offsets[d] = begin;
    result.sizes[d] = end - begin;
  }
  return result;
}

std::string Region::text() const {
  std::string text = "[";
  for (size_t d = 0; d < sizes.size(); ++d) {
    const int64_t begin = offsets[d], size = sizes[d];
    // A region that is refused may hold any numbers.
    const auto end = try_add(begin, size);
    text += (d ? "," : "") + std::to_string(begin) + ":" +
            (end ? std::to_string(*end) : std::to_string(begin) + "+" + std::to_string(size));
  }
  return text + "]";
}

// Range [begin, begin + count) of the block whose leading indices are `lead`.
static void split_range(const Shape& shape, Shape& lead, int64_t begin, int64_t count,
                        std::vector<Region>& out) {
  const size_t d = lead.size();
  const auto emit = [&](int64_t offset, int64_t size) {
    Region r{lead, Shape::filled(d, 1)};
    r.offsets.push_back(offset);
    r.sizes.push_back(size);
    for (size_t k = d + 1; k < shape.size(); ++k) {
      r.offsets.push_back(0);
      r.sizes.push_back(shape[k]);
    }
    out.push_back(std::move(r));
  };
  const auto within = [&](int64_t index, int64_t first, int64_t length) {
    lead.push_back(index);
    split_range(shape, lead, first, length, out);
    lead.pop_back();
  };
  int64_t row = 1;
  for (size_t k = d + 1; k < shape.size(); ++k) row *= shape[k];
  if (begin / row == (begin + count - 1) / row && count < row) return within(begin / row, begin % row, count);
  if (const int64_t skipped = begin % row; skipped != 0) {
    within(begin / row, skipped, row - skipped);
    count -= row - skipped;
    begin += row - skipped;
  }
  if (count >= row) emit(begin / row, count / row);
  if (const int64_t rest = count % row; rest != 0) within(begin / row + count / row, 0, rest);
}

std::vector<Region> flat_range_as_regions(const Shape& shape, int64_t begin, int64_t count) {
  const int64_t total = shape.elements();
  CAPSTAN_ASSERT(begin >= 0 && count >= 0 && count <= total - begin, "range outside of the tensor");
  std::vector<Region> result;
  if (count == 0) return result;
  if (shape.empty()) return {Region{}};
  Shape lead;
  split_range(shape, lead, begin, count, result);
  return result;
}

std::optional<std::string> tiling_problem(const Shape& shape, std::span<const Region> regions) {
  // The number of regions that cover an element is the sum of the regions' indicator functions, and an
  // indicator function is determined by the signed corners of its region. So the regions tile the shape iff
  // their corners sum to those of the shape. Otherwise the first corner in lexicographic order is an element
  // whose count is wrong by exactly that sum.
  const size_t rank = shape.size();
  if (shape.elements() == 0) return std::nullopt;
  struct SignedCorner {
    std::array<int64_t, Shape::kMaxRank> at;
    int64_t sign;
  };
  std::vector<SignedCorner> corners;
  const auto add = [&](const Region& r, int64_t weight) {
    if (std::find(r.sizes.begin(), r.sizes.end(), 0) != r.sizes.end()) return;
    for (unsigned mask = 0; mask < (1u << rank); ++mask) {
      SignedCorner corner{{}, weight};
      for (size_t d = 0; d < rank; ++d) {
        const bool far = (mask >> d) & 1u;
        corner.at[d] = r.offsets[d] + (far ? r.sizes[d] : 0);
        if (far) corner.sign = -corner.sign;
      }
      corners.push_back(corner);
    }
  };
  corners.reserve((regions.size() + 1) << rank);
  add(full_region(shape), -1);
  for (const Region& region : regions) {
    CAPSTAN_ASSERT(fits(region, shape), "region outside of its tensor");
    add(region, 1);
  }
  std::sort(corners.begin(), corners.end(),
            [](const SignedCorner& a, const SignedCorner& b) { return a.at < b.at; });
  for (size_t i = 0; i < corners.size();) {
    int64_t sum = 0;
    size_t j = i;
    for (; j < corners.size() && corners[j].at == corners[i].at; ++j) sum += corners[j].sign;
    if (sum != 0) {
      const std::string element = Shape(std::span(corners[i].at).first(rank)).text();
      return "element " + element +
             (sum < 0 ? " is in no region" : " is in " + std::to_string(sum + 1) + " regions");
    }
    i = j;
  }
  return std::nullopt;
}

bool can_convert(DType from, DType to) {
  if (from == to) return true;
  const auto converts = [](DType type) {
    return type == DType::f32 || type == DType::bf16 || type == DType::f16;
  };
  return converts(from) && converts(to);
}

template <class From, class To>
static void convert_row(const std::byte* source, std::byte* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    From from;
    std::memcpy(&from, source + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
    const To to(static_cast<float>(from));
    std::memcpy(target + i * static_cast<int64_t>(sizeof(To)), &to, sizeof(To));
  }
}

template <class From>
static void convert_row_from(const std::byte* source, std::byte* target, DType to, int64_t count) {
  if (to == DType::f32)
    convert_row<From, float>(source, target, count);
  else if (to == DType::bf16)
    convert_row<From, bf16>(source, target, count);
  else
    convert_row<From, f16>(source, target, count);
}

static void copy_row(const std::byte* source, DType from, std::byte* target, DType to, int64_t count) {
  if (from == to) {
    std::memcpy(target, source, static_cast<size_t>(count * size_of(from)));
  } else if (from == DType::f32) {
    convert_row_from<float>(source, target, to, count);
  } else if (from == DType::bf16) {
    convert_row_from<bf16>(source, target, to, count);
  } else {
    convert_row_from<f16>(source, target, to, count);
  }
}

void copy_region(const Region& region, const Region& source_region, const std::byte* source,
                 DType source_type, const Region& target_region, std::byte* target, DType target_type) {
  CAPSTAN_ASSERT(can_convert(source_type, target_type), "conversion between these element types");
  if (region.sizes.elements() == 0) return;
  const size_t rank = region.sizes.size();
  const auto flat = [&](const Region& array, const Shape& index) {
    int64_t position = 0;
    for (size_t d = 0; d < rank; ++d) position = position * array.sizes[d] + (index[d] - array.offsets[d]);
    return position;
  };
  // Trailing dimensions that the region spans completely in both arrays form one long row.
  size_t rows = rank;
  int64_t row = 1;
  while (rows > 0) {
    --rows;
    row *= region.sizes[rows];
    if (region.sizes[rows] != source_region.sizes[rows] || region.sizes[rows] != target_region.sizes[rows])
      break;
  }
  Shape index = region.offsets;
  while (true) {
    copy_row(source + flat(source_region, index) * size_of(source_type), source_type,
             target + flat(target_region, index) * size_of(target_type), target_type, row);
    size_t d = rows;
    while (d > 0) {
      --d;
      if (++index[d] < region.offsets[d] + region.sizes[d]) break;
      index[d] = region.offsets[d];
      if (d == 0) return;
    }
    if (rows == 0) return;
  }
}

}  // namespace capstan
