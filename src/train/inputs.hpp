// The files and directories that a recipe names, looked for without reading them.
#pragma once

#include <string>
#include <vector>

#include "config/config.hpp"

namespace capstan::train {

// A file or directory that a recipe names and that is not there, or is of another kind than the field takes.
struct MissingFile {
  std::string field;    // "dataset.data_path"
  std::string name;     // as the recipe has it
  std::string message;  // "not found: dataset.data_path = data/corpus"
  std::string help;     // near names, or what else to do; may be empty
};

// What a new run of the recipe needs and does not find, in the order of use; empty: everything is there. A recipe that is resolved
// and has no errors. resumes: the run goes on from a checkpoint of its own, and of the weights needs only those beside which adapters
// stand. Reads directories alone, no content.
std::vector<MissingFile> missing_files(const config::Config& config, bool resumes = false);

// ErrorCode::not_found with all of them.
void require_files(const std::vector<MissingFile>& missing);

}  // namespace capstan::train
