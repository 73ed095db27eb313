// log.txt of a run: every line and warning that the run said, with the time in UTC, over all its starts.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

namespace capstan::records {

class LogFile {
 public:
  explicit LogFile(const std::filesystem::path& path);  // appends; throws ErrorCode::io when it cannot
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;
  // Each text is in the file when the call returns. A full disk loses lines, never the run.
  void line(const std::string& text) noexcept;
  void warning(const std::string& text) noexcept;

 private:
  struct Sink;
  std::unique_ptr<Sink> sink_;
};

}  // namespace capstan::records
