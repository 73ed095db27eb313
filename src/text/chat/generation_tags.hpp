// {% generation %} for programs whose Jinja does not know it.
#pragma once

#include <string>
#include <string_view>

namespace capstan::text::chat {

// The template with `{% if true %}` … `{% endif %}` in place of `{% generation %}` … `{% endgeneration %}`:
// with the same white space control it renders the same text in every Jinja, whatever its settings for
// blocks. A text without such tags, or one that is no template, is returned as it is. A name that is set
// between the tags is seen after them as well.
std::string without_generation_tags(std::string_view text);

}  // namespace capstan::text::chat
