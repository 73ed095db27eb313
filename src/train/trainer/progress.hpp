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
  // Prints a warning, which stays like a line.
  virtual void warning(const std::string& text) = 0;
  // Replaces the last status on a terminal. Elsewhere it does nothing; the trainer also writes lines at its
  // intervals.
  virtual void status(const std::string& text) = 0;
  virtual bool terminal() const = 0;
  // A signal asks the run to stop. The text says when the run stops, or that a second signal has ended it.
  // Called in the signal handler: write the text at once, with async-signal-safe functions only.
  virtual void stop_requested(std::string_view) noexcept {}
};

}  // namespace capstan::train
