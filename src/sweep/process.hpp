// Runs another program to its end.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace capstan::sweep {

struct ProcessResult {
  // Exit code, or 128 + the number of the signal that ended the program.
  int code = 0;
  std::string out, err;
};
// Returns nullopt if PATH has no such program, or if it took longer than `seconds` and was killed.
std::optional<ProcessResult> run_process(const std::vector<std::string>& words, double seconds);

}  // namespace capstan::sweep
