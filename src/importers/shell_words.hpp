// Reads the words and variables of a shell script without executing it. Command substitutions, arithmetic and
// variables of the environment stay as written and are marked. If the script's own words decide the condition
// of an `if`, a `case`, `&&` or `||`, only the branch that would run is read. Otherwise every branch is read,
// and the words that it assigns are marked; if it empties or unsets a variable, those that the variable had.
// Functions are read where they are called. A default for a variable from outside, as in ${NAME:-default},
// fills in a word but decides no condition.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::importers {

struct ShellWord {
  std::string text;
  // Byte offset in the script of each byte of `text`.
  std::vector<uint32_t> offsets;
  // For each byte: the undecided branch (1 …) whose assignment wrote it or would remove it, or 0.
  std::vector<uint16_t> marks;
  // Why the word is unknown, such as "`$1` is an argument of the script"; empty if it is known.
  std::string unknown_reason;
  // Variables from outside of the script whose default, as in ${NAME:-default}, is in the word. The word is
  // known, but a condition that reads it is not decided by the script.
  std::vector<std::string> defaulted;
  // Offset of the word, also where it is empty.
  uint32_t begin = 0;
};

using ShellCommand = std::vector<ShellWord>;

// A branch or loop whose condition is not decided by the script.
struct ShellBranch {
  uint32_t begin = 0;
  // Text of the condition, such as "if [ $SIZE = 7b ]".
  std::string text;
  // Variables in the condition that the script does not set.
  std::vector<std::string> variables;
  // Variables in the condition for which the script has a default, with its text.
  std::map<std::string, std::string> defaults;
  // Whether a command in the branch changes a variable.
  bool assigns = false;
};

// A value that a variable has if another branch runs.
struct ShellAlternative {
  uint32_t begin = 0;
  std::string text;
};

// A command that may set variables and is not executed, such as `source env.sh`.
struct ShellUnread {
  uint32_t begin = 0;
  std::string text;
};

struct ShellScript {
  // The commands without assignments.
  std::vector<ShellCommand> commands;
  // For each command: the undecided branch (1 …) that contains it, or 0.
  std::vector<size_t> branch_of;
  // The undecided branches, in the order of the script.
  std::vector<ShellBranch> branches;
  // The other values of a variable that an undecided branch assigns, by the offset of the first byte of the
  // value that is read.
  std::map<uint32_t, std::vector<ShellAlternative>> alternatives;
  // The commands that may set variables, in the order of the script.
  std::vector<ShellUnread> unread;
};

// `variables`: values for what the script takes from its environment ("SIZE") or its arguments ("1").
// Throws ErrorCode::format for an unclosed quote or bracket, and for variables that grow beyond all bounds.
ShellScript read_shell(std::string_view text, const std::map<std::string, std::string>& variables = {});

}  // namespace capstan::importers
