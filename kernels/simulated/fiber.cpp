#include "kernels/simulated/fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <boost/context/detail/fcontext.hpp>
#include <cerrno>
#include <string>

#include "base/error.hpp"
#include "base/file.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define CAPSTAN_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CAPSTAN_ADDRESS_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define CAPSTAN_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CAPSTAN_THREAD_SANITIZER 1
#endif
#endif
#ifdef CAPSTAN_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef CAPSTAN_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif

namespace capstan::kernels::simulated {

namespace context = boost::context::detail;

namespace {
#ifdef CAPSTAN_ADDRESS_SANITIZER
constexpr size_t kStackBytes = size_t{256} << 10;
#else
constexpr size_t kStackBytes = size_t{64} << 10;
#endif
size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}
}  // namespace

Fiber::Fiber() {
#ifdef CAPSTAN_THREAD_SANITIZER
  sanitizer_fiber_ = __tsan_get_current_fiber();
#endif
}

Fiber::Fiber(Entry entry, void* argument) : entry_(entry), argument_(argument), bytes_(kStackBytes) {
  void* memory = ::mmap(nullptr, bytes_ + page_bytes(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    fail(ErrorCode::no_fit,
         "the stack of a simulated thread cannot be allocated: " + system_error_text(errno));
  // A stack that overflows crashes.
  ::mprotect(memory, page_bytes(), PROT_NONE);
  stack_ = static_cast<std::byte*>(memory) + page_bytes();
#ifdef CAPSTAN_THREAD_SANITIZER
  sanitizer_fiber_ = __tsan_create_fiber(0);
#endif
  restart();
}

Fiber::~Fiber() {
  if (!entry_) return;
#ifdef CAPSTAN_THREAD_SANITIZER
  __tsan_destroy_fiber(sanitizer_fiber_);
#endif
#ifdef CAPSTAN_ADDRESS_SANITIZER
  // The functions on this stack never return, so that nothing else forgets where their locals end; the next
  // mapping may get these addresses.
  __asan_unpoison_memory_region(stack_, bytes_);
#endif
  ::munmap(stack_ - page_bytes(), bytes_ + page_bytes());
}

void Fiber::restart() {
#ifdef CAPSTAN_ADDRESS_SANITIZER
  __asan_unpoison_memory_region(stack_, bytes_);
#endif
  fake_stack_ = nullptr;
  context_ = context::make_fcontext(stack_ + bytes_, bytes_, [](context::transfer_t transfer) {
    static_cast<Fiber*>(transfer.data)->context_ = transfer.fctx;
    begin(transfer.data);
  });
}

namespace {
// The fiber to which this thread switches.
thread_local Fiber* target = nullptr;
}  // namespace

void Fiber::begin(void* from) {
  Fiber& self = *target;
  self.arrive(static_cast<Fiber*>(from));
  self.entry_(self.argument_);
}

void Fiber::switch_to(Fiber& next) {
  target = &next;
#ifdef CAPSTAN_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(&fake_stack_, next.stack_, next.bytes_);
#endif
#ifdef CAPSTAN_THREAD_SANITIZER
  __tsan_switch_to_fiber(next.sanitizer_fiber_, 0);
#endif
  const context::transfer_t transfer = context::jump_fcontext(next.context_, this);
  auto* from = static_cast<Fiber*>(transfer.data);
  from->context_ = transfer.fctx;
  arrive(from);
}

// A thread's own stack gets its bounds from the first switch away from it.
void Fiber::arrive([[maybe_unused]] Fiber* from) {
#ifdef CAPSTAN_ADDRESS_SANITIZER
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &bytes);
  if (!from->entry_) {
    from->stack_ = static_cast<std::byte*>(const_cast<void*>(bottom));
    from->bytes_ = bytes;
  }
#endif
}

}  // namespace capstan::kernels::simulated
