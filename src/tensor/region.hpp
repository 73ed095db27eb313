// Shape and Region: the sizes of a tensor, and a rectangular part of it. Initialization, shards, checkpoints,
// external formats and 4-bit weights all describe parts of tensors with them.
#pragma once

#include <array>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensor/dtype.hpp"

namespace capstan {

// Up to six sizes (or offsets), outermost first. Trivially copyable.
class Shape {
 public:
  static constexpr int kMaxRank = 6;

  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes);
  explicit Shape(std::span<const int64_t> sizes);
  static Shape filled(size_t rank, int64_t value);

  int rank() const { return rank_; }
  template <std::integral Index>
  int64_t operator[](Index i) const {
    return sizes_[static_cast<size_t>(i)];
  }
  template <std::integral Index>
  int64_t& operator[](Index i) {
    return sizes_[static_cast<size_t>(i)];
  }
  std::span<const int64_t> sizes() const { return {sizes_.data(), size()}; }

  // The number of dimensions, and iteration over the sizes.
  size_t size() const { return static_cast<size_t>(rank_); }
  bool empty() const { return rank_ == 0; }
  const int64_t* begin() const { return sizes_.data(); }
  const int64_t* end() const { return sizes_.data() + rank_; }
  int64_t* begin() { return sizes_.data(); }
  int64_t* end() { return sizes_.data() + rank_; }
  int64_t back() const { return sizes_[size() - 1]; }
  void push_back(int64_t size);
  void pop_back() { sizes_[static_cast<size_t>(--rank_)] = 0; }

  // The product of the sizes; 1 for rank 0. Throws ErrorCode::format where it exceeds 2^63 or a size is
  // negative.
  int64_t elements() const;
  // elements(), but returns nullopt instead of an error.
  std::optional<int64_t> try_elements() const;

  // "[4,1024,768]", which is also its form in the JSON of manifests and safetensors headers.
  std::string text() const;

  bool operator==(const Shape& other) const = default;
  // Lexicographic.
  std::strong_ordering operator<=>(const Shape& other) const;

 private:
  std::array<int64_t, kMaxRank> sizes_{};
  int rank_ = 0;
};

// The elements with offsets[d] <= index[d] < offsets[d] + sizes[d] for every dimension d. Rank 0 is the one
// element of a scalar.
struct Region {
  Shape offsets, sizes;

  // "[0:2,4:8]".
  std::string text() const;
  bool operator==(const Region& other) const = default;
};

Region full_region(const Shape& shape);
// True where the region has the shape's rank and lies inside of it. Offsets and sizes may be any numbers.
bool fits(const Region& region, const Shape& shape);
// nullopt where the regions share no element.
std::optional<Region> intersect(const Region& a, const Region& b);

// The elements [begin, begin + count) of the row-major tensor as regions, in order. Rank 0 and 1 need at most
// one region, rank 2 at most three (end of a row, full rows, begin of a row), rank r at most 2 r - 1.
std::vector<Region> flat_range_as_regions(const Shape& shape, int64_t begin, int64_t count);

// Returns nullopt if the regions cover every element of `shape` exactly once, else a sentence that names the
// first element that is missing or covered twice. Every region must fit the shape. Takes O(regions · 2^rank ·
// log), whatever their arrangement.
std::optional<std::string> tiling_problem(const Shape& shape, std::span<const Region> regions);

// True where copy_region supports the conversion: equal types, and fp32, bf16 and fp16 among each other.
bool can_convert(DType from, DType to);

// Copies the elements of `region` from a row-major host array that holds `source_region` to one that holds
// `target_region`, and converts them where the types differ (to the nearest value, ties to even; in
// fp16 to infinity from 65520 on). Both regions contain `region`. Addresses need no alignment.
void copy_region(const Region& region, const Region& source_region, const std::byte* source,
                 DType source_type, const Region& target_region, std::byte* target, DType target_type);

}  // namespace capstan
