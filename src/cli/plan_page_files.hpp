// The files of plan_page/, embedded at build time.
#pragma once

#include <string_view>

namespace capstan::cli {

// Content of body.html.
std::string_view plan_body();
// Content of plan.js.
std::string_view plan_script();

}  // namespace capstan::cli
