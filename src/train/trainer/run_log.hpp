// The lines that a run reports: to the sink of the program that runs it, and to log.txt in the run directory.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "train/records/log_file.hpp"
#include "train/trainer/progress.hpp"

namespace capstan::train {

// The log of a run; only rank 0 writes it. Lines from before open() are kept, and written to the file when it
// is opened.
class RunLog {
 public:
  RunLog(ProgressSink& sink, bool is_rank0) : sink_(sink), is_rank0_(is_rank0) {}

  // Opens log.txt on rank 0.
  void open(const std::filesystem::path& path);

  // Writes to the file only.
  void log_only(const std::string& text);
  void line(const std::string& text);
  void warning(const std::string& text);
  // Replaces the progress line of a terminal. It is not written to the file.
  void status(const std::string& text) {
    if (is_rank0_) sink_.status(text);
  }

  bool terminal() const { return is_rank0_ && sink_.terminal(); }
  // Null on ranks other than 0.
  ProgressSink* sink() const { return is_rank0_ ? &sink_ : nullptr; }

 private:
  ProgressSink& sink_;
  bool is_rank0_;
  std::unique_ptr<records::LogFile> file_;
  std::vector<std::string> pending_;
};

}  // namespace capstan::train
