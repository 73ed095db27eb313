// What went wrong, as text on standard error and as an exit code.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "cli/context.hpp"

namespace capstan::cli {

// How messages look; known before the command line is parsed, because errors in it are shown in this form
// too.
struct Appearance {
  MessageFormat messages = MessageFormat::human;
  bool color = false;
};

// Any exception as capstan::Error: std::bad_alloc becomes no_fit, anything unknown internal.
Error as_error(std::exception_ptr exception);

std::string render_error(const Error& error, const std::vector<std::string>& command, const Appearance& how);

// Shows it and returns the exit code. In a world of several ranks an error is shown once, though each may hit
// it: rank 0 speaks at once, another rank waits a moment, in which the launcher ends it if rank 0 failed too.
int report(const Error& error, const std::vector<std::string>& command, const Appearance& how);

}  // namespace capstan::cli
