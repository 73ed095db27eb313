// Returns the text of the error that an action throws.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "base/error.hpp"

namespace capstan::test {

// "code: message", with context and help; empty where no capstan::Error is thrown. Other exceptions pass.
template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return std::string(name_of(error.code())) + ": " + error.what();
  }
  return {};
}

// Where it is false, what there is instead is printed.
inline bool holds(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  MESSAGE("not in: " << text);
  return false;
}

}  // namespace capstan::test
