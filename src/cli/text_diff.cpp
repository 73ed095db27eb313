#include "cli/text_diff.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/text.hpp"

namespace capstan::cli {

namespace {

struct Line {
  char mark;  // ' ', '-', '+'
  std::string_view text;
};

std::vector<std::string_view> lines_of(std::string_view text) {
  auto lines = split(text, '\n');
  if (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

// The longest common subsequence, by dynamic programming over the lines between the common beginning and
// end.
std::vector<Line> aligned(const std::vector<std::string_view>& a, const std::vector<std::string_view>& b) {
  size_t head = 0, tail = 0;
  while (head < a.size() && head < b.size() && a[head] == b[head]) ++head;
  while (head + tail < a.size() && head + tail < b.size() && a[a.size() - 1 - tail] == b[b.size() - 1 - tail])
    ++tail;
  const size_t n = a.size() - head - tail, m = b.size() - head - tail;
  std::vector<Line> out;
  for (size_t i = 0; i < head; ++i) out.push_back({' ', a[i]});
  // Beyond it one block for another.
  constexpr size_t kTable = 16'000'000;
  size_t i = 0, j = 0;
  if (n * m <= kTable) {
    std::vector<uint32_t> common((n + 1) * (m + 1), 0);
    const auto at = [&](size_t x, size_t y) -> uint32_t& { return common[x * (m + 1) + y]; };
    for (size_t x = n; x-- > 0;)
      for (size_t y = m; y-- > 0;)
        at(x, y) = a[head + x] == b[head + y] ? at(x + 1, y + 1) + 1 : std::max(at(x + 1, y), at(x, y + 1));
    while (i < n && j < m) {
      if (a[head + i] == b[head + j])
        out.push_back({' ', a[head + i]}), ++i, ++j;
      else if (at(i + 1, j) >= at(i, j + 1))
        out.push_back({'-', a[head + i++]});
      else
        out.push_back({'+', b[head + j++]});
    }
  }
  while (i < n) out.push_back({'-', a[head + i++]});
  while (j < m) out.push_back({'+', b[head + j++]});
  for (size_t k = 0; k < tail; ++k) out.push_back({' ', a[a.size() - tail + k]});
  return out;
}

}  // namespace

std::string unified_diff(std::string_view before, std::string_view after, const std::string& name) {
  if (before == after) return {};
  constexpr size_t kAround = 3;
  const std::vector<Line> lines = aligned(lines_of(before), lines_of(after));
  std::string out = "--- " + name + "\n+++ " + name + "\n";
  size_t at = 0, old_line = 1, new_line = 1;
  while (at < lines.size()) {
    size_t change = at;
    while (change < lines.size() && lines[change].mark == ' ') ++change;
    if (change == lines.size()) break;
    const size_t begin = std::max(at, change > kAround ? change - kAround : 0);
    old_line += begin - at;
    new_line += begin - at;
    // Changes close to each other belong to one hunk.
    size_t end = change, quiet = 0;
    while (end < lines.size() && quiet <= 2 * kAround) quiet = lines[end++].mark == ' ' ? quiet + 1 : 0;
    if (quiet > kAround) end -= quiet - kAround;
    size_t olds = 0, news = 0;
    std::string hunk;
    for (size_t i = begin; i < end; ++i) {
      olds += lines[i].mark != '+';
      news += lines[i].mark != '-';
      hunk += lines[i].mark + std::string(lines[i].text) + "\n";
    }
    out += "@@ -" + std::to_string(old_line) + "," + std::to_string(olds) + " +" + std::to_string(new_line) +
           "," + std::to_string(news) + " @@\n" + hunk;
    old_line += olds;
    new_line += news;
    at = end;
  }
  return out;
}

}  // namespace capstan::cli
