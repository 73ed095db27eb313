// A template's text split into tokens, with the white space rules of trim_blocks and lstrip_blocks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/chat/source.hpp"

namespace capstan::text::chat {

enum class TokenKind : uint8_t {
  data,
  variable_begin,
  variable_end,
  block_begin,
  block_end,
  name,
  text,
  integer,
  real,
  op,
  end
};

struct Token {
  TokenKind kind;
  // Byte offset in the source.
  size_t at;
  // The text of template data, the value of a string literal, or the token as written.
  std::string text;
};

// Returns the tokens of the source; the last one has kind `end`. Throws ErrorCode::format where no token can
// be read.
std::vector<Token> tokenize(const Source& source);

}  // namespace capstan::text::chat
