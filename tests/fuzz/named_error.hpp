// Checks of the fuzz targets: code that reads untrusted bytes accepts them, or throws an error that says what
// is wrong with them.
#pragma once

#include <cstdlib>

#include "base/error.hpp"

namespace capstan::fuzz {

// Bytes of a format: any other error than one of these is a bug.
template <class Action>
void expect_named_error(Action action) {
  try {
    action();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::format && error.code() != ErrorCode::unsupported) std::abort();
  }
}

// Where more may be wrong than the bytes: a path, an option.
template <class Action>
void expect_no_internal_error(Action action) {
  try {
    action();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal) std::abort();
  }
}

}  // namespace capstan::fuzz
