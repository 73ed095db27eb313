// Requests to stop: SIGINT and SIGTERM (and SIGUSR1, which mpirun forwards) ask the loop to save and leave
// after the current step; a second SIGINT or SIGTERM ends the process at once with 130 or 143.
#pragma once

namespace capstan::train {

class StopSignals {
 public:
  StopSignals();   // installs the handlers; one object at a time
  ~StopSignals();  // puts back what was there
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  // A signal has come, or a parent of several ranks has left the file that CAPSTAN_STOP_FILE names.
  static bool received();
};

}  // namespace capstan::train
