// The files of page/, embedded at build time (EmbedFiles.cmake).
#pragma once

#include <string_view>

namespace capstan::records {

// page.html, with {{title}}, {{style}}, {{body}}, {{data}}, {{charts}} and {{script}}.
std::string_view page_file();
std::string_view style_file();   // page.css
std::string_view charts_file();  // charts.js
std::string_view runs_body();    // runs.html
std::string_view runs_script();  // runs.js

}  // namespace capstan::records
