#include "support/sampled_device.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "kernels/simulated/device_kernels.hpp"
#include "kernels/simulated/overflow.hpp"

namespace capstan::test {

namespace {
constexpr int64_t kPage = 4096;
// Blocks lie apart: between two of them is as much as the first one has, and at least a page.
constexpr int64_t kSmallSpacing = 2 * kPage / 512, kLargeSpacing = 2;
// Copies and fills up to this size are executed.
constexpr int64_t kSmallCopy = int64_t{4} << 20;

void check_system(int result, const char* call) {
  if (result != 0) fail(ErrorCode::no_fit, std::string(call) + ": " + system_error_text(errno));
}
std::byte* first_page(std::byte* data) {
  return data - reinterpret_cast<uintptr_t>(data) % kPage;
}
size_t pages_of(std::byte* data, int64_t size) {
  return static_cast<size_t>(round_up(data + size - first_page(data), kPage));
}
}  // namespace

ReservedAddresses::ReservedAddresses(int64_t bytes) : bytes_(bytes) {
  void* const mapped = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) fail(ErrorCode::no_fit, "no addresses: " + system_error_text(errno));
  begin_ = static_cast<std::byte*>(mapped);
}
ReservedAddresses::~ReservedAddresses() {
  ::munmap(begin_, static_cast<size_t>(bytes_));
}

SampledDevice::SampledDevice(const kernels::simulated::Sample& sample)
    : Device(cuda::CudaDevice::rules()),
      sampled_(sample),
      small_(int64_t{1} << 40),
      large_(int64_t{1} << 46) {
  table_ = kernels::simulated_device_kernels().table;
}
SampledDevice::~SampledDevice() {
  release_pinned_pool();
}

LaunchMode SampledDevice::launch_mode(const void* kernel) const {
  return kernels::simulated_device_kernels().stream_kernels.contains(kernel) ? LaunchMode::call
                                                                             : LaunchMode::none;
}

std::byte* SampledDevice::place(Pool pool, int64_t offset, int64_t size) {
  const bool is_small = pool == Pool::small;
  const ReservedAddresses& range = is_small ? small_ : large_;
  const int64_t begin = offset * (is_small ? kSmallSpacing : kLargeSpacing),
                end = round_up(begin + size, kPage);
  if (end > range.bytes()) return nullptr;
  // The end of the block is that of a page.
  std::byte* const data = range.at(end - size);
  check_system(::mprotect(first_page(data), pages_of(data, size), PROT_READ | PROT_WRITE), "mprotect");
  return data;
}
void SampledDevice::occupy(std::byte* data, int64_t bytes, int64_t, MemoryCategory category) {
  blocks_[data] = {bytes, category};
}
void SampledDevice::retire(std::byte* data, int64_t size) {
  blocks_.erase(data);
  check_system(::madvise(first_page(data), pages_of(data, size), MADV_DONTNEED), "madvise");
  check_system(::mprotect(first_page(data), pages_of(data, size), PROT_NONE), "mprotect");
}
void SampledDevice::zero(std::byte* data, int64_t bytes) {
  if (bytes <= kSmallCopy) {
    std::memset(data, 0, static_cast<size_t>(bytes));
    return;
  }
  std::byte* const begin = first_page(data + kPage - 1);
  std::byte* const end = first_page(data + bytes);
  std::memset(data, 0, static_cast<size_t>(begin - data));
  std::memset(end, 0, static_cast<size_t>(data + bytes - end));
  check_system(::madvise(begin, static_cast<size_t>(end - begin), MADV_DONTNEED), "madvise");
}
void SampledDevice::copy(std::byte* to, const std::byte* from, int64_t bytes) {
  copy_to_device(to, from, bytes);
}
void SampledDevice::copy_to_device(std::byte* to, const void* from, int64_t bytes) {
  // Null: rows that a meta device does not need.
  if (from && bytes > 0 && bytes <= kSmallCopy) std::memcpy(to, from, static_cast<size_t>(bytes));
}
void SampledDevice::copy_to_host(void*, const std::byte*, int64_t) {
  fail(ErrorCode::internal, "the value of a sampled launch was asked for");
}

std::string SampledDevice::text_of(const void* address) const {
  const auto* const at = static_cast<const std::byte*>(address);
  const auto after = blocks_.upper_bound(at);
  if (after == blocks_.begin()) return "memory of no block";
  const auto& [begin, block] = *std::prev(after);
  return std::to_string(at - begin - block.bytes) + " bytes after a block of " + std::to_string(block.bytes) +
         " bytes (" + std::string(name_of(block.category)) + ")";
}

namespace {
const SampledDevice* reporting = nullptr;
// The thread cannot continue: what it holds, such as the allocator of the heap, is never used again, unless
// the fault lies in it.
void report_fault(int, siginfo_t* info, void*) {
  // An index that overflows is often why.
  const std::string overflow = kernels::simulated::take_overflow();
  const std::string text = kernels::simulated::running_launch_text() + ": access to " +
                           reporting->text_of(info->si_addr) + (overflow.empty() ? "" : "; " + overflow) +
                           "\n";
  (void)!::write(STDERR_FILENO, text.data(), text.size());
  ::_exit(1);
}
}  // namespace

void SampledDevice::report_faults() {
  reporting = this;
  // The stacks of fibers are too small for a report.
  static std::array<std::byte, size_t{1} << 16> memory;
  const stack_t stack{.ss_sp = memory.data(), .ss_flags = 0, .ss_size = memory.size()};
  check_system(::sigaltstack(&stack, nullptr), "sigaltstack");
  struct sigaction action = {};
  action.sa_sigaction = report_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL})
    check_system(::sigaction(signal, &action, nullptr), "sigaction");
}

}  // namespace capstan::test
