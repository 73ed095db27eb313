// What the tests of the records share.
#pragma once

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "base/error.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/temporary_directory.hpp"

namespace capstan::records::test {

namespace fs = std::filesystem;

using capstan::test::error_of;
using capstan::test::holds;
using capstan::test::TemporaryDirectory;

inline std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}
inline void spill(const fs::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
}

}  // namespace capstan::records::test
