// The CUDA device of a recipe, on a backend without CUDA: when it can be used, the device of a rank, and
// training to the bits of the CPU.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/world.hpp"
#include "kernels/simulated/table.hpp"
#include "support/devices.hpp"
#include "support/fake_cuda.hpp"
#include "support/simulated_gpu.hpp"
#include "support/tiny.hpp"
#include "train/setup/cuda.hpp"
#include "train/setup/device.hpp"
#include "train/setup/transport.hpp"
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

TEST_CASE("the CUDA backend can be used where it sees devices of compute capability 8.0 or newer") {
  test::FakeCuda& fake = test::reset_fake_cuda();
  fake.devices = 3;
  const train::CudaStatus usable = status_with(&kernels::cpu_table());
  CHECK(usable.usable);
  CHECK(usable.devices == 3);
  CHECK(usable.reason.empty());
  // Ranks share the memory of a device that they take in turn.
  const int64_t memory = train::facts_of_rank(usable, 0).memory;
  CHECK(memory > 0);
  CHECK(train::gpu_memory_of_rank(usable, 1) == memory);
  CHECK(train::gpu_memory_of_rank(usable, 3) == memory);
  CHECK(train::gpu_memory_of_rank(usable, 4) == memory / 2);
  // Eight ranks whose processes see one GPU each, their own or the same one.
  fake.devices = 1;
  const train::CudaStatus own = status_with(&kernels::cpu_table());
  CHECK(train::gpu_memory_of_rank(own, {8, 1}) == memory);
  CHECK(train::gpu_memory_of_rank(own, {8, 8}) == memory / 8);
  fake.devices = 3;
  CHECK(!train::gpu_memory_of_rank({}, 1));
  CHECK(train::make_cuda_device(usable, 0, 1)->description().starts_with("cuda 0 (fake GPU"));
  CHECK(train::make_cuda_device(usable, 2, 1)->description().starts_with("cuda 2 (fake GPU"));
  CHECK(train::make_cuda_device(usable, 4, 1)->description().starts_with("cuda 1 (fake GPU"));

  for (const int capability : {70, 75, 80, 86, 120}) {
    CAPTURE(capability);
    fake.capability = capability;
    const train::CudaStatus status = status_with(&kernels::cpu_table());
    CHECK(bool(status.usable) == (capability >= 80));
    CHECK(status.reason ==
          (capability >= 80 ? ""
                            : "GPU 0 (fake GPU) has compute capability 7." + std::to_string(capability - 70) +
                                  ", and the kernels need 8.0 or newer"));
    if (status.usable) CHECK(train::facts_of_rank(status, 4).major == capability / 10);
  }

  fake.failing = "count_devices", fake.code = cuda::StatusCode::unavailable;
  const train::CudaStatus no_driver = status_with(&kernels::cpu_table());
  CHECK(!no_driver.usable);
  CHECK(no_driver.reason == "fake_count_devices: planted error");
  // Estimates use the kernels also where there is no device.
  CHECK(no_driver.table == &kernels::cpu_table());
}

TEST_CASE("without a backend, estimates of a GPU have the workspaces of its kernels") {
  if (train::cuda_status().table) return;
  const auto device = train::make_meta_device_for(config::DeviceKind::cuda, 3, 1);
  const kernels::Table& table = device->table();
  const kernels::Table& simulated = kernels::simulated_table();
  CHECK(table.attention == simulated.attention);
  CHECK(table.optimizers == simulated.optimizers);
  const kernels::GemmShape shape{false, false, 64, 48, 32, 32, 48, 48};
  const auto bytes = [&](const kernels::Table& of, DType c) {
    return of.gemm->run_workspace(shape, {DType::bf16, DType::bf16, c}, 1, 0).total(0);
  };
  CHECK(bytes(table, DType::f32) == (size_t{32} << 20) + 256);
  // fp32 rows, which become fp16.
  CHECK(bytes(table, DType::f16) == bytes(table, DType::f32) + 64 * 48 * 4);
  // The sizes of the simulation are as before.
  CHECK(bytes(simulated, DType::f32) == (size_t{16} << 10) + 256);
}

