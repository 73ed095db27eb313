// The samples of tests/text/tokenizer, made by tests/golden/make_tokenizer_fixtures.py.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "support/paths.hpp"

namespace tokenizer_fixtures {

inline std::filesystem::path path(const std::string& name) {
  return std::filesystem::path(capstan::test::kSourceDirectory) / "tests" / "text" / "tokenizer" / name;
}

inline std::vector<std::string> lines(const std::string& name) {
  const std::string content = capstan::read_file(path(name));
  std::vector<std::string> result;
  for (const auto line : capstan::split(content, '\n')) result.emplace_back(line);
  result.pop_back();  // after the last newline
  return result;
}

inline std::vector<std::string> samples() {
  std::vector<std::string> result;
  for (const auto& line : lines("text.txt"))
    result.push_back(capstan::json_of("\"" + line + "\"").get<std::string>());
  return result;
}

inline std::vector<std::vector<int32_t>> expected_ids(const std::string& name) {
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::vector<std::vector<int32_t>> result;
  for (const auto& line : lines(name + ".ids")) {
    auto& ids = result.emplace_back();
    for (size_t i = 0; i + 1 < line.size(); i += 2)
      ids.push_back(static_cast<int32_t>(digits.find(line[i]) * 64 + digits.find(line[i + 1])));
  }
  return result;
}

}  // namespace tokenizer_fixtures
