#include "text/tokenizer/byte_trie.hpp"

#include <algorithm>

namespace capstan::text {

ByteTrie::ByteTrie(std::vector<std::pair<std::string_view, int32_t>> entries) {
  roots_.fill(-1);
  std::erase_if(entries, [](const auto& entry) { return entry.first.empty(); });
  std::stable_sort(entries.begin(), entries.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  // Builds the trie level by level. A node represents a range of entries with a common prefix.
  struct EntryRange {
    // Index of the node; -1 for the root.
    int32_t node;
    size_t begin, end;
  };
  std::vector<EntryRange> level = {{-1, 0, entries.size()}}, next;
  for (size_t depth = 0; !level.empty(); ++depth, level.swap(next)) {
    next.clear();
    for (const EntryRange& range : level) {
      size_t i = range.begin;
      for (; i < range.end && entries[i].first.size() == depth; ++i)
        if (range.node >= 0) nodes_[static_cast<size_t>(range.node)].value = entries[i].second;
      const auto first = static_cast<int32_t>(nodes_.size());
      while (i < range.end) {
        const auto byte = static_cast<unsigned char>(entries[i].first[depth]);
        size_t stop = i;
        while (stop < range.end && static_cast<unsigned char>(entries[stop].first[depth]) == byte) ++stop;
        const auto node = static_cast<int32_t>(nodes_.size());
        nodes_.push_back({-1, 0, 0, byte});
        if (range.node < 0) roots_[byte] = node;
        next.push_back({node, i, stop});
        i = stop;
      }
      if (range.node >= 0) {
        nodes_[static_cast<size_t>(range.node)].first = first;
        nodes_[static_cast<size_t>(range.node)].count =
            static_cast<int16_t>(static_cast<int32_t>(nodes_.size()) - first);
      }
    }
  }
}

}  // namespace capstan::text
