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
// expected_end: by comm::monotonic_ns().
std::atomic<int64_t> current_step{0}, expected_end{0};
// saving_step: -1 while saving_directory changes or no save is under way.
std::atomic<int64_t> saved_step{-1}, saving_step{-1};
std::array<char, 4096> saving_directory;
// The file that asks for a stop; the parent of several ranks, or a sweep, creates it.
const char* stop_file = nullptr;
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<void*>::is_always_lock_free);

bool stop_file_exists() {
  return stop_file && ::access(stop_file, F_OK) == 0;
}

void answer() {
  ProgressSink* const sink = answer_sink;
  // If the file exists, the parent has printed the answer already.
  if (!sink || stop_file_exists()) return;
  std::array<char, 192> buffer;
  const char* const phase = current_phase;
  sink->stop_requested(
      stop_notice(buffer, phase ? phase : "", current_step, expected_end, comm::monotonic_ns()));
}

void answer_again() {
  ProgressSink* const sink = answer_sink;
  if (!sink || stop_file_exists()) return;
  std::array<char, 192> buffer;
  int64_t saved = saved_step, saving = saving_step;
  // The save has ended since the trainer published that it was under way.
  if (saving >= 0 && ::access(saving_directory.data(), F_OK) == 0) saved = saving, saving = -1;
  sink->stop_requested(stopped_notice(buffer, saved, saving));
}

void handle(int signal) {
  // SIGUSR1 may come more than once (from the parent and from the launcher): it never ends the process.
  if (first_signal != 0 && signal == SIGUSR1) return;
  if (first_signal != 0) {
    answer_again();
    ::_exit(128 + signal);
  }
  first_signal = signal;
  const int error = errno;
  answer();
  errno = error;
}

// Writes text and numbers without allocating; text that does not fit is truncated.
class NoticeText {
 public:
  explicit NoticeText(std::span<char> buffer) : buffer_(buffer) {}
  NoticeText& operator<<(std::string_view text) {
    size_ += text.copy(buffer_.data() + size_, buffer_.size() - size_);
    return *this;
  }
  NoticeText& operator<<(int64_t number) {
    std::array<char, 24> digits;
    const auto [end, error] = std::to_chars(digits.data(), digits.data() + digits.size(), number);
    return *this << std::string_view(digits.data(), static_cast<size_t>(end - digits.data()));
  }
  std::string_view text() const { return {buffer_.data(), size_}; }

 private:
  std::span<char> buffer_;
  size_t size_ = 0;
};
}  // namespace

int64_t ExpectedStop::encoded() const {
  if (seconds <= 0) return lower_bound ? -1 : 0;
  const int64_t end = comm::monotonic_ns() + static_cast<int64_t>(seconds * 1e9);
  return lower_bound ? -end : end;
}

std::string_view stop_notice(std::span<char> buffer, std::string_view phase, int64_t step, int64_t step_end,
                             int64_t now) {
  NoticeText text(buffer);
  const bool evaluates = phase == "evaluate", saves = phase == "save", trains = !evaluates && !saves;
  text << "stopping after "
       << (evaluates  ? "this evaluation"
           : saves    ? "this save"
           : step < 1 ? "the first step"
                      : "this step");
  const bool lower_bound = step_end < 0;
  const int64_t remaining = step_end == 0 ? 0 : (lower_bound ? -step_end : step_end) - now;
  // Rounded; a lower bound down.
  const int64_t seconds = lower_bound     ? remaining / 1'000'000'000
                          : remaining > 0 ? std::max<int64_t>(1, (remaining + 500'000'000) / 1'000'000'000)
                                          : 0;
  if (seconds > 0) {
    text << (lower_bound ? ", at least " : ", about ") << (seconds < 120 ? seconds : (seconds + 30) / 60)
         << (seconds < 120 ? " s" : " min") << (lower_bound ? " by the estimate" : "");
  } else if (trains && step < 1) {
    text << ", which has not begun";
  } else if (trains && lower_bound) {
    text << ", the first to be timed";
  } else if (trains && step_end != 0) {
    text << ", which takes longer than expected";
  }
  text << "; a second signal stops at once";
  return text.text();
}

std::string_view stopped_notice(std::span<char> buffer, int64_t saved, int64_t saving) {
  NoticeText text(buffer);
  text << "stopped now";
  if (saving >= 0) text << ", the save of step " << saving << " is abandoned";
  if (saved >= 0)
    text << "; the newest checkpoint is of step " << saved;
  else
    text << "; the run has no checkpoint";
  return text.text();
}

StopSignals::StopSignals(ProgressSink* sink, bool handles) : handles_(handles) {
  first_signal = 0;
  current_phase = nullptr;
  current_step = 0, expected_end = 0;
  saved_step = saving_step = -1;
  stop_file = std::getenv("CAPSTAN_STOP_FILE");
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
  return first_signal != 0 || stop_file_exists();
}
void StopSignals::publish_step(int64_t step) {
  current_step = step;
}
void StopSignals::publish_phase(std::string_view phase) {
  current_phase = phase.data();
}
void StopSignals::publish_expected_end(int64_t encoded) {
  expected_end = encoded;
}
void StopSignals::publish_save(int64_t step, const std::filesystem::path& directory) {
  saving_step = -1;
  const std::string& path = directory.native();
  // The system cannot open a longer path.
  if (path.size() >= saving_directory.size()) return;
  saving_directory[path.copy(saving_directory.data(), path.size())] = '\0';
  saving_step = step;
}
void StopSignals::publish_saved_step(int64_t step) {
  saved_step = step;
  saving_step = -1;
}

void publish_expected_stop(comm::World& world, const ExpectedStop& expected) {
  const int64_t encoded = expected.encoded();
  StopSignals::publish_expected_end(encoded);
  world.publish_expected_end(encoded);
}

void publish_saved_step(comm::World& world, int64_t step) {
  StopSignals::publish_saved_step(step);
  world.publish_saved_step(step);
}

}  // namespace capstan::train
