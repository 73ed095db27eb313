#include "kernels/bench/bench.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "base/clock.hpp"
#include "base/philox.hpp"
#include "kernels/arguments.hpp"
#include "kernels/gemm_arguments.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"
#include "tensor/tensor.hpp"

namespace capstan::kernels {

namespace {

using arguments::contiguous_heads;
using arguments::packed_heads;

// Returns the shortest of as many runs as fit into `seconds`; at least two, because the first one has cold
// caches. On a device with queues, events time several runs in a row, so that the host's launches and waits
// count only if they take longer than the kernels.
template <class Run>
double shortest(Device& device, double seconds, Run&& run) {
  if (device.is_meta()) return 1;
  constexpr double kRow = 2e-3;
  double best = 1e30;
  int row = 1;
  const double start = steady_seconds();
  for (int i = 0; i < 2 || steady_seconds() - start < seconds; ++i) {
    const double taken = seconds_on(device,
                                    [&] {
                                      for (int j = 0; j < row; ++j) run();
                                    }) /
                         row;
    best = std::min(best, taken);
    if (device.queues_work() && taken * row < kRow)
      row = static_cast<int>(std::clamp(kRow / std::max(taken, 1e-6), 1.0, 1000.0));
  }
  return best;
}

// Random bits from a linear congruential generator; the upper ones are better.
uint32_t next_random(uint32_t& state) {
  return state = state * 1664525u + 1013904223u;
}

// Values in [-1, 1): never measure on zeros, some machines are faster on them.
Tensor noise(Device& device, int64_t n, DType dtype = DType::f32) {
  if (device.is_meta()) return Tensor::empty(device, {n}, dtype);
  std::vector<float> values(static_cast<size_t>(n));
  uint32_t state = 1;
  for (float& v : values) v = static_cast<float>(static_cast<int32_t>(next_random(state))) * 0x1p-31f;
  Tensor wide = Tensor::from_host<float>(device, {n}, values);
  if (dtype == DType::f32) return wide;
  Tensor narrow = Tensor::empty(device, {n}, dtype);
  launch(device, device.table().elementwise->cast, wide, narrow, n);
  return narrow;
}

}  // namespace

double seconds_on(Device& device, const std::function<void()>& work) {
  if (!device.queues_work()) {
    const double before = steady_seconds();
    work();
    device.synchronize();
    return steady_seconds() - before;
  }
  const std::unique_ptr<Event> before = device.record_time(Queue::compute);
  work();
  const std::unique_ptr<Event> after = device.record_time(Queue::compute);
  device.synchronize();
  return after->time() - before->time();
}

bool is_accelerator(double gflops) {
  return gflops > 5e3;
}

double gemm_gflops(Device& device, const NamedGemm& s, DType dtype, double seconds) {
  const Tensor a = noise(device, s.m * s.k, dtype), b = noise(device, s.n * s.k, dtype),
               c = Tensor::zeros(device, {s.m * s.n});
  const GemmShape shape{s.trans_a, s.trans_b, s.m, s.n, s.k, s.trans_a ? s.m : s.k, s.trans_b ? s.k : s.n,
                        s.n};
  // A weight gradient (A transposed) adds to what is there.
  const Gemm& kernel = *device.table().gemm;
  const float beta = s.trans_a ? 1.0f : 0.0f;
  const double time = shortest(device, seconds, [&] {
    launch(device, kernel.run_workspace(shape, {dtype, dtype, DType::f32}, 1.0f, beta, false), kernel.run,
           shape, a, b, c, 1.0f, beta, GemmEpilogueTensors{});
  });
  return 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k) / time * 1e-9;
}

DType cpu_gemm_type(DType compute) {
  return compute == DType::bf16 && cpu_features().native_bf16_gemm ? DType::bf16 : DType::f32;
}

