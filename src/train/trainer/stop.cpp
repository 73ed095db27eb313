#include "train/trainer/stop.hpp"

#include <unistd.h>
#include <csignal>
#include <cstdlib>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>

#include "comm/watchdog/rank_status.hpp"

namespace capstan::train {

namespace {
volatile std::sig_atomic_t first_signal = 0;
constexpr std::array<int, 3> kSignals{SIGINT, SIGTERM, SIGUSR1};
std::array<struct sigaction, 3> before;

// Read by the handler.
std::atomic<ProgressSink*> answer_sink{nullptr};
std::atomic<const char*> current_phase{nullptr};
std::atomic<int64_t> current_step{0}, expected_end{0};  // comm::monotonic_ns
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<void*>::is_always_lock_free);

void answer() {
  ProgressSink* const sink = answer_sink;
  if (!sink) return;
  std::array<char, 128> buffer;
  const char* const phase = current_phase;
  const int64_t end = expected_end;
  sink->stop_requested(
      stop_notice(buffer, phase ? phase : "", current_step, end > 0 ? end - comm::monotonic_ns() : 0));
}

void handle(int signal) {
  // SIGUSR1 may come more than once (from the parent and from the launcher): it never ends the process.
  if (first_signal != 0 && signal != SIGUSR1) ::_exit(128 + signal);
  if (first_signal != 0) return;
  first_signal = signal;
  const int error = errno;
  answer();
  errno = error;
}
}  // namespace

std::string_view stop_notice(std::span<char> buffer, std::string_view phase, int64_t step,
                             int64_t remaining_ns) {
  size_t size = 0;
  const auto add = [&](std::string_view text) {
    size += text.copy(buffer.data() + size, buffer.size() - size);
  };
  add("stopping after ");
  add(phase == "evaluate" ? "this evaluation"
      : phase == "save"   ? "this save"
      : step < 1          ? "the first step"
                          : "this step");
  if (remaining_ns > 0) {
    const int64_t seconds = std::max<int64_t>(1, (remaining_ns + 500'000'000) / 1'000'000'000);
    add(", about ");
    const auto [end, error] = std::to_chars(buffer.data() + size, buffer.data() + buffer.size(),
                                            seconds < 120 ? seconds : (seconds + 30) / 60);
    size = static_cast<size_t>(end - buffer.data());
    add(seconds < 120 ? " s" : " min");
  }
  add("; again to stop now");
  return {buffer.data(), size};
}

StopSignals::StopSignals(ProgressSink* sink, bool handles) : handles_(handles) {
  first_signal = 0;
  current_phase = nullptr;
  current_step = 0, expected_end = 0;
  if (!handles_) return;
  answer_sink = sink;
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &before[i]);
}
StopSignals::~StopSignals() {
  if (!handles_) return;
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before[i], nullptr);
  answer_sink = nullptr;
}
bool StopSignals::received() {
  if (first_signal != 0) return true;
  static const char* const file = std::getenv("CAPSTAN_STOP_FILE");
  return file && ::access(file, F_OK) == 0;
}
void StopSignals::at_step(int64_t step) {
  current_step = step;
}
void StopSignals::at_phase(std::string_view phase) {
  current_phase = phase.data();
}
void StopSignals::expect(double seconds) {
  expected_end = seconds > 0 ? comm::monotonic_ns() + static_cast<int64_t>(seconds * 1e9) : 0;
}

void publish_expected_stop(comm::World& world, double seconds) {
  StopSignals::expect(seconds);
  world.expect(seconds);
}

}  // namespace capstan::train
