#include "cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "process.hpp"
#include "support/paths.hpp"

namespace capstan::test {

namespace fs = std::filesystem;

namespace {

constexpr const char* kPrompt = "--- $ capstan ";

std::vector<Case> read_cases(const std::string& text) {
  std::vector<Case> cases;
  std::string* into = nullptr;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("=== ")) {
      cases.push_back({line.substr(4), {}, {}, 0, {}});
      into = nullptr;
    } else if (line.starts_with(kPrompt)) {
      cases.back().command = line.substr(std::string(kPrompt).size());
      into = nullptr;
    } else if (line.starts_with("--- exit ")) {
      cases.back().code = std::stoi(line.substr(9));
      into = &cases.back().said;
    } else if (line.starts_with("--- ")) {
      into = &cases.back().files.emplace_back(line.substr(4), "").second;
    } else if (into) {
      *into += line + "\n";
    }
  }
  // A blank line stands between cases.
  for (Case& one : cases)
    while (one.said.ends_with("\n\n") || one.said == "\n") one.said.pop_back();
  return cases;
}

std::string text_of(const std::vector<Case>& cases) {
  std::string text;
  for (const Case& one : cases) {
    text += (text.empty() ? "=== " : "\n=== ") + one.name + "\n";
    for (const auto& [name, content] : one.files) text += "--- " + name + "\n" + content;
    text += kPrompt + one.command + "\n--- exit " + std::to_string(one.code) + "\n" + one.said;
  }
  return text;
}

std::vector<std::string> shell_words(const std::string& line) {
  std::vector<std::string> words;
  char quote = 0;
  bool inside = false;
  for (const char c : line) {
    if (quote ? c == quote : c == '\'' || c == '"') {
      if (!inside) words.emplace_back();
      inside = true;
      quote = quote ? 0 : c;
    } else if (!quote && c == ' ') {
      inside = false;
    } else {
      if (!inside) words.emplace_back();
      inside = true;
      words.back() += c;
    }
  }
  return words;
}

}  // namespace

size_t run_cases(const std::string& directory) {
  std::vector<fs::path> files;
  for (const auto& entry :
       fs::directory_iterator(fs::path(capstan::test::kSourceDirectory) / "tests/cli" / directory))
    if (entry.path().extension() == ".txt") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  size_t seen = 0;
  for (const fs::path& file : files) {
    std::vector<Case> cases = read_cases(read_text(file.string()));
    for (Case& one : cases) {
      ScratchDirectory scratch;
      for (const auto& [name, content] : one.files) {
        fs::create_directories(fs::path(scratch.file(name)).parent_path());
        scratch.write(name, content);
      }
      Launch launch;
      launch.arguments = shell_words(one.command);
      launch.directory = scratch.path();
      const Finished done = run(launch);
      std::string said = done.err + done.out;
      while (said.ends_with("\n\n") || said == "\n") said.pop_back();
      for (size_t at; (at = said.find(scratch.path())) != std::string::npos;)
        said.replace(at, scratch.path().size(), "DIR");
      ++seen;
      if (std::getenv("CAPSTAN_WRITE_GOLDEN")) {
        one.code = done.code;
        one.said = said;
        continue;
      }
      INFO(file.filename().string() << ": " << one.name << "\n$ capstan " << one.command);
      CHECK(done.code == one.code);
      CHECK(said == one.said);
      if (done.code != 0) CHECK(done.out.empty());  // data only when there are some
    }
    if (std::getenv("CAPSTAN_WRITE_GOLDEN")) std::ofstream(file, std::ios::binary) << text_of(cases);
  }
  return seen;
}

}  // namespace capstan::test
