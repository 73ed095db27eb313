#include "config/tools/edit.hpp"

#include <algorithm>
#include <utility>

#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan::config {

namespace {

bool is_blank_in_line(char c) {
  return c == ' ' || c == '\t' || c == '\r';
}

size_t line_begin(std::string_view text, size_t at) {
  const size_t before = at == 0 ? std::string_view::npos : text.rfind('\n', at - 1);
  if (before != std::string_view::npos) return before + 1;
  return text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0;
}
// The line's end: its line feed, or the end of the text.
size_t line_end(std::string_view text, size_t at) {
  return std::min(text.find('\n', at), text.size());
}

// Returns the offset after the quoted scalar at `at`.
size_t quoted_end(std::string_view text, size_t at) {
  const char quote = text[at];
  for (size_t i = at + 1; i < text.size(); ++i) {
    if (quote == '"' && text[i] == '\\')
      ++i;
    else if (text[i] == quote && !(quote == '\'' && i + 1 < text.size() && text[i + 1] == '\'' && ++i))
      return i + 1;
  }
  return text.size();
}

// Returns the offset of the `,`, `]` or `}` that ends an item in brackets.
size_t flow_item_end(std::string_view text, size_t at) {
  int depth = 0;
  // A quote elsewhere is a character like others: `it's`.
  bool token_begins = true;
  for (; at < text.size(); ++at) {
    const char c = text[at];
    if ((c == '"' || c == '\'') && token_begins) {
      at = quoted_end(text, at) - 1;
    } else if (c == '#' && at > 0 && is_blank(text[at - 1])) {
      at = line_end(text, at) - 1;
    } else if (c == '[' || c == '{') {
      ++depth;
    } else if (c == ']' || c == '}') {
      if (depth-- == 0) return at;
    } else if (c == ',' && depth == 0) {
      return at;
    }
    if (!is_blank(c)) token_begins = std::string_view("[{,:").find(c) != std::string_view::npos;
  }
  return text.size();
}

// Returns the offset after a value that ends on its line; for a value of several lines, the end of the first.
size_t value_end(std::string_view text, const Entry& entry) {
  const size_t at = offset_of(text, entry.value->location.line, entry.value->location.column);
  if (at >= text.size()) return text.size();
  if (entry.value->kind == Node::Kind::null && entry.value->empty) return line_end(text, at);
  if (text[at] == '"' || text[at] == '\'') return quoted_end(text, at);
  if (text[at] == '[' || text[at] == '{') return std::min(flow_item_end(text, at + 1) + 1, text.size());
  size_t end = at;
  const size_t last = line_end(text, at);
  while (end < last && !(text[end] == '#' && end > at && is_blank_in_line(text[end - 1]))) ++end;
  while (end > at && is_blank_in_line(text[end - 1])) --end;
  return end;
}

bool in_braces(std::string_view text, const Node& map) {
  const size_t at = offset_of(text, map.location.line, map.location.column);
  return at < text.size() && text[at] == '{';
}

// The first of the comment lines directly above a line, in its column; the line itself where there are none.
// A comment at the head of the file describes the file.
size_t comment_begin(std::string_view text, size_t line, std::string_view indent) {
  size_t begin = line;
  while (begin > 0) {
    const size_t above = line_begin(text, begin - 1);
    if (above >= begin) break;
    const std::string_view passed = text.substr(above, line_end(text, above) - above);
    if (!passed.starts_with(indent) || passed.substr(indent.size()).find('#') != 0) break;
    if (above == line_begin(text, 0)) return line;
    begin = above;
  }
  return begin;
}

std::vector<TextEdit> block_removal(std::string_view text, const Entry& entry, CommentsOfEntry comments) {
  const size_t key = offset_of(text, entry.location.line, entry.location.column);
  const size_t begin = line_begin(text, key);
  const std::string_view indent = text.substr(begin, key - begin);
  if (key >= text.size() || indent.find_first_not_of(' ') != std::string_view::npos) return {};

  // The comment after the value stays, on a line of its own.
  std::string kept;
  const bool block_scalar = entry.value->kind == Node::Kind::scalar && entry.value->quoted && [&] {
    const size_t at = offset_of(text, entry.value->location.line, entry.value->location.column);
    return at < text.size() && (text[at] == '|' || text[at] == '>');
  }();
  const auto comment_of = [&](size_t from) {
    const size_t last = line_end(text, from);
    for (size_t at = from; at < last; ++at)
      if (text[at] == '#' && at > 0 && is_blank_in_line(text[at - 1]))
        kept += std::string(indent) + std::string(text.substr(at, last - at)) + "\n";
  };
  const bool one_line = entry.value->location.line == entry.location.line;
  const bool nested =
      (entry.value->kind == Node::Kind::map || entry.value->kind == Node::Kind::list) && !one_line;
  size_t end = line_end(text, key);
  if (one_line && !block_scalar) {
    const size_t last = value_end(text, entry);
    end = line_end(text, last);
    comment_of(last);
  } else if (nested) {
    comment_of(key);
  }

  // Includes the following lines of the value: those indented deeper, and list items in the key's column.
  for (size_t at = end; at < text.size();) {
    const size_t first = at + 1, last = line_end(text, first);
    if (first >= text.size()) break;
    const std::string_view line = text.substr(first, last - first);
    const size_t depth = line.find_first_not_of(' ');
    const bool empty = trim(line).empty() || line == "\r";
    const bool comment = !empty && !block_scalar && line[depth] == '#';
    const bool goes_on = !empty && !comment &&
                         (depth > indent.size() || (depth == indent.size() && line[depth] == '-' &&
                                                    entry.value->kind == Node::Kind::list));
    if (!empty && !comment && !goes_on) break;
    if (goes_on) {
      // Comment lines in between belong to what stays.
      for (size_t between = end; between + 1 < first;) {
        const size_t stop = line_end(text, between + 1);
        const std::string_view passed = text.substr(between + 1, stop - between - 1);
        if (!block_scalar && trim(passed).starts_with('#')) kept += std::string(passed) + "\n";
        between = stop;
      }
      end = last;
    }
    at = last;
  }
  const size_t past = std::min(end + 1, text.size());
  const bool drop = comments == CommentsOfEntry::go;
  std::vector<TextEdit> edits{
      {drop ? comment_begin(text, begin, indent) : begin, past, drop ? std::string() : kept}};

  if (entry.section.empty() || entry.parent->items.size() > 1) return edits;
  const size_t section = offset_of(text, entry.section_location.line, entry.section_location.column);
  const size_t section_end = line_end(text, section);
  const std::string_view line = text.substr(section, section_end - section);
  const size_t comment = line.find(" #");
  TextEdit removal{line_begin(text, section), std::min(section_end + 1, text.size()), {}};
  if (drop)
    removal.begin = comment_begin(text, removal.begin, {});
  else if (comment != std::string_view::npos)
    removal.replacement = std::string(trim(line.substr(comment))) + "\n";
  edits.push_back(std::move(removal));
  return edits;
}

// Whether only blanks precede `at` on its line.
bool begins_line(std::string_view text, size_t at) {
  while (at > 0 && is_blank_in_line(text[at - 1])) --at;
  return at == line_begin(text, at);
}

// Returns the offset after blanks, and after the comment that follows them on the line.
size_t comment_end(std::string_view text, size_t at) {
  while (at < text.size() && is_blank_in_line(text[at])) ++at;
  return at < text.size() && text[at] == '#' ? line_end(text, at) : at;
}

// The edits that remove an entry in braces that begins its line, with its comments. `end`: the character
// after its value. Empty if other entries follow on the line.
std::vector<TextEdit> flow_lines_removal(std::string_view text, const Entry& entry, size_t begin,
                                         size_t end) {
  const size_t line = line_begin(text, begin);
  const size_t first = comment_begin(text, line, text.substr(line, begin - line));
  if (text[end] == ',') {
    const size_t last = comment_end(text, end + 1);
    if (last < text.size() && text[last] != '\n') return {};
    return {{first, std::min(last + 1, text.size()), {}}};
  }
  if (!begins_line(text, end) || entry.index == 0) return {};
  // The comma after the entry before it, which comments may follow.
  const Node& before = entry.parent->items[entry.index - 1];
  const SourceLocation& at = before.empty ? entry.parent->key_locations[entry.index - 1] : before.location;
  const size_t comma = flow_item_end(text, offset_of(text, at.line, at.column));
  const size_t last = comment_end(text, value_end(text, entry));
  if (comma >= first || text[comma] != ',' || last >= end || text[last] != '\n') return {};
  return {{comma, comma + 1, {}}, {first, last + 1, {}}};
}

std::vector<TextEdit> flow_removal(std::string_view text, const Entry& entry, CommentsOfEntry comments) {
  size_t begin = offset_of(text, entry.location.line, entry.location.column);
  const size_t value = offset_of(text, entry.value->location.line, entry.value->location.column);
  size_t end = flow_item_end(text, entry.value->empty ? begin : value);
  if (end >= text.size()) return {};
  if (comments == CommentsOfEntry::go && begins_line(text, begin))
    if (auto edits = flow_lines_removal(text, entry, begin, end); !edits.empty()) return edits;
  if (text[end] == ',') {
    ++end;
    while (end < text.size() && is_blank_in_line(text[end])) ++end;
    return {{begin, end, {}}};
  }
  while (begin > 0 && is_blank(text[begin - 1])) --begin;
  if (begin == 0 || text[begin - 1] != ',') return {};
  while (end > begin && is_blank_in_line(text[end - 1])) --end;
  return {{begin - 1, end, {}}};
}

}  // namespace

