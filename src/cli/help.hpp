// Help texts, all made from the option tables and the pages of docs/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/options.hpp"

namespace capstan::cli {

struct Topic {
  std::string_view name;   // "exit-codes"
  std::string_view title;  // first heading of the page
  std::string_view text;   // the page
};
// docs/*.md, embedded at build time.
const std::vector<Topic>& topics();

// At most 24 lines.
std::string short_help(const Command& command);
std::string full_help(const Command& command);
std::string group_help(std::string_view group);  // "data": its commands
std::string program_help(bool full);
// One line for a group such as "data"; empty for a name that is no group.
std::string_view purpose_of_group(std::string_view group);

// "train", "data prepare", "data", "overrides" → its help. ErrorCode::usage for an unknown name.
std::string help_on(const std::vector<std::string>& words);

// Throws ErrorCode::usage for an unknown command, with near names.
[[noreturn]] void unknown_command(const std::string& word);

}  // namespace capstan::cli
