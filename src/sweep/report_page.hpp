// The files of report/, embedded at build time.
#pragma once

#include <string_view>

namespace capstan::sweep {

std::string_view report_page();    // page.html, with {{title}}, {{style}}, {{data}} and {{script}}
std::string_view report_style();   // page.css
std::string_view report_script();  // page.js

}  // namespace capstan::sweep