size_t offset_of(std::string_view text, int line, int column) {
  size_t at = text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0;
  for (int i = 1; i < line; ++i) {
    at = text.find('\n', at);
    if (at == std::string_view::npos) return text.size();
    ++at;
  }
  for (int i = 1; i < column && at < text.size() && text[at] != '\n'; ++i)
    at += static_cast<size_t>(decode_utf8(text, at).bytes);
  return std::min(at, text.size());
}

std::string apply_edits(std::string_view text, std::vector<TextEdit> edits) {
  std::vector<TextEdit> chosen;
  for (auto& edit : edits) {
    const bool overlaps = std::any_of(chosen.begin(), chosen.end(), [&](const TextEdit& other) {
      return edit.begin < other.end && other.begin < edit.end;
    });
    if (!overlaps && edit.begin <= edit.end && edit.end <= text.size()) chosen.push_back(std::move(edit));
  }
  std::stable_sort(chosen.begin(), chosen.end(),
                   [](const TextEdit& a, const TextEdit& b) { return a.begin < b.begin; });
  std::string out;
  size_t at = 0;
  for (const auto& edit : chosen) {
    out += text.substr(at, edit.begin - at);
    out += edit.replacement;
    at = edit.end;
  }
  return out + std::string(text.substr(at));
}

