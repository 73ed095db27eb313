// Parts of texts for people: counts with their noun, words of a shell, cells of a Markdown table.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace capstan {

// The noun as it follows the count: "rank" after 1, else "ranks"; "batch" and "batches".
std::string plural(int64_t count, std::string_view noun);
// The count with its noun: "1 rank", "2 ranks".
std::string counted(int64_t count, std::string_view noun);

// Quotes a word for a POSIX shell, in single quotes, unless it means the same without them.
std::string shell_quoted(std::string_view word);
// The words as a line for a shell.
std::string shell_line(std::span<const std::string> words);

// Escapes a text for a cell of a Markdown table.
std::string markdown_cell(std::string_view text);

}  // namespace capstan
