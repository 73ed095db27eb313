// Files as texts.
#pragma once

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace capstan::test {

inline std::string slurp(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}
inline void spill(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
}

}  // namespace capstan::test
