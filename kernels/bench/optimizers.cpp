#include <span>
#include <string>

#include "kernels/bench/kernel_bench.hpp"
#include "tensor/launch.hpp"

namespace capstan::kernels {

namespace {

constexpr StepScale kStep{.lr = 1e-3, .weight_decay = 0.1f};
constexpr const char* kSize = " (16 Mi parameters)";

// One value of a struct that kernels read from device memory.
template <class T>
Tensor in_device_memory(Device& device, const T& value) {
  Tensor bytes = Tensor::empty(device, {sizeof value}, DType::u8);
  bytes.copy_from_host_bytes(std::as_bytes(std::span(&value, 1)));
  return bytes;
}
Tensor step_control(Device& device) {
  return in_device_memory(device, StepControl());
}
// One range of all elements.
Tensor one_range(Device& device, int64_t count) {
  return in_device_memory(device, UpdateRange{.count = count});
}

}  // namespace

void KernelBench::adam() {
  const int64_t n = kElements, blocks = n / kMomentBlock;
  const Tensor grad = noise(device_, n), main = noise(device_, n), ranges = one_range(device_, n),
               control = step_control(device_), none;
  const Optimizers& kernel = *device_.table().optimizers;
  const AdamStep step{.scale = kStep, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
  struct Moments {
    const char* name;
    DType type;
    int64_t blocks;
  };
  for (const Moments& moments :
       {Moments{"adam", DType::f32, 0}, Moments{"adam, bf16 moments", DType::bf16, 0},
        Moments{"adam, fp8 moments", DType::u8, blocks}}) {
    const auto scales = [&] { return moments.blocks > 0 ? Tensor::zeros(device_, {moments.blocks}) : none; };
    const Tensor m = Tensor::zeros(device_, {n}, moments.type), v = Tensor::zeros(device_, {n}, moments.type),
                 m_scales = scales(), v_scales = scales();
    bound_by_memory(moments.name + std::string(kSize),
                    (12 + 4 * size_of(moments.type)) * n + 16 * moments.blocks, [&] {
                      launch(device_, kernel.update_workspace(1), kernel.adam, step, control, ranges, 1, grad,
                             main, m, m_scales, v, v_scales, none);
                    });
  }
}

void KernelBench::optimizers() {
  const int64_t n = kElements;
  const Tensor grad = noise(device_, n), main = noise(device_, n), m = noise(device_, n),
               ranges = one_range(device_, n), control = step_control(device_),
               squares = Tensor::from_host<double>(device_, {1}, std::vector<double>{1}), none;
  const Optimizers& kernel = *device_.table().optimizers;
  const LionStep lion{.scale = kStep, .beta1 = 0.95f, .beta2 = 0.98f};
  bound_by_memory(std::string("lion") + kSize, 20 * n, [&] {
    launch(device_, kernel.update_workspace(1), kernel.lion, lion, control, ranges, 1, grad, main, m, none);
  });
  const SgdStep sgd{.scale = kStep, .momentum = 0.9f};
  bound_by_memory(std::string("sgd with momentum") + kSize, 20 * n, [&] {
    launch(device_, kernel.update_workspace(1), kernel.sgd, sgd, control, ranges, 1, grad, main, m, none);
  });
  const MuonStep muon{.scale = kStep, .momentum = 0.95f, .nesterov = true};
  bound_by_memory(std::string("muon momentum") + kSize, 16 * n, [&] {
    launch(device_, kernel.update_workspace(1), kernel.muon_momentum, muon, control, ranges, 1, grad, main,
           m);
  });
  bound_by_memory(std::string("muon normalization") + kSize, 8 * n,
                  [&] { launch(device_, kernel.normalize, squares, 1e-7f, grad, n); });
  bound_by_memory(std::string("muon update") + kSize, 12 * n, [&] {
    launch(device_, kernel.update_workspace(1), kernel.muon_update, kStep, control, ranges, 1, grad, main,
           none);
  });
}

// Moments in fp8, as checkpoints read and write them.
void KernelBench::moments() {
  const int64_t n = kElements, blocks = n / kMomentBlock;
  const Tensor values = noise(device_, n), codes = Tensor::zeros(device_, {n}, DType::u8),
               scales = Tensor::zeros(device_, {blocks}), ranges = one_range(device_, n);
  const Optimizers& kernel = *device_.table().optimizers;
  bound_by_memory("encode fp8 moments (16 Mi)", 5 * n + 4 * blocks, [&] {
    launch(device_, kernel.encode_moment, ranges, 1, false, values, 0, n, codes, scales);
  });
  bound_by_memory("decode fp8 moments (16 Mi)", 5 * n + 4 * blocks, [&] {
    launch(device_, kernel.decode_moment, ranges, 1, false, codes, scales, 0, n, values);
  });
}

void KernelBench::gradient_sums() {
  const int64_t n = kElements;
  const Tensor grad = noise(device_, n), ranges = one_range(device_, n),
               sum = Tensor::zeros(device_, {1}, DType::f64), count = Tensor::zeros(device_, {1}, DType::i64);
  const Optimizers& kernel = *device_.table().optimizers;
  bound_by_memory("sum of squares (16 Mi)", 4 * n, [&] {
    launch(device_, kernel.sum_of_squares_workspace(1, n), kernel.sum_of_squares, ranges, 1, grad, sum,
           false);
  });
  bound_by_memory("number of zeros (16 Mi)", 4 * n, [&] {
    launch(device_, kernel.count_zeros_workspace(1, n), kernel.count_zeros, ranges, 1, grad, count, false);
  });
  bound_by_memory("fingerprint (16 Mi)", 4 * n, [&] {
    launch(device_, device_.table().step_control->add_fingerprint, grad, 4 * n, 1, count);
  });
}

}  // namespace capstan::kernels
