// Pages of curves as one self-contained HTML file. `runs plot` and `sweep plot` share the frame, the style
// and the charts (page/).
#pragma once

#include <string>
#include <string_view>

namespace capstan::records {

struct Page {
  // Title of the browser window. It is escaped.
  std::string title;
  // HTML inside <main>, and the script that draws in it with Charts of page/charts.js.
  std::string_view body, script;
  // JSON that the script reads.
  std::string data;
};
std::string page_html(const Page& page);

}  // namespace capstan::records
