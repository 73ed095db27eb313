#include "kernels/simulated/shared_memory.hpp"

#include <algorithm>

#include "base/error.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define CAPSTAN_POISONS_SHARED_MEMORY 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CAPSTAN_POISONS_SHARED_MEMORY 1
#endif
#endif
#ifdef CAPSTAN_POISONS_SHARED_MEMORY
#include <sanitizer/asan_interface.h>
#endif

namespace capstan::kernels::simulated {

namespace {
// Guard bytes on either side of an array. The array is aligned to them.
constexpr size_t kGuardBytes = 128;
constexpr std::byte kGuard{0xA5};
// Bytes of shared memory that a block may have on the architectures from sm_90 on.
constexpr size_t kMostBytes = size_t{227} << 10;
// Bytes of shared memory that the arrays of constant size of a block may have.
constexpr size_t kMostStaticBytes = size_t{48} << 10;

template <bool kPoison>
void mark_guards([[maybe_unused]] SharedArray& array, [[maybe_unused]] size_t bytes) {
#ifdef CAPSTAN_POISONS_SHARED_MEMORY
  // The address sanitizer ends a range exactly where the next one begins a multiple of 8.
  std::byte* const end = array.data + bytes;
  if constexpr (kPoison) {
    __asan_poison_memory_region(array.data - kGuardBytes, kGuardBytes);
    __asan_poison_memory_region(end, kGuardBytes);
  } else {
    __asan_unpoison_memory_region(array.data - kGuardBytes, 2 * kGuardBytes + bytes);
  }
#endif
}
}  // namespace

void SharedMemory::begin_block() {
  for (const auto& array : arrays_) array->used = false;
  static_bytes_ = dynamic_bytes_ = 0;
  dynamic_ = nullptr;
}

SharedArray& SharedMemory::array(const SharedSite& site, int64_t count, size_t element_bytes, bool dynamic) {
  SharedArray* array = nullptr;
  for (const auto& known : arrays_)
    if (known->site == &site) array = known.get();
  if (!array) {
    array = arrays_.emplace_back(std::make_unique<SharedArray>()).get();
    array->site = &site;
  }
  if (!array->used) {
    count_bytes(*array, static_cast<size_t>(count) * element_bytes, dynamic);
    prepare(*array, count, element_bytes);
  }
  return *array;
}

void SharedMemory::count_bytes(const SharedArray& array, size_t bytes, bool dynamic) {
  const std::string place = array.site->at.text() + ": ";
  if (dynamic && dynamic_)
    fail(ErrorCode::internal, place + array.site->name + " lies in the same dynamic shared memory as " +
                                  dynamic_->name + " (" + dynamic_->at.text() + ")");
  if (dynamic) dynamic_ = array.site;
  (dynamic ? dynamic_bytes_ : static_bytes_) += bytes;
  if (static_bytes_ > kMostStaticBytes)
    fail(ErrorCode::internal, place + "the arrays of shared memory that a kernel declares have " +
                                  std::to_string(static_bytes_) + " bytes, and a GPU allows " +
                                  std::to_string(kMostStaticBytes));
  if (static_bytes_ + dynamic_bytes_ > kMostBytes)
    fail(ErrorCode::internal, place + "the shared memory of a block has " +
                                  std::to_string(static_bytes_ + dynamic_bytes_) +
                                  " bytes, and a GPU allows " + std::to_string(kMostBytes));
}

void SharedMemory::prepare(SharedArray& array, int64_t count, size_t element_bytes) {
  const size_t bytes = static_cast<size_t>(count) * element_bytes;
  const bool resize = array.count != count || array.element_bytes != element_bytes;
  if (resize) {
    if (array.data) mark_guards<false>(array, static_cast<size_t>(array.count) * array.element_bytes);
    array.storage.assign(bytes + 3 * kGuardBytes, kGuard);
    const auto start = reinterpret_cast<uintptr_t>(array.storage.data());
    array.data = array.storage.data() + kGuardBytes + (kGuardBytes - start % kGuardBytes) % kGuardBytes;
    array.count = count;
    array.element_bytes = element_bytes;
    array.elements.resize(static_cast<size_t>(count));
  }
  std::fill_n(array.data, bytes, std::byte{0xFF});
  std::fill(array.elements.begin(), array.elements.end(), SharedElement{});
  if (resize) mark_guards<true>(array, bytes);
  array.used = true;
}

void SharedMemory::end_block() const {
#ifndef CAPSTAN_POISONS_SHARED_MEMORY
  for (const auto& array : arrays_) {
    if (!array->used) continue;
    const size_t bytes = static_cast<size_t>(array->count) * array->element_bytes;
    const auto intact = [](std::byte b) { return b == kGuard; };
    if (!std::all_of(array->data - kGuardBytes, array->data, intact) ||
        !std::all_of(array->data + bytes, array->data + bytes + kGuardBytes, intact))
      fail(ErrorCode::internal, array->site->at.text() + ": a thread wrote outside of " +
                                    std::string(array->site->name) + ", which has " +
                                    std::to_string(array->count) + " elements");
  }
#endif
}

}  // namespace capstan::kernels::simulated
