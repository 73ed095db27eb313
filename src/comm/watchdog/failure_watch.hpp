// How the watchdog reports and handles rank failures.
#pragma once

#include <functional>

#include "base/error.hpp"

namespace capstan::comm {

// How rank failures are handled. The first rank that detects a dead rank, or a rank that keeps others waiting
// for longer than `timeout`, reports it once for all ranks. Every process then ends with exit code 4.
struct FailureWatch {
  double timeout = 600;  // seconds
  // Called on the rank that detected the failure, from the watchdog's thread. Not called where a parent
  // process reports failures.
  std::function<void(const Error&)> report;
  // Called after the report, on each rank that notices the failure, instead of ending the process. Where it
  // is empty, the process ends with exit code 4.
  std::function<void()> after_report;
};

}  // namespace capstan::comm
