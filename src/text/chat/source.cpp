#include "text/chat/source.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "base/utf8.hpp"
#include "text/chat/value.hpp"

namespace capstan::text::chat {

Source::Source(std::string name, std::string_view text) : name_(std::move(name)) {
  if (text.size() > kMaxBytes)
    fail(ErrorCode::format, name_ + ": a chat template of " + human_bytes(static_cast<double>(text.size())) +
                                ", more than the limit of " + human_bytes(kMaxBytes));
  text_.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\r') {
      if (i + 1 < text.size() && text[i + 1] == '\n') ++i;
      text_ += '\n';
    } else {
      text_ += text[i];
    }
  }
  if (text_.ends_with('\n')) text_.pop_back();
}

void Source::fail_at(size_t offset, const std::string& what, ErrorCode code, std::string help) const {
  const std::string_view all = text_;
  offset = std::min(offset, all.size());
  // Without a line break, npos + 1 is 0.
  const size_t begin = all.substr(0, offset).rfind('\n') + 1;
  const size_t end = std::min(all.find('\n', offset), all.size());
  const auto line = 1 + std::count(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(begin), '\n');
  // The message shows only a part of a long line, around the offset.
  constexpr size_t kShownBytes = 80;
  size_t from = begin, to = end;
  if (to - from > kShownBytes) {
    from = std::max(begin, offset - std::min(offset, kShownBytes / 4));
    to = std::min(end, from + kShownBytes);
    while (from < offset && is_continuation(all[from])) ++from;
    while (to < end && is_continuation(all[to])) ++to;
  }
  const std::string shown = (from > begin ? "…" : "") +
                            std::string(strip_back(strip_front(all.substr(from, to - from)))) +
                            (to < end ? "…" : "");
  fail(code,
       name_ + ":" + std::to_string(line) + ":" +
           std::to_string(1 + count_code_points(all.substr(begin, offset - begin))) + ": " + what +
           (shown.empty() ? "" : ": `" + shown + "`"),
       std::move(help));
}

}  // namespace capstan::text::chat
