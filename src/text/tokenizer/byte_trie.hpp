// Maps texts to numbers and finds all entries that are prefixes of a text.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace capstan::text {

class ByteTrie {
 public:
  // If texts are equal, the last one counts.
  explicit ByteTrie(std::vector<std::pair<std::string_view, int32_t>> entries);
  ByteTrie() : ByteTrie(std::vector<std::pair<std::string_view, int32_t>>()) {}

  // Calls match(bytes, value) for every entry that the text begins with, the shortest first.
  template <class F>
  void prefixes(std::string_view text, F match) const {
    if (text.empty()) return;
    int32_t node = roots_[static_cast<unsigned char>(text[0])];
    for (size_t i = 1; node >= 0; ++i) {
      const Node& here = nodes_[static_cast<size_t>(node)];
      if (here.value >= 0) match(i, here.value);
      if (i >= text.size()) return;
      node = child(here, static_cast<unsigned char>(text[i]));
    }
  }
  bool empty() const { return nodes_.empty(); }

 private:
  struct Node {
    int32_t value = -1;
    // Index of the first child; children are adjacent and ordered by byte.
    int32_t first = 0;
    int16_t count = 0;
    unsigned char byte = 0;
  };
  int32_t child(const Node& node, unsigned char byte) const {
    int32_t low = node.first, high = node.first + node.count;
    while (low < high) {
      const int32_t middle = low + (high - low) / 2;
      const unsigned char here = nodes_[static_cast<size_t>(middle)].byte;
      if (here == byte) return middle;
      if (here < byte)
        low = middle + 1;
      else
        high = middle;
    }
    return -1;
  }

  std::vector<Node> nodes_;
  std::array<int32_t, 256> roots_;
};

}  // namespace capstan::text
