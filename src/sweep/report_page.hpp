// The files of report/, embedded at build time.
#pragma once

#include <string_view>

namespace capstan::sweep {

// Content of body.html.
std::string_view report_body();
// Content of report.js.
std::string_view report_script();

}  // namespace capstan::sweep
