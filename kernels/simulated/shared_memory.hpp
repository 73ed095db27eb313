// Shared memory of simulated blocks: exactly sized, filled with NaN, with bytes around each array that
// nothing may change. Every access through Shared<T> is checked, and records its thread and source location.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/simulated/location.hpp"

namespace capstan::kernels::simulated {

// Bytes of shared memory that a launch may have on the simulated GPU; initially kMaxSharedBytes.
size_t most_shared_bytes();
void set_most_shared_bytes(size_t bytes);

// A declaration of shared memory.
struct SharedSite {
  const char* name;
  Location at;
};

// The last access to an element. Epochs count the barriers of the block and of the warp.
struct SharedAccess {
  static constexpr int16_t kNone = -1, kSeveral = -2, kLanes = 2048;
  // Index of the thread in the block; kNone: no access; kSeveral: threads of several warps; kLanes + warp:
  // several lanes of one warp.
  int16_t thread = kNone;
  uint32_t epoch = 0, warp_epoch = 0;
  Location at{"", 0};
};
struct SharedElement {
  SharedAccess write, read;
  // An asynchronous copy to it has started (`write`) and has not been waited for.
  bool copying = false;
};

// One array of a block.
struct SharedArray {
  const SharedSite* site = nullptr;
  int64_t count = 0;
  size_t element_bytes = 0;
  // The elements, between the sentinel bytes.
  std::byte* data = nullptr;
  std::vector<std::byte> storage;
  std::vector<SharedElement> elements;
  // Whether this block has declared it.
  bool used = false;
};

// The arrays of a block, kept for the next one.
class SharedMemory {
 public:
  // dynamic_bytes: those of the launch.
  void begin_block(size_t dynamic_bytes);
  // The array of a declaration, filled with NaN for the first thread of a block that calls this. dynamic: the
  // array lies in the bytes that the launch gives, and a kernel declares it once; the other arrays have 48
  // KiB together.
  SharedArray& array(const SharedSite& site, int64_t count, size_t element_bytes, bool dynamic);
  // Throws if bytes around an array have changed.
  void end_block() const;

 private:
  void count_bytes(const SharedArray& array, size_t bytes, bool dynamic);
  void prepare(SharedArray& array, int64_t count, size_t element_bytes);

  std::vector<std::unique_ptr<SharedArray>> arrays_;
  // Bytes of the arrays of constant size that this block has declared, and those of the launch.
  size_t static_bytes_ = 0, dynamic_bytes_ = 0;
  const SharedSite* dynamic_ = nullptr;
};

// An index with the source location of its use.
struct Index {
  int64_t value;
  Location at;
  template <class I>
  requires std::is_integral_v<I>
  constexpr Index(I index, Location location = {}) : value(static_cast<int64_t>(index)), at(location) {}
};

void read_shared(SharedArray& array, Index i);
void write_shared(SharedArray& array, Index i);

// An element; reads and writes it where it is used as a T.
template <class T>
class SharedReference {
 public:
  SharedReference(SharedArray& array, Index i) : array_(array), i_(i) {}
  SharedReference(const SharedReference&) = default;
  operator T() const {  // NOLINT: as a reference
    read_shared(array_, i_);
    T value;
    std::memcpy(&value, address(), sizeof(T));
    return value;
  }
  const SharedReference& operator=(T value) const {
    write_shared(array_, i_);
    std::memcpy(address(), &value, sizeof(T));
    return *this;
  }
  const SharedReference& operator=(const SharedReference& o) const { return *this = static_cast<T>(o); }
  const SharedReference& operator+=(T value) const { return *this = static_cast<T>(*this) + value; }

 private:
  std::byte* address() const { return array_.data + static_cast<size_t>(i_.value) * sizeof(T); }
  SharedArray& array_;
  Index i_;
};

// Shared memory that a kernel has declared.
template <class T>
class Shared {
 public:
  static_assert(std::is_trivially_copyable_v<T>);
  explicit Shared(SharedArray& array) : array_(array) {}
  SharedReference<T> operator[](Index i) const { return {array_, i}; }
  int64_t size() const { return array_.count; }
  SharedArray& array() const { return array_; }
  // Accesses through the pointer are checked by the sentinel bytes only.
  T* data() const { return reinterpret_cast<T*>(array_.data); }

 private:
  SharedArray& array_;
};

}  // namespace capstan::kernels::simulated
