#include "text/tokenizer/utf8_lossy.hpp"

#include <algorithm>

#include "base/utf8.hpp"

namespace capstan::text {

namespace {

// Length of the longest incomplete character at the beginning of `bytes`, which do not begin with a complete
// character; 0 if they begin with no valid character. Appending the smallest and the largest continuation
// bytes completes any valid beginning.
size_t incomplete_character(std::string_view bytes) {
  for (size_t length = std::min<size_t>(3, bytes.size()); length > 0; --length)
    for (const char* rest : {"\x80\x80\x80", "\xBF\xBF\xBF"})
      if (decode_utf8(std::string(bytes.substr(0, length)) + rest, 0).bytes > static_cast<int>(length))
        return length;
  return 0;
}

}  // namespace

size_t append_lossy(std::string& out, std::string_view bytes, bool last) {
  size_t at = 0;
  while (at < bytes.size()) {
    const CodePoint c = decode_utf8(bytes, at);
    if (c.bytes > 1 || c.value < 0x80) {
      out += bytes.substr(at, static_cast<size_t>(c.bytes));
      at += static_cast<size_t>(c.bytes);
      continue;
    }
    const size_t begun = incomplete_character(bytes.substr(at));
    if (begun == bytes.size() - at && !last) return at;
    out += kReplacementCharacter;
    at += std::max<size_t>(1, begun);
  }
  return at;
}

}  // namespace capstan::text
