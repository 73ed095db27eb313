// Completion of a command line in a shell, from the option tables, the usage lines and the field tables.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::cli {

// The hidden command that the completion scripts call: `capstan __complete WORD…`. It has no help and no
// options.
inline constexpr std::string_view kCompletionCommand = "__complete";

struct Candidate {
  // The full word. The shell adds no blank after a word that ends in `=`, `.` or `/`.
  std::string text;
  // Description in one line; may be empty.
  std::string doc;
};

// Returns the words that can complete the last word. `words` is the command line without the program's name;
// its last word may be empty. For an invalid command line it returns none, and does not throw.
std::vector<Candidate> complete(std::span<const std::string> words);

// One line "text<TAB>doc" for each candidate.
std::string candidates_text(std::span<const Candidate> candidates);

}  // namespace capstan::cli