double measured_gemm_gflops(Device& device, DType type) {
  // A sanitizer build is a hundred times slower; keep its benchmark short.
  double best = gemm_gflops(device, NamedGemm{"", false, false, 256, 256, 256}, type, 0.01);
  if (best < 3) return best;
  for (const NamedGemm& shape :
       {NamedGemm{"", false, true, 1024, 768, 768}, NamedGemm{"", false, false, 1024, 1024, 1024}})
    best = std::max(best, gemm_gflops(device, shape, type, 0.12));
  // Smaller than the largest of kAcceleratorGemm, because a training run may fill the memory of the GPU.
  if (is_accelerator(best))
    best = std::max(best, gemm_gflops(device, NamedGemm{"", false, true, 4096, 4096, 4096}, type, 0.12));
  return best;
}

double measured_copy_gbps(Device& device) {
  const auto rate_of = [&](int64_t n) {
    const Tensor a = noise(device, n), b = Tensor::zeros(device, {n});
    const double time =
        shortest(device, 0.1, [&] { launch(device, device.table().elementwise->cast, a, b, n); });
    return 8.0 * static_cast<double>(n) / time * 1e-9;
  };
  const double rate = rate_of(16 << 20);
  // Beyond the cache of a GPU, which holds 64 MiB.
  return rate > 500 ? rate_of(256 << 20) : rate;
}

double kernel_latency_seconds(Device& device) {
  constexpr int64_t kFew = 256;
  const Tensor a = noise(device, kFew), b = Tensor::zeros(device, {kFew});
  return shortest(device, 0.02, [&] { launch(device, device.table().elementwise->cast, a, b, kFew); });
}

std::vector<NamedGemm> named_gemms(bool large_model) {
  std::vector<NamedGemm> shapes{
      {"gpt2-124m qkv forward", false, true, 4096, 2304, 768},
      {"gpt2-124m qkv input gradient", false, false, 4096, 768, 2304},
      {"gpt2-124m qkv weight gradient", true, false, 2304, 768, 4096},
      {"gpt2-124m mlp up forward", false, true, 4096, 3072, 768},
      {"gpt2-124m mlp up weight gradient", true, false, 3072, 768, 4096},
      {"gpt2-124m mlp down forward", false, true, 4096, 768, 3072},
      {"gpt2-124m mlp down input gradient", false, false, 4096, 3072, 768},
      {"gpt2-124m mlp down weight gradient", true, false, 768, 3072, 4096},
      {"gpt2-124m head forward (1024 tokens)", false, true, 1024, 50304, 768},
      {"gpt2-124m head input gradient", false, false, 1024, 768, 50304},
      {"gpt2-124m head weight gradient", true, false, 50304, 768, 1024},
      {"quickstart qkv forward", false, true, 2048, 512, 256},
      {"quickstart mlp up forward", false, true, 2048, 1024, 256},
      {"quickstart mlp down forward", false, true, 2048, 256, 1024},
      {"quickstart mlp up input gradient", false, false, 2048, 256, 1024},
      {"quickstart mlp up weight gradient", true, false, 1024, 256, 2048},
      {"quickstart mlp down weight gradient", true, false, 256, 1024, 2048},
      {"quickstart head forward", false, true, 1024, 8192, 256},
      {"quickstart head weight gradient", true, false, 8192, 256, 1024},
  };
  static constexpr NamedGemm kLarge[] = {
      {"llama3-8b qkv forward", false, true, 8192, 6144, 4096},
      {"llama3-8b qkv weight gradient", true, false, 6144, 4096, 8192},
      {"llama3-8b mlp up forward", false, true, 8192, 28672, 4096},
      {"llama3-8b mlp up input gradient", false, false, 8192, 4096, 28672},
      {"llama3-8b mlp up weight gradient", true, false, 28672, 4096, 8192},
      {"llama3-8b mlp down forward", false, true, 8192, 4096, 14336},
      {"llama3-8b head forward (1024 tokens)", false, true, 1024, 128256, 4096},
  };
  if (large_model) shapes.insert(shapes.end(), std::begin(kLarge), std::end(kLarge));
  return shapes;
}

namespace {

struct BenchModel {
  const char* name;
  int64_t batch, seq, groups, heads_per_group, head_dim, width, inner, vocabulary;
  bool gated;
  int64_t tokens() const { return batch * seq; }
  int64_t heads() const { return groups * heads_per_group; }
};

class KernelBench {
 public:
  KernelBench(Device& device, const KernelBenchOptions& options)
      : device_(device),
        options_(options),
        attention_(options.attention),
        activations_(options.activations),
        bytes_(size_of(options.activations)) {}

