// A shell script as far as words and variables go. Nothing is executed: what a command would have printed, and what only
// the shell's arithmetic or the environment knows, stays as written and is marked.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::importer {

struct ShellWord {
  std::string text;
  std::vector<uint32_t> at;  // byte offset in the script of each byte of `text`
  std::string open;    // why the word cannot be known: "`$1` is an argument of the script"; empty: it is
  uint32_t begin = 0;  // offset of the word, also where it is empty
};

using ShellCommand = std::vector<ShellWord>;

struct ShellScript {
  std::vector<ShellCommand> commands;  // assignments are left out
  // Offsets of `if`, `case`, `for` and the like: every branch is read, the last assignment counts.
  std::vector<uint32_t> branches;
};

// Throws ErrorCode::format for an unclosed quote or bracket, and for variables that grow beyond all bounds.
ShellScript read_shell(std::string_view text);

}  // namespace capstan::importer
