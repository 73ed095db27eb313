// Markdown for generated pages.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace capstan::config {

// The text as a code span.
std::string code(std::string_view text);
// Code spans, separated by commas.
std::string codes(const std::vector<std::string>& texts);

// Breaks the paragraphs and list items of a page, each of which is one line of it, at 110 columns. Lines of
// tables, headings and code stay.
std::string wrapped_markdown(std::string_view page);

}  // namespace capstan::config