  void run() {
    std::vector<BenchModel> models{{"gpt2-124m", 4, 1024, 12, 1, 64, 768, 3072, 50304, false},
                                   {"quickstart", 16, 128, 4, 2, 32, 256, 1024, 8192, true}};
    if (options_.large_model) models.push_back({kLargeModel, 1, 8192, 8, 4, 128, 4096, 14336, 128256, true});
    for (const BenchModel& m : models) {
      attention(m);
      norms(m);
      mlp(m);
      experts(m);
      vocabulary(m);
      quantize(m);
    }
    optimizer();
  }

  void attention(const BenchModel& m) {
    const std::string prefix = std::string(m.name) + " ";
    const int64_t tokens = m.tokens(), heads = m.heads();
    const QkvLayout layout{m.groups, m.heads_per_group, m.head_dim};
    AttentionShape a;
    a.groups = m.groups;
    a.heads_per_group = m.heads_per_group;
    a.qk_dim = a.v_dim = m.head_dim;
    a.batch = m.batch;
    a.seq = m.seq;
    a.scale = 1 / std::sqrt(static_cast<float>(m.head_dim));
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
    const double gemm = static_cast<double>(m.batch * heads) * static_cast<double>(m.seq) *
                        static_cast<double>(m.seq) * static_cast<double>(m.head_dim);
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
    rope(m, layout);
  }

