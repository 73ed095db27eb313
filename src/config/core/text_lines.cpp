#include "config/core/text_lines.hpp"

#include <algorithm>

#include "base/utf8.hpp"

namespace capstan::config {

TextLines::TextLines(int source, std::string_view text) : source_(source), text_(text) {
  begins_.push_back(0);
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == '\n') begins_.push_back(i + 1);
}
size_t TextLines::offset(size_t line, size_t column) const {
  return line < begins_.size() ? std::min(text_.size(), begins_[line] + column) : text_.size();
}
SourceLocation TextLines::location(size_t offset, size_t bytes) const {
  const size_t line = line_of(offset);
  if (line != last_line_ || offset < last_offset_) {
    last_line_ = line;
    last_offset_ = begins_[line];
    last_column_ = 1;
  }
  last_column_ += static_cast<int>(count_code_points(text_.substr(last_offset_, offset - last_offset_)));
  last_offset_ = offset;
  std::string_view covered = text_.substr(std::min(offset, text_.size()), bytes);
  covered = covered.substr(0, covered.find('\n'));
  return {source_, static_cast<int>(line) + 1, last_column_,
          std::max(1, static_cast<int>(count_code_points(covered)))};
}
std::string_view TextLines::line(size_t number) const {
  if (number >= begins_.size()) return {};
  return text_.substr(begins_[number], text_.find('\n', begins_[number]) - begins_[number]);
}
size_t TextLines::line_of(size_t offset) const {
  return static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), offset) - begins_.begin()) - 1;
}

}  // namespace capstan::config
