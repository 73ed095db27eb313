#include <algorithm>

#include "kernels/bench/kernel_bench.hpp"
#include "tensor/launch.hpp"

namespace capstan::kernels {

namespace {

constexpr int64_t kExperts = 8, kTopk = 2, kRanks = kTopk;

}  // namespace

// Eight experts of half the width, two for each token: as many FLOPs as the MLP. The loads are unequal.
void KernelBench::experts(const BenchModel& m) {
  const std::string prefix = m.prefix() + "experts";
  const int64_t tokens = m.tokens(), rows = tokens * kTopk, inner = m.inner / 2;
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
  // As many slots, sent by several ranks.
  const Tensor counts = Tensor::from_host<int64_t>(
                   device_, {kRanks * kExperts}, std::vector<int64_t>(kRanks * kExperts, tokens / kExperts)),
               of_all = Tensor::zeros(device_, {1 + kExperts}, DType::i64),
               to_row = Tensor::zeros(device_, {rows}, DType::i32),
               to_slot = Tensor::zeros(device_, {rows}, DType::i32), dropped = Tensor::zeros(device_, {1});
  bound_by_memory(prefix + ": regroup", 8 * rows, [&] {
    launch(device_, kernel.regroup, counts, kRanks, kExperts, rows, of_all, to_row, to_slot);
  });
  bound_by_memory(prefix + ": count dropped", 8 * rows,
                  [&] { launch(device_, kernel.count_dropped, shape, choices, row_of_slot, dropped); });
  expert_rows(m, numbers, row_of_slot, slot_of_row);
  expert_gemms(prefix, numbers.flat_range(1, kExperts, {kExperts}), rows, inner, m.width);
}

void KernelBench::expert_rows(const BenchModel& m, const Tensor& numbers, const Tensor& row_of_slot,
                              const Tensor& slot_of_row) {
  const std::string prefix = m.prefix() + "experts";
  const int64_t tokens = m.tokens(), rows = tokens * kTopk;
  const ExpertPermutation& kernel = *device_.table().expert_permutation;
  const Tensor none;
  const Tensor x = noise(device_, tokens * m.width, activations_),
               y = noise(device_, rows * m.width, activations_), weights = noise(device_, rows);
  bound_by_memory(prefix + ": permute", 2 * bytes_ * rows * m.width,
                  [&] { launch(device_, kernel.permute, x, slot_of_row, none, y, rows, kTopk, m.width); });
  bound_by_memory(prefix + ": unpermute", bytes_ * (rows + tokens) * m.width, [&] {
    launch(device_, kernel.unpermute, y, row_of_slot, weights, x, tokens, kTopk, m.width);
  });
  const Tensor dweights = Tensor::zeros(device_, {rows}), sums = Tensor::zeros(device_, {kExperts * m.width}),
               sizes = numbers.flat_range(1, kExperts, {kExperts}),
               unused = Tensor::zeros(device_, {kExperts}, DType::i64);
  bound_by_memory(prefix + ": gradient of the weights", bytes_ * (rows + tokens) * m.width, [&] {
    launch(device_, kernel.unpermute_backward_weights, x, y, row_of_slot, dweights, tokens, kTopk, m.width);
  });
  bound_by_memory(prefix + ": sums of rows", bytes_ * rows * m.width,
                  [&] { launch(device_, kernel.sum_rows, y, sizes, kExperts, m.width, sums); });
  bound_by_memory(prefix + ": clear unused rows", bytes_ * rows * m.width,
                  [&] { launch(device_, kernel.clear_unused, y, unused, kExperts, rows, m.width); });
}

// The up projection of experts, and one dense GEMM of as many FLOPs.
void KernelBench::expert_gemms(const std::string& prefix, const Tensor& sizes, int64_t rows, int64_t out,
                               int64_t in) {
  const int64_t count = sizes.elements();
  const Tensor x = noise(device_, rows * in, attention_), w = noise(device_, count * out * in, attention_),
               y = noise(device_, rows * out, attention_),
               gradient = Tensor::zeros(device_, {count * out * in}), none;
  const Gemm& gemm = *device_.table().gemm;
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(out) * static_cast<double>(in);
  const GemmShape forward{
      .trans_b = true, .m = rows, .n = out, .k = in, .lda = in, .ldb = in, .ldc = out, .stride_b = out * in};
  bound_by_gemms(prefix + ": grouped gemm forward", flops, [&] {
    launch(
        device_,
        gemm.run_grouped_workspace(forward, GemmGroups::m, count, {attention_, attention_, attention_}, 1, 0),
        gemm.run_grouped, forward, GemmGroups::m, sizes, count, x, w, y, 1.0f, 0.0f, none);
  });
  bound_by_gemms(prefix + ": dense gemm of as many rows", flops, [&] {
    launch(device_, gemm.run_workspace(forward, {attention_, attention_, attention_}, 1, 0), gemm.run,
           forward, x, w, y, 1.0f, 0.0f, Tensor());
  });
  const GemmShape backward{
      .trans_a = true, .m = out, .n = in, .k = rows, .lda = out, .ldb = in, .ldc = in, .stride_c = out * in};
  bound_by_gemms(prefix + ": grouped gemm weight gradient", flops, [&] {
    launch(device_,
           gemm.run_grouped_workspace(backward, GemmGroups::k, count, {attention_, attention_, DType::f32}, 1,
                                      1),
           gemm.run_grouped, backward, GemmGroups::k, sizes, count, y, x, gradient, 1.0f, 1.0f, none);
  });
}

// Gated, with the weights of the tokens, at the rows of experts().
void KernelBench::expert_activation(const BenchModel& m) {
  const int64_t rows = m.tokens() * kTopk, cols = m.inner / 2;
  const Tensor x = noise(device_, rows * 2 * cols, activations_),
               y = noise(device_, rows * cols, activations_),
               dx = Tensor::zeros(device_, {rows * 2 * cols}, activations_), weights = noise(device_, rows),
               dweights = Tensor::zeros(device_, {rows}),
               used = Tensor::from_host<int64_t>(device_, {1}, std::vector<int64_t>{rows});
  const Activation& kernel = *device_.table().activation;
  bound_by_memory(m.prefix() + "experts: swiglu forward", 3 * bytes_ * rows * cols, [&] {
    launch(device_, kernel.expert_forward, ActivationFunction{}, x, weights, used, y, rows, cols);
  });
  bound_by_memory(m.prefix() + "experts: swiglu backward", 5 * bytes_ * rows * cols, [&] {
    launch(device_, kernel.expert_backward, ActivationFunction{}, y, x, weights, used, dx, dweights, rows,
           cols);
  });
}

// Many small experts, as routers are slowest with them. On a GPU the arrays fit into its cache.
void KernelBench::router(const BenchModel& m) {
  const std::string prefix = m.prefix() + "experts: router ";
  constexpr int64_t kSmallExperts = 128, kChosen = 8;
  const int64_t tokens = m.tokens(), logits_bytes = 4 * tokens * kSmallExperts,
                chosen_bytes = 4 * tokens * kChosen;
  const RouterShape shape{
      .tokens = tokens, .experts = kSmallExperts, .topk = kChosen, .pre_softmax = true, .normalize = true};
  const Tensor logits = noise(device_, tokens * kSmallExperts),
               experts = Tensor::zeros(device_, {tokens * kChosen}, DType::i32),
               probabilities = noise(device_, tokens * kChosen),
               dlogits = Tensor::zeros(device_, {tokens * kSmallExperts}),
               counts = Tensor::zeros(device_, {kSmallExperts}), none;
  const Router& kernel = *device_.table().router;
  const auto choose = [&] { launch(device_, kernel.choose, shape, logits, none, none, experts); };
  choose();
  bound_by_memory(prefix + "choice", logits_bytes + chosen_bytes, choose);
  bound_by_memory(prefix + "probabilities", logits_bytes + 2 * chosen_bytes,
                  [&] { launch(device_, kernel.probabilities, shape, logits, experts, probabilities); });
  bound_by_memory(prefix + "backward", 2 * logits_bytes + 2 * chosen_bytes,
                  [&] { launch(device_, kernel.backward, shape, logits, experts, probabilities, dlogits); });
  const TokenSegments segments{.count = 1, .rows = tokens};
  const auto count = [&] {
    launch(device_, kernel.count, experts, tokens, kChosen, segments, kSmallExperts, counts);
  };
  count();
  bound_by_memory(prefix + "counts", chosen_bytes, count);
  const RouterLoss loss{.tokens = tokens, .experts = kSmallExperts, .segments = segments};
  const Tensor values = Tensor::zeros(device_, {tokens}), gradient = noise(device_, 1);
  bound_by_memory(prefix + "balancing loss", logits_bytes + 4 * tokens,
                  [&] { launch(device_, kernel.loss, loss, logits, counts, none, values); });
  bound_by_memory(prefix + "balancing loss backward", 2 * logits_bytes, [&] {
    launch(device_, kernel.loss_backward, loss, logits, counts, none, gradient, dlogits);
  });
  if (!kernel.logits) return;
  const Tensor x = noise(device_, tokens * m.width, activations_),
               weight = noise(device_, kSmallExperts * m.width, activations_),
               wide = Tensor::zeros(device_, {tokens * kSmallExperts}, DType::f64);
  bound_by_gemms(prefix + "logits in fp64",
                 2.0 * static_cast<double>(tokens * kSmallExperts) * static_cast<double>(m.width), [&] {
                   launch(device_, kernel.logits, x, weight, none, tokens, kSmallExperts, m.width, wide);
                 });
}

}  // namespace capstan::kernels
