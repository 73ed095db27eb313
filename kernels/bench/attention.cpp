#include <cmath>

#include "kernels/arguments.hpp"
#include "kernels/bench/kernel_bench.hpp"
#include "tensor/launch.hpp"

namespace capstan::kernels {

namespace {

using arguments::contiguous_heads;
using arguments::packed_heads;

AttentionShape attention_shape(const BenchModel& m) {
  AttentionShape a;
  a.groups = m.groups;
  a.heads_per_group = m.heads_per_group;
  a.qk_dim = a.v_dim = m.head_dim;
  a.batch = m.batch;
  a.seq = m.seq;
  a.scale = 1 / std::sqrt(static_cast<float>(m.head_dim));
  return a;
}
// FLOPs of half of a GEMM of seq x seq x head_dim, of all heads.
double square_gemm(const BenchModel& m) {
  return static_cast<double>(m.batch * m.heads()) * static_cast<double>(m.seq) * static_cast<double>(m.seq) *
         static_cast<double>(m.head_dim);
}

}  // namespace

void KernelBench::attention(const BenchModel& m) {
  const std::string prefix = m.prefix();
  const int64_t tokens = m.tokens(), heads = m.heads();
  const QkvLayout layout = m.qkv();
  const AttentionShape a = attention_shape(m);
  const Tensor qkv = noise(device_, tokens * layout.row(), attention_),
               out = Tensor::zeros(device_, {tokens * heads * m.head_dim}, attention_),
               dout = noise(device_, tokens * heads * m.head_dim, attention_),
               dqkv = Tensor::zeros(device_, {tokens * layout.row()}, attention_),
               lse = Tensor::zeros(device_, {m.batch * heads * m.seq}), none;
  const arguments::QkvHeads x = packed_heads(qkv, layout), dx = packed_heads(dqkv, layout);
  const arguments::Heads y = contiguous_heads(out, m.groups, m.heads_per_group, m.head_dim),
                         dy = contiguous_heads(dout, m.groups, m.heads_per_group, m.head_dim);
  const arguments::Documents documents;
  // Two GEMMs of seq x seq x head_dim forward, five backward; half of the square is masked.
  const double gemm = square_gemm(m);
  const Attention& kernel = *device_.table().attention;
  bound_by_gemms(prefix + "attention forward", 2 * gemm, [&] {
    launch(device_, kernel.forward_workspace(a, attention_, 0), kernel.forward, a, x.q, x.k, x.v, documents,
           none, y, lse);
  });
  bound_by_gemms(prefix + "attention backward", 5 * gemm, [&] {
    launch(device_, kernel.backward_workspace(a, attention_, 0), kernel.backward, a, x.q, x.k, x.v, y, lse,
           dy, documents, none, dx.q, dx.k, dx.v);
  });
  // One token of each sequence after seq - 1 cached ones; reads the cache.
  AttentionShape step = a;
  step.seq = 1;
  const Tensor k_cache = noise(device_, tokens * m.groups * m.head_dim, attention_),
               v_cache = noise(device_, tokens * m.groups * m.head_dim, attention_),
               past = Tensor::from_host<int32_t>(device_, {1},
                                                 std::vector<int32_t>{static_cast<int32_t>(m.seq - 1)});
  bound_by_memory(prefix + "attention decode, one token",
                  2 * size_of(attention_) * tokens * m.groups * m.head_dim, [&] {
                    launch(device_, kernel.decode_workspace(step, attention_, m.seq), kernel.decode, step,
                           x.q, x.k, x.v, k_cache, v_cache, past, m.seq, y, Tensor());
                  });
}

void KernelBench::attention_sink(const BenchModel& m) {
  const int64_t tokens = m.tokens(), values = tokens * m.heads() * m.head_dim, sums = tokens * m.heads();
  const Tensor out = noise(device_, values, attention_), dout = noise(device_, values, attention_),
               lse = noise(device_, sums), logits = noise(device_, m.heads(), activations_),
               dlogits = Tensor::zeros(device_, {m.heads()});
  const auto heads_of = [&](const Tensor& x) {
    return contiguous_heads(x, m.groups, m.heads_per_group, m.head_dim);
  };
  const AttentionSink& kernel = *device_.table().attention_sink;
  bound_by_memory(m.prefix() + "attention sink forward", 2 * (size_of(attention_) * values + 4 * sums),
                  [&] { launch(device_, kernel.forward, attention_shape(m), logits, heads_of(out), lse); });
  bound_by_memory(m.prefix() + "attention sink backward", 2 * size_of(attention_) * values + 4 * sums, [&] {
    launch(device_, kernel.backward, attention_shape(m), logits, heads_of(out), lse, heads_of(dout), dlogits);
  });
}

// The queries of a sequence with the keys of the preceding one: no key is masked.
void KernelBench::context_attention(const BenchModel& m) {
  const int64_t tokens = m.tokens(), values = tokens * m.heads() * m.head_dim;
  const QkvLayout layout = m.qkv();
  AttentionBlock block;
  block.shape = attention_shape(m);
  block.queries.segments[0] = {m.seq, m.seq};
  block.keys.segments[0] = {0, m.seq};
  const Tensor qkv = noise(device_, tokens * layout.row(), attention_),
               out = Tensor::zeros(device_, {values}), dout = noise(device_, values, attention_),
               dqkv = Tensor::zeros(device_, {tokens * layout.row()}),
               lse = Tensor::zeros(device_, {tokens * m.heads()}), none;
  const arguments::QkvHeads x = packed_heads(qkv, layout), dx = packed_heads(dqkv, layout);
  const arguments::Heads y = contiguous_heads(out, m.groups, m.heads_per_group, m.head_dim),
                         dy = contiguous_heads(dout, m.groups, m.heads_per_group, m.head_dim);
  const arguments::Documents documents;
  const ContextAttention& kernel = *device_.table().context_attention;
  bound_by_gemms(m.prefix() + "context-parallel attention forward", 4 * square_gemm(m), [&] {
    launch(device_, kernel.forward_workspace(block, 0), kernel.forward, block, x.q, x.k, x.v, documents, none,
           false, y, lse);
  });
  bound_by_gemms(m.prefix() + "context-parallel attention backward", 10 * square_gemm(m), [&] {
    launch(device_, kernel.backward_workspace(block, 0), kernel.backward, block, x.q, x.k, x.v, y, lse, dy,
           documents, none, dx.q, dx.k, dx.v);
  });
}

void KernelBench::rope(const BenchModel& m) {
  const std::string prefix = m.prefix();
  const QkvLayout layout = m.qkv();
  const int64_t tokens = m.tokens(), rotated = tokens * (layout.row() - m.groups * m.head_dim);
  const Tensor qkv = noise(device_, tokens * layout.row(), activations_),
               angles = noise(device_, m.seq * m.head_dim / 2),
               q_out = Tensor::zeros(device_, {tokens * m.heads() * m.head_dim}, activations_),
               k_out = Tensor::zeros(device_, {tokens * m.groups * m.head_dim}, activations_),
               dqkv = noise(device_, tokens * layout.row(), activations_),
               gamma = noise(device_, m.head_dim, activations_),
               dgamma = Tensor::zeros(device_, {m.head_dim}), none;
  std::vector<int32_t> row_positions(static_cast<size_t>(tokens));
  for (size_t i = 0; i < row_positions.size(); ++i)
    row_positions[i] = static_cast<int32_t>(i % static_cast<size_t>(m.seq));
  const Tensor positions = Tensor::from_host<int32_t>(device_, {tokens}, row_positions);
  const arguments::RopeAngles table{angles, angles, positions};
  const arguments::QkvHeads x = packed_heads(qkv, layout), dx = packed_heads(dqkv, layout);
  const arguments::Heads q = contiguous_heads(q_out, m.groups, m.heads_per_group, m.head_dim),
                         k = contiguous_heads(k_out, m.groups, 1, m.head_dim);
  const arguments::QkNormWeights gammas{gamma, none, gamma, none};
  const arguments::QkNormGradients dgammas{dgamma, none, dgamma, none};
  RopeShape shape{.rows = tokens,
                  .groups = m.groups,
                  .heads_per_group = m.heads_per_group,
                  .head_dim = m.head_dim,
                  .rotary_dim = m.head_dim};
  const Rope& kernel = *device_.table().rope;
  bound_by_memory(prefix + "rope", 2 * bytes_ * rotated, [&] {
    launch(device_, kernel.forward, shape, x.q, x.k, table, arguments::QkNormWeights(), x.q, x.k);
  });
  shape.norm = QkNorm::rms;
  shape.eps = 1e-5f;
  bound_by_memory(prefix + "qk norm + rope forward", 2 * bytes_ * rotated,
                  [&] { launch(device_, kernel.forward, shape, x.q, x.k, table, gammas, q, k); });
  bound_by_memory(prefix + "qk norm + rope backward", 3 * bytes_ * rotated, [&] {
    launch(device_, kernel.backward_workspace(shape, true), kernel.backward, shape, dx.q, dx.k, x.q, x.k,
           table, gammas, dx.q, dx.k, dgammas);
  });
}

void KernelBench::head_norm(const BenchModel& m) {
  const std::string prefix = m.prefix() + "norm across heads, ";
  const HeadNormShape shape{.qkv = m.qkv(),
                            .rows = m.tokens(),
                            .query_cols = m.heads() * m.head_dim,
                            .key_cols = m.groups * m.head_dim,
                            .eps = 1e-5f};
  const int64_t rows = m.tokens(), full = rows * shape.qkv.row(),
                normalized = rows * (shape.query_cols + shape.key_cols);
  const Tensor qkv = noise(device_, full, activations_), dy = noise(device_, full, activations_),
               y = Tensor::zeros(device_, {full}, activations_), squares = Tensor::zeros(device_, {2 * rows}),
               dots = Tensor::zeros(device_, {2 * rows}),
               query_gamma = noise(device_, shape.query_cols, activations_),
               key_gamma = noise(device_, shape.key_cols, activations_),
               dquery_gamma = Tensor::zeros(device_, {shape.query_cols}),
               dkey_gamma = Tensor::zeros(device_, {shape.key_cols});
  const HeadNorm& kernel = *device_.table().head_norm;
  const auto sum_squares = [&] { launch(device_, kernel.squares, shape, qkv, squares); };
  sum_squares();
  bound_by_memory(prefix + "squares", bytes_ * normalized + 8 * rows, sum_squares);
  bound_by_memory(prefix + "forward", 2 * bytes_ * full + 8 * rows, [&] {
    launch(device_, kernel.forward_workspace(shape), kernel.forward, shape, qkv, squares, query_gamma,
           key_gamma, y);
  });
  bound_by_memory(prefix + "dot products", 2 * bytes_ * normalized + 16 * rows, [&] {
    launch(device_, kernel.dots_workspace(shape), kernel.dots, shape, dy, qkv, squares, query_gamma,
           key_gamma, dots);
  });
  bound_by_memory(prefix + "backward", bytes_ * (2 * full + normalized) + 16 * rows, [&] {
    launch(device_, kernel.backward_workspace(shape, true), kernel.backward, shape, dy, qkv, squares, dots,
           query_gamma, key_gamma, y, dquery_gamma, dkey_gamma);
  });
}

}  // namespace capstan::kernels
