// The files of page/, embedded at build time (EmbedFiles.cmake).
#pragma once

#include <string_view>

namespace capstan::records {

// page.html, with {{title}}, {{style}}, {{body}}, {{data}}, {{charts}} and {{script}}; and page.css,
// charts.js, runs.html, experts.js and runs.js.
std::string_view page_file();
std::string_view style_file();
std::string_view charts_file();
std::string_view runs_body();
std::string_view experts_script();
std::string_view runs_script();

}  // namespace capstan::records
