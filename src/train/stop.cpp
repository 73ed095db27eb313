#include "train/stop.hpp"

#include <unistd.h>
#include <csignal>
#include <cstdlib>

#include <array>

namespace capstan::train {

namespace {
volatile std::sig_atomic_t first_signal = 0;
constexpr std::array<int, 3> kSignals{SIGINT, SIGTERM, SIGUSR1};
std::array<struct sigaction, 3> before;

void handle(int signal) {
  // SIGUSR1 may come more than once (from the parent and from the launcher): it never ends the process.
  if (first_signal != 0 && signal != SIGUSR1) ::_exit(128 + signal);
  if (first_signal == 0) first_signal = signal;
}
}  // namespace

StopSignals::StopSignals() {
  first_signal = 0;
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &before[i]);
}
StopSignals::~StopSignals() {
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before[i], nullptr);
}
bool StopSignals::received() {
  if (first_signal != 0) return true;
  static const char* const file = std::getenv("CAPSTAN_STOP_FILE");
  return file && ::access(file, F_OK) == 0;
}

}  // namespace capstan::train
