// Standard output and standard error: colours, one redrawn status line, and writes whose failure is noticed.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "train/trainer/progress.hpp"

namespace capstan::cli {

enum class ColorWhen : uint8_t { automatic, always, never };

// NO_COLOR, CLICOLOR=0, CLICOLOR_FORCE, TERM=dumb and not being a terminal count only under `automatic`.
bool use_color(ColorWhen when, int descriptor);
bool is_terminal(int descriptor);
int terminal_columns();

// Data. The first failed write is remembered; finish_output() reports it as ErrorCode::io (a closed pipe is
// not an error: the reader had enough).
void put(std::string_view text);
void flush_output();  // what was put so far is seen now
void finish_output();

// Diagnostics: to standard error, whole, unbuffered.
void say(std::string_view text);

// Lines and one status line on standard error.
class Progress : public train::ProgressSink {
 public:
  // `shown` false: only warnings (a rank other than 0, or --quiet). `prefix` begins each line.
  Progress(bool shown, bool color);
  ~Progress() override;
  void line(const std::string& text) override;
  void warning(const std::string& text) override;
  void status(const std::string& text) override;
  bool terminal() const override { return terminal_; }
  void stop_requested(std::string_view text) noexcept override;

  // Elsewhere than on a terminal, work without a rhythm of its own writes a status as a line this often.
  void plain_status_every(std::chrono::seconds interval) { interval_ = interval; }

 private:
  void clear();
  bool shown_, color_, terminal_;
  bool drawn_ = false;
  std::chrono::seconds interval_{0};
  std::chrono::steady_clock::time_point last_plain_{};
};

}  // namespace capstan::cli
