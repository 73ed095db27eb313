// The interface for reading regions of named tensors, whatever their storage: a checkpoint, files of another
// program, or such files under Capstan's parameter names.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.hpp"
#include "tensor/dtype.hpp"
#include "tensor/region.hpp"

namespace capstan::checkpoint {

struct TensorInfo {
  DType dtype = DType::f32;
  // Shape of the global tensor.
  Shape shape;
};

// Splits the region along its first dimension into slabs of at most `bytes` each, but at least one row.
std::vector<Region> row_slabs(const Region& region, DType dtype, int64_t bytes);

// copy_region() from a range of a mapped file, in chunks whose pages do not stay resident afterward.
void copy_mapped_region(const MappedFile& map, std::span<const std::byte> source, const Region& region,
                        const Region& source_region, DType source_type, const Region& target_region,
                        std::byte* target, DType target_type);

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  // A description for messages, such as "checkpoint `runs/a`".
  virtual std::string description() const = 0;
  virtual std::vector<std::string> names() const = 0;
  // Returns nullptr if there is no such tensor.
  virtual const TensorInfo* find(std::string_view name) const = 0;
  // Fills `out` (row-major, the size of `wanted` in `dtype`) and converts where can_convert allows. Errors:
  // not_found, unsupported (a conversion), failed (outside of the shape), format (inconsistent files). Not
  // thread-safe.
  virtual void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) = 0;

  // Throws ErrorCode::not_found, with similar names, if there is no such tensor.
  const TensorInfo& at(std::string_view name) const;
  void read_all(std::string_view name, DType dtype, std::span<std::byte> out);

 protected:
  TensorSource() = default;
  TensorSource(const TensorSource&) = default;
  TensorSource(TensorSource&&) = default;
  TensorSource& operator=(const TensorSource&) = default;
  TensorSource& operator=(TensorSource&&) = default;
};

// A source with a map of its tensors. Entry: a TensorInfo with the data that reading needs.
template <class Entry>
class MapSource : public TensorSource {
 public:
  std::vector<std::string> names() const override {
    std::vector<std::string> result;
    for (const auto& tensor : tensors_) result.push_back(tensor.first);
    return result;
  }
  const TensorInfo* find(std::string_view name) const override {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second;
  }

 protected:
  const Entry& entry(std::string_view name) const { return static_cast<const Entry&>(at(name)); }
  std::map<std::string, Entry, std::less<>> tensors_;
};

}  // namespace capstan::checkpoint
