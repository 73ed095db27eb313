// The CUDA device of a recipe, on a backend without CUDA: when it can be used, the device of a rank, and
// training to the bits of the CPU.
#include <doctest/doctest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/world.hpp"
#include "support/devices.hpp"
#include "support/fake_cuda.hpp"
#include "support/tiny.hpp"
#include "train/setup/cuda.hpp"
#include "train/setup/device.hpp"
#include "train/trainer/data_setup.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;

namespace {

train::CudaStatus status_with(const kernels::Table* table) {
  static cuda::Backend backend;
  backend = test::fake_backend();
  backend.table = table;
  return train::cuda_status({.backend = &backend, .found = true});
}

struct TrainedNumbers {
  std::vector<double> losses;
  int64_t host_waits = 0;
};
TrainedNumbers train_steps(std::unique_ptr<Device> device, bool llama) {
  const config::Config config = testing::tiny_config(llama);
  const auto world = comm::World::single_process();
  Device& used = *device;
  train::StepRunner runner(config, *world, std::move(device));
  runner.initialize();
  const auto data = train::open_datasets(config, nullptr);
  data::Loader loader(data[0], runner.loader_options());
  TrainedNumbers numbers;
  train::StepTimers timers;
  for (int step = 0; step < 4; ++step) {
    const train::StepResult result = runner.train_step(loader, timers);
    numbers.losses.insert(numbers.losses.end(), {result.loss, result.gradient_norm});
  }
  numbers.host_waits = used.host_waits();
  return numbers;
}

}  // namespace

TEST_CASE("a model trains on the cuda device with the CPU's bits, and the host waits as on the checked one") {
  for (const bool llama : {false, true})
    for (const bool patient : {false, true}) {
      CAPTURE(llama);
      CAPTURE(patient);
      test::reset_fake_cuda().patient = patient;
      const TrainedNumbers expected = train_steps(test::Cpu::make(1), llama);
      const TrainedNumbers checked = train_steps(test::Checked::make(1), llama);
      const TrainedNumbers found =
          train_steps(std::make_unique<test::HostKernelCudaDevice>(kernels::cpu_table()), llama);
      CHECK(found.losses == expected.losses);
      CHECK(found.host_waits == checked.host_waits);
      CHECK(test::fake_cuda().open_devices == 0);
      CHECK(test::fake_cuda().events == 0);
      CHECK(test::fake_cuda().mapped == 0);
    }
}

TEST_CASE("the CUDA backend can be used where it sees a device and has all kernels") {
  test::FakeCuda& fake = test::reset_fake_cuda();
  fake.devices = 3;
  const train::CudaStatus usable = status_with(&kernels::cpu_table());
  CHECK(usable.usable);
  CHECK(usable.devices == 3);
  CHECK(usable.reason.empty());
  // Ranks take the devices in turn.
  CHECK(train::make_cuda_device(usable, 0, 1)->description().starts_with("cuda 0 (fake GPU"));
  CHECK(train::make_cuda_device(usable, 2, 1)->description().starts_with("cuda 2 (fake GPU"));
  CHECK(train::make_cuda_device(usable, 4, 1)->description().starts_with("cuda 1 (fake GPU"));

  const train::CudaStatus no_kernels = status_with(nullptr);
  CHECK(!no_kernels.usable);
  CHECK(!no_kernels.table);
  CHECK(no_kernels.built);
  CHECK(no_kernels.reason == "the CUDA backend has no kernels");
  kernels::Table table = kernels::cpu_table();
  table.gemm = nullptr, table.step_control = nullptr;
  CHECK(status_with(&table).reason == "the CUDA backend lacks the kernels gemm, step_control");
  CHECK(!status_with(&table).table);

  fake.failing = "count_devices", fake.code = cuda::StatusCode::unavailable;
  const train::CudaStatus no_driver = status_with(&kernels::cpu_table());
  CHECK(!no_driver.usable);
  CHECK(no_driver.reason == "fake_count_devices: planted error");
  // Estimates use the kernels also where there is no device.
  CHECK(no_driver.table == &kernels::cpu_table());
}

TEST_CASE("train.device: auto and cuda on this machine") {
  using config::DeviceKind;
  const train::CudaStatus& here = train::cuda_status();
  CHECK(train::device_kind(DeviceKind::automatic) == (here.usable ? DeviceKind::cuda : DeviceKind::cpu));
  CHECK(train::device_kind(DeviceKind::checked) == DeviceKind::checked);
  if (here.usable) return;
  const std::string note = train::device_note(DeviceKind::automatic);
  CHECK(note == (here.built ? "train.device=auto: on the CPU, because " + here.reason : ""));
  CHECK(train::device_note(DeviceKind::cpu).empty());
  train::check_device(DeviceKind::automatic);
  train::check_device(DeviceKind::cpu);
  try {
    train::check_device(DeviceKind::cuda);
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::unsupported);
    CHECK(error.message() == "train.device: cuda: " + here.reason);
    CHECK(error.help() == here.help + "; train.device=cpu trains here");
  }
}

TEST_CASE("ranks that share a GPU are counted by the GPU's address and host") {
  CHECK(train::shared_gpus({"a 01:00.0", "a 02:00.0", "b 01:00.0"}).empty());
  CHECK(train::shared_gpus({"", ""}).empty());
  CHECK(train::shared_gpus({"a 01:00.0", "a 01:00.0", "a 02:00.0", "a 02:00.0"}) ==
        "4 ranks share 2 GPUs: their kernels run in turn, and the memory of a GPU is that of all its ranks");
  test::reset_fake_cuda();
  const auto world = comm::World::single_process();
  CHECK(train::shared_gpus(*world, *test::Cpu::make(1)).empty());
  const test::HostKernelCudaDevice device(kernels::cpu_table());
  CHECK(train::shared_gpus(*world, device).empty());
}
