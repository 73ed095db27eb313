// The files of report/, embedded at build time.
#pragma once

#include <string_view>

namespace capstan::sweep {

std::string_view report_body();    // body.html
std::string_view report_script();  // report.js

}  // namespace capstan::sweep
