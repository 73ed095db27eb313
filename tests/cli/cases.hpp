// Command lines and what the program must say to them, word for word, in text files:
//
//   === a misspelled key                     a case; its files; the command; its exit code and output
//   --- my.yaml
//   model: {num_layer: 3}
//   --- $ capstan check my.yaml
//   --- exit 1
//   error[C0102]: unknown key `model.num_layer`
//   …
//
// Each case runs in a directory of its own. With CAPSTAN_WRITE_GOLDEN=1 the files are written anew from what
// the program says.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace capstan::test {

struct Case {
  std::string name;
  std::vector<std::pair<std::string, std::string>> files;
  // Words as a shell would split them: quotes, no variables.
  std::string command;
  int code = 0;
  // Standard error, then standard output.
  std::string said;
};

// Runs every case of the *.txt files in a directory below tests/cli. Returns how many there were.
size_t run_cases(const std::string& directory);

}  // namespace capstan::test
