// Python's string methods, on UTF-8.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::text::chat {

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalized(std::string_view text);
// Python's str.title().
std::string title_by_letters(std::string_view text);
// Jinja2's filter `title`.
std::string title_by_words(std::string_view text);
enum class StripSide : uint8_t { front, back, both };
// Removes the given characters, or white space for nullopt, from the given sides.
std::string_view stripped(std::string_view text, std::optional<std::string_view> characters, StripSide side);
// Splits at `separator`; nullopt splits at white space and gives no empty parts. Makes at most `most` splits;
// a negative number means no limit.
std::vector<std::string> split_text(std::string_view text, std::optional<std::string_view> separator,
                                    int64_t most, bool from_back);
std::vector<std::string> split_lines(std::string_view text);
std::string replaced(std::string_view text, std::string_view from, std::string_view to, int64_t most);

}  // namespace capstan::text::chat
