#include <algorithm>
#include <tuple>

#include "base/error.hpp"
#include "kernels/bench/kernel_bench.hpp"
#include "kernels/common/nf4.hpp"
#include "tensor/launch.hpp"
#include "tensor/region.hpp"

namespace capstan::kernels {

namespace {

constexpr float kOnes[] = {1, 1};

// Bytes of the codes, and of the scales of blocks.
int64_t bytes_of(const GemmOperand& x) {
  return x.values.bytes() + (x.layout == ScaleLayout::tensor ? 0 : x.scale.bytes());
}

// Whether the tensor cores of this device have the formats of the GEMM that `multiply` launches. Other errors
// are those of its measurement.
bool supported(const std::function<void()>& multiply) {
  try {
    multiply();
  } catch (const Error& error) {
    return error.message().find("compute capability") == std::string::npos &&
           error.message().find("cuBLASLt 12.9") == std::string::npos;
  }
  return true;
}

}  // namespace

void KernelBench::quantize(const BenchModel& m) {
  const int64_t rows = m.tokens(), cols = m.width;
  const Tensor x = noise(device_, rows * cols, activations_),
               scale = Tensor::from_host<float>(device_, {2}, kOnes), amax = Tensor::zeros(device_, {1}),
               none;
  const Quantize& kernel = *device_.table().quantize;
  const QuantizeShape shape{rows, cols, cols};
  constexpr DType kFp8 = DType::f8e4m3, kFp4 = DType::f4e2m1x2;
  for (const auto& [name, wanted] : {
           std::pair("fp8", QuantizeFormat{kFp8, ScaleLayout::tensor}),
           {"blockwise fp8", {kFp8, ScaleLayout::block_1x128}},
           {"blockwise fp8 of weights", {kFp8, ScaleLayout::block_128x128}},
           {"mxfp8", {kFp8, ScaleLayout::block_1x32}},
           {"nvfp4", {kFp4, ScaleLayout::block_1x16}},
           {"nvfp4 of weights", {.codes = kFp4, .layout = ScaleLayout::block_1x16, .square = true}},
           {"nvfp4 of gradients",
            {.codes = kFp4, .layout = ScaleLayout::block_1x16, .hadamard = true, .stochastic = true}},
       }) {
    const QuantizeFormat format = wanted;
    const GemmOperand along = empty_operand(format, rows, cols), across = empty_operand(format, cols, rows);
    const bool tensor = format.layout == ScaleLayout::tensor || format.layout == ScaleLayout::block_1x16;
    const Tensor& of_tensor = tensor ? scale : none;
    bound_by_memory(m.prefix() + "quantize to " + name + ", and its transpose",
                    bytes_ * rows * cols + bytes_of(along) + bytes_of(across), [&] {
                      launch(device_, kernel.quantize, format, shape, x, of_tensor, along, of_tensor, across,
                             none, RoundingPosition{});
                    });
  }
  bound_by_memory(m.prefix() + "maximum of a tensor", bytes_ * rows * cols,
                  [&] { launch(device_, kernel.absolute_maximum, x, shape, false, amax); });
  const Tensor codes = Tensor::zeros(device_, {rows * cols}, kFp8),
               transposed = Tensor::zeros(device_, {rows * cols}, kFp8);
  bound_by_memory(m.prefix() + "transpose of fp8 codes", 2 * rows * cols,
                  [&] { launch(device_, kernel.transpose_codes, codes, transposed, rows, cols); });
}

void KernelBench::quantized_outputs(const BenchModel& m) {
  const int64_t tokens = m.tokens(), n = tokens * m.width, wide = tokens * m.inner,
                in = m.gated ? 2 * wide : wide;
  const auto kind = m.gated ? ActivationKind::silu : ActivationKind::gelu_tanh;
  const Tensor x = noise(device_, std::max(n, in), activations_),
               y = Tensor::zeros(device_, {std::max(n, wide)}, activations_),
               gamma = noise(device_, m.width, activations_), rstd = Tensor::zeros(device_, {tokens}),
               scale = Tensor::from_host<float>(device_, {2}, kOnes), amax = Tensor::zeros(device_, {1}),
               none;
  const NormRows rows{tokens, m.width, 1, 0, m.width};
  const Norm& norm = *device_.table().norm;
  const Activation& activation = *device_.table().activation;
  for (const auto& [name, layout] : {std::pair("fp8", ScaleLayout::tensor),
                                     {"blockwise fp8", ScaleLayout::block_1x128},
                                     {"mxfp8", ScaleLayout::block_1x32}}) {
    const QuantizeFormat format{DType::f8e4m3, layout};
    const auto output = [&](int64_t cols) {
      const bool delayed = format.layout == ScaleLayout::tensor;
      return QuantizedOutputTensors{format, delayed ? scale : none, empty_operand(format, tokens, cols),
                                    empty_operand(format, cols, tokens), delayed ? amax : none};
    };
    const QuantizedOutputTensors of_norm = output(m.width), of_mlp = output(m.inner);
    const std::string suffix = std::string(" forward, quantized to ") + name;
    bound_by_memory(m.prefix() + "norm" + suffix,
                    2 * bytes_ * n + bytes_of(of_norm.rows) + bytes_of(of_norm.columns), [&] {
                      launch(device_, norm.forward_workspace(rows), norm.forward, true, rows, x, none, none,
                             gamma, 0.0f, none, 1e-5f, y, none, rstd, of_norm);
                    });
    bound_by_memory(m.prefix() + (m.gated ? "swiglu" : "gelu") + suffix,
                    bytes_ * (in + wide) + bytes_of(of_mlp.rows) + bytes_of(of_mlp.columns), [&] {
                      launch(device_, activation.forward_workspace(m.gated, false, m.inner),
                             activation.forward, kind, m.gated, x, none, y, tokens, m.inner, of_mlp);
                    });
  }
}

// The QKV projection. The peak is that of the GEMMs in options.attention: of a GPU in 16 bits, which FP8 may
// exceed.
void KernelBench::low_precision_gemms(const BenchModel& m) {
  const int64_t rows = m.tokens(), out = m.qkv().row(), in = m.width;
  const Tensor y = Tensor::zeros(device_, {rows * out}, attention_);
  const GemmShape shape{.trans_b = true, .m = rows, .n = out, .k = in, .lda = in, .ldb = in, .ldc = out};
  constexpr DType kFp8 = DType::f8e4m3, kFp4 = DType::f4e2m1x2;
  for (const auto& [name, x_format, w_format] :
       {std::tuple("fp8", QuantizeFormat{kFp8, ScaleLayout::tensor},
                   QuantizeFormat{kFp8, ScaleLayout::tensor}),
        {"blockwise fp8", {kFp8, ScaleLayout::block_1x128}, {kFp8, ScaleLayout::block_128x128}},
        {"mxfp8", {kFp8, ScaleLayout::block_1x32}, {kFp8, ScaleLayout::block_1x32}},
        {"nvfp4",
         {kFp4, ScaleLayout::block_1x16},
         {.codes = kFp4, .layout = ScaleLayout::block_1x16, .square = true}}}) {
    const std::string of = m.prefix() + name + " gemm forward";
    if (!options_.wanted(of)) continue;
    const GemmOperand x = quantized_noise(x_format, rows, in), w = quantized_noise(w_format, out, in);
    const Gemm& gemm = *device_.table().gemm;
    const GemmTypes types{x.values.dtype(), w.values.dtype(), attention_, x.layout, w.layout};
    const auto multiply = [&] {
      launch(device_, gemm.run_workspace(shape, types, 1, 0), gemm.run, shape, x, w, y, 1.0f, 0.0f, Tensor());
    };
    if (supported(multiply))
      bound_by_gemms(of, 2.0 * static_cast<double>(rows * out) * static_cast<double>(in), multiply);
  }
}

GemmOperand KernelBench::quantized_noise(const QuantizeFormat& format, int64_t rows, int64_t cols) const {
  GemmOperand codes = empty_operand(format, rows, cols);
  const bool tensor = format.layout == ScaleLayout::tensor || format.layout == ScaleLayout::block_1x16;
  const Tensor x = noise(device_, rows * cols, activations_),
               scale = tensor ? Tensor::from_host<float>(device_, {2}, kOnes) : Tensor();
  launch(device_, device_.table().quantize->quantize, format, QuantizeShape{rows, cols, cols}, x, scale,
         codes, scale, GemmOperand(), Tensor(), RoundingPosition{});
  return codes;
}

// DoRA of the QKV projection, of rank 16.
void KernelBench::adapters(const BenchModel& m) {
  const int64_t tokens = m.tokens(), out = m.qkv().row(), in = m.width, rank = 16;
  const Tensor w = noise(device_, out * in, activations_), b = noise(device_, out * rank, activations_),
               p = noise(device_, out * rank), g = noise(device_, rank * rank),
               lengths = Tensor::zeros(device_, {out});
  const Adapter& kernel = *device_.table().adapter;
  const auto row_lengths = [&] {
    launch(device_, kernel.row_lengths_workspace(rank), kernel.row_lengths, w, p, b, g, 0.1f, lengths, out,
           in, rank);
  };
  row_lengths();
  bound_by_memory(m.prefix() + "dora row lengths", bytes_ * out * (in + rank) + 4 * out * (rank + 1),
                  row_lengths);
  const Tensor u = noise(device_, tokens * out, activations_),
               dy = noise(device_, tokens * out, activations_),
               magnitudes = noise(device_, out, activations_),
               y = Tensor::zeros(device_, {tokens * out}, activations_),
               gradient = Tensor::zeros(device_, {out});
  bound_by_memory(m.prefix() + "dora scaling of columns", 2 * bytes_ * tokens * out, [&] {
    launch(device_, kernel.scale_columns_workspace(out), kernel.scale_columns, u, magnitudes, lengths, y,
           tokens, out);
  });
  bound_by_memory(m.prefix() + "dora magnitude gradient", 2 * bytes_ * tokens * out, [&] {
    launch(device_, kernel.magnitude_gradient_workspace(), kernel.magnitude_gradient, dy, u, lengths,
           gradient, tokens, out);
  });
}

// Weights of the QKV projection in 4 bits, without and with double quantization of the scales.
void KernelBench::nf4(const BenchModel& m) {
  constexpr int64_t kBlock = 64;
  const int64_t rows = m.qkv().row(), cols = m.width, n = rows * cols, blocks = n / kBlock;
  const Tensor x = noise(device_, n), codes = Tensor::zeros(device_, {n / 2}, DType::u8),
               scales = Tensor::zeros(device_, {blocks}),
               scale_codes = Tensor::zeros(device_, {blocks}, DType::u8),
               nested = noise(device_, ceil_div(blocks, kNf4NestedBlock)), map = noise(device_, 256),
               offset = noise(device_, 1), y = Tensor::zeros(device_, {n}, activations_), none;
  const Adapter& kernel = *device_.table().adapter;
  const auto to_codes = [&] { launch(device_, kernel.nf4_quantize, x, n, kBlock, codes, scales); };
  to_codes();
  bound_by_memory(m.prefix() + "nf4 quantization", 4 * n + n / 2 + 4 * blocks, to_codes);
  const Region region = full_region({rows, cols});
  bound_by_memory(m.prefix() + "nf4 dequantization", n / 2 + 4 * blocks + bytes_ * n, [&] {
    launch(device_, kernel.nf4_dequantize, region, cols, kBlock, codes, scales, none, none, none, none, y);
  });
  bound_by_memory(m.prefix() + "nf4 dequantization of scales and values", n / 2 + blocks + bytes_ * n, [&] {
    launch(device_, kernel.nf4_dequantize, region, cols, kBlock, codes, none, scale_codes, nested, map,
           offset, y);
  });
}

}  // namespace capstan::kernels
