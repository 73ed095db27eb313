// A regular expression of a tokenizer.json, in Oniguruma's syntax (oniguruma.hpp; PCRE2, interpreted, bounded), for
// patterns without a scanner. Its classes are of PCRE2's own Unicode version (14 in Debian 12).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/function_ref.hpp"

namespace capstan::data {

class Pattern {
 public:
  // Throws ErrorCode::format when it does not compile, ErrorCode::unsupported when PCRE2 cannot find the same.
  static std::shared_ptr<const Pattern> compile(std::string_view regex);
  static std::shared_ptr<const Pattern> literal(std::string_view text);

  // Calls match(begin, end) for every match, left to right, without overlaps; an empty match directly after
  // another match is left out. Throws ErrorCode::format when the limits on backtracking are reached: no text
  // makes it hang.
  void find_all(std::string_view text, FunctionRef<void(size_t begin, size_t end)> match) const;

 private:
  Pattern() = default;
  static std::shared_ptr<Pattern> make(std::string_view regex);
  struct Code;
  std::shared_ptr<const Code> code_;
  std::string regex_, literal_;  // a literal is looked for without the engine
};

}  // namespace capstan::data
