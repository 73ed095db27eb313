// The one door through which kernels run. It turns tensors into the raw arrays that a kernel takes, at the address that
// this device's kernels may follow, and runs the kernel on the device's queue. On the meta device nothing runs.
#pragma once

#include <type_traits>
#include <utility>

#include "base/error.hpp"
#include "tensor/tensor.hpp"

namespace capstan {

// The value that a kernel parameter of type P gets from an argument.
template <class P>
struct KernelArgument {
  template <class A>
  static P from(A&& value) {
    return static_cast<P>(std::forward<A>(value));
  }
};
template <>
struct KernelArgument<kernels::In> {
  static kernels::In from(const Tensor& t) {
    return t.defined() ? kernels::In{t.address(), t.dtype()} : kernels::In{};
  }
};
template <>
struct KernelArgument<kernels::Out> {
  static kernels::Out from(const Tensor& t) {
    return t.defined() ? kernels::Out{t.address(), t.dtype()} : kernels::Out{};
  }
};
// A typed pointer parameter takes a tensor of exactly that type, or an undefined one as nullptr.
template <class T>
struct KernelArgument<T*> {
  static T* from(const Tensor& t) {
    if (!t.defined()) return nullptr;
    CAPSTAN_ASSERT(t.dtype() == DTypeOf<std::remove_const_t<T>>::value, "kernel argument " + t.text());
    return reinterpret_cast<T*>(t.address());
  }
};

template <class... P, class... A>
void launch(Device& device, void (*kernel)(kernels::Context&, P...), A&&... arguments) {
  static_assert(sizeof...(P) == sizeof...(A),
                "as many arguments as the kernel has parameters after its context");
  if (device.is_meta()) return;
  kernel(device.context(), KernelArgument<P>::from(std::forward<A>(arguments))...);
}

}  // namespace capstan
