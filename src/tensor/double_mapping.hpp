// Device memory in the memory of the host: one sparse file that is mapped twice. The addresses of tensors lie
// in the first mapping, which has no access rights, so that host code crashes that uses them. Kernels and
// copies use the second one, at a fixed distance.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace capstan {

// Content of device memory before it is written, and after it was freed: a NaN as bf16, fp16, fp32 and fp64,
// and an index out of every range as an integer.
inline constexpr uint16_t kNotWritten = 0x7FF4;
void fill_not_written(std::byte* begin, int64_t bytes);
// Writes two bytes in turn.
void fill_alternating(std::byte* begin, int64_t bytes, std::byte first, std::byte second);

class DoubleMapping {
 public:
  // device: completes "the memory of the … cannot be made" (ErrorCode::unsupported). accessible: kernels can
  // use all of it, except for what forbid() is called for; else only what allow() is called for.
  DoubleMapping(std::string device, int64_t bytes, bool accessible);
  ~DoubleMapping();
  DoubleMapping(const DoubleMapping&) = delete;
  DoubleMapping& operator=(const DoubleMapping&) = delete;

  // Begin of the first mapping.
  std::byte* begin() const { return front_; }
  int64_t bytes() const { return bytes_; }
  // From the first mapping to the second one.
  std::ptrdiff_t distance() const { return back_ - front_; }

  // Lets kernels use these bytes, which are full pages; false: the system refuses.
  bool allow(int64_t offset, int64_t bytes);
  bool forbid(int64_t offset, int64_t bytes);
  // Returns the memory of full pages to the system.
  void discard(int64_t offset, int64_t bytes);

 private:
  std::byte* map(int access);
  [[noreturn]] void refuse(const char* call);
  void close();

  const std::string device_;
  const int64_t bytes_;
  int file_ = -1;
  std::byte *front_ = nullptr, *back_ = nullptr;
};

}  // namespace capstan
