// Help texts, all made from the option tables and the pages of docs/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/options.hpp"
#include "config/tools/reference.hpp"

namespace capstan::cli {

struct Topic {
  // Name of the page, such as "exit-codes".
  std::string_view name;
  // First heading of the page, without the words before a colon and in lower case.
  std::string_view title;
  // Text of the full page.
  std::string_view text;
};
// The pages of docs/*.md, embedded at build time.
const std::vector<Topic>& topics();
// The index of docs/reference/; its pages are "reference/model" …, made from the tables in the program.
inline constexpr std::string_view kReferenceTopic = "reference";
inline constexpr std::string_view kReferenceTitle = "every field, rule, recipe and preset";

// Pages of the reference about files that are no recipes.
const std::vector<config::FilePage>& file_pages();

// Help of a command in at most 24 lines.
std::string short_help(const Command& command);
std::string full_help(const Command& command);
// Help of a group of commands, such as "data".
std::string group_help(std::string_view group);
std::string program_help(bool full);
// Description of a group such as "data" in one line. Empty for a name that is no group.
std::string_view purpose_of_group(std::string_view group);

// Returns the help on a command, group or topic, given as words ("train", "data prepare", "data",
// "overrides"). Throws ErrorCode::usage for an unknown name.
std::string help_on(const std::vector<std::string>& words);

// Throws ErrorCode::usage for an unknown command, with near names.
[[noreturn]] void unknown_command(const std::string& word);

}  // namespace capstan::cli
