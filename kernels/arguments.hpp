// Structs of tensors as arguments of launch(), for the kernels' structs of the same name.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/rope.hpp"
#include "tensor/launch.hpp"

namespace capstan {

namespace arguments {

// `first` begins with head 0 of group 0 of token 0.
struct Heads {
  Tensor first;
  kernels::HeadStrides strides;
};
struct QkvHeads {
  Heads q, k, v;
};
// The heads of packed QKV [N, row].
inline QkvHeads packed_heads(const Tensor& qkv, const kernels::QkvLayout& layout) {
  const auto from = [&](int64_t first) {
    const int64_t rest = qkv.elements() - first;
    return Heads{qkv.flat_range(first, rest, {rest}), layout.strides()};
  };
  // Query head 0 begins the row, also in a layout without query heads.
  return {from(0), from(layout.key(0)), from(layout.value(0))};
}
// The heads of a contiguous [N, groups * heads_per_group * width].
inline Heads contiguous_heads(const Tensor& x, int64_t groups, int64_t heads_per_group, int64_t width) {
  return {x, {groups * heads_per_group * width, heads_per_group * width, width}};
}

// Undefined tensors: each sequence is one document.
struct Documents {
  Tensor start;       // i32 [N]
  Tensor cu_seqlens;  // i32 [documents + 1]
  int64_t max_seqlen = 0;
  int64_t count() const { return cu_seqlens.defined() ? cu_seqlens.elements() - 1 : 0; }
};

struct RopeAngles {
  Tensor cos, sin, positions;
};
struct QkNormWeights {
  Tensor q_gamma, q_beta, k_gamma, k_beta;
};
struct QkNormGradients {
  Tensor q_gamma, q_beta, k_gamma, k_beta;
  bool defined() const {
    return q_gamma.defined() || q_beta.defined() || k_gamma.defined() || k_beta.defined();
  }
};

}  // namespace arguments

template <>
struct KernelArgument<kernels::HeadsIn> {
  static kernels::HeadsIn from(Device& device, const arguments::Heads& heads) {
    return {KernelArgument<kernels::In>::from(device, heads.first), heads.strides};
  }
};
template <>
struct KernelArgument<kernels::HeadsOut> {
  static kernels::HeadsOut from(Device& device, const arguments::Heads& heads) {
    return {KernelArgument<kernels::Out>::from(device, heads.first), heads.strides};
  }
};
template <>
struct KernelArgument<kernels::Documents> {
  static kernels::Documents from(Device& device, const arguments::Documents& d) {
    using Indices = KernelArgument<const int32_t*>;
    return {.start = Indices::from(device, d.start),
            .cu_seqlens = Indices::from(device, d.cu_seqlens),
            .count = d.count(),
            .max_seqlen = d.max_seqlen};
  }
};
template <>
struct KernelArgument<kernels::RopeAngles> {
  static kernels::RopeAngles from(Device& device, const arguments::RopeAngles& a) {
    using Floats = KernelArgument<const float*>;
    return {Floats::from(device, a.cos), Floats::from(device, a.sin),
            KernelArgument<const int32_t*>::from(device, a.positions)};
  }
};
template <>
struct KernelArgument<kernels::QkNormWeights> {
  static kernels::QkNormWeights from(Device& device, const arguments::QkNormWeights& w) {
    using In = KernelArgument<kernels::In>;
    return {In::from(device, w.q_gamma), In::from(device, w.q_beta), In::from(device, w.k_gamma),
            In::from(device, w.k_beta)};
  }
};
template <>
struct KernelArgument<kernels::QkNormGradients> {
  static kernels::QkNormGradients from(Device& device, const arguments::QkNormGradients& g) {
    using Floats = KernelArgument<float*>;
    return {Floats::from(device, g.q_gamma), Floats::from(device, g.q_beta), Floats::from(device, g.k_gamma),
            Floats::from(device, g.k_beta)};
  }
};

}  // namespace capstan
