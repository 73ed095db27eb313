#include "text/tokenizer/added_tokens.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "text/tokenizer/unicode.hpp"

namespace capstan::text {

namespace {

// Finds the longest pattern that begins at each byte of a text: an Aho-Corasick automaton of the reversed
// patterns reads the text from its end.
class LongestMatches {
 public:
  struct Match {
    int32_t token = -1;
    uint32_t bytes = 0;
  };

  LongestMatches(const std::vector<std::pair<std::string, int32_t>>& patterns, std::string_view text) {
    for (const auto& [pattern, token] : patterns) {
      int32_t node = 0;
      for (auto byte = pattern.rbegin(); byte != pattern.rend(); ++byte) {
        int32_t next = child(node, *byte);
        if (next < 0) {
          next = static_cast<int32_t>(nodes_.size());
          nodes_.push_back({-1, nodes_[static_cast<size_t>(node)].child, 0, {}, *byte});
          nodes_[static_cast<size_t>(node)].child = next;
        }
        node = next;
      }
      nodes_[static_cast<size_t>(node)].longest = {token, static_cast<uint32_t>(pattern.size())};
    }
    std::vector<int32_t> queue = {0};
    for (size_t i = 0; i < queue.size(); ++i) {
      const int32_t parent = queue[i];
      for (int32_t node = at(parent).child; node >= 0; node = at(node).sibling) {
        queue.push_back(node);
        at(node).fail = parent == 0 ? 0 : step(at(parent).fail, at(node).byte);
        if (at(node).longest.token < 0) at(node).longest = at(at(node).fail).longest;
      }
    }
    matches_.resize(text.size());
    int32_t state = 0;
    for (size_t i = text.size(); i-- > 0;) {
      state = step(state, text[i]);
      matches_[i] = at(state).longest;
    }
  }
  const Match& operator[](size_t offset) const { return matches_[offset]; }

 private:
  struct Node {
    int32_t child = -1, sibling = -1, fail = 0;
    Match longest;
    char byte = 0;
  };
  Node& at(int32_t node) { return nodes_[static_cast<size_t>(node)]; }
  int32_t child(int32_t node, char byte) {
    int32_t next = at(node).child;
    while (next >= 0 && at(next).byte != byte) next = at(next).sibling;
    return next;
  }
  int32_t step(int32_t state, char byte) {
    for (;; state = at(state).fail) {
      if (const int32_t next = child(state, byte); next >= 0) return next;
      if (state == 0) return 0;
    }
  }

  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::vector<Match> matches_;
};

}  // namespace

void TokenFinder::add(std::string_view pattern, int32_t token) {
  if (pattern.empty()) return;
  patterns_.emplace_back(pattern, token);
  const auto byte_at = [&](size_t i) { return static_cast<unsigned char>(pattern[i]); };
  int32_t& root = roots_[byte_at(0)];
  if (root < 0) {
    root = static_cast<int32_t>(nodes_.size());
    nodes_.push_back({-1, -1, -1, byte_at(0)});
    ++first_bytes_;
    only_first_ = byte_at(0);
  }
  int32_t node = root;
  for (size_t i = 1; i < pattern.size(); ++i) {
    int32_t child = child_of(node, byte_at(i));
    if (child < 0) {
      child = static_cast<int32_t>(nodes_.size());
      nodes_.push_back({-1, nodes_[static_cast<size_t>(node)].child, -1, byte_at(i)});
      nodes_[static_cast<size_t>(node)].child = child;
    }
    node = child;
  }
  nodes_[static_cast<size_t>(node)].token = token;
  for (size_t second = 0; second < 256; ++second)
    if (pattern.size() == 1 || second == byte_at(1)) pairs_.set(size_t{byte_at(0)} << 8 | second);
}

int32_t TokenFinder::match_at(std::string_view text, size_t begin, size_t& end, size_t& steps) const {
  int32_t node = roots_[static_cast<unsigned char>(text[begin])];
  int32_t found = -1;
  for (size_t i = begin + 1; node >= 0; ++i) {
    const Node& here = nodes_[static_cast<size_t>(node)];
    if (here.token >= 0) {
      found = here.token;
      end = i;
    }
    ++steps;
    if (i >= text.size()) break;
    node = child_of(node, static_cast<unsigned char>(text[i]));
  }
  return found;
}

// The first offset from `from` on at which a token may begin; text.size() when there is none.
size_t TokenFinder::next_candidate(std::string_view text, size_t from) const {
  if (first_bytes_ == 1) {
    const void* found =
        from < text.size() ? std::memchr(text.data() + from, only_first_, text.size() - from) : nullptr;
    return found ? static_cast<size_t>(static_cast<const char*>(found) - text.data()) : text.size();
  }
  const auto byte_at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  for (size_t i = from; i + 1 < text.size(); ++i)
    if (pairs_[size_t{byte_at(i)} << 8 | byte_at(i + 1)]) return i;
  // Only a token of one byte fits at the end of the text.
  const size_t last = text.size() - 1;
  return from < text.size() && roots_[byte_at(last)] >= 0 ? last : text.size();
}

void TokenFinder::split(std::string_view text, const std::vector<AddedToken>& tokens, bool specials_as_text,
                        FunctionRef<void(std::string_view, int32_t)> part) const {
  // End of the last token, including the white space that it absorbed.
  size_t done = 0;
  const size_t most_steps = 4096 + 8 * text.size();
  size_t steps = 0;
  // Created when the simple search has taken too many steps.
  std::optional<LongestMatches> matches;
  for (size_t at = next_candidate(text, 0); at < text.size();) {
    size_t stop = 0;
    if (steps > most_steps && !matches) matches.emplace(patterns_, text);
    int32_t index = -1;
    if (matches) {
      index = (*matches)[at].token;
      stop = at + (*matches)[at].bytes;
    } else {
      index = match_at(text, at, stop, steps);
    }
    if (index < 0) {
      at = next_candidate(text, at + 1);
      continue;
    }
    const AddedToken& token = tokens[static_cast<size_t>(index)];
    size_t start = at;
    // The search continues after this match, even if the match is rejected.
    at = stop;
    bool counts = !(specials_as_text && token.special);
    if (counts && token.single_word) {
      const bool after_word = start > 0 && is_word_character(character_before(text, start).value);
      const bool before_word =
          stop < text.size() &&
          is_word_character(decode_character(text.data() + stop, text.data() + text.size()).value);
      counts = !after_word && !before_word;
    }
    if (counts) {
      const UnicodeClasses& classes = unicode_classes();
      if (token.lstrip) {
        while (start > 0) {
          const CodePoint before = character_before(text, start);
          if (!(classes.of(before.value) & kSpace)) break;
          start -= before.bytes;
        }
        start = std::max(start, done);
      }
      if (token.rstrip) {
        while (stop < text.size()) {
          const CodePoint after = decode_character(text.data() + stop, text.data() + text.size());
          if (!(classes.of(after.value) & kSpace)) break;
          stop += after.bytes;
        }
      }
      if (done < start) part(text.substr(done, start - done), -1);
      part(text.substr(start, stop - std::min(start, stop)), token.id);
      done = stop;
    }
    at = next_candidate(text, at);
  }
  if (done < text.size()) part(text.substr(done), -1);
}

}  // namespace capstan::text