std::vector<Entry> entries_of(const Node& recipe) {
  std::vector<Entry> out;
  for (size_t i = 0; i < recipe.items.size(); ++i) {
    const Node& value = recipe.items[i];
    out.push_back({"", recipe.keys[i], recipe.key_locations[i], &value, &recipe, i, {}});
    if (value.kind != Node::Kind::map || recipe.keys[i].find('.') != std::string::npos) continue;
    for (size_t j = 0; j < value.items.size(); ++j)
      out.push_back({recipe.keys[i], value.keys[j], value.key_locations[j], &value.items[j], &value, j,
                     recipe.key_locations[i]});
  }
  return out;
}

std::vector<TextEdit> removal(std::string_view text, const Entry& entry, CommentsOfEntry comments) {
  if (!in_braces(text, *entry.parent)) return block_removal(text, entry, comments);
  if (entry.parent->items.size() > 1) return flow_removal(text, entry, comments);
  if (entry.section.empty()) return {};
  Entry section{"", entry.section, entry.section_location, entry.parent, entry.parent, 0, {}};
  return block_removal(text, section, comments);
}

std::string_view value_text(std::string_view text, const Entry& entry) {
  if (entry.value->location.line != entry.location.line || entry.value->empty) return {};
  const size_t begin = offset_of(text, entry.value->location.line, entry.value->location.column);
  size_t end = in_braces(text, *entry.parent) ? flow_item_end(text, begin) : value_end(text, entry);
  while (end > begin && is_blank_in_line(text[end - 1])) --end;
  const std::string_view value = text.substr(begin, end - begin);
  return value.find('\n') != std::string_view::npos || value.starts_with('|') || value.starts_with('>')
             ? std::string_view()
             : value;
}

}  // namespace capstan::config
