// Pages of curves as one HTML file that needs nothing else: no script from elsewhere, no network. `runs plot`
// and `sweep plot` share the frame, the style and the charts (page/).
#pragma once

#include <string>
#include <string_view>

namespace capstan::records {

struct Page {
  std::string title;  // of the window; any text
  // HTML inside <main>, and what draws in it with Charts of page/charts.js.
  std::string_view body, script;
  std::string data;  // JSON for the script
};
std::string page_html(const Page& page);

}  // namespace capstan::records
