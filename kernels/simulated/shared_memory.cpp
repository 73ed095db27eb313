#include "kernels/simulated/shared_memory.hpp"

#include <algorithm>
#include <atomic>

#include "base/error.hpp"
#include "kernels/common/shared_memory_limits.hpp"

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
std::atomic<size_t> most_bytes = kMaxSharedBytes;
}  // namespace
size_t most_shared_bytes() {
  return most_bytes;
}
void set_most_shared_bytes(size_t bytes) {
  most_bytes = bytes;
}

namespace {
// Sentinel bytes on either side of an array. The array is aligned to their number.
constexpr size_t kSentinelBytes = 128;
constexpr std::byte kSentinel{0xA5};

template <bool kPoison>
void mark_sentinels([[maybe_unused]] SharedArray& array, [[maybe_unused]] size_t bytes) {
#ifdef CAPSTAN_POISONS_SHARED_MEMORY
  // The address sanitizer ends a range exactly where the next one begins a multiple of 8.
  std::byte* const end = array.data + bytes;
  if constexpr (kPoison) {
    __asan_poison_memory_region(array.data - kSentinelBytes, kSentinelBytes);
    __asan_poison_memory_region(end, kSentinelBytes);
  } else {
    __asan_unpoison_memory_region(array.data - kSentinelBytes, 2 * kSentinelBytes + bytes);
  }
#endif
}
}  // namespace

void SharedMemory::begin_block(size_t dynamic_bytes) {
  for (const auto& array : arrays_) array->used = false;
  static_bytes_ = 0;
  dynamic_bytes_ = dynamic_bytes;
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
  const std::string location = array.site->at.text() + ": ";
  if (dynamic && dynamic_)
    fail(ErrorCode::internal, location + array.site->name + " lies in the same dynamic shared memory as " +
                                  dynamic_->name + " (" + dynamic_->at.text() + ")");
  if (dynamic)
    dynamic_ = array.site;
  else
    static_bytes_ += bytes;
  if (static_bytes_ > kDefaultSharedBytes)
    fail(ErrorCode::internal, location + "the arrays of shared memory that a kernel declares have " +
                                  std::to_string(static_bytes_) + " bytes, and a GPU allows " +
                                  std::to_string(kDefaultSharedBytes));
  const size_t all = static_bytes_ + dynamic_bytes_;
  if (dynamic_bytes_ > 0 && all > kDefaultSharedBytes && !raises_shared_limit(dynamic_bytes_))
    fail(ErrorCode::internal, location + "the shared memory of a block has " + std::to_string(all) +
                                  " bytes, and a launch with " + std::to_string(dynamic_bytes_) +
                                  " of them allows " + std::to_string(kDefaultSharedBytes));
  if (all > most_shared_bytes())
    fail(ErrorCode::internal, location + "the shared memory of a block has " + std::to_string(all) +
                                  " bytes, and a GPU allows " + std::to_string(most_shared_bytes()));
}

void SharedMemory::prepare(SharedArray& array, int64_t count, size_t element_bytes) {
  const size_t bytes = static_cast<size_t>(count) * element_bytes;
  const bool resize = array.count != count || array.element_bytes != element_bytes;
  if (resize) {
    if (array.data) mark_sentinels<false>(array, static_cast<size_t>(array.count) * array.element_bytes);
    array.storage.assign(bytes + 3 * kSentinelBytes, kSentinel);
    const auto start = reinterpret_cast<uintptr_t>(array.storage.data());
    array.data =
        array.storage.data() + kSentinelBytes + (kSentinelBytes - start % kSentinelBytes) % kSentinelBytes;
    array.count = count;
    array.element_bytes = element_bytes;
    array.elements.resize(static_cast<size_t>(count));
  }
  std::fill_n(array.data, bytes, std::byte{0xFF});
  std::fill(array.elements.begin(), array.elements.end(), SharedElement{});
  if (resize) mark_sentinels<true>(array, bytes);
  array.used = true;
}

void SharedMemory::end_block() const {
#ifndef CAPSTAN_POISONS_SHARED_MEMORY
  for (const auto& array : arrays_) {
    if (!array->used) continue;
    const size_t bytes = static_cast<size_t>(array->count) * array->element_bytes;
    const auto intact = [](std::byte b) { return b == kSentinel; };
    if (!std::all_of(array->data - kSentinelBytes, array->data, intact) ||
        !std::all_of(array->data + bytes, array->data + bytes + kSentinelBytes, intact))
      fail(ErrorCode::internal, array->site->at.text() + ": a thread wrote outside of " +
                                    std::string(array->site->name) + ", which has " +
                                    std::to_string(array->count) + " elements");
  }
#endif
}

}  // namespace capstan::kernels::simulated
