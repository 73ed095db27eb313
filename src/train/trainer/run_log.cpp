#include "train/trainer/run_log.hpp"

#include <utility>

namespace capstan::train {

void RunLog::open(const std::filesystem::path& path) {
  file_ = std::make_unique<records::LogFile>(path);
  for (const std::string& text : std::exchange(pending_, {})) file_->line(text);
}

void RunLog::log_only(const std::string& text) {
  if (file_)
    file_->line(text);
  else
    pending_.push_back(text);
}

void RunLog::line(const std::string& text) {
  if (is_rank0_) sink_.line(text);
  log_only(text);
}

void RunLog::warning(const std::string& text) {
  if (is_rank0_) sink_.warning(text);
  log_only("warning: " + text);
}

}  // namespace capstan::train
