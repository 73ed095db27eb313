// Guards against bad numbers, bad machines and ranks that do not answer.
#pragma once

#include <cstdint>
#include <optional>

namespace capstan::config {

enum class SpikeAction : uint8_t { off, warn, skip, rewind };
enum class RerunMode : uint8_t { disabled, validate_results, report_stats };

struct ResilienceConfig {
  double timeout = 600.0;               // seconds a rank may stay silent before it is named and the run ends
  std::optional<int64_t> memory_limit;  // bytes of one rank; null: what the device has
  bool check_for_nan = true;            // stop before a NaN or infinite loss or gradient touches the state
  SpikeAction loss_spike_action = SpikeAction::warn;
  double loss_spike_factor = 10.0;  // times the running mean
  SpikeAction grad_norm_spike_action = SpikeAction::warn;
  double grad_norm_spike_factor = 10.0;
  int64_t spike_window = 100;                  // steps of the running mean
  int64_t max_rewinds = 3;                     // rewinds before the run stops
  RerunMode rerun_mode = RerunMode::disabled;  // compute a suspicious step again and compare
};

}  // namespace capstan::config
