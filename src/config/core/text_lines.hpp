// The lines of a text: byte offsets as locations.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "config/core/diagnostics.hpp"

namespace capstan::config {

// Locations are fast in the order of the text, because characters of a line are counted from the last
// location.
class TextLines {
 public:
  // source: index of the source that locations name. The text must outlive the object.
  TextLines(int source, std::string_view text);

  std::string_view text() const { return text_; }
  // Returns the location of `bytes` bytes at `offset`, as far as they are on its line.
  SourceLocation location(size_t offset, size_t bytes = 1) const;
  // Returns the offset of a byte of a line; the size of the text if it has no such line or byte. Lines and
  // columns are counted from 0, here and below.
  size_t offset(size_t line, size_t column) const;
  size_t line_of(size_t offset) const;
  size_t begin_of(size_t line) const { return begins_[line]; }
  // Returns a line without its end; empty if there is none.
  std::string_view line(size_t number) const;

 private:
  int source_;
  std::string_view text_;
  std::vector<size_t> begins_;
  // Line, offset and column of the last location.
  mutable size_t last_line_ = static_cast<size_t>(-1), last_offset_ = 0;
  mutable int last_column_ = 1;
};

}  // namespace capstan::config
