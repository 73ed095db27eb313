// Standard output and standard error: colors, one redrawn status line, and reported write errors.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "base/missing.hpp"
#include "train/trainer/progress.hpp"

namespace capstan::cli {

enum class ColorWhen : uint8_t { automatic, always, never };

// NO_COLOR, CLICOLOR=0, CLICOLOR_FORCE, TERM=dumb and the kind of descriptor count only under `automatic`.
bool use_color(ColorWhen when, int descriptor);
bool is_terminal(int descriptor);
int terminal_columns();

// Writes data to standard output. finish_output() reports the first failed write as ErrorCode::io; a closed
// pipe is not an error.
void put(std::string_view text);
void flush_output();
void finish_output();

// Writes diagnostics to standard error, unbuffered, after flushing standard output.
void print_stderr(std::string_view text);

// Lines and one status line on standard error.
class Progress : public train::ProgressSink {
 public:
  // shown: false on a rank other than 0 and with --quiet; then only warnings are printed.
  Progress(bool shown, bool color);
  ~Progress() override;
  void line(const std::string& text) override;
  void warning(const std::string& text) override;
  void status(const std::string& text) override;
  bool terminal() const override { return terminal_; }
  void stop_requested(std::string_view text) noexcept override;

  // Without a terminal, prints the status as a line this often.
  void plain_status_every(std::chrono::seconds interval) { interval_ = interval; }

 private:
  void clear();
  bool shown_, color_, terminal_;
  bool drawn_ = false;
  std::chrono::seconds interval_{0};
  std::chrono::steady_clock::time_point last_plain_{};
};

// Warns of HTML pages among files of text that are named otherwise, and notes the others.
void report_html_pages(Progress& progress, const HtmlPages& pages);

}  // namespace capstan::cli
