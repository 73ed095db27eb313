// One call of cuDNN's attention: what its plan depends on, and the launch. cudnn_attention.cpp calls the
// library, for GPUs, in a build with CAPSTAN_CUDNN; kernels/simulated/cudnn_attention.cpp checks the call and
// computes on the host. Whoever includes it defines CAPSTAN_GPU, because the host compiler compiles both.
#pragma once

#include <compare>
#include <cstddef>

#include "tensor/kernel_context.hpp"

#ifndef CAPSTAN_GPU
#error "define CAPSTAN_GPU: cuda or simulated"
#endif

namespace capstan::kernels::CAPSTAN_GPU {

// In elements; the elements of a head are consecutive.
struct CudnnStrides {
  int64_t sequence = 0, head = 0, token = 0;
  auto operator<=>(const CudnnStrides&) const = default;
};

// Attention of each head, or its gradients by an algorithm whose bits do not depend on the order of blocks:
// all on which a plan depends. Strides are multiples of 16 bytes.
struct CudnnCall {
  bool backward = false;
  // bf16 or fp16, of all tensors but lse.
  DType type = DType::bf16;
  // Heads of queries, each heads / key_heads of which share a head of keys and values.
  int64_t sequences = 0, heads = 0, key_heads = 0, seq = 0, qk_dim = 0, v_dim = 0;
  float scale = 0;
  bool causal = true;
  // > 0, with causality: keys in (position - window, position].
  int64_t window = 0;
  CudnnStrides q, k, v, out;
  // Of the backward pass.
  CudnnStrides dout, dq, dk, dv;
  auto operator<=>(const CudnnCall&) const = default;
};

// Multiples of 16 bytes.
struct CudnnPointers {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  // Written by the forward pass, read by the backward pass. lse: fp32 [sequences, heads, seq], natural log.
  void *out = nullptr, *lse = nullptr;
  const void* dout = nullptr;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  // A multiple of 256 bytes.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

// Enqueues the call. False if cuDNN has no plan for it within that workspace, and nothing was enqueued; an
// error is reported in the context's slot. Plans, and refusals, are kept for the process, by GPU and call.
bool enqueue_cudnn(Context& c, const CudnnCall& call, const CudnnPointers& pointers);

}  // namespace capstan::kernels::CAPSTAN_GPU
