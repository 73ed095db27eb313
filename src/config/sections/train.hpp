// The training loop: batch sizes, length, stop rules and where it runs.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "config/core/types.hpp"

namespace capstan::config {

// Automatic is spelled auto.
enum class DeviceKind : uint8_t { automatic, cpu, cuda, checked, simulated, meta };

template <>
struct EnumNames<DeviceKind> {
  static constexpr EnumEntry<DeviceKind> list[] = {
      {DeviceKind::automatic, "auto", "CUDA where a device is present, else the CPU"},
      {DeviceKind::cpu, "cpu", "the CPU"},
      {DeviceKind::cuda, "cuda", "an NVIDIA GPU", "gpu"},
      {DeviceKind::checked, "checked",
       "an asynchronous device emulated on the CPU, which detects missing synchronization", "guard"},
      {DeviceKind::simulated, "simulated",
       "the CUDA kernels, compiled for the CPU and checked while they run"},
      {DeviceKind::meta, "meta", "shapes without data: nothing is computed"},
  };
};

struct TrainConfig {
  int64_t micro_batch_size = 1;
  // Derived: micro_batch_size * data-parallel size.
  std::optional<int64_t> global_batch_size;
  // [start, increment, samples]; empty: the batch size is constant. BatchRamp interprets it.
  std::vector<int64_t> rampup_batch_size;
  // Batches that do not divide into micro-batches are rounded down instead of refused.
  bool decrease_batch_size_if_needed = false;
  // Derived: global_batch_size / (micro_batch_size * data-parallel size).
  std::optional<int64_t> num_microbatches;
  // Exactly one of train_iters, train_samples and epochs.
  std::optional<int64_t> train_iters;
  std::optional<int64_t> train_samples;
  std::optional<double> epochs;
  std::optional<int64_t> exit_interval;
  std::optional<double> exit_duration_in_mins;
  bool exit_signal_handler = true;
  DeviceKind device = DeviceKind::automatic;
  std::optional<int64_t> threads;
};

}  // namespace capstan::config
