#include "train/records/log_file.hpp"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/basic_file_sink.h>

#include "base/error.hpp"

namespace capstan::records {

struct LogFile::Sink {
  explicit Sink(const std::filesystem::path& path)
      : logger("run", std::make_shared<spdlog::sinks::basic_file_sink_st>(path.string())) {
    logger.set_formatter(
        std::make_unique<spdlog::pattern_formatter>("%Y-%m-%dT%H:%M:%SZ %v", spdlog::pattern_time_type::utc));
    logger.flush_on(spdlog::level::info);
    // The library would print on standard error at each failure; the trainer says what matters there.
    logger.set_error_handler([](const std::string&) {});
  }
  spdlog::logger logger;
};

LogFile::LogFile(const std::filesystem::path& path) {
  try {
    sink_ = std::make_unique<Sink>(path);
  } catch (const spdlog::spdlog_ex& problem) {
    fail(ErrorCode::io, "cannot write the log " + path.string() + ": " + problem.what());
  }
}

LogFile::~LogFile() = default;

void LogFile::line(const std::string& text) noexcept {
  sink_->logger.log(spdlog::level::info, spdlog::string_view_t(text));
}

void LogFile::warning(const std::string& text) noexcept {
  line("warning: " + text);
}

}  // namespace capstan::records
