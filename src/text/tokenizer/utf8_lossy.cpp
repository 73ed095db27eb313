#include "text/tokenizer/utf8_lossy.hpp"

namespace capstan::text {

size_t append_lossy(std::string& out, std::string_view bytes, bool last) {
  size_t i = 0;
  while (i < bytes.size()) {
    const auto at = [&](size_t k) { return static_cast<unsigned char>(bytes[i + k]); };
    const unsigned first = at(0);
    if (first < 0x80) {
      out += bytes[i++];
      continue;
    }
    const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    if (first < 0xC2 || first > 0xF4) {
      out += kReplacementCharacter;
      ++i;
      continue;
    }
    size_t good = 1;
    while (good < length && i + good < bytes.size()) {
      const unsigned low = good > 1 ? 0x80 : first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
      const unsigned high = good > 1 ? 0xBF : first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
      if (at(good) < low || at(good) > high) break;
      ++good;
    }
    if (good == length) {
      out += bytes.substr(i, length);
    } else if (i + good == bytes.size() && !last) {
      return i;
    } else {
      out += kReplacementCharacter;
    }
    i += good;
  }
  return i;
}

}  // namespace capstan::text
