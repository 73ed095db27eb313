#include "base/philox.hpp"
#include "kernels/bench/kernel_bench.hpp"
#include "tensor/launch.hpp"

namespace capstan::kernels {

void KernelBench::norms(const BenchModel& m) {
  const std::string prefix = m.prefix();
  const int64_t tokens = m.tokens(), n = m.tokens() * m.width;
  const Tensor x = noise(device_, n, activations_), y = Tensor::zeros(device_, {n}, activations_),
               z = noise(device_, n, activations_), gamma = noise(device_, m.width, activations_),
               mean = Tensor::zeros(device_, {tokens}), rstd = Tensor::zeros(device_, {tokens}),
               dgamma = Tensor::zeros(device_, {m.width}), none;
  const NormRows rows{tokens, m.width, 1, 0, m.width};
  const Norm& kernel = *device_.table().norm;
  bound_by_memory(prefix + "norm forward", 2 * bytes_ * n, [&] {
    launch(device_, kernel.forward_workspace(rows), kernel.forward, false, rows, x, none, none, gamma, 0.0f,
           gamma, 1e-5f, y, mean, rstd, QuantizedOutputTensors());
  });
  bound_by_memory(prefix + "residual + norm forward", 4 * bytes_ * n, [&] {
    launch(device_, kernel.forward_workspace(rows), kernel.forward, true, rows, x, z, x, gamma, 0.0f, none,
           1e-5f, y, none, rstd, QuantizedOutputTensors());
  });
  bound_by_memory(prefix + "norm backward, accumulated", 4 * bytes_ * n, [&] {
    launch(device_, kernel.backward_workspace(rows, true), kernel.backward, false, rows, z, x, gamma, 0.0f,
           mean, rstd, y, true, dgamma, dgamma);
  });
  bound_by_memory(prefix + "bias + residual", 3 * bytes_ * n, [&] {
    const Elementwise& elementwise = *device_.table().elementwise;
    launch(device_, elementwise.bias_dropout_add_workspace(true, m.width), elementwise.bias_dropout_add, x,
           gamma, z, y, tokens, m.width, 0.0f, PhiloxKey{1, 2}, none);
  });
}

void KernelBench::mlp(const BenchModel& m) {
  const std::string prefix = m.prefix();
  const int64_t tokens = m.tokens();
  const int64_t wide = tokens * m.inner, in = m.gated ? 2 * wide : wide;
  const auto kind = m.gated ? ActivationKind::silu : ActivationKind::gelu_tanh;
  const Tensor x = noise(device_, in, activations_), y = noise(device_, wide, activations_),
               dx = Tensor::zeros(device_, {in}, activations_), none;
  bound_by_memory(prefix + (m.gated ? "swiglu forward" : "gelu forward"), bytes_ * (in + wide), [&] {
    launch(device_, device_.table().activation->forward, kind, m.gated, x, none, y, tokens, m.inner,
           QuantizedOutputTensors());
  });
  bound_by_memory(prefix + (m.gated ? "swiglu backward" : "gelu backward"), bytes_ * (2 * in + wide), [&] {
    launch(device_, device_.table().activation->backward, kind, m.gated, y, x, none, dx, tokens, m.inner);
  });
  const Tensor sums = Tensor::zeros(device_, {m.inner});
  bound_by_memory(prefix + "column sum", bytes_ * wide, [&] {
    const Gemm& gemm = *device_.table().gemm;
    launch(device_, gemm.column_sum_workspace(tokens, m.inner), gemm.column_sum, y, sums, tokens, m.inner,
           m.inner, true);
  });
}

void KernelBench::cross_entropy(const BenchModel& m) {
  const std::string prefix = m.prefix();
  const int64_t rows = 256;
  const Tensor logits = noise(device_, rows * m.vocabulary),
               labels = Tensor::zeros(device_, {rows}, DType::i32), losses = Tensor::zeros(device_, {rows}),
               weight = noise(device_, rows), none;
  // The gradients overwrite the logits, as in the model's head.
  bound_by_memory(prefix + "cross-entropy and gradient (256 rows)", 8 * rows * m.vocabulary, [&] {
    launch(device_, device_.table().cross_entropy->full, logits, labels, weight, rows, m.vocabulary,
           m.vocabulary, 0.0f, losses, logits, m.vocabulary);
  });
  bound_by_memory(prefix + "cross-entropy alone (256 rows)", 4 * rows * m.vocabulary, [&] {
    launch(device_, device_.table().cross_entropy->full, logits, labels, weight, rows, m.vocabulary,
           m.vocabulary, 0.0f, losses, none, 0);
  });
  // The same on logits and gradients in bf16, which a device may choose.
  const Tensor narrow = noise(device_, rows * m.vocabulary, DType::bf16);
  bound_by_memory(prefix + "bf16 cross-entropy (256 rows)", 4 * rows * m.vocabulary, [&] {
    launch(device_, device_.table().cross_entropy->full, narrow, labels, weight, rows, m.vocabulary,
           m.vocabulary, 0.0f, losses, narrow, m.vocabulary);
  });
  cross_entropy_steps(m, logits, labels, weight);
}

// The steps of a loss whose vocabulary is sharded.
void KernelBench::cross_entropy_steps(const BenchModel& m, const Tensor& logits, const Tensor& labels,
                                      const Tensor& weight) {
  const int64_t rows = labels.elements(), n = rows * m.vocabulary;
  const Tensor row_max = Tensor::zeros(device_, {rows}), sum_exp = Tensor::zeros(device_, {rows}),
               target = Tensor::zeros(device_, {rows});
  const CrossEntropy& kernel = *device_.table().cross_entropy;
  const std::string prefix = m.prefix() + "cross-entropy, ";
  bound_by_memory(prefix + "softcap (256 rows)", 8 * n,
                  [&] { launch(device_, kernel.softcap, logits, 30.0f, n); });
  const auto maximum = [&] {
    launch(device_, kernel.row_max, logits, rows, m.vocabulary, m.vocabulary, row_max);
  };
  const auto sums = [&] {
    launch(device_, kernel.row_sums, logits, labels, row_max, rows, m.vocabulary, m.vocabulary, 0, sum_exp,
           target);
  };
  maximum(), sums();
  bound_by_memory(prefix + "row maximum (256 rows)", 4 * n, maximum);
  bound_by_memory(prefix + "row sums (256 rows)", 4 * n, sums);
  bound_by_memory(prefix + "backward (256 rows)", 8 * n, [&] {
    launch(device_, kernel.backward, logits, labels, row_max, sum_exp, weight, rows, m.vocabulary,
           m.vocabulary, 0, 0.0f, logits, m.vocabulary);
  });
}

void KernelBench::sampling(const BenchModel& m) {
  const std::string prefix = m.prefix();
  const int64_t rows = 256;
  const Tensor logits = noise(device_, rows * m.vocabulary);
  const Decoding& decoding = *device_.table().decoding;
  const Tensor next = Tensor::zeros(device_, {rows}, DType::i32),
               position = Tensor::zeros(device_, {1}, DType::i32);
  for (const SamplingOptions& options : {SamplingOptions{.temperature = 0}, SamplingOptions{.top_k = 50}}) {
    bound_by_memory(
        prefix + (options.temperature > 0 ? "top-k sampling (256 rows)" : "greedy sampling (256 rows)"),
        4 * rows * m.vocabulary, [&] {
          launch(device_, decoding.sample_workspace(options, rows, m.vocabulary), decoding.sample, options,
                 logits, rows, m.vocabulary, m.vocabulary, position, next);
        });
  }
}

void KernelBench::embedding(const BenchModel& m) {
  const std::string prefix = m.prefix();
  const int64_t tokens = m.tokens(), n = m.tokens() * m.width;
  const Tensor none;
  const Tensor wte = noise(device_, m.vocabulary * m.width, activations_),
               out_rows = noise(device_, n, activations_),
               gradient = Tensor::zeros(device_, {m.vocabulary * m.width});
  std::vector<int32_t> random(static_cast<size_t>(tokens));
  for (uint32_t state = 1; int32_t & id : random)
    id = static_cast<int32_t>((next_random(state) >> 8) % static_cast<uint32_t>(m.vocabulary));
  const Tensor ids = Tensor::from_host<int32_t>(device_, {tokens}, random);
  bound_by_memory(prefix + "embedding forward", 2 * bytes_ * n, [&] {
    launch(device_, device_.table().embedding->forward, wte, ids, none, none, out_rows, tokens, m.width, 0,
           m.vocabulary);
  });
  bound_by_memory(prefix + "embedding backward", (bytes_ + 8) * n, [&] {
    const kernels::Embedding& kernel = *device_.table().embedding;
    launch(device_, kernel.backward_workspace(tokens, m.width, m.vocabulary), kernel.backward, out_rows, ids,
           gradient, tokens, m.width, 0, m.vocabulary);
  });
}

}  // namespace capstan::kernels
