// Where the trainer speaks. It never prints: the program that runs it (or a test) hands in a sink.
#pragma once

#include <string>

namespace capstan::train {

class ProgressSink {
 public:
  virtual ~ProgressSink() = default;
  virtual void line(const std::string& text) = 0;     // stays
  virtual void warning(const std::string& text) = 0;  // stays, marked as a warning
  // Replaces the last status on a terminal; elsewhere nothing happens, the trainer writes lines at its intervals.
  virtual void status(const std::string& text) = 0;
  virtual bool terminal() const = 0;
};

}  // namespace capstan::train
