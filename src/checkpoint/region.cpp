#include "checkpoint/region.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/checked.hpp"
#include "tensor/half.hpp"

namespace capstan::checkpoint {

std::optional<int64_t> try_element_count(const Shape& shape) {
  int64_t count = 1;
  bool empty = false;
  for (const int64_t size : shape) {
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

int64_t element_count(const Shape& shape) {
  if (const auto count = try_element_count(shape)) return *count;
  fail(ErrorCode::format, "shape " + to_text(shape) + " has a negative size or more than 2^63 elements");
}

Region full_region(const Shape& shape) {
  return {Shape(shape.size(), 0), shape};
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
  if (a.rank() != b.rank()) return std::nullopt;
  Region result{Shape(a.rank()), Shape(a.rank())};
  for (size_t d = 0; d < a.rank(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (end <= begin) return std::nullopt;
    result.offsets[d] = begin;
    result.sizes[d] = end - begin;
  }
  return result;
}

std::string to_text(const Shape& shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) text += (d ? "," : "") + std::to_string(shape[d]);
  return text + "]";
}

std::string to_text(const Region& region) {
  std::string text = "[";
  for (size_t d = 0; d < region.rank(); ++d) {
    const int64_t begin = region.offsets[d], size = region.sizes[d];
    const auto end = try_add(begin, size);  // a refused one may be anything
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
    Region r{lead, Shape(d, 1)};
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
  const int64_t total = element_count(shape);
  CAPSTAN_ASSERT(begin >= 0 && count >= 0 && count <= total - begin, "range outside of the tensor");
  std::vector<Region> result;
  if (count == 0) return result;
  if (shape.empty()) return {Region{}};
  Shape lead;
  split_range(shape, lead, begin, count, result);
  return result;
}

std::optional<std::string> tiling_problem(const Shape& shape, std::span<const Region> chunks) {
  // The function "how often is this cell written" is the sum of the pieces' indicator functions, and an
  // indicator function of a box is determined by its signed corners. So the pieces tile the shape iff their
  // corners sum to the shape's, and where they do not, the first corner in lexicographic order is a cell
  // whose count is wrong by exactly that sum.
  const size_t rank = shape.size();
  CAPSTAN_ASSERT(rank <= kMaxRank, "rank of a checkpointed tensor");
  if (element_count(shape) == 0) return std::nullopt;
  struct Corner {
    std::array<int64_t, kMaxRank> at;
    int64_t sign;
  };
  std::vector<Corner> corners;
  const auto add = [&](const Region& r, int64_t weight) {
    if (std::find(r.sizes.begin(), r.sizes.end(), 0) != r.sizes.end()) return;
    for (unsigned mask = 0; mask < (1u << rank); ++mask) {
      Corner corner{{}, weight};
      for (size_t d = 0; d < rank; ++d) {
        const bool far = (mask >> d) & 1u;
        corner.at[d] = r.offsets[d] + (far ? r.sizes[d] : 0);
        if (far) corner.sign = -corner.sign;
      }
      corners.push_back(corner);
    }
  };
  corners.reserve((chunks.size() + 1) << rank);
  add(full_region(shape), -1);
  for (const auto& chunk : chunks) {
    CAPSTAN_ASSERT(fits(chunk, shape), "piece outside of its tensor");
    add(chunk, 1);
  }
  std::sort(corners.begin(), corners.end(), [](const Corner& a, const Corner& b) { return a.at < b.at; });
  for (size_t i = 0; i < corners.size();) {
    int64_t sum = 0;
    size_t j = i;
    for (; j < corners.size() && corners[j].at == corners[i].at; ++j) sum += corners[j].sign;
    if (sum != 0) {
      const std::string cell =
          to_text(Shape(corners[i].at.begin(), corners[i].at.begin() + static_cast<int64_t>(rank)));
      return "cell " + cell + (sum < 0 ? " is in no piece" : " is in " + std::to_string(sum + 1) + " pieces");
    }
    i = j;
  }
  return std::nullopt;
}

bool can_convert(DType from, DType to) {
  if (from == to) return true;
  const bool to_float = to == DType::f32 || to == DType::bf16;
  return to_float && (from == DType::f32 || from == DType::bf16 || from == DType::f16);
}

template <class From, class To, class Convert>
static void convert_row(const std::byte* source, std::byte* target, int64_t count, Convert convert) {
  for (int64_t i = 0; i < count; ++i) {
    From from;
    std::memcpy(&from, source + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
    const To to = convert(from);
    std::memcpy(target + i * static_cast<int64_t>(sizeof(To)), &to, sizeof(To));
  }
}

static void copy_row(const std::byte* source, DType from, std::byte* target, DType to, int64_t count) {
  if (from == to) {
    std::memcpy(target, source, static_cast<size_t>(count * size_of(from)));
  } else if (from == DType::f32) {
    convert_row<float, bf16>(source, target, count, [](float x) { return bf16(x); });
  } else if (from == DType::bf16) {
    convert_row<bf16, float>(source, target, count, [](bf16 x) { return static_cast<float>(x); });
  } else if (to == DType::f32) {
    convert_row<uint16_t, float>(source, target, count, half_to_float);
  } else {
    convert_row<uint16_t, bf16>(source, target, count, [](uint16_t x) { return bf16(half_to_float(x)); });
  }
}

void copy_region(const Region& part, const Region& source_box, const std::byte* source, DType source_type,
                 const Region& target_box, std::byte* target, DType target_type) {
  CAPSTAN_ASSERT(can_convert(source_type, target_type), "conversion between these element types");
  const size_t rank = part.rank();
  const auto flat = [&](const Region& box, const Shape& index) {
    int64_t position = 0;
    for (size_t d = 0; d < rank; ++d) position = position * box.sizes[d] + (index[d] - box.offsets[d]);
    return position;
  };
  // Trailing dimensions that part, source and target span alike are one long row.
  size_t rows = rank;
  int64_t row = 1;
  while (rows > 0) {
    --rows;
    row *= part.sizes[rows];
    if (part.sizes[rows] != source_box.sizes[rows] || part.sizes[rows] != target_box.sizes[rows]) break;
  }
  Shape index = part.offsets;
  while (true) {
    copy_row(source + flat(source_box, index) * size_of(source_type), source_type,
             target + flat(target_box, index) * size_of(target_type), target_type, row);
    size_t d = rows;
    while (d > 0) {
      --d;
      if (++index[d] < part.offsets[d] + part.sizes[d]) break;
      index[d] = part.offsets[d];
      if (d == 0) return;
    }
    if (rows == 0) return;
  }
}

}  // namespace capstan::checkpoint
