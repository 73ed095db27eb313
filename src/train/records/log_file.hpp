// The log.txt of a run: every line and warning of all its starts, with the time in UTC.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

namespace capstan::records {

class LogFile {
 public:
  // Opens the file for appending. Throws ErrorCode::io if that fails.
  explicit LogFile(const std::filesystem::path& path);
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;
  // Each text is in the file when the call returns. On a full disk lines are lost, but the run continues.
  void line(const std::string& text) noexcept;
  void warning(const std::string& text) noexcept;

 private:
  struct Sink;
  std::unique_ptr<Sink> sink_;
};

}  // namespace capstan::records
