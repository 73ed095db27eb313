// The text of a template, and places in it.
#pragma once

#include <string>
#include <string_view>

#include "base/error.hpp"

namespace capstan::text::chat {

class Source {
 public:
  static constexpr size_t kMaxBytes = 1 << 20;

  // Line breaks become `\n`, one at the end goes, as Jinja2 reads it. ErrorCode::format beyond kMaxBytes.
  Source(std::string name, std::string_view text);

  const std::string& name() const { return name_; }
  std::string_view text() const { return text_; }
  // "NAME:LINE:COLUMN: what: `the line`"; line and column from 1, the column in characters.
  [[noreturn]] void fail_at(size_t offset, const std::string& what, ErrorCode code = ErrorCode::format,
                            std::string help = {}) const;

 private:
  std::string name_, text_;
};

}  // namespace capstan::text::chat
