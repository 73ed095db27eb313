// Ranges of elements of flat tensors.
#pragma once

#include <algorithm>
#include <cstdint>

namespace capstan {

struct FlatRange {
  int64_t begin = 0, count = 0;
  int64_t end() const { return begin + count; }
};

// The range that two ranges have in common; count 0: none.
inline FlatRange intersection(const FlatRange& a, const FlatRange& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max<int64_t>(0, std::min(a.end(), b.end()) - begin)};
}

}  // namespace capstan
