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
  // Long name without the dashes, such as "run-dir".
  std::string_view name;
  // Short form, such as 'o'. 0: none.
  char letter = 0;
  // Name of the argument in help texts, such as "DIR". Empty: the option is a flag.
  std::string_view argument;
  // Description in one line.
  std::string_view doc;
  // Heading in the full help. Empty: the command's own options.
  std::string_view group;
  // The legal values, separated by blanks. Empty: any.
  std::string_view choices;
  // May be given more than once.
  bool repeats = false;
};

struct Example {
  // The command line without the program's name.
  std::string_view command;
  std::string_view doc;
};

class Arguments;
struct Context;

struct Command {
  // Full name, such as "train" or "data prepare".
  std::string_view name;
  // Description in one line.
  std::string_view purpose;
  // Arguments after the name, as written in the synopsis.
  std::string_view usage;
  std::vector<Example> examples;
  // Options of the command, without the global ones.
  std::vector<Option> options;
  // Paragraphs of the full help.
  std::string_view details;
  // Whether bare words that look like overrides are overrides.
  bool overrides = false;
  // Maximum number of bare words that are not overrides.
  size_t max_words = 0;
  int (*run)(Context&) = nullptr;
};

std::span<const Option> global_options();
// -f --set --append --unset, of commands with `overrides`.
std::span<const Option> override_options();

// The parsed arguments of one command line. Words and overrides keep their order.
class Arguments {
 public:
  bool has(std::string_view option) const { return count(option) > 0; }
  size_t count(std::string_view option) const;
  // The last value of an option that was given several times.
  std::optional<std::string> value(std::string_view option) const;
  // All values of an option, in their order.
  std::vector<std::string> values(std::string_view option) const;
  // Throws ErrorCode::usage if the option is missing.
  std::string required(std::string_view option) const;
  // The value as a number from `least` to `most`; above_least: `least` itself is out of range. Throws
  // ErrorCode::usage for another text, and for a number out of range.
  std::optional<int64_t> integer(std::string_view option, int64_t least, int64_t most = INT64_MAX) const;
  std::optional<double> number(std::string_view option, double least, double most,
                               bool above_least = false) const;

  const std::vector<std::string>& words() const { return words_; }
  // Throws ErrorCode::usage, "`what` is missing", with the command's usage, if there are fewer words.
  const std::string& word(size_t index, std::string_view what) const;
  const std::vector<config::Override>& overrides() const { return overrides_; }

 private:
  friend class ArgumentParser;
  // "data prepare FILE… [flags]"
  std::string usage_;
  std::vector<std::pair<std::string_view, std::string>> values_;
  std::vector<std::string> words_;
  std::vector<config::Override> overrides_;
};

// Parses the tokens. Throws ErrorCode::usage that reports all errors at once.
Arguments parse_arguments(const Command& command, const std::vector<std::string>& tokens);

// The index of the command among the tokens: the first word that is neither a global flag nor the argument of
// one.
std::optional<size_t> find_command_word(const std::vector<std::string>& tokens);

// "data" → {"prepare", "inspect"}; empty for a command without subcommands.
std::vector<std::string_view> words_of_group(std::span<const Command* const> commands,
                                             std::string_view group);

// Whether a word is meant as an override; the override parser checks how it is written.
bool is_override_word(std::string_view word);

// The help of the error for an unknown name: "did you mean `a` or `b`?"; empty when nothing is near. `prefix`
// and `suffix` stand before and after each candidate.
std::string did_you_mean(std::string_view given, const std::vector<std::string>& candidates,
                         std::string_view prefix = "", std::string_view suffix = "");
// The same where all names can be listed: "did you mean `a`? It takes one of: a, b, c".
std::string choices_help(std::string_view given, const std::vector<std::string>& choices);

}  // namespace capstan::cli
