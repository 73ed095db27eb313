// The one error type that Capstan throws. Its library code never exits and never prints.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace capstan {

// The kind of error, with the exit code to which the command line maps it (exit_code_of).
enum class ErrorCode : uint8_t {
  // 2: bad command line, or arguments that make no sense.
  usage,
  // 2 (`check`: 1): a recipe with errors.
  config,
  // 2: a file or name that does not exist.
  not_found,
  // 2: an unreadable, malformed or corrupt file.
  format,
  // 1: the operating system refused a read or write.
  io,
  // 1: the work itself failed (a non-finite loss, a refused resume).
  failed,
  // 1: legal, but this build cannot do it.
  unsupported,
  // 3: does not fit the hardware.
  no_fit,
  // 4: a rank failed, stalled or disagrees.
  rank_failure,
  // 70: a bug in Capstan.
  internal,
};

std::string_view name_of(ErrorCode code);
int exit_code_of(ErrorCode code);

// message: one self-standing sentence, lower case, no full stop, says what is wrong and with which values.
// context: where, innermost first ("in shard `x.safetensors`", "while loading checkpoint `runs/a/…`").
// help:    what would be right, where there is a way out. It may hold markers of actions, such as "{resume}",
//          for which help() and what() have plain words.
class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message, std::string help = {});

  // Adds a context line; returns *this so that a handler may `throw e.in(…)`.
  Error& in(std::string context);
  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  const std::string& help() const { return help_; }
  // The help with the markers of actions, for a front end that writes actions in its own words.
  const std::string& marked_help() const { return marked_help_; }
  const std::vector<std::string>& context() const { return context_; }
  // Message, context and help on separate lines.
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  void compose();
  ErrorCode code_;
  std::string message_, marked_help_, help_, what_;
  std::vector<std::string> context_;
};

}  // namespace capstan
