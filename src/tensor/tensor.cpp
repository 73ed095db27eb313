#include "tensor/tensor.hpp"

#include <cstring>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace capstan {

Storage::Storage(Device& device, int64_t bytes, MemoryCategory category)
    : device_(device), bytes_(bytes), category_(category), data_(device.allocate(bytes, category)) {}
Storage::~Storage() {
  device_.free(data_, bytes_, category_);
}

Tensor Tensor::empty(Device& device, const Shape& shape, DType dtype) {
  Tensor result;
  result.storage_ = std::make_shared<Storage>(device, checked_mul(shape.elements(), size_of(dtype)),
                                              CategoryScope::current());
  result.shape_ = shape;
  result.dtype_ = dtype;
  for (int64_t i = shape.rank() - 1, stride = 1; i >= 0; --i) {
    result.strides_[static_cast<size_t>(i)] = stride;
    stride *= shape[static_cast<int>(i)];
  }
  return result;
}

Tensor Tensor::zeros(Device& device, const Shape& shape, DType dtype) {
  Tensor result = empty(device, shape, dtype);
  device.zero(result.address(), result.bytes());
  return result;
}

Tensor Tensor::from_host_bytes(Device& device, const Shape& shape, DType dtype,
                               std::span<const std::byte> bytes) {
  Tensor result = empty(device, shape, dtype);
  result.copy_from_host_bytes(bytes);
  return result;
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  for (int i = shape_.rank() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[static_cast<size_t>(i)] != expected) return false;
    expected *= shape_[i];
  }
  return true;
}

void Tensor::for_each_rows(FunctionRef<void(const ByteRows&)> take) const {
  if (elements() == 0) return;
  const int64_t element = size_of(dtype_);
  ByteRows rows{address(), element};
  int dim = rank() - 1;
  for (; dim >= 0 && (size(dim) == 1 || stride(dim) * element == rows.row_bytes); --dim)
    rows.row_bytes *= size(dim);
  // Dimensions over which the rows stay equally far apart.
  for (; dim >= 0 && (size(dim) == 1 || rows.rows == 1 || stride(dim) * element == rows.rows * rows.stride);
       --dim) {
    if (rows.rows == 1) rows.stride = stride(dim) * element;
    rows.rows *= size(dim);
  }
  int64_t groups = 1;
  for (int d = 0; d <= dim; ++d) groups *= size(d);
  for (int64_t group = 0; group < groups; ++group) {
    ByteRows here = rows;
    for (int64_t d = dim, rest = group; d >= 0; rest /= size(static_cast<int>(d--)))
      here.begin += rest % size(static_cast<int>(d)) * stride(static_cast<int>(d)) * element;
    take(here);
  }
}

Tensor Tensor::view(const Shape& shape) const {
  CAPSTAN_ASSERT(is_contiguous() && shape.elements() == elements(),
                 "view of " + text() + " as " + shape.text());
  return flat_range(0, elements(), shape);
}

Tensor Tensor::flat_range(int64_t begin, int64_t count, const Shape& shape) const {
  CAPSTAN_ASSERT(
      is_contiguous() && begin >= 0 && count >= 0 && begin + count <= elements() && shape.elements() == count,
      "range of " + text());
  Tensor result = *this;
  result.offset_ += begin * size_of(dtype_);
  result.shape_ = shape;
  for (int64_t i = shape.rank() - 1, stride = 1; i >= 0; --i) {
    result.strides_[static_cast<size_t>(i)] = stride;
    stride *= shape[static_cast<int>(i)];
  }
  return result;
}

Tensor Tensor::as_type(DType dtype) const {
  const int64_t from = size_of(dtype_), to = size_of(dtype);
  CAPSTAN_ASSERT(is_contiguous() && rank() > 0 && size(-1) * from % to == 0,
                 text() + " seen as another type");
  Tensor result = *this;
  result.dtype_ = dtype;
  result.shape_[rank() - 1] = size(-1) * from / to;
  for (int i = 0; i < rank() - 1; ++i) {
    int64_t& stride = result.strides_[static_cast<size_t>(i)];
    stride = stride * from / to;
  }
  return result;
}

Tensor Tensor::slice(int dim, int64_t begin, int64_t count) const {
  CAPSTAN_ASSERT(dim >= 0 && dim < rank() && begin >= 0 && count >= 0 && begin + count <= size(dim),
                 "slice of " + text());
  Tensor result = *this;
  result.offset_ += begin * stride(dim) * size_of(dtype_);
  result.shape_[dim] = count;
  return result;
}

void Tensor::copy_to_host_bytes(DType expected, std::span<std::byte> bytes) const {
  CAPSTAN_ASSERT(dtype_ == expected && is_contiguous() && static_cast<int64_t>(bytes.size()) == this->bytes(),
                 "copy of " + text() + " to the host");
  device().copy_to_host(bytes.data(), address(), this->bytes());
}
void Tensor::copy_from_host_bytes(std::span<const std::byte> bytes) const {
  CAPSTAN_ASSERT(is_contiguous() && static_cast<int64_t>(bytes.size()) == this->bytes(),
                 "copy from the host to " + text());
  device().copy_to_device(address(), bytes.data(), this->bytes());
}

template <class T>
static std::vector<float> floats_of(const std::vector<T>& values) {
  std::vector<float> result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = static_cast<float>(values[i]);
  return result;
}

std::vector<float> Tensor::to_floats() const {
  if (dtype_ == DType::f32) return to_host<float>();
  if (dtype_ == DType::bf16) return floats_of(to_host<bf16>());
  if (dtype_ == DType::f16) return floats_of(to_host<f16>());
  if (dtype_ == DType::f64) return floats_of(to_host<double>());
  fail(ErrorCode::internal, "internal error: to_floats of " + text());
}

std::string Tensor::text() const {
  if (!defined()) return "(no tensor)";
  return std::string(name_of(dtype_)) + shape_.text() + " on " + std::string(device().name());
}

}  // namespace capstan
