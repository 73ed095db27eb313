// Stacks that are switched without the operating system. Each simulated thread that waits has one.
#pragma once

#include <cstddef>

namespace capstan::kernels::simulated {

// A stack with the address at which its execution continues. All fibers that switch to each other run on one
// thread of the host.
class Fiber {
 public:
  using Entry = void (*)(void* argument);

  // The fiber of the calling thread's own stack, to which other fibers switch back.
  Fiber();
  // entry(argument) runs at the first switch to this fiber and never returns.
  Fiber(Entry entry, void* argument);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Suspends this fiber, which is running, and continues `next`. Returns when a fiber switches to this one.
  void switch_to(Fiber& next);
  // The next switch to this fiber calls its entry function from the beginning. Objects on its stack are not
  // destroyed.
  void restart();

 private:
  static void begin(void* from);
  // Called on the stack of this fiber after a switch to it.
  void arrive(Fiber* from);

  void* context_ = nullptr;
  Entry entry_ = nullptr;
  void* argument_ = nullptr;
  // The stack without its guard page. For a thread's own stack it is set only with the address sanitizer.
  std::byte* stack_ = nullptr;
  size_t bytes_ = 0;
  // Handles by which the address and thread sanitizers know the stack.
  void *fake_stack_ = nullptr, *sanitizer_fiber_ = nullptr;
};

}  // namespace capstan::kernels::simulated
