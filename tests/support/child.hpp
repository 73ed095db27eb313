// Runs code in a process of its own, whose end the caller reports.
#pragma once

#include <string>

#include "base/function_ref.hpp"

namespace capstan::test {

struct ChildResult {
  bool succeeded = false;
  // The message of an error, and what it has written to the standard error.
  std::string text;
};
// Only while this process has one thread.
ChildResult run_in_child(FunctionRef<void()> body);

}  // namespace capstan::test
