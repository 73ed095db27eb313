#include "text/chat/text_functions.hpp"

#include <utf8proc.h>

#include <algorithm>

#include "base/utf8.hpp"
#include "text/chat/value.hpp"

namespace capstan::text::chat {

namespace {

// Calls f(code point) for each character.
template <class F>
std::string mapped(std::string_view text, F f) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = decode_utf8(text, i);
    append_utf8(out, f(point.value));
    i += static_cast<size_t>(point.bytes);
  }
  return out;
}
// ß, whose upper-case form in Python is SS.
constexpr char32_t kSharpS = 0xDF;
char32_t up(char32_t c) {
  return c == kSharpS ? c : static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c)));
}
char32_t down(char32_t c) {
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}
char32_t titled(char32_t c) {
  return static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c)));
}

}  // namespace

// Other letters whose upper-case form has two characters are left unchanged.
std::string upper(std::string_view text) {
  return replaced(mapped(text, up), "ß", "SS", -1);
}
std::string lower(std::string_view text) {
  return mapped(text, down);
}
std::string capitalized(std::string_view text) {
  bool first = true;
  return mapped(text, [&](char32_t c) { return std::exchange(first, false) ? titled(c) : down(c); });
}
std::string title_by_letters(std::string_view text) {
  bool inside = false;
  return mapped(text, [&](char32_t c) {
    const bool cased = up(c) != c || down(c) != c;
    const char32_t result = inside ? down(c) : titled(c);
    inside = cased;
    return result;
  });
}
std::string title_by_words(std::string_view text) {
  bool inside = false;
  return mapped(text, [&](char32_t c) {
    std::string one;
    append_utf8(one, c);
    const bool between = one.find_first_of("-({[<") != std::string::npos || blank_at(one, 0) > 0;
    const char32_t result = inside ? down(c) : up(c);
    inside = !between;
    return result;
  });
}

std::string_view stripped(std::string_view text, std::optional<std::string_view> characters, StripSide side) {
  if (!characters) {
    if (side != StripSide::back) text = strip_front(text);
    if (side != StripSide::front) text = strip_back(text);
    return text;
  }
  const auto taken = [&](std::string_view c) { return characters->find(c) != std::string_view::npos; };
  while (side != StripSide::back && !text.empty()) {
    const auto length = static_cast<size_t>(decode_utf8(text, 0).bytes);
    if (!taken(text.substr(0, length))) break;
    text.remove_prefix(length);
  }
  while (side != StripSide::front && !text.empty()) {
    const size_t start = character_start(text, text.size() - 1);
    if (!taken(text.substr(start))) break;
    text.remove_suffix(text.size() - start);
  }
  return text;
}

std::vector<std::string> split_text(std::string_view text, std::optional<std::string_view> separator,
                                    int64_t most, bool from_back) {
  std::vector<std::string> parts;
  const auto full = [&] { return most >= 0 && static_cast<int64_t>(parts.size()) >= most; };
  if (!separator) {
    text = from_back ? strip_back(text) : strip_front(text);
    while (!text.empty()) {
      if (full()) {
        parts.emplace_back(text);
        break;
      }
      size_t at = from_back ? text.size() : 0;
      if (from_back) {
        while (at > 0) {
          const size_t start = character_start(text, at - 1);
          if (blank_at(text, start) > 0) break;
          at = start;
        }
        parts.emplace_back(text.substr(at));
        text = strip_back(text.substr(0, at));
      } else {
        while (at < text.size() && blank_at(text, at) == 0) ++at;
        parts.emplace_back(text.substr(0, at));
        text = strip_front(text.substr(at));
      }
    }
  } else {
    for (;;) {
      const size_t at = full()      ? std::string_view::npos
                        : from_back ? text.rfind(*separator)
                                    : text.find(*separator);
      if (at == std::string_view::npos) break;
      if (from_back) {
        parts.emplace_back(text.substr(at + separator->size()));
        text = text.substr(0, at);
      } else {
        parts.emplace_back(text.substr(0, at));
        text = text.substr(at + separator->size());
      }
    }
    parts.emplace_back(text);
  }
  if (from_back) std::reverse(parts.begin(), parts.end());
  return parts;
}

namespace {

// Length of the line break at `at`, as Python's str.splitlines() defines it; 0: there is none.
size_t line_break(std::string_view text, size_t at) {
  const std::string_view rest = text.substr(at);
  for (const std::string_view wide : {"\r\n", "\xC2\x85", "\xE2\x80\xA8", "\xE2\x80\xA9"})
    if (rest.starts_with(wide)) return wide.size();
  return std::string_view("\n\v\f\r\x1C\x1D\x1E").find(rest.front()) != std::string_view::npos ? 1 : 0;
}

}  // namespace

std::vector<std::string> split_lines(std::string_view text) {
  std::vector<std::string> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t ending = line_break(text, at);
    if (ending > 0) lines.emplace_back(text.substr(begin, at - begin));
    at += std::max<size_t>(ending, 1);
    if (ending > 0) begin = at;
  }
  if (begin < text.size()) lines.emplace_back(text.substr(begin));
  return lines;
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to, int64_t most) {
  std::string out;
  size_t at = 0;
  for (int64_t count = 0; most < 0 || count < most; ++count) {
    if (from.empty()) {
      // An empty `from` matches between all characters and at both ends.
      if (at > text.size()) break;
      out += to;
      if (at == text.size()) return out;
      const auto length = static_cast<size_t>(decode_utf8(text, at).bytes);
      out += text.substr(at, length);
      at += length;
      continue;
    }
    const size_t found = text.find(from, at);
    if (found == std::string_view::npos) break;
    out += text.substr(at, found - at);
    out += to;
    at = found + from.size();
  }
  out += text.substr(std::min(at, text.size()));
  return out;
}

}  // namespace capstan::text::chat
