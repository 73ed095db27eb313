// Runs a kernel on a queue of a device: passes tensors as raw arrays at the addresses that the device's
// kernels use, provides a workspace, and enqueues the kernel. The meta device only counts the launch and
// allocates the workspace. Kernels run through launch() only.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "base/error.hpp"
#include "tensor/tensor.hpp"

namespace capstan {

// Converts an argument of launch() to a kernel parameter of type P. Arrays come from tensors of the launching
// device only, so that no host address reaches a kernel.
template <class P>
struct KernelArgument {
  static_assert(std::is_trivially_copyable_v<P>, "a launch keeps its arguments by value");
  template <class A>
  static P from(Device&, A&& value) {
    return static_cast<P>(std::forward<A>(value));
  }
};
inline std::byte* kernel_address(Device& device, const Tensor& t, bool writes) {
  CAPSTAN_ASSERT(&t.device() == &device, "kernel argument " + t.text() + " of another device");
  if (device.declares_accesses())
    t.for_each_rows([&](const ByteRows& rows) { device.declare_kernel_access(rows, writes); });
  return device.kernel_address(t.address());
}
template <>
struct KernelArgument<kernels::In> {
  static kernels::In from(Device& device, const Tensor& t) {
    return t.defined() ? kernels::In{kernel_address(device, t, false), t.dtype()} : kernels::In{};
  }
};
template <>
struct KernelArgument<kernels::Out> {
  static kernels::Out from(Device& device, const Tensor& t) {
    return t.defined() ? kernels::Out{kernel_address(device, t, true), t.dtype()} : kernels::Out{};
  }
};
// A typed pointer parameter takes a tensor of exactly that type, or an undefined one as nullptr.
template <class T>
struct KernelArgument<T*> {
  static T* from(Device& device, const Tensor& t) {
    if (!t.defined()) return nullptr;
    CAPSTAN_ASSERT(t.dtype() == DTypeOf<std::remove_const_t<T>>::value, "kernel argument " + t.text());
    return reinterpret_cast<T*>(kernel_address(device, t, !std::is_const_v<T>));
  }
};

// The workspace of one launch, on the launching device; empty where the kernel needs none.
class LaunchWorkspace {
 public:
  LaunchWorkspace(Device& device, Queue queue, kernels::WorkspaceSize size)
      : device_(device), queue_(queue), workspace_(device.take_workspace(queue, size)) {}
  ~LaunchWorkspace() {
    if (workspace_.data) device_.return_workspace(queue_, workspace_);
  }
  LaunchWorkspace(const LaunchWorkspace&) = delete;
  LaunchWorkspace& operator=(const LaunchWorkspace&) = delete;

  kernels::LaunchContext context() const {
    kernels::LaunchContext context = device_.context(queue_);
    if (workspace_.data) context.workspace = {device_.kernel_address(workspace_.data), workspace_.bytes};
    return context;
  }

 private:
  Device& device_;
  const Queue queue_;
  const kernels::Workspace workspace_;
};

template <class... P>
void call_kernel(kernels::Context& context, void (*kernel)(kernels::Context&, P...),
                 std::type_identity_t<P>... values) {
  kernel(context, values...);
  if (context.error->file) [[unlikely]]
    throw_kernel_error(*context.error);
}

template <class... P>
void enqueue_kernel(Device& device, Queue queue, kernels::Context& context,
                    void (*kernel)(kernels::Context&, P...), std::type_identity_t<P>... values) {
  device.enqueue(queue, [kernel, context, arguments = std::tuple<P...>(values...)] {
    std::apply([&](const P&... each) { call_kernel(context, kernel, each...); }, arguments);
  });
}

// `workspace`: the size that the family of this device declares for the shape.
template <class... P, class... A>
void launch(Device& device, Queue queue, kernels::WorkspaceSize workspace,
            void (*kernel)(kernels::Context&, P...), A&&... arguments) {
  static_assert(sizeof...(P) == sizeof...(A),
                "as many arguments as the kernel has parameters after its context");
  device.count_launch(queue);
  const LaunchWorkspace temporary(device, queue, workspace);
  switch (device.launch_mode(reinterpret_cast<const void*>(kernel))) {
    case LaunchMode::call:
      return call_kernel(temporary.context(), kernel,
                         KernelArgument<P>::from(device, std::forward<A>(arguments))...);
    case LaunchMode::queue: {
      kernels::LaunchContext context = temporary.context();
      // With a null stream the kernel runs immediately when the queue reaches this work.
      context.stream = nullptr;
      return enqueue_kernel(device, queue, context, kernel,
                            KernelArgument<P>::from(device, std::forward<A>(arguments))...);
    }
    case LaunchMode::none:
      return;
  }
}
template <class... P, class... A>
void launch(Device& device, Queue queue, void (*kernel)(kernels::Context&, P...), A&&... arguments) {
  launch(device, queue, kernels::WorkspaceSize{}, kernel, std::forward<A>(arguments)...);
}

// Launches on the compute queue.
template <class... P, class... A>
void launch(Device& device, kernels::WorkspaceSize workspace, void (*kernel)(kernels::Context&, P...),
            A&&... arguments) {
  launch(device, Queue::compute, workspace, kernel, std::forward<A>(arguments)...);
}
template <class... P, class... A>
void launch(Device& device, void (*kernel)(kernels::Context&, P...), A&&... arguments) {
  launch(device, Queue::compute, kernels::WorkspaceSize{}, kernel, std::forward<A>(arguments)...);
}

}  // namespace capstan
