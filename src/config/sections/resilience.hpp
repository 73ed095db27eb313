// Section `resilience`: detection of anomalies, of faulty hardware and of ranks that do not answer.
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
      {SpikeAction::off, "off", "no detection"},
      {SpikeAction::warn, "warn", "a warning and an event in metrics.jsonl"},
      {SpikeAction::skip, "skip", "the update is skipped"},
      {SpikeAction::rewind, "rewind", "load the newest valid checkpoint and skip the batch of the spike"},
  };
};

template <>
struct EnumNames<RerunMode> {
  static constexpr EnumEntry<RerunMode> list[] = {
      {RerunMode::disabled, "disabled", "never"},
      {RerunMode::validate_results, "validate_results", "recompute a suspicious step and compare"},
      {RerunMode::report_stats, "report_stats", "as validate_results, with statistics of the differences"},
  };
};

struct ResilienceConfig {
  Duration timeout{600.0};
  std::optional<Bytes> memory_limit;
  std::optional<Bytes> memory_limit_host;
  bool check_for_nan = true;
  SpikeAction loss_spike_action = SpikeAction::off;
  double loss_spike_factor = 10.0;
  SpikeAction grad_norm_spike_action = SpikeAction::off;
  double grad_norm_spike_factor = 10.0;
  int64_t spike_window = 100;
  int64_t max_rewinds = 3;
  RerunMode rerun_mode = RerunMode::disabled;
};

}  // namespace capstan::config
