// Requests to stop: SIGINT and SIGTERM (and SIGUSR1, which a parent forwards through mpirun) ask the loop to save and leave
// after the current step; a second SIGINT or SIGTERM ends the process at once with 130 or 143.
#pragma once

namespace capstan::train {

class StopSignals {
 public:
  StopSignals();   // installs the handlers; one object at a time
  ~StopSignals();  // puts back what was there
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  static int received();  // the first signal's number, 0: none
};

}  // namespace capstan::train
