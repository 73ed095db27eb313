#include "train/records/page.hpp"

#include <map>

#include "train/records/curve.hpp"
#include "train/records/page_files.hpp"

namespace capstan::records {

namespace {

// JSON inside a script element: a `<` could end it, and stands in texts only.
std::string without_markup(const std::string& json) {
  std::string text;
  text.reserve(json.size());
  for (const char c : json) text += c == '<' ? std::string("\\u003c") : std::string(1, c);
  return text;
}

// Replaces each {{name}} once. The inserted text is not searched again.
std::string filled(std::string_view page, const std::map<std::string_view, std::string>& parts) {
  std::string text;
  for (size_t at = 0;;) {
    const size_t begin = page.find("{{", at), end = page.find("}}", begin);
    text += page.substr(at, begin - at);
    if (end == std::string_view::npos) return text;
    text += parts.at(page.substr(begin + 2, end - begin - 2));
    at = end + 2;
  }
}

}  // namespace

std::string page_html(const Page& page) {
  return filled(page_file(), {{"title", html_escaped(page.title)},
                              {"style", std::string(style_file())},
                              {"body", std::string(page.body)},
                              {"data", without_markup(page.data)},
                              {"charts", std::string(charts_file())},
                              {"script", std::string(page.script)}});
}

}  // namespace capstan::records
