// The files and directories that a recipe names: whether they are there, and whether they can be used.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/core/config.hpp"

namespace capstan::train {

// A file or directory that a recipe names and that is not there, or is of another kind than the field takes.
struct MissingFile {
  std::string field;    // "dataset.data_path"
  std::string name;     // as the recipe has it
  std::string message;  // "not found: dataset.data_path = data/corpus"
  std::string help;     // near names, or what else to do; may be empty
};

// What a new run of the recipe needs and does not find, in the order of use; empty: everything is there. A
// recipe that is resolved and has no errors. resumes: the run goes on from a checkpoint of its own, and of
// the weights needs only those beside which adapters stand. Reads directories alone, no content.
std::vector<MissingFile> missing_files(const config::Config& config, bool resumes = false);

// quick: reads the tokenizer, the indices of datasets and the beginning of fine-tuning files. full: opens the
// data as a run does, and reads the shapes of the weights.
enum class Inspection : uint8_t { quick, full };

// Files that are there and cannot be used: a tokenizer that is none, larger than the model's vocabulary, or
// not the one with which the data were prepared; an indexed dataset that is damaged; what an incomplete
// download leaves in the place of a file; fully inspected also data without a sample, lines that cannot be
// read, and weights of other shapes. Fields of `missing` (missing_files() of the recipe) are left out, and so
// is what can be read only with them.
std::vector<MissingFile> unusable_files(const config::Config& config, const std::vector<MissingFile>& missing,
                                        Inspection inspection);

// ErrorCode::not_found with all of them.
void require_files(const std::vector<MissingFile>& missing);

}  // namespace capstan::train
