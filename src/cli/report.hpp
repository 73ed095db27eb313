// Errors as text on standard error and as exit codes.
#pragma once

#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/actions.hpp"
#include "base/error.hpp"
#include "cli/context.hpp"

namespace capstan::cli {

// Format and color of messages. Known before the command line is parsed, because errors in it are shown with
// them too.
struct MessageStyle {
  MessageFormat messages = MessageFormat::human;
  bool color = false;
};

// The words of the command line for the actions that texts of the library propose, with flags.
std::span<const Action> action_flags();
// Writes the marked actions of a text, "{resume}", in these words.
std::string with_flags(std::string_view text);

// Converts any exception to capstan::Error: std::bad_alloc becomes no_fit, an unknown exception becomes
// internal.
Error as_error(std::exception_ptr exception);

std::string render_error(const Error& error, const std::vector<std::string>& command,
                         const MessageStyle& style);

// Shows the error and returns the exit code. Ranks that fail together show it once: rank 0 prints at once,
// another rank waits half a second, in which the launcher ends it if rank 0 failed too.
int report(const Error& error, const std::vector<std::string>& command, const MessageStyle& style);

}  // namespace capstan::cli
