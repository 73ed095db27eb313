// A range of bytes in a text.
#pragma once

#include <cstddef>

namespace capstan::text {

// Bytes [begin, end) of the original text.
struct OffsetRange {
  size_t begin = 0, end = 0;
  bool operator==(const OffsetRange&) const = default;
};

}  // namespace capstan::text
