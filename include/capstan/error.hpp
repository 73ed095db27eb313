// The one error type that Capstan throws. Its library code never exits and never prints.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace capstan {

// What kind of thing went wrong; the command line maps it to a process exit code (exit_code_of).
enum class ErrorCode : uint8_t {
  usage,         // bad command line, or arguments that make no sense                     -> 2
  config,        // a recipe with errors                                                  -> 2 (check: 1)
  not_found,     // a file or name that does not exist                                    -> 2
  format,        // an unreadable, malformed or corrupt file                              -> 2
  io,            // the operating system refused a read or write                          -> 1
  failed,        // the work itself failed (a non-finite loss, a refused resume)          -> 1
  unsupported,   // legal, but this build cannot do it                                    -> 1
  no_fit,        // does not fit the hardware                                             -> 3
  rank_failure,  // a rank failed, stalled or disagrees                                   -> 4
  internal,      // a bug in Capstan                                                      -> 70
};

std::string_view name_of(ErrorCode code);
int exit_code_of(ErrorCode code);

// message: one self-standing sentence, lower case, no full stop, says what is wrong and with which values.
// context: where, innermost first ("in shard `x.safetensors`", "while loading checkpoint `runs/a/…`").
// help:    what would be right, where there is a way out.
class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message, std::string help = {});

  // Adds a context line; returns *this so that a handler may `throw e.in(…)`.
  Error& in(std::string context);
  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  const std::string& help() const { return help_; }
  const std::vector<std::string>& context() const { return context_; }
  const char* what() const noexcept override {
    return what_.c_str();
  }  // message, context and help on separate lines

 private:
  void compose();
  ErrorCode code_;
  std::string message_, help_, what_;
  std::vector<std::string> context_;
};

}  // namespace capstan
