// A regular expression of a tokenizer.json, in Oniguruma's syntax. Only patterns without a scanner use it.
// Its character classes follow the Unicode version of the installed Oniguruma (14 in Debian 12).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/function_ref.hpp"

namespace capstan::text {

class Pattern {
 public:
  // Throws ErrorCode::format when the expression does not compile, ErrorCode::unsupported for Unicode blocks
  // (\p{InCyrillic}), in which versions of Oniguruma differ, and for calls of groups (\g<name>), which can
  // take exponential time to compile.
  static std::shared_ptr<const Pattern> compile(std::string_view regex);
  static std::shared_ptr<const Pattern> literal(std::string_view text);

  // Calls match(begin, end) for every match, left to right, without overlaps; an empty match directly after
  // another match is skipped. A match contains valid UTF-8 only, and each search is bounded: throws
  // ErrorCode::format when it needs too much backtracking or memory.
  void find_all(std::string_view text, FunctionRef<void(size_t begin, size_t end)> match) const;

 private:
  Pattern() = default;
  struct Code;
  std::shared_ptr<const Code> code_;
  std::string regex_;
  // A literal text, which is searched without Oniguruma.
  std::string literal_;
};

}  // namespace capstan::text
