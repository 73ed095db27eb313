// CONTRIBUTING's "Add a device", tried: a device of one file, with memory of its own and a table of few
// kernels, runs an operation and trains a model to the bits of the CPU.
#include <doctest/doctest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "comm/world.hpp"
#include "ops/matmul.hpp"
#include "support/devices.hpp"
#include "support/tiny.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;

namespace {

int64_t gemms = 0;

// The families that the model uses, and no other. A kernel of its own in front of each GEMM; the others are
// the CPU's.
kernels::Gemm slab_gemm() {
  kernels::Gemm family = *kernels::cpu_table().gemm;
  family.run = [](kernels::Context& c, kernels::GemmShape shape, kernels::Operand a, kernels::Operand b,
                  kernels::Out out, float alpha, float beta, kernels::GemmEpilogue epilogue) {
    ++gemms;
    kernels::cpu_table().gemm->run(c, shape, a, b, out, alpha, beta, epilogue);
  };
  return family;
}
const kernels::Table& slab_table() {
  static const kernels::Gemm gemm = slab_gemm();
  static const kernels::Table table = [] {
    kernels::Table families = kernels::cpu_table();
    families.gemm = &gemm;
    families.head_norm = nullptr, families.context_attention = nullptr, families.adapter = nullptr;
    return families;
  }();
  return table;
}

// Memory that the host may not read, in one slab for each pool; kernels see it `kOffset` bytes further on.
// The allocator grows in larger steps than that of the CPU.
class SlabDevice final : public Device {
 public:
  SlabDevice() : Device(rules()), threads_(2) {
    table_ = &slab_table();
    host_threads_ = &threads_;
    kernel_offset_ = kOffset;
    for (Slab& slab : slabs_) slab.reset(static_cast<std::byte*>(std::aligned_alloc(kOffset, kSlab)));
  }
  DeviceType type() const override { return DeviceType::cuda; }
  void synchronize() override {}
  void zero(std::byte* data, int64_t bytes) override {
    std::memset(kernel_address(data), 0, static_cast<size_t>(bytes));
  }
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(kernel_address(to), from + kOffset, static_cast<size_t>(bytes));
  }
  void copy_to_device(std::byte* to, const void* from, int64_t bytes) override {
    count_copy(Queue::host_to_device, bytes);
    if (bytes > 0) std::memcpy(kernel_address(to), from, static_cast<size_t>(bytes));
  }
  void copy_to_host(void* to, const std::byte* from, int64_t bytes) override {
    count_copy(Queue::device_to_host, bytes);
    if (bytes > 0) std::memcpy(to, from + kOffset, static_cast<size_t>(bytes));
  }
  std::byte* host_address(std::byte*) override { return nullptr; }

 protected:
  bool grow(Pool, int64_t end, int64_t bytes) override { return end + bytes <= kSlab - kOffset; }
  void shrink(Pool, int64_t, int64_t) override {}
  std::byte* place(Pool pool, int64_t offset, int64_t) override {
    return slabs_[static_cast<size_t>(pool)].get() + offset;
  }

 private:
  static constexpr int64_t kOffset = 4096, kSlab = int64_t{32} << 20;
  static AllocatorRules rules() {
    AllocatorRules rules;
    rules.small_growth = 1 << 20;
    return rules;
  }
  using Slab = std::unique_ptr<std::byte, decltype(&std::free)>;
  ThreadPool threads_;
  std::array<Slab, 2> slabs_{Slab(nullptr, std::free), Slab(nullptr, std::free)};
};

// Losses and gradient norms of some steps.
std::vector<double> train_on(std::unique_ptr<Device> device, bool llama) {
  const config::Config config = testing::tiny_config(llama);
  const auto world = comm::World::alone();
  train::StepRunner runner(config, *world, std::move(device));
  runner.initialize();
  const auto data = train::open_datasets(config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  std::vector<double> numbers;
  train::StepTimers timers;
  for (int step = 0; step < 4; ++step) {
    const train::StepResult result = runner.train_step(loader, timers);
    numbers.insert(numbers.end(), {result.loss, result.gradient_norm});
  }
  return numbers;
}

}  // namespace

TEST_CASE("a second device runs an operation with the CPU's bits") {
  const auto product = [](Device& device) {
    std::vector<float> values(60);
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.37f * static_cast<float>(i % 11) - 1;
    const Tensor a = Tensor::from_host<float>(device, {5, 12}, values), c = Tensor::zeros(device, {5, 5});
    ops::matmul(ops::Transpose::no, ops::Transpose::yes, a, a, c);
    return c.to_host<float>();
  };
  SlabDevice slab;
  gemms = 0;
  CHECK(product(slab) == product(*test::Cpu::make(1)));
  CHECK(gemms == 1);
  CHECK(slab.memory().reserved == 1 << 20);
}

TEST_CASE("a second device trains a model with the CPU's bits") {
  for (const bool llama : {false, true}) {
    gemms = 0;
    CHECK(train_on(std::make_unique<SlabDevice>(), llama) == train_on(test::Cpu::make(1), llama));
    CHECK(gemms > 0);
  }
}
