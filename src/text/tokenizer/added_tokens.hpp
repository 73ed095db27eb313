// Added tokens, such as <|endoftext|> and <|im_start|>, which are found in the text before it is normalized
// and split.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/function_ref.hpp"

namespace capstan::text {

struct AddedToken {
  int32_t id = -1;
  std::string content;
  // Matches only as a full word, not inside one.
  bool single_word = false;
  // Includes the white space before it.
  bool lstrip = false;
  // Includes the white space after it.
  bool rstrip = false;
  // Is searched in the normalized text, in its own normalized form.
  bool normalized = false;
  // Is dropped by decode(…, skip_special).
  bool special = false;
};

// Finds tokens in a text: the leftmost first, and of several that begin there the longest. Takes linear time:
// text that makes the simple search read its bytes repeatedly is searched by an Aho-Corasick automaton
// instead.
class TokenFinder {
 public:
  // Maximum length of one token.
  static constexpr size_t kMaxBytes = 1024;

  // Adds a token. `pattern` is the text to search for: the content, or its normalized form. `token` indexes
  // the caller's list of tokens.
  void add(std::string_view pattern, int32_t token);
  bool empty() const { return nodes_.size() == 1; }

  // Calls part(text, id) for the parts of the text in order: id is -1 for text between tokens (never empty).
  // With `specials_as_text` special tokens count as text.
  void split(std::string_view text, const std::vector<AddedToken>& tokens, bool specials_as_text,
             FunctionRef<void(std::string_view text, int32_t id)> part) const;

 private:
  struct Node {
    int32_t child = -1, sibling = -1;
    int32_t token = -1;
    unsigned char byte = 0;
  };
  int32_t child_of(int32_t node, unsigned char byte) const {
    int32_t child = nodes_[static_cast<size_t>(node)].child;
    while (child >= 0 && nodes_[static_cast<size_t>(child)].byte != byte)
      child = nodes_[static_cast<size_t>(child)].sibling;
    return child;
  }
  // Returns the token of the longest match at `begin` and sets `end` to its end; -1 without a match. Adds the
  // number of bytes read to `steps`.
  int32_t match_at(std::string_view text, size_t begin, size_t& end, size_t& steps) const;
  size_t next_candidate(std::string_view text, size_t from) const;

  std::vector<std::pair<std::string, int32_t>> patterns_;
  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::array<int32_t, 256> roots_ = [] {
    std::array<int32_t, 256> none{};
    none.fill(-1);
    return none;
  }();
  // First two bytes (a one-byte token has all that begin with it).
  std::bitset<1 << 16> pairs_;
  int first_bytes_ = 0;
  unsigned char only_first_ = 0;
};

}  // namespace capstan::text
