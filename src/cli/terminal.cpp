#include "cli/terminal.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan::cli {

namespace {

int g_output_error = 0;

bool set_to_something(const char* name) {
  const char* value = std::getenv(name);
  return value && *value;
}

bool write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace

bool is_terminal(int descriptor) {
  // Under a launcher the ranks' standard error is a pipe that ends at the parent's terminal (launch.cpp).
  if (descriptor == STDERR_FILENO && set_to_something("CAPSTAN_PARENT_TERMINAL")) return true;
  return ::isatty(descriptor) != 0;
}

bool use_color(ColorWhen when, int descriptor) {
  if (when != ColorWhen::automatic) return when == ColorWhen::always;
  if (set_to_something("NO_COLOR")) return false;
  const char* force = std::getenv("CLICOLOR_FORCE");
  if (force && *force && std::strcmp(force, "0") != 0) return true;
  const char* setting = std::getenv("CLICOLOR");
  if (setting && std::strcmp(setting, "0") == 0) return false;
  const char* term = std::getenv("TERM");
  if (!term || std::strcmp(term, "dumb") == 0) return false;
  return is_terminal(descriptor);
}

int terminal_columns() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 100;
}

void put(std::string_view text) {
  if (g_output_error == 0 && std::fwrite(text.data(), 1, text.size(), stdout) != text.size())
    g_output_error = errno;
}

void flush_output() {
  if (std::fflush(stdout) != 0 && g_output_error == 0) g_output_error = errno;
}

void finish_output() {
  if (std::fflush(stdout) != 0 && g_output_error == 0) g_output_error = errno;
  if (g_output_error != 0 && g_output_error != EPIPE)
    fail(ErrorCode::io, "cannot write to standard output: " + system_error_text(g_output_error));
}

void print_stderr(std::string_view text) {
  flush_output();
  write_all(STDERR_FILENO, text);
}

Progress::Progress(bool shown, bool color)
    : shown_(shown), color_(color), terminal_(shown && is_terminal(STDERR_FILENO)) {}

Progress::~Progress() {
  clear();
}

void Progress::clear() {
  if (drawn_) write_all(STDERR_FILENO, "\r\x1b[K");
  drawn_ = false;
}

void Progress::line(const std::string& text) {
  if (!shown_) return;
  clear();
  write_all(STDERR_FILENO, escape_controls(text) + "\n");
}

void Progress::warning(const std::string& text) {
  clear();
  write_all(STDERR_FILENO,
            (color_ ? "\x1b[33mwarning:\x1b[0m " : "warning: ") + escape_controls(text) + "\n");
}

void Progress::stop_requested(std::string_view text) noexcept {
  if (!shown_) return;
  // Clears the line, on which the terminal may have written ^C.
  if (terminal_) write_all(STDERR_FILENO, "\r\x1b[K");
  write_all(STDERR_FILENO, text);
  write_all(STDERR_FILENO, "\n");
}

void Progress::status(const std::string& text) {
  if (!shown_) return;
  if (!terminal_) {
    const auto now = std::chrono::steady_clock::now();
    if (interval_.count() == 0 || now - last_plain_ < interval_) return;
    last_plain_ = now;
    write_all(STDERR_FILENO, text + "\n");
    return;
  }
  // One line, truncated at the edge: a wrapped status could not be redrawn.
  const size_t most = static_cast<size_t>(std::max(20, terminal_columns() - 1));
  std::string shown;
  size_t columns = 0;
  for (size_t at = 0; at < text.size() && columns < most; ++columns) {
    const size_t bytes = static_cast<size_t>(decode_utf8(text, at).bytes);
    shown.append(text, at, bytes);
    at += bytes;
  }
  write_all(STDERR_FILENO, "\r" + shown + "\x1b[K");
  drawn_ = true;
}

void report_html_pages(Progress& progress, const HtmlPages& pages) {
  if (const std::string text = pages.warning(); !text.empty()) progress.warning(text);
  if (const std::string text = pages.note(); !text.empty()) progress.line("note: " + text);
}

}  // namespace capstan::cli
