// The variables of a shell script, and the blocks and lists of commands on which they depend: which commands
// run, which branches are not decided, and what a variable then has. shell_words.cpp reads the commands.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "importers/shell_condition.hpp"
#include "importers/shell_reader.hpp"

namespace capstan::importers {

class ShellBlocks : protected ShellReader {
 protected:
  using ShellReader::ShellReader;

  // Commands that `&&`, `||` and `|` join.
  struct List {
    // Whether its next command runs, and the undecided branch that says so; 0: none.
    Truth runs = Truth::yes;
    size_t branch = 0;
    // The exit status so far.
    Truth status = Truth::yes;
    // Whether an operator precedes the next command, and whether it is `&&`, not `||`.
    bool joined = false, all = true;
    // Offset of the pipeline that the next command continues.
    std::optional<size_t> pipeline;
    // Offset of the first command whose status is unknown, and the variables on which the status depends.
    std::optional<size_t> unknown_begin;
    std::vector<std::string> variables;
    // Variables that the commands after an undecided `&&` leave empty.
    std::set<std::string> emptied;
  };

  // A variable as it is outside of a subshell, or of the function that declares it `local`.
  struct SavedVariable {
    std::optional<Words> value;
    bool unset = false;
  };

  struct Block {
    enum class Kind : uint8_t { branches, cases, loop, group, subshell } kind = Kind::branches;
    // Offset of its first word.
    size_t begin = 0;
    // Text of the condition, such as "case $SIZE in".
    std::string text;
    // Offset of the condition, or of the commands of a group.
    size_t condition_begin = 0;
    // Whether the words are between `if` and `then`.
    bool condition = false;
    // The next word is a pattern of `case`.
    bool patterns = false;
    // The exit status of the last list: of the condition, or of a group.
    Truth value = Truth::yes;
    // Whether the branch that is being read runs.
    Truth runs = Truth::yes;
    // Whether one of the branches before it ran.
    Truth before = Truth::no;
    // The word that `case` compares.
    ShellWord subject;
    // Index of the undecided branch in out_.branches, from 1; 0: none.
    size_t undecided = 0;
    std::vector<std::string> variables;
    // The name of the function whose body it is.
    std::string function;
    // The list that the block is a command of.
    List list;
    // The values, marked, of the variables that the branch that is being read changes.
    std::map<std::string, Words> replaced;
    // The number of branches that may run, and for each variable, the number of those that leave it empty.
    size_t branches = 0;
    std::map<std::string, size_t> emptied;
    // Whether one of the branches runs in any case.
    bool exhaustive = false;
    // The variables that a subshell has changed, as they were before.
    std::map<std::string, SavedVariable> outside;
  };

  bool inside(Block::Kind kind) const { return !blocks_.empty() && blocks_.back().kind == kind; }
  bool in_condition() const { return !blocks_.empty() && blocks_.back().condition; }

  Block& open_block(Block::Kind kind, size_t begin);
  // `end`: offset after the commands of the block.
  void close_block(size_t end);
  // A variable that the branch leaves empty or unset gets the value back that it had before.
  void end_branch(Block& block);
  // `holds`: the condition of the branch.
  void begin_branch(Block& block, Truth holds);

  // Whether the script's own words say that the current command does not run.
  bool skipping() const;
  // The outermost undecided branch; 0: none.
  size_t undecided() const;

  // The script's text from `begin` to the current offset, on one line.
  std::string written_since(size_t begin) const;

  // Adds an undecided branch to `out_`, unless an enclosing one is there already. Returns the index of the
  // outermost one, from 1; 0: the branch is skipped.
  size_t report_branch(size_t begin, std::string text, const std::vector<std::string>& variables);
  // Adds the variables on which the words of a command depend.
  void note_variables(const ShellCommand& command, std::vector<std::string>& variables) const;

  // Marks the text that an undecided branch writes or removes. If the new value begins with the old one
  // (A="$A --more"), only the rest is marked.
  static void mark(Words& value, const Words& before, size_t branch);

  // Sets a variable to a value, or unsets it if there is none. If an undecided branch empties or unsets it,
  // the branch leaves no text to mark: the text that it removes is marked instead, and is restored at the end
  // of the branch. `begin`: offset of the value.
  void change(const std::string& name, std::optional<Words> value, size_t begin);
  // The value of a variable becomes unknown.
  void forget(const std::string& name);

  // Adds what a variable has to `outside`, unless it is there already, for restore().
  void keep(const std::string& name, std::map<std::string, SavedVariable>& outside) const;
  // Called before a variable changes: a subshell keeps its variables to itself.
  void keep_from_subshell(const std::string& name);
  void restore(const std::string& name, SavedVariable before);

  // The blocks that enclose the current command.
  std::vector<Block> blocks_;
  // The list that the current command is part of.
  List list_;
  // The exit status of the block that has just ended, and its offset.
  struct ClosedBlock {
    Truth status = Truth::yes;
    size_t begin = 0;
  };
  std::optional<ClosedBlock> closed_;
  // The function whose body begins next; empty: none.
  std::string defining_;
  // The offsets of the bodies of functions.
  std::map<std::string, std::pair<size_t, size_t>> functions_;
  ShellScript out_;

 private:
  // Whether the value expands to nothing that could be marked.
  static bool is_blank(const Words& value);
  // Keeps what the variable has if the branch that assigns `value` does not run. `current`: its value now.
  void note_alternatives(const std::string& name, const Words& current, const Words& value);
  // Changes a variable after an undecided `&&` or `||`. In `P && X= || X=` one of the two commands runs in
  // any case, since an assignment succeeds.
  void change_in_list(const std::string& name, std::optional<Words>& value, Words before);
  // The value of a variable that the script does not set outside of the branch.
  static Words as_written(const std::string& name, size_t begin);
  // The innermost block that is undecided, itself or in the branch that is being read; nullptr: none.
  Block* undecided_block();
};

}  // namespace capstan::importers
