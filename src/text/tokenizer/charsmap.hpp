// The table of replacements that SentencePiece compiles into its models (`precompiled_charsmap`): a
// double-array trie of what is replaced, and the texts that it is replaced by.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::text {

class Charsmap {
 public:
  // Throws ErrorCode::format when the sizes, the trie's links or the texts' ends are wrong; `place` begins
  // the message.
  Charsmap(std::string_view blob, const std::string& place);

  struct Match {
    size_t bytes;           // of the text, > 0
    std::string_view text;  // takes their place
  };
  // The longest, or the shortest, entry that the text begins with.
  std::optional<Match> longest(std::string_view text) const { return match(text, true); }
  std::optional<Match> shortest(std::string_view text) const { return match(text, false); }

 private:
  std::optional<Match> match(std::string_view text, bool longest) const;

  static constexpr size_t kMostBytes = 1024;  // a longer text is no entry
  std::vector<uint32_t> units_;
  std::string texts_;  // each ends with NUL
};

}  // namespace capstan::text
