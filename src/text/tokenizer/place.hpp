// Where something lies in a text.
#pragma once

#include <cstddef>

namespace capstan::text {

// Bytes [begin, end) of the original text.
struct Place {
  size_t begin = 0, end = 0;
  bool operator==(const Place&) const = default;
};

}  // namespace capstan::text
