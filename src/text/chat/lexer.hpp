// A template's text cut into tokens, with the white space rules of trim_blocks and lstrip_blocks.
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
  size_t at;         // in the source
  std::string text;  // data, the value of a text, or the token as written
};

// Ends with a token `end`. ErrorCode::format for what cannot be a token.
std::vector<Token> tokenize(const Source& source);

}  // namespace capstan::text::chat
