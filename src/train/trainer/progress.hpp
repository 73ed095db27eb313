// Receives the reports of the trainer, which never prints: the program that runs it (or a test) passes a
// sink.
#pragma once

#include <string>
#include <string_view>

namespace capstan::train {

class ProgressSink {
 public:
  virtual ~ProgressSink() = default;
  // Prints a line that stays on the screen; status() is overwritten.
  virtual void line(const std::string& text) = 0;
  // Stays, marked as a warning.
  virtual void warning(const std::string& text) = 0;
  // Replaces the last status on a terminal; elsewhere nothing happens, the trainer writes lines at its
  // intervals.
  virtual void status(const std::string& text) = 0;
  virtual bool terminal() const = 0;
  // A signal asks the run to stop; the text says when it will. Called within the signal handler: write it at
  // once, and do nothing that a handler may not do.
  virtual void stop_requested(std::string_view) noexcept {}
};

}  // namespace capstan::train
