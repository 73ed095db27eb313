// The program without main().
#pragma once

#include <string>
#include <vector>

namespace capstan::cli {

// command: the program's name and its arguments. Returns the exit code.
int run_program(const std::vector<std::string>& command);

}  // namespace capstan::cli
