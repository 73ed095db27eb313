// Stacks that are switched without the operating system: a simulated thread waits on its own.
#pragma once

#include <cstddef>

namespace capstan::kernels::simulated {

// A stack with the place at which its execution continues. All fibers that switch to each other run on one
// thread of the host.
class Fiber {
 public:
  using Entry = void (*)(void* argument);

  // The stack of the calling thread; others switch back to it.
  Fiber();
  // entry(argument) runs at the first switch to this fiber and never returns.
  Fiber(Entry entry, void* argument);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Continues `next` in the place of this fiber, which runs; returns when another one switches to it.
  void switch_to(Fiber& next);
  // Abandons what the fiber was doing: the next switch to it calls its entry again. Objects on its stack are
  // not destroyed.
  void restart();

 private:
  static void begin(void* from);
  // Called on the stack of this fiber after a switch to it.
  void arrive(Fiber* from);

  void* context_ = nullptr;
  Entry entry_ = nullptr;
  void* argument_ = nullptr;
  // The stack without its guard page. Of a thread's own stack only the address sanitizer knows it.
  std::byte* stack_ = nullptr;
  size_t bytes_ = 0;
  // What the address and thread sanitizers know of the stack.
  void *fake_stack_ = nullptr, *sanitizer_fiber_ = nullptr;
};

}  // namespace capstan::kernels::simulated
