#include "checkpoint/tensor_source.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"

namespace capstan::checkpoint {

const TensorInfo& TensorSource::at(std::string_view name) const {
  if (const auto* tensor = find(name)) return *tensor;
  const auto all = names();
  const auto near = near_matches(name, all);
  fail(ErrorCode::not_found, description() + " has no tensor " + in_quotes(name),
       near.empty() ? "" : "near names: " + join(near, ", "));
}

std::vector<Region> row_slabs(const Region& region, DType dtype, int64_t bytes) {
  if (region.sizes.empty()) return {region};
  const int64_t rows = region.sizes[0];
  const int64_t row_bytes = rows == 0 ? 0 : region.sizes.elements() / rows * size_of(dtype);
  const int64_t most = std::max<int64_t>(1, row_bytes == 0 ? rows : bytes / row_bytes);
  std::vector<Region> slabs;
  for (int64_t row = 0; row < rows; row += most) {
    slabs.push_back(region);
    slabs.back().offsets[0] += row;
    slabs.back().sizes[0] = std::min(most, rows - row);
  }
  return slabs;
}

void copy_mapped_region(const MappedFile& map, std::span<const std::byte> source, const Region& region,
                        const Region& source_region, DType source_type, const Region& target_region,
                        std::byte* target, DType target_type) {
  constexpr int64_t kResident = int64_t{8} << 20;
  const size_t rank = region.sizes.size();
  // Releases complete rows of the source region, whether or not the copied region spans them.
  Region rows = source_region;
  if (rank > 0) rows.offsets[0] = region.offsets[0], rows.sizes[0] = region.sizes[0];
  for (Region slab : row_slabs(rows, source_type, kResident)) {
    const int64_t row_bytes = rank == 0 || slab.sizes[0] == 0
                                  ? static_cast<int64_t>(source.size())
                                  : slab.sizes.elements() / slab.sizes[0] * size_of(source_type);
    const int64_t begin = rank == 0 ? 0 : (slab.offsets[0] - source_region.offsets[0]) * row_bytes;
    const int64_t bytes = rank == 0 ? row_bytes : slab.sizes[0] * row_bytes;
    for (size_t d = 1; d < rank; ++d) slab.offsets[d] = region.offsets[d], slab.sizes[d] = region.sizes[d];
    copy_region(slab, source_region, source.data(), source_type, target_region, target, target_type);
    map.release(source.subspan(static_cast<size_t>(begin), static_cast<size_t>(bytes)));
  }
}

void TensorSource::read_all(std::string_view name, DType dtype, std::span<std::byte> out) {
  read(name, dtype, full_region(at(name).shape), out);
}

}  // namespace capstan::checkpoint
