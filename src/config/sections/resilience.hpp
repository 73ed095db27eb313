// Guards against bad numbers, bad machines and ranks that do not answer.
#pragma once

#include <cstdint>
#include <optional>

#include "config/core/types.hpp"

namespace capstan::config {

enum class SpikeAction : uint8_t { off, warn, skip, rewind };
enum class RerunMode : uint8_t { disabled, validate_results, report_stats };

template <>
struct EnumNames<SpikeAction> {
  static constexpr EnumEntry<SpikeAction> list[] = {
      {SpikeAction::off, "off", "not looked at"},
      {SpikeAction::warn, "warn", "a warning and an event in metrics.jsonl"},
      {SpikeAction::skip, "skip", "the update is skipped"},
      {SpikeAction::rewind, "rewind", "back to the last checkpoint, past the batch"},
  };
};

template <>
struct EnumNames<RerunMode> {
  static constexpr EnumEntry<RerunMode> list[] = {
      {RerunMode::disabled, "disabled", "never"},
      {RerunMode::validate_results, "validate_results", "compute a suspicious step again and compare"},
      {RerunMode::report_stats, "report_stats", "as validate_results, with statistics of the differences"},
  };
};

struct ResilienceConfig {
  Duration timeout{600.0};            // how long a rank may stay silent before it is named and the run ends
  std::optional<Bytes> memory_limit;  // of one rank; null: what the device has
  bool check_for_nan = true;          // stop before a NaN or infinite loss or gradient touches the state
  SpikeAction loss_spike_action = SpikeAction::off;
  double loss_spike_factor = 10.0;  // times the running mean
  SpikeAction grad_norm_spike_action = SpikeAction::off;
  double grad_norm_spike_factor = 10.0;
  int64_t spike_window = 100;                  // steps of the running mean
  int64_t max_rewinds = 3;                     // rewinds before the run stops
  RerunMode rerun_mode = RerunMode::disabled;  // compute a suspicious step again and compare
};

}  // namespace capstan::config
