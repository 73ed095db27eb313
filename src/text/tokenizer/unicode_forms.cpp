#include "text/tokenizer/unicode_forms.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <optional>

#include "text/tokenizer/unicode_history.hpp"

namespace capstan::text {

namespace {

uint8_t combining_class(char32_t c) {
  if (c >= kRawByte || is_later_mark(c)) return 0;
  return static_cast<uint8_t>(utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class);
}

// Returns the composition of two characters, or 0.
char32_t compose(char32_t first, char32_t second) {
  if (first >= kRawByte || second >= kRawByte || second < 0x300) return 0;
  std::array<utf8proc_int32_t, 2> pair = {static_cast<utf8proc_int32_t>(first),
                                          static_cast<utf8proc_int32_t>(second)};
  const auto count = utf8proc_normalize_utf32(
      pair.data(), 2, static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  return count == 1 ? static_cast<char32_t>(pair[0]) : 0;
}

// The decomposed text, marks in canonical order.
void decompose(bool compatible, std::string_view text, std::vector<Change>& out) {
  const auto options = static_cast<utf8proc_option_t>(compatible ? UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT
                                                                 : UTF8PROC_DECOMPOSE | UTF8PROC_STABLE);
  // End of the last character of class 0.
  size_t starter = 0;
  std::vector<std::pair<uint8_t, Change>> marks;
  const auto sort_marks = [&](size_t end) {
    if (end - starter < 2) return;
    marks.clear();
    for (size_t i = starter; i < end; ++i) marks.emplace_back(combining_class(out[i].value), out[i]);
    std::stable_sort(marks.begin(), marks.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = starter; i < end; ++i) out[i] = marks[i - starter].second;
  };
  for_each_character(text, [&](char32_t c, size_t) {
    std::array<utf8proc_int32_t, 32> part;
    utf8proc_ssize_t count = 1;
    part[0] = static_cast<utf8proc_int32_t>(c);
    if (c >= 0xA0 && c < kRawByte && !has_later_decomposition(c)) {
      int boundary = 0;
      count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), part.data(), part.size(), options,
                                      &boundary);
      if (count < 1 || count > static_cast<utf8proc_ssize_t>(part.size())) {
        part[0] = static_cast<utf8proc_int32_t>(c);
        count = 1;
      }
    }
    for (utf8proc_ssize_t i = 0; i < count; ++i) {
      const auto value = static_cast<char32_t>(part[static_cast<size_t>(i)]);
      if (value < 0x300 || combining_class(value) == 0) {
        sort_marks(out.size());
        starter = out.size() + 1;
      }
      out.push_back({value, i > 0 ? 1 : 0});
    }
  });
  sort_marks(out.size());
}

// Composes characters. A composed character counts in `change` the characters that it replaces.
void recompose(const std::vector<Change>& in, std::vector<Change>& out) {
  // Marks after the starter that did not combine with it.
  std::vector<Change> pending;
  std::optional<Change> starter;
  uint8_t last_class = 0;
  const auto flush = [&] {
    if (starter) out.push_back(*starter);
    out.insert(out.end(), pending.begin(), pending.end());
    pending.clear();
  };
  for (const Change& next : in) {
    const uint8_t rank = next.value < 0x300 ? 0 : combining_class(next.value);
    if (!starter) {
      if (rank != 0)
        out.push_back(next);
      else
        starter = next;
      continue;
    }
    if (pending.empty() || last_class < rank) {
      if (const char32_t joined = compose(starter->value, next.value)) {
        *starter = {joined, starter->change + next.change - 1};
        continue;
      }
      if (!pending.empty() || rank != 0) {
        pending.push_back(next);
        last_class = rank;
        continue;
      }
    } else if (rank != 0) {
      pending.push_back(next);
      last_class = rank;
      continue;
    }
    flush();
    starter = next;
  }
  flush();
}

}  // namespace

bool normal_form(UnicodeForm form, std::string_view text, Changes& changes) {
  // No character below U+00A0 decomposes or composes with another one below.
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; }))
    return false;
  const bool compatible = form == UnicodeForm::nfkc || form == UnicodeForm::nfkd;
  if (form == UnicodeForm::nfd || form == UnicodeForm::nfkd) {
    decompose(compatible, text, changes.list);
    return true;
  }
  std::vector<Change> parts;
  decompose(compatible, text, parts);
  recompose(parts, changes.list);
  return true;
}

}  // namespace capstan::text
