// Runs another program to its end.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace capstan::sweep {

struct CommandResult {
  int code = 0;  // 128 + signal when one ended it
  std::string out, err;
};
// nullopt: PATH has no such program, or it took longer than `seconds` (then it is killed).
std::optional<CommandResult> run_command(const std::vector<std::string>& words, double seconds);

}  // namespace capstan::sweep
