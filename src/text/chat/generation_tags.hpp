// Removes {% generation %} tags from templates, for programs whose Jinja does not support them.
#pragma once

#include <string>
#include <string_view>

namespace capstan::text::chat {

// Returns the template with `{% if true %}` and `{% endif %}` in place of the tags. With the same white space
// control it renders the same text in every Jinja, whatever its block settings. A text without such tags, or
// one that is no template, is returned unchanged. Unlike in a generation block, a name that is set between
// the tags is visible after them.
std::string without_generation_tags(std::string_view text);

}  // namespace capstan::text::chat