  void rope(const BenchModel& m, const QkvLayout& layout) {
    const std::string prefix = std::string(m.name) + " ";
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

  void norms(const BenchModel& m) {
    const std::string prefix = std::string(m.name) + " ";
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

  void mlp(const BenchModel& m) {
    const std::string prefix = std::string(m.name) + " ";
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

  // Eight experts of half the width, two for each token: as many FLOPs as the MLP. The loads are unequal.
  void experts(const BenchModel& m) {
    const std::string prefix = std::string(m.name) + " experts";
    constexpr int64_t kExperts = 8, kTopk = 2;
    const int64_t tokens = m.tokens(), rows = tokens * kTopk, inner = m.inner / 2;
    if (!any_wanted(prefix + ": ", {"plan", "permute", "unpermute", "grouped gemm forward",
                                    "dense gemm of as many rows", "grouped gemm weight gradient"}))
      return;
    std::vector<int32_t> random;
    for (uint32_t state = 1; static_cast<int64_t>(random.size()) < rows;) {
      const uint32_t bits = next_random(state);
      // The smaller of two draws: lower experts have more tokens.
      const auto first = static_cast<int32_t>(std::min(bits >> 29, bits >> 25 & 7u));
      random.insert(random.end(), {first, static_cast<int32_t>((first + 1 + (bits >> 20 & 3)) % kExperts)});
    }
    const Tensor choices = Tensor::from_host<int32_t>(device_, {rows}, random), none,
                 numbers = Tensor::zeros(device_, {1 + kExperts}, DType::i64),
                 row_of_slot = Tensor::zeros(device_, {rows}, DType::i32),
                 slot_of_row = Tensor::zeros(device_, {rows}, DType::i32);
    const PermutationShape shape{.tokens = tokens, .topk = kTopk, .experts = kExperts};
    const ExpertPermutation& kernel = *device_.table().expert_permutation;
    const auto plan = [&] {
      launch(device_, kernel.plan_workspace(shape), kernel.plan, shape, choices, none, numbers, row_of_slot,
             slot_of_row);
    };
    plan();
    bound_by_memory(prefix + ": plan", 12 * rows, plan);
    const Tensor x = noise(device_, tokens * m.width, activations_),
                 y = noise(device_, rows * m.width, activations_), weights = noise(device_, rows);
    bound_by_memory(prefix + ": permute", 2 * bytes_ * rows * m.width,
                    [&] { launch(device_, kernel.permute, x, slot_of_row, none, y, rows, kTopk, m.width); });
    bound_by_memory(prefix + ": unpermute", bytes_ * (rows + tokens) * m.width, [&] {
      launch(device_, kernel.unpermute, y, row_of_slot, weights, x, tokens, kTopk, m.width);
    });
    expert_gemms(prefix, numbers.flat_range(1, kExperts, {kExperts}), rows, inner, m.width);
  }

  // The up projection of experts, and one dense GEMM of as many FLOPs.
  void expert_gemms(const std::string& prefix, const Tensor& sizes, int64_t rows, int64_t out, int64_t in) {
    const int64_t count = sizes.elements();
    const Tensor x = noise(device_, rows * in, attention_), w = noise(device_, count * out * in, attention_),
                 y = noise(device_, rows * out, attention_),
                 gradient = Tensor::zeros(device_, {count * out * in}), none;
    const Gemm& gemm = *device_.table().gemm;
    const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(out) * static_cast<double>(in);
    const GemmShape forward{.trans_b = true,
                            .m = rows,
                            .n = out,
                            .k = in,
                            .lda = in,
                            .ldb = in,
                            .ldc = out,
                            .stride_b = out * in};
    bound_by_gemms(prefix + ": grouped gemm forward", flops, [&] {
      launch(device_,
             gemm.run_grouped_workspace(forward, GemmGroups::m, count, {attention_, attention_, attention_},
                                        1, 0),
             gemm.run_grouped, forward, GemmGroups::m, sizes, count, x, w, y, 1.0f, 0.0f, none);
    });
    bound_by_gemms(prefix + ": dense gemm of as many rows", flops, [&] {
      launch(device_, gemm.run_workspace(forward, {attention_, attention_, attention_}, 1, 0, false),
             gemm.run, forward, x, w, y, 1.0f, 0.0f, GemmEpilogueTensors{});
    });
    const GemmShape backward{.trans_a = true,
                             .m = out,
                             .n = in,
                             .k = rows,
                             .lda = out,
                             .ldb = in,
                             .ldc = in,
                             .stride_c = out * in};
    bound_by_gemms(prefix + ": grouped gemm weight gradient", flops, [&] {
      launch(device_,
             gemm.run_grouped_workspace(backward, GemmGroups::k, count, {attention_, attention_, DType::f32},
                                        1, 1),
             gemm.run_grouped, backward, GemmGroups::k, sizes, count, y, x, gradient, 1.0f, 1.0f, none);
    });
  }

  void vocabulary(const BenchModel& m) {
    const std::string prefix = std::string(m.name) + " ";
    const int64_t tokens = m.tokens(), n = m.tokens() * m.width;
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
    if (!any_wanted(prefix + "embedding ", {"forward", "backward"})) return;
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
      launch(device_, kernel.backward_workspace(tokens, m.width, m.vocabulary), kernel.backward, out_rows,
             ids, gradient, tokens, m.width, 0, m.vocabulary);
    });
  }

  void quantize(const BenchModel& m) {
    const int64_t rows = m.tokens(), cols = m.width;
    const auto codes = [&](ScaleLayout layout) {
      GemmOperand x;
      x.layout = layout;
      x.values = Tensor::zeros(device_, {rows * cols}, DType::f8e4m3);
      x.scale = Tensor::zeros(device_, {rows * cols}, DType::f8e8m0);
      return x;
    };
    const Tensor x = noise(device_, rows * cols, activations_),
                 scale = Tensor::from_host<float>(device_, {2}, kOnes), none;
    for (const auto& [name, layout] :
         {std::pair("fp8", ScaleLayout::tensor), {"mxfp8", ScaleLayout::block_1x32}}) {
      const GemmOperand along = codes(layout), across = codes(layout);
      const QuantizeFormat format{DType::f8e4m3, layout};
      bound_by_memory(std::string(m.name) + " quantize to " + name + ", and its transpose",
                      (bytes_ + 2) * rows * cols, [&] {
                        launch(device_, device_.table().quantize->quantize, format,
                               QuantizeShape{rows, cols, cols}, x, scale, along, scale, across, none,
                               RoundingPosition{});
                      });
    }
  }

  void optimizer() {
    const int64_t n = 16 << 20;
    const Tensor grad = noise(device_, n), main = noise(device_, n), m = noise(device_, n),
                 v = Tensor::zeros(device_, {n}), none;
    const UpdateRange range{.count = n};
    const Tensor ranges = Tensor::empty(device_, {sizeof range}, DType::u8);
    ranges.copy_from_host_bytes(std::as_bytes(std::span(&range, 1)));
    const StepControl step;
    const Tensor control = Tensor::empty(device_, {sizeof step}, DType::u8);
    control.copy_from_host_bytes(std::as_bytes(std::span(&step, 1)));
    const StepScale scale{.lr = 1e-3, .weight_decay = 0.1f};
    const Optimizers& kernel = *device_.table().optimizers;
    const AdamStep adam{.scale = scale, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
    bound_by_memory("adam (16 Mi parameters)", 28 * n, [&] {
      launch(device_, kernel.update_workspace(1), kernel.adam, adam, control, ranges, 1, grad, main, m, none,
             v, none, none);
    });
    const LionStep lion{.scale = scale, .beta1 = 0.95f, .beta2 = 0.98f};
    bound_by_memory("lion (16 Mi parameters)", 20 * n, [&] {
      launch(device_, kernel.update_workspace(1), kernel.lion, lion, control, ranges, 1, grad, main, m, none);
    });
    const Tensor sum = Tensor::zeros(device_, {1}, DType::f64);
    bound_by_memory("sum of squares (16 Mi)", 4 * n, [&] {
      launch(device_, kernel.sum_of_squares_workspace(1, n), kernel.sum_of_squares, ranges, 1, grad, sum,
             false);
    });
    const int64_t rows = 4096, cols = 4096;
    std::vector<int64_t> ids(static_cast<size_t>(rows));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
    const Tensor dropout_rows = Tensor::from_host<int64_t>(device_, {rows}, ids);
    bound_by_memory("dropout (16 Mi)", 8 * n, [&] {
      launch(device_, device_.table().elementwise->dropout, grad, v, rows, cols, 0, 0.1f, PhiloxKey{1, 2},
             dropout_rows);
    });
  }

  std::vector<KernelRate> take() { return std::move(rates_); }

 private:
  static constexpr float kOnes[] = {1, 1};
  // Whether one of these kernels is wanted, before its arrays are made.
  bool any_wanted(const std::string& prefix, std::initializer_list<const char*> kernels) const {
    return std::any_of(kernels.begin(), kernels.end(),
                       [&](const char* kernel) { return options_.wanted(prefix + kernel); });
  }
  template <class Run>
  void bound_by_memory(std::string name, int64_t bytes, Run&& run) {
    if (!options_.wanted(name)) return;
    const double rate = static_cast<double>(bytes) / shortest(device_, options_.seconds, run) * 1e-9;
    rates_.push_back({std::move(name), Peak::copy, rate, rate / options_.copy_gbps});
  }
  template <class Run>
  void bound_by_gemms(std::string name, double flops, Run&& run) {
    if (!options_.wanted(name)) return;
    const double rate = flops / shortest(device_, options_.seconds, run) * 1e-9;
    rates_.push_back({std::move(name), Peak::gemm, rate, rate / options_.gemm_gflops});
  }

  Device& device_;
  const KernelBenchOptions& options_;
  // Data types of attention, and of the activations and weights of the other kernels with its bytes.
  const DType attention_, activations_;
  const int64_t bytes_;
  std::vector<KernelRate> rates_;
};

}  // namespace

std::vector<KernelRate> measure_kernels(Device& device, const KernelBenchOptions& options) {
  KernelBench bench(device, options);
  bench.run();
  return bench.take();
}

std::vector<std::string> kernel_names() {
  const auto device = make_meta_device(cpu_table());
  std::vector<std::string> names;
  for (const NamedGemm& shape : named_gemms(true)) names.emplace_back(shape.name);
  for (KernelRate& kernel : measure_kernels(*device, {.seconds = 0, .large_model = true}))
    names.push_back(std::move(kernel.name));
  return names;
}

}  // namespace capstan::kernels
