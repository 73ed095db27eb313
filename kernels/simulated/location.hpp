// A source location in a kernel.
#pragma once

#include <cstring>
#include <string>

namespace capstan::kernels::simulated {

// A source line. As the last, defaulted parameter `Location at = {}` of a function, it is the line of the
// call.
struct Location {
  const char* file = "";
  int line = 0;
  constexpr Location(const char* in = __builtin_FILE(), int at = __builtin_LINE()) : file(in), line(at) {}
  bool operator==(const Location& o) const {
    return line == o.line && (file == o.file || std::strcmp(file, o.file) == 0);
  }
  // "kernels/cuda/norm.cu:52"
  std::string text() const;
};

}  // namespace capstan::kernels::simulated
