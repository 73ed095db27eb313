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
  // Throws ErrorCode::format when the sizes, the trie's links or the texts' ends are wrong; `location` begins
  // the message.
  Charsmap(std::string_view blob, const std::string& location);

  struct Match {
    // Length of the matched text in bytes, > 0.
    size_t bytes;
    // The replacement of the matched text.
    std::string_view text;
  };
  // Returns the longest, or the shortest, entry that the text begins with.
  std::optional<Match> longest(std::string_view text) const { return match(text, true); }
  std::optional<Match> shortest(std::string_view text) const { return match(text, false); }

 private:
  std::optional<Match> match(std::string_view text, bool longest) const;

  // Entries are no longer than this.
  static constexpr size_t kMaxBytes = 1024;
  std::vector<uint32_t> units_;
  // The replacement texts, each terminated by NUL.
  std::string texts_;
};

}  // namespace capstan::text
