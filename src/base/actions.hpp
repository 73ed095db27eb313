// Actions that texts of the library propose, such as resuming a run. How a user takes an action depends on
// the front end: the command line has a flag, a program that embeds Capstan an option. A text therefore holds
// a marker, "{resume}, or give {other_run_dir}", and each front end writes the marker in its own words: the
// command line by with_flags (cli/report.hpp), Error::help() by plain_actions().
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace capstan {

struct Action {
  // The marker without its braces.
  std::string_view name;
  std::string_view words;
};

// Every action, with words that name no option of a front end.
std::span<const Action> plain_action_words();

// Replaces each marker of an action in `words`. Other texts in braces stay.
std::string expand_actions(std::string_view text, std::span<const Action> words);
std::string plain_actions(std::string_view text);

}  // namespace capstan
