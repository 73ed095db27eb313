// How library code throws the one error type; the type itself is public.
#pragma once

#include "capstan/error.hpp"

namespace capstan {

[[noreturn]] void fail(ErrorCode code, std::string message, std::string help = {});

// A broken invariant of our own: always on, throws ErrorCode::internal with file and line.
#define CAPSTAN_ASSERT(condition, text)                                  \
  do {                                                                   \
    if (!(condition)) [[unlikely]]                                       \
      ::capstan::assertion_failed(#condition, text, __FILE__, __LINE__); \
  } while (false)
[[noreturn]] void assertion_failed(const char* condition, const std::string& text, const char* file,
                                   int line);

}  // namespace capstan
