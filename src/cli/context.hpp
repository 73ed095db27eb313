// The parsed command line that a command runs with.
#pragma once

#include <string>
#include <vector>

#include "cli/options.hpp"

namespace capstan::cli {

enum class MessageFormat : uint8_t { human, compact, json };

struct Context {
  const Command* command = nullptr;
  Arguments args;
  // The full command line, with the program's name first.
  std::vector<std::string> command_line;
  MessageFormat messages = MessageFormat::human;
  // -1: quiet; 0: normal; 1 and 2: more output.
  int verbosity = 0;
  bool color_out = false, color_err = false;
  bool quiet() const { return verbosity < 0; }
};

std::span<const Command* const> all_commands();

// The command line, quoted so that it can be typed again.
std::string command_text(const std::vector<std::string>& command_line);

}  // namespace capstan::cli
