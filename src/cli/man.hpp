// Manual pages, from the option tables, the field tables and the help topics.
#pragma once

#include <map>
#include <string>

namespace capstan::cli {

// "man1/capstan.1", one "man1/capstan-COMMAND.1" for each command, "man5/capstan-recipe.5" → roff text.
std::map<std::string, std::string> man_pages();

}  // namespace capstan::cli
