// A text, a tokenizer and a dataset of it, and a recipe for a tiny model, in one directory that is made once.
#pragma once

#include <string>
#include <vector>

#include "base/json.hpp"
#include "process.hpp"

namespace capstan::test {

struct Prepared : ScratchDirectory {
  Prepared();
  // Runs the program in the directory.
  Finished in(std::vector<std::string> arguments) const;
};
const Prepared& prepared();

// The rows of a metrics.jsonl, and the losses of a run by step.
std::vector<Json> rows_of(const std::string& file);
std::vector<double> losses_of(const std::string& run);

}  // namespace capstan::test
