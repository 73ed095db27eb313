#pragma once

#include <chrono>

namespace capstan {

// Seconds of the host's steady clock, from a moment that is the same for all threads of this process.
inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace capstan
