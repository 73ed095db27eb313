// Which attention cuDNN computes, and which the kernels here: one table by compute capability. A build
// without cuDNN (CAPSTAN_CUDNN) has no choice, and on the simulated GPU only tests make one.
//
// The choice depends on shape and GPU alone, so that a resumed run computes the same bits.
#pragma once

#include <algorithm>
#include <iterator>

#include "base/division.hpp"
#include "kernels/attention.hpp"

namespace capstan::kernels {

enum class AttentionPass { forward, backward };

// Rates in TFLOP/s, causal and bf16 unless stated, at 2k, 4k and 8k tokens: published by others, not measured
// here. Sources: NVIDIA's cudnn-frontend, benchmark/sdpa_benchmark_training/results (H200, GB200; cuDNN 9.19
// of 2026 unless stated), and the paper of FlashAttention-3 (H100, 2024), whose rates of FlashAttention-2 are
// what the kernels here aim at: they multiply by the same instructions. The backward pass is deterministic
// here; "atomic" marks rates of the algorithm that is not.
struct CudnnHeads {
  // 90 for 9.0.
  int capability;
  AttentionPass pass;
  int64_t qk_dim, v_dim;
};
inline constexpr CudnnHeads kCudnnHeads[] = {
    // 8.0, 8.9, 12.0: none. On A100 and RTX PRO 6000 cuDNN was slower than FlashAttention-2 (PR #48163 of
    // huggingface/transformers).

    // 9.0, heads of 64: 334, 363, 379 (cuDNN 9.1), FlashAttention-2 262, 284, 295.
    {90, AttentionPass::forward, 64, 64},
    // 484, 591, 644, FlashAttention-2 298, 319, 333.
    {90, AttentionPass::forward, 128, 128},
    // 522, 599, 643.
    {90, AttentionPass::forward, 192, 128},
    // Atomic: 370, 474, 541, and without a mask 504, 560, 594, FlashAttention-2 291, 310, 318. Deterministic:
    // no rate known of 128, but of 192/128. The matrix of kMostMatrixBytes costs time and memory.
    {90, AttentionPass::backward, 128, 128},
    // Deterministic: 352, 404, 442.
    {90, AttentionPass::backward, 192, 128},
    // Not the backward pass of heads of 64 (atomic, with a window of 1024: 264, 289, 300).

    // 10.0, 10.3: the tensor cores of these GPUs have instructions of their own, which the kernels here lack.
    // Heads of 64, with a window of 1024: 497, 574, 609.
    {100, AttentionPass::forward, 64, 64},
    {103, AttentionPass::forward, 64, 64},
    // 1042, 1335, 1598.
    {100, AttentionPass::forward, 128, 128},
    {103, AttentionPass::forward, 128, 128},
    // 1065, 1350, 1527.
    {100, AttentionPass::forward, 192, 128},
    {103, AttentionPass::forward, 192, 128},
    // Atomic, with a window of 1024: 559, 617, 646.
    {100, AttentionPass::backward, 64, 64},
    {103, AttentionPass::backward, 64, 64},
    // Deterministic: 785, 1009, 1133 (cuDNN 9.23).
    {100, AttentionPass::backward, 128, 128},
    {103, AttentionPass::backward, 128, 128},
    // Deterministic: 880, 1108, 1248.
    {100, AttentionPass::backward, 192, 128},
    {103, AttentionPass::backward, 192, 128},
};
// A plan is built for each length, in tenths of a second: cuDNN gets the lengths that training repeats.
inline constexpr int64_t kShortestCudnnSeq = 512, kCudnnSeqMultiple = 128;
// The deterministic backward pass of other GPUs than 10.x stores a matrix of seq x seq for each head, 16 bits
// an element (1 GiB: 32 heads at 4k), also of keys that a window hides. There the sequences of a batch are
// computed one after the other, and parts of their heads, so that a matrix takes no more than this; cuDNN
// gets calls without a window.
inline constexpr int64_t kMostMatrixBytes = int64_t{1} << 30;

// The matrix of a group of heads; 0: there is none.
inline int64_t cudnn_matrix_bytes(int capability, AttentionPass pass, const AttentionShape& s) {
  if (pass == AttentionPass::forward || capability / 10 == 10) return 0;
  return 2 * s.heads_per_group * round_up(s.seq, int64_t{64}) * round_up(s.seq, int64_t{128});
}
// Groups of heads of a call, all of whose matrices take at most `most` bytes if one does; they divide those
// of the shape.
inline int64_t cudnn_groups(int capability, AttentionPass pass, const AttentionShape& s, int64_t most) {
  const int64_t of_group = cudnn_matrix_bytes(capability, pass, s);
  int64_t groups = s.groups;
  while (groups > 1 && (groups * of_group > most || s.groups % groups != 0)) --groups;
  return groups;
}
// Workspace of a call that cuDNN computes, in bytes: what its plans take (tests/kernels/cudnn_plans.cpp), and
// somewhat more. The backward pass has a sum for each query, with groups of several query heads the keys' and
// values' gradients of each of them, and the matrix.
inline size_t cudnn_workspace(int capability, AttentionPass pass, const AttentionShape& s,
                              int64_t most_matrix = kMostMatrixBytes) {
  constexpr size_t kOfPlan = 1024;
  if (pass == AttentionPass::forward) return kOfPlan;
  const int64_t groups = cudnn_groups(capability, pass, s, most_matrix),
                matrix = groups * cudnn_matrix_bytes(capability, pass, s),
                of_gradients = s.heads_per_group > 1 ? s.qk_dim + s.v_dim : 0,
                floats = (matrix > 0 ? 1 : s.batch) * groups * s.heads_per_group * s.seq * (1 + of_gradients);
  return static_cast<size_t>(4 * floats + matrix) + kOfPlan;
}

// What cuDNN's graphs express, whatever the GPU. Everything else stays with the kernels here: fp32, dropout,
// capped logits, documents, windows that look ahead.
inline bool cudnn_expresses(AttentionPass pass, const AttentionShape& s, DType type) {
  const bool is_16_bits = type == DType::bf16 || type == DType::f16;
  return is_16_bits && s.dropout == 0 && s.softcap == 0 && (s.window == 0 || s.causal) && s.qk_dim % 8 == 0 &&
         s.v_dim % 8 == 0 && s.seq > (pass == AttentionPass::backward ? 1 : 0) && s.batch > 0;
}
// The table's choice.
inline bool prefers_cudnn(int capability, AttentionPass pass, const AttentionShape& s) {
  const bool has_heads =
      std::any_of(std::begin(kCudnnHeads), std::end(kCudnnHeads), [&](const CudnnHeads& h) {
        return h.capability == capability && h.pass == pass && h.qk_dim == s.qk_dim && h.v_dim == s.v_dim;
      });
  if (!has_heads || s.seq < kShortestCudnnSeq || s.seq % kCudnnSeqMultiple != 0) return false;
  const int64_t of_group = cudnn_matrix_bytes(capability, pass, s);
  const bool has_window = s.window > 0 && s.window < s.seq;
  return of_group == 0 || (of_group <= kMostMatrixBytes && !has_window);
}

}  // namespace capstan::kernels
