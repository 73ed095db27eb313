#include "config/tools/markdown.hpp"

#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan::config {

std::string code(std::string_view text) {
  return "`" + std::string(text) + "`";
}

std::string codes(const std::vector<std::string>& texts) {
  std::string out;
  for (const auto& text : texts) out += (out.empty() ? "" : ", ") + code(text);
  return out;
}

static constexpr size_t kColumns = 110;

// The parts of a text between which a line may end: words and short code spans. A line that
// began with one of the characters of `marks` would be a list, a heading, a table or a quotation.
static std::vector<std::string_view> breakable_parts(std::string_view text) {
  constexpr std::string_view marks = "-+*#|>=";
  std::vector<std::string_view> parts;
  size_t begin = 0, code_end = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '`' && at >= code_end) {
      const size_t close = text.find('`', at + 1);
      if (close == std::string_view::npos) continue;
      code_end = close + 1;
      if (close - at < kColumns / 2) at = close;
    } else if (text[at] == ' ' && at + 1 < text.size() &&
               marks.find(text[at + 1]) == std::string_view::npos) {
      parts.push_back(text.substr(begin, at - begin));
      begin = at + 1;
    }
  }
  parts.push_back(text.substr(begin));
  return parts;
}

static std::string wrapped(std::string_view text, std::string_view indent) {
  std::string out;
  size_t column = 0;
  for (const std::string_view part : breakable_parts(text)) {
    const size_t width = count_code_points(part);
    if (!out.empty() && column + 1 + width > kColumns) {
      out += "\n" + std::string(indent);
      column = indent.size() + width;
    } else {
      if (!out.empty()) out += ' ', ++column;
      column += width;
    }
    out += part;
  }
  return out;
}

std::string wrapped_markdown(std::string_view page) {
  std::string out;
  for (const std::string_view line : split(page, '\n')) {
    if (!out.empty()) out += '\n';
    const bool kept = line.starts_with('|') || line.starts_with('#') || line.starts_with("    ");
    out += kept ? std::string(line) : wrapped(line, line.starts_with("- ") ? "  " : "");
  }
  return out;
}

}  // namespace capstan::config
