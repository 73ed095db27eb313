// What a shell's completion asks: the words that can stand at the end of a command line. Made from the option tables, the
// usage lines and the field tables.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::cli {

// What the scripts call: `capstan __complete WORD…`. In no help, and without options of its own.
inline constexpr std::string_view kCompletionCommand = "__complete";

struct Candidate {
  std::string text;  // the whole word; one that ends in `=`, `.` or `/` goes on, so no blank follows it
  std::string doc;   // one line, may be empty
};

// words: the command line without the program's name; the last one is being typed, and may be empty. Never throws for what
// stands on the line: where nothing is known there is nothing to offer.
std::vector<Candidate> complete(std::span<const std::string> words);

// One line "text<TAB>doc" for each candidate.
std::string candidates_text(std::span<const Candidate> candidates);

}  // namespace capstan::cli
