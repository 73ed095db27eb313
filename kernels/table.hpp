// A device's kernels: one pointer per family, and what families agree on.
#pragma once

#include "kernels/activation.hpp"
#include "kernels/adapter.hpp"
#include "kernels/attention.hpp"
#include "kernels/attention_sink.hpp"
#include "kernels/block_scales.hpp"
#include "kernels/context_attention.hpp"
#include "kernels/cross_entropy.hpp"
#include "kernels/decoding.hpp"
#include "kernels/elementwise.hpp"
#include "kernels/embedding.hpp"
#include "kernels/expert_permutation.hpp"
#include "kernels/gemm.hpp"
#include "kernels/head_norm.hpp"
#include "kernels/norm.hpp"
#include "kernels/optimizers.hpp"
#include "kernels/quantize.hpp"
#include "kernels/rope.hpp"
#include "kernels/router.hpp"
#include "kernels/step_control.hpp"

namespace capstan::kernels {

struct Table {
  const Gemm* gemm;
  const Norm* norm;
  const HeadNorm* head_norm;
  const Activation* activation;
  const Rope* rope;
  const Attention* attention;
  const AttentionSink* attention_sink;
  const ContextAttention* context_attention;
  const Embedding* embedding;
  const Router* router;
  const ExpertPermutation* expert_permutation;
  const CrossEntropy* cross_entropy;
  const Decoding* decoding;
  const Elementwise* elementwise;
  const Optimizers* optimizers;
  const Adapter* adapter;
  const Quantize* quantize;
  const StepControlKernels* step_control;
  // Where `quantize` writes the scales of blocks and `gemm` reads them.
  ScaleOrder scale_order = ScaleOrder::row_major;
  // Lines for the log, one after the other, each once: what a library has not computed, and why. A slower
  // kernel computes it. Null where nothing is left; may be null.
  const char* (*next_note)() = nullptr;
};

const Table& cpu_table();

// The CPU features that the kernels use, for the start-up log line: e.g. "AVX2; bf16 GEMMs widen to fp32".
struct CpuFeatures {
  // "AVX2", "AVX-512", "AVX-512 bf16", "AMX bf16" …
  const char* instruction_set;
  bool native_bf16_gemm;
};
CpuFeatures cpu_features();

}  // namespace capstan::kernels
