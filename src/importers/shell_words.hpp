// A shell script as far as words and variables go. Nothing is executed: what a command would have printed,
// and what only the shell's arithmetic or the environment knows, stays as written and is marked.
//
// Of an `if` or `case` whose condition the script's own words decide, the branch that runs is read and the
// others are not. Where they do not, every branch is read, and the words that it assigns are marked.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::importers {

struct ShellWord {
  std::string text;
  // Byte offset in the script of each byte of `text`
  std::vector<uint32_t> at;
  // Of each byte: 0, or the branch (1 …) whose assignment wrote it, where that is not decided.
  std::vector<uint16_t> marks;
  // Why the word cannot be known: "`$1` is an argument of the script"; empty: it is.
  std::string open;
  // Offset of the word, also where it is empty.
  uint32_t begin = 0;
};

using ShellCommand = std::vector<ShellWord>;

// A branch or loop of which it is not known whether it runs.
struct ShellBranch {
  uint32_t begin = 0;
  // "if [ $SIZE = 7b ]"
  std::string text;
  // That would decide it, as far as the script does not set them.
  std::vector<std::string> variables;
  // What runs in it changes a variable.
  bool assigns = false;
};

struct ShellScript {
  // Assignments are left out.
  std::vector<ShellCommand> commands;
  // Of each command: 0, or the undecided branch (1 …) in which it stands.
  std::vector<size_t> branch_of;
  // Undecided, in the order of the script.
  std::vector<ShellBranch> branches;
};

// `variables`: values for what the script takes from its environment ("SIZE") or its arguments ("1").
// Throws ErrorCode::format for an unclosed quote or bracket, and for variables that grow beyond all bounds.
ShellScript read_shell(std::string_view text, const std::map<std::string, std::string>& variables = {});

}  // namespace capstan::importers