TEST_CASE("low-precision GEMMs are refused by name on a GPU that does not have them") {
  using config::Fp8Recipe;
  const auto refusal = [](const config::MixedPrecisionConfig& precision, int capability) -> std::string {
    try {
      train::check_precision(precision, {"a GPU", capability});
      return "";
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::unsupported);
      CHECK(error.help().find("mixed_precision=bf16_mixed") == 0);
      return error.message();
    }
  };
  config::MixedPrecisionConfig plain, fp8, fp4;
  fp8.fp8 = config::Fp8Format::hybrid;
  fp4.fp4 = config::Fp4Format::e2m1;
  for (const int capability : {80, 86, 89, 90, 100, 103, 120}) {
    CAPTURE(capability);
    CHECK(refusal(plain, capability).empty());
    CHECK(refusal(fp4, capability).empty() == (capability >= 100));
    for (const auto& [recipe, fits] :
         {std::pair(Fp8Recipe::delayed, capability >= 89), std::pair(Fp8Recipe::tensorwise, capability >= 89),
          std::pair(Fp8Recipe::blockwise, capability == 90),
          std::pair(Fp8Recipe::mxfp8, capability >= 100)}) {
      fp8.fp8_recipe = recipe;
      CAPTURE(config::enum_name(recipe));
      CHECK(refusal(fp8, capability).empty() == fits);
    }
  }
  fp8.fp8_recipe = Fp8Recipe::mxfp8;
  CHECK(refusal(fp8, 90) ==
        "mixed_precision.fp8_recipe: mxfp8 needs a GPU of compute capability 10.0 or newer, and this one (a "
        "GPU) has 9.0");
  CHECK(refusal(fp4, 89) ==
        "mixed_precision.fp4_recipe: nvfp4 needs a GPU of compute capability 10.0 or newer, and this one (a "
        "GPU) has 8.9");

  // Of a device of this machine: before a training step, and before its device is made.
  config::Config config = testing::tiny_config(true);
  config.train.device = config::DeviceKind::simulated;
  config.mixed_precision = fp8;
  const auto refused = [&] {
    try {
      const auto world = comm::World::single_process();
      train::StepRunner runner(config, *world);
      return std::string();
    } catch (const Error& error) {
      return error.message();
    }
  };
  CHECK(refused().find("mixed_precision.fp8_recipe: mxfp8 needs a GPU of compute capability 10.0") == 0);
  const test::SimulatedGpu newer(100);
  CHECK(refused().empty());
}

TEST_CASE("train.device: auto and cuda on this machine") {
  using config::DeviceKind;
  const train::CudaStatus& here = train::cuda_status();
  CHECK(train::device_kind(DeviceKind::automatic) == (here.usable ? DeviceKind::cuda : DeviceKind::cpu));
  CHECK(train::device_kind(DeviceKind::checked) == DeviceKind::checked);
  if (here.usable) return;
  config::Config config;
  config.train.device = DeviceKind::automatic;
  std::vector<std::string> notes;
  if (here.built) notes.push_back("train.device=auto: on the CPU, because " + here.reason);
  CHECK(train::device_notes(config) == notes);
  config.mixed_precision.tf32 = true;
  notes.emplace_back(
      "mixed_precision.tf32 has no effect on the CPU: fp32 operands are multiplied as they are");
  CHECK(train::device_notes(config) == notes);
  config.train.device = DeviceKind::cpu;
  CHECK(train::device_notes(config).empty());
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

TEST_CASE("a router in fp64 is refused by name where the device has none") {
  using config::DeviceKind;
  config::Config config = capstan::testing::tiny_config(true);
  config.model.moe_router_dtype = config::RouterDtype::fp64;
  for (const auto device : {DeviceKind::cpu, DeviceKind::checked, DeviceKind::simulated}) {
    config.train.device = device;
    config.model.num_moe_experts.reset();
    train::check_device(config, 0);
    config.model.num_moe_experts = 4;
    std::string message;
    try {
      train::check_device(config, 0);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::unsupported);
      CHECK(error.help() == "model.moe_router_dtype=fp32");
      message = error.message();
    }
    CHECK(message == (device == DeviceKind::simulated
                          ? "model.moe_router_dtype: fp64: train.device simulated "
                            "has no router in fp64"
                          : ""));
  }
}

TEST_CASE("dist.distributed_backend chooses the channel of tensors") {
  using config::DistributedBackend;
  using train::Transport;
  const auto choice_of = [](DistributedBackend backend, const std::vector<std::string>& problems,
                            const std::vector<std::string>& gpus) {
    try {
      const train::TransportChoice choice = train::choose_transport(backend, problems, gpus);
      return (choice.transport == Transport::nccl ? "nccl: " : "host: ") + choice.note;
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::unsupported);
      return "refused: " + error.message();
    }
  };
  const std::vector<std::string> none, fine{"", ""}, missing{"", "no library"}, two{"a 1", "a 2"},
      one{"a 1", "a 1"};
  using enum DistributedBackend;
  CHECK(choice_of(automatic, none, none) == "host: ");
  CHECK(choice_of(mpi, fine, two) == "host: ");
  CHECK(choice_of(automatic, fine, two) == "nccl: transfers between GPUs by NCCL");
  CHECK(choice_of(nccl, fine, two) == "nccl: transfers between GPUs by NCCL");
  const std::string automatic_note =
      "host: dist.distributed_backend=auto: transfers go through host memory, because ";
  CHECK(choice_of(automatic, fine, one) ==
        automatic_note + "2 ranks share 1 GPU, and NCCL needs one for each rank");
  CHECK(choice_of(automatic, missing, two) == automatic_note + "no library (rank 1)");
  CHECK(choice_of(nccl, none, none) ==
        "refused: dist.distributed_backend: nccl: the ranks do not train on GPUs, whose memory NCCL "
        "transfers");
  CHECK(choice_of(nccl, missing, two) == "refused: dist.distributed_backend: nccl: no library (rank 1)");

  // Of a run that has not begun, also where there is no GPU.
  config::Config config = testing::tiny_config(true, 2);
  config.train.device = config::DeviceKind::cpu;
  CHECK(train::planned_transport(config) == Transport::host);
  config.train.device = config::DeviceKind::cuda;
  const bool without = train::cuda_status().built && !train::cuda_status().has_nccl;
  CHECK(train::planned_transport(config) == (without ? Transport::host : Transport::nccl));
  config.dist.distributed_backend = mpi;
  CHECK(train::planned_transport(config) == Transport::host);
  config.dist.distributed_backend = nccl;
  CHECK(train::planned_transport(config) == Transport::nccl);
  // One rank has nothing to transfer, but `nccl` is for GPUs.
  const auto world = comm::World::single_process();
  CHECK(train::choose_transport(config, *world, train::RankGpu{}).transport == Transport::host);
  CHECK_THROWS_AS(train::choose_transport(config, *world, std::nullopt), Error);
  config.dist.world_size = 1;
  CHECK(train::planned_transport(config) == Transport::host);
}

