// The text of a template, and errors at offsets in it.
#pragma once

#include <string>
#include <string_view>

#include "base/error.hpp"

namespace capstan::text::chat {

class Source {
 public:
  static constexpr size_t kMaxBytes = 1 << 20;

  // Converts line breaks to `\n` and removes one at the end, as Jinja2 does. Throws ErrorCode::format for a
  // text above kMaxBytes.
  Source(std::string name, std::string_view text);

  const std::string& name() const { return name_; }
  std::string_view text() const { return text_; }
  // Throws the message "NAME:LINE:COLUMN: what: `the line`". Line and column count from 1; the column counts
  // characters.
  [[noreturn]] void fail_at(size_t offset, const std::string& what, ErrorCode code = ErrorCode::format,
                            std::string help = {}) const;

 private:
  std::string name_, text_;
};

}  // namespace capstan::text::chat
