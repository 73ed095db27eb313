// The training loop: batch sizes, length, stop rules and where it runs.
#pragma once

#include <cstdint>
#include <optional>

#include "config/core/types.hpp"

namespace capstan::config {

enum class DeviceKind : uint8_t { automatic, cpu, cuda, checked, meta };  // automatic is spelled auto

template <>
struct EnumNames<DeviceKind> {
  static constexpr EnumEntry<DeviceKind> list[] = {
      {DeviceKind::automatic, "auto", "CUDA where a device is present, else the CPU"},
      {DeviceKind::cpu, "cpu", "the CPU"},
      {DeviceKind::cuda, "cuda", "an NVIDIA GPU"},
      {DeviceKind::checked, "checked",
       "an asynchronous device emulated on the CPU, which detects missing synchronization", "guard"},
      {DeviceKind::meta, "meta", "shapes without memory: nothing is computed"},
  };
};

struct TrainConfig {
  int64_t micro_batch_size = 1;  // samples of one forward pass of one model replica
  std::optional<int64_t>
      global_batch_size;  // samples of one step; derived: micro_batch_size * data-parallel size
  std::optional<int64_t>
      num_microbatches;                // derived: global_batch_size / (micro_batch_size * data-parallel size)
  std::optional<int64_t> train_iters;  // exactly one of train_iters, train_samples and epochs
  std::optional<int64_t> train_samples;
  std::optional<double> epochs;          // passes over the training data
  std::optional<int64_t> exit_interval;  // stop with a checkpoint after each multiple of so many steps
  std::optional<double> exit_duration_in_mins;
  bool exit_signal_handler = true;  // SIGINT/SIGTERM: save, then exit 75
  DeviceKind device = DeviceKind::automatic;
  std::optional<int64_t> threads;  // CPU threads of one rank; null: cores / ranks of this machine
};

}  // namespace capstan::config
