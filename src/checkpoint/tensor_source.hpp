// Where tensors are read from by name: a checkpoint, another program's files, or such files under Capstan's names. Whoever
// loads weights asks for the rectangles that it needs and does not know which of them it reads.
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
  Shape shape;  // of the whole tensor
};

// The rectangle cut along its first dimension into parts of at most `bytes` each, but of one row at least.
std::vector<Region> row_slabs(const Region& region, DType dtype, int64_t bytes);

// copy_region() from a part of a mapped file, in pieces whose pages do not stay resident afterwards.
void copy_mapped_region(const MappedFile& map, std::span<const std::byte> source, const Region& part,
                        const Region& source_box, DType source_type, const Region& target_box,
                        std::byte* target, DType target_type);

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  virtual std::string place() const = 0;  // "checkpoint `runs/a`", for messages
  virtual std::vector<std::string> names() const = 0;
  virtual const TensorInfo* find(std::string_view name) const = 0;  // nullptr: not there
  // Fills `out` (row-major, the size of `wanted` in `dtype`), converting where can_convert allows. ErrorCode::not_found,
  // ::unsupported (a conversion), ::failed (outside of the shape), ::format (files that contradict themselves). May not be
  // called from two threads at once.
  virtual void read(std::string_view name, DType dtype, const Region& wanted, std::span<std::byte> out) = 0;

  const TensorInfo& at(std::string_view name) const;  // throws ErrorCode::not_found with near names
  void read_all(std::string_view name, DType dtype, std::span<std::byte> out);

 protected:
  TensorSource() = default;
  TensorSource(const TensorSource&) = default;
  TensorSource(TensorSource&&) = default;
  TensorSource& operator=(const TensorSource&) = default;
  TensorSource& operator=(TensorSource&&) = default;
};

// One that knows its tensors before the first is read. Entry: a TensorInfo with what reading takes besides.
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