TEST_CASE("overlap of tensor-parallel transfers is said to hide little where they go through the host") {
  using train::Transport;
  config::Config config = testing::tiny_config(true, 2);
  config.dist.tensor_model_parallel_size = 2;
  config.dist.sequence_parallel = true;
  CHECK(train::tensor_overlap_note(config, Transport::host).empty());
  config.comm_overlap.tp_comm_overlap = true;
  CHECK(train::tensor_overlap_note(config, Transport::host)
            .starts_with("comm_overlap.tp_comm_overlap: transfers go through host memory"));
  for (const Transport transport : {Transport::nccl, Transport::nccl_stand_in})
    CHECK(train::tensor_overlap_note(config, transport).empty());
  config.dist.tensor_model_parallel_size = 1;
  CHECK(train::tensor_overlap_note(config, Transport::host).empty());
}

namespace {

// Ranges and marks as an outline: a range indents what lies in it, a mark begins with a dash.
struct RecordedRanges {
  std::vector<std::string> lines;
  size_t depth = 0;
};
RecordedRanges recorded;
void record_range(const char* name) {
  recorded.lines.push_back(std::string(2 * recorded.depth++, ' ') + name);
}
void record_end() {
  --recorded.depth;
}
void record_mark(const char* name) {
  recorded.lines.push_back(std::string(2 * recorded.depth, ' ') + "- " + name);
}

// The lines within the first range of this name, without its indentation.
std::vector<std::string> within(const std::vector<std::string>& lines, const std::string& name) {
  std::vector<std::string> inner;
  const auto begin = std::find(lines.begin(), lines.end(), name);
  REQUIRE(begin != lines.end());
  for (auto line = begin + 1; line != lines.end() && line->starts_with("  "); ++line)
    inner.push_back(line->substr(2));
  return inner;
}
// The outermost ranges.
std::vector<std::string> outermost(const std::vector<std::string>& lines) {
  std::vector<std::string> names;
  for (const std::string& line : lines)
    if (!line.starts_with(" ") && !line.starts_with("- ")) names.push_back(line);
  return names;
}

}  // namespace

TEST_CASE("a profiler sees the step, its passes, layers and operations as nested ranges") {
  test::reset_fake_cuda();
  static cuda::Runtime runtime;
  runtime = *test::fake_backend().runtime;
  runtime.begin_range = record_range, runtime.end_range = record_end, runtime.mark = record_mark;
  cuda::Backend backend = test::fake_backend();
  backend.runtime = &runtime;
  recorded = {};
  train_steps(std::make_unique<test::HostKernelCudaDevice>(kernels::cpu_table(), 1, backend), true);
  CHECK(recorded.depth == 0);
  CHECK(outermost(recorded.lines) == std::vector<std::string>{"step 1", "step 2", "step 3", "step 4"});
  const auto step = within(recorded.lines, "step 2");
  CHECK(outermost(step) == std::vector<std::string>{"forward of micro-batch 0", "backward of micro-batch 0",
                                                    "forward of micro-batch 1", "backward of micro-batch 1",
                                                    "reduce gradients", "optimizer", "wait for the step"});
  const auto forward = within(step, "forward of micro-batch 0"),
             backward = within(step, "backward of micro-batch 0");
  CHECK(outermost(forward) == std::vector<std::string>{"layer 0", "layer 1"});
  CHECK(forward.front() == "- embedding");
  CHECK(forward.back() == "- linear_cross_entropy");
  const auto layer = within(forward, "layer 1");
  for (const char* operation : {"- linear", "- attention", "- bias_activation"})
    CHECK_MESSAGE(std::count(layer.begin(), layer.end(), operation) > 0, operation);
  // The backward pass runs the operations in reverse order, and weight gradients within them.
  std::vector<std::string> expected;
  for (const std::string& line : forward)
    if (const size_t mark = line.find("- "); mark != std::string::npos)
      expected.insert(expected.begin(), line.substr(mark + 2) + " backward");
  CHECK(outermost(backward) == expected);
  CHECK(outermost(within(backward, "linear backward")) == std::vector<std::string>{"linear weight gradient"});
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
