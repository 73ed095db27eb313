// Tensor: a strided view of a reference-counted Storage on one device. Copying a Tensor copies the view.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/function_ref.hpp"
#include "tensor/device.hpp"
#include "tensor/dtype.hpp"
#include "tensor/region.hpp"

namespace capstan {

class Storage {
 public:
  Storage(Device& device, int64_t bytes, MemoryCategory category);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  Device& device() const { return device_; }
  // A device address; use it only in launch() and copies.
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  MemoryCategory category() const { return category_; }

 private:
  Device& device_;
  int64_t bytes_;
  MemoryCategory category_;
  std::byte* data_;
};

class Tensor {
 public:
  // Empty: defined() is false.
  Tensor() = default;
  // Uninitialized, contiguous, in the memory category CategoryScope::current().
  static Tensor empty(Device& device, const Shape& shape, DType dtype = DType::f32);
  // All bytes zero.
  static Tensor zeros(Device& device, const Shape& shape, DType dtype = DType::f32);
  template <class T>
  static Tensor from_host(Device& device, const Shape& shape, std::span<const T> values) {
    return from_host_bytes(device, shape, DTypeOf<T>::value, std::as_bytes(values));
  }
  static Tensor from_host_bytes(Device& device, const Shape& shape, DType dtype,
                                std::span<const std::byte> bytes);

  bool defined() const { return storage_ != nullptr; }
  Device& device() const { return storage_->device(); }
  const Shape& shape() const { return shape_; }
  int64_t size(int dim) const { return shape_[dim < 0 ? dim + shape_.rank() : dim]; }
  // Distance of two neighbors along a dimension, in elements.
  int64_t stride(int dim) const { return strides_[static_cast<size_t>(dim < 0 ? dim + shape_.rank() : dim)]; }
  int rank() const { return shape_.rank(); }
  int64_t elements() const { return shape_.elements(); }
  int64_t bytes() const { return elements() * size_of(dtype_); }
  DType dtype() const { return dtype_; }
  bool is_contiguous() const;
  // Passes the memory of the elements, and none between them, to `take`.
  void for_each_rows(FunctionRef<void(const ByteRows&)> take) const;
  // A device address, see Storage::data.
  std::byte* address() const { return storage_->data() + offset_; }
  // No other tensor shares the storage.
  bool unique() const { return storage_.use_count() == 1; }
  bool shares_storage_with(const Tensor& other) const { return storage_ == other.storage_; }
  const std::shared_ptr<Storage>& storage() const { return storage_; }
  // The same view of other memory of the same size; null: a view without memory, which is not defined().
  Tensor with_storage(std::shared_ptr<Storage> storage) const {
    Tensor result = *this;
    result.storage_ = std::move(storage);
    return result;
  }

  // Views, without a copy. view() needs a contiguous tensor and the same number of elements.
  Tensor view(const Shape& shape) const;
  Tensor slice(int dim, int64_t begin, int64_t count) const;
  // Reinterprets the bytes of a contiguous tensor; scales the last size.
  Tensor as_type(DType dtype) const;
  // A view of elements [begin, begin + count) of a contiguous tensor.
  Tensor flat_range(int64_t begin, int64_t count, const Shape& shape) const;

  // Explicit copies; the tensor must be contiguous. A copy to the host is complete on return. After a copy
  // from the host returns, the caller may change `bytes`, and kernels launched later read the values.
  template <class T>
  std::vector<T> to_host() const {
    std::vector<T> values(static_cast<size_t>(elements()));
    copy_to_host_bytes(DTypeOf<T>::value, std::as_writable_bytes(std::span(values)));
    return values;
  }
  void copy_to_host_bytes(DType expected, std::span<std::byte> bytes) const;
  void copy_from_host_bytes(std::span<const std::byte> bytes) const;
  // To float whatever the type (fp32, bf16, fp16, fp64): for tests, logs and checks, not for hot paths.
  std::vector<float> to_floats() const;

  // "bf16[4, 1024] on cpu".
  std::string text() const;

 private:
  std::shared_ptr<Storage> storage_;
  int64_t offset_ = 0;  // bytes
  Shape shape_;
  std::array<int64_t, Shape::kMaxRank> strides_{};
  DType dtype_ = DType::f32;
};

}  // namespace capstan
