// Rectangles of a tensor: the unit in which a checkpoint says who wrote what, and in which a reader asks for
// what it needs.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensor/dtype.hpp"

namespace capstan::checkpoint {

inline constexpr size_t kMaxRank = 6;
using Shape = std::vector<int64_t>;

// The cells with offsets[d] <= index[d] < offsets[d] + sizes[d] for every dimension d. Rank 0 is the one cell
// of a scalar.
struct Region {
  Shape offsets, sizes;

  size_t rank() const { return sizes.size(); }
  bool operator==(const Region& other) const { return offsets == other.offsets && sizes == other.sizes; }
};

std::optional<int64_t> try_element_count(const Shape& shape);  // nullopt: a negative size, or above 2^63
int64_t element_count(const Shape& shape);                     // the same, throwing ErrorCode::format
Region full_region(const Shape& shape);
bool fits(const Region& region, const Shape& shape);                // same rank, inside, no overflow
std::optional<Region> intersect(const Region& a, const Region& b);  // nullopt: no cell in common
std::string to_text(const Shape& shape);                            // "[2,3]"
std::string to_text(const Region& region);                          // "[0:2,4:8]"

// The elements [begin, begin + count) of the row-major tensor as rectangles, in order. Rank 0 and 1 need at
// most one, rank 2 at most three (end of a row, whole rows, begin of a row), rank r at most 2 r - 1.
std::vector<Region> flat_range_as_regions(const Shape& shape, int64_t begin, int64_t count);

// nullopt when the pieces cover every cell of `shape` exactly once, else a sentence that names the first cell
// which they do not. Takes O(pieces · 2^rank · log) whatever their arrangement. Every piece must fit the
// shape.
std::optional<std::string> tiling_problem(const Shape& shape, std::span<const Region> chunks);

// True where copy_region knows the conversion: equal types, fp32 <-> bf16, and fp16 -> fp32 or bf16.
bool can_convert(DType from, DType to);

// Copies the cells of `part` from a row-major array that holds `source_box` to one that holds `target_box`
// (both contain `part`; addresses need no alignment), converting where the types differ (to bf16: nearest
// even).
void copy_region(const Region& part, const Region& source_box, const std::byte* source, DType source_type,
                 const Region& target_box, std::byte* target, DType target_type);

}  // namespace capstan::checkpoint
