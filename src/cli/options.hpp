// The option table of a command and the arguments parsed by it. Parser, help, manual pages and completion
// read the same table.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/core/override.hpp"

namespace capstan::cli {

struct Option {
  std::string_view name;      // "run-dir"
  char letter = 0;            // 'o'; 0: none
  std::string_view argument;  // "DIR"; empty: a flag
  std::string_view doc;       // one line
  std::string_view group;     // heading in the full help; empty: the command's own
  std::string_view choices;   // the values it takes, separated by blanks; empty: any
  bool repeats = false;       // may be given more than once
};

struct Example {
  std::string_view command;  // without the program's name
  std::string_view doc;
};

class Arguments;
struct Context;

struct Command {
  std::string_view name;     // "train", "data prepare"
  std::string_view purpose;  // one line
  std::string_view usage;    // what follows the name
  std::vector<Example> examples;
  std::vector<Option> options;  // the global ones are not listed
  std::string_view details;     // paragraphs of the full help
  // Which bare words are overrides: none; all that look like one.
  bool overrides = false;
  size_t max_words = 0;  // bare words that are not overrides
  int (*run)(Context&) = nullptr;
};

std::span<const Option> global_options();
std::span<const Option> override_options();  // -f --set --append --unset, of commands with `overrides`

// The parsed arguments of one command line. Words and overrides keep their order.
class Arguments {
 public:
  bool has(std::string_view option) const { return count(option) > 0; }
  size_t count(std::string_view option) const;
  std::optional<std::string> value(std::string_view option) const;  // the last one
  std::vector<std::string> values(std::string_view option) const;   // all of them, in their order
  std::string required(std::string_view option) const;              // ErrorCode::usage when missing
  std::optional<int64_t> integer(std::string_view option, int64_t least, int64_t most = INT64_MAX) const;
  std::optional<double> number(std::string_view option, double least, double most) const;

  const std::vector<std::string>& words() const { return words_; }
  // ErrorCode::usage: "`what` is missing".
  const std::string& word(size_t index, std::string_view what) const;
  const std::vector<config::Override>& overrides() const { return overrides_; }

 private:
  friend class ArgumentParser;
  std::vector<std::pair<std::string_view, std::string>> values_;
  std::vector<std::string> words_;
  std::vector<config::Override> overrides_;
};

// Reports all errors at once: ErrorCode::usage.
Arguments parse_arguments(const Command& command, const std::vector<std::string>& tokens);

// The index of the command among the tokens: the first word that is neither a global flag nor the argument of
// one.
std::optional<size_t> find_command_word(const std::vector<std::string>& tokens);

// "data" → {"prepare", "inspect"}; empty for a command without subcommands.
std::vector<std::string_view> words_of_group(std::span<const Command* const> commands,
                                             std::string_view group);

// Whether a word is meant as an override; the override parser checks how it is written.
bool is_override_word(std::string_view word);

// The help of the error for an unknown name: "did you mean `a` or `b`?"; empty when nothing is near.
std::string did_you_mean(std::string_view given, const std::vector<std::string>& candidates,
                         std::string_view prefix = "");

}  // namespace capstan::cli
