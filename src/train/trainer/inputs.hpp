// Checks the files and directories that a recipe names, and the directories that its run writes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/sections/config.hpp"
#include "train/trainer/run_options.hpp"

namespace capstan::train {

// A file or directory that a recipe names but that does not exist, is of the wrong kind, or cannot be used.
struct MissingFile {
  // Path of the field, such as "dataset.data_path".
  std::string field;
  // Name of the file as written in the recipe.
  std::string name;
  // The message, such as "not found: dataset.data_path = data/corpus".
  std::string message;
  // Similar names, or another remedy, with the markers of actions (base/actions.hpp). It may be empty.
  std::string help;
};

// Returns the missing inputs of a new run of the recipe, in the order of use. The recipe must be resolved
// without errors. resumes: the run continues from a checkpoint of its own, and needs the pretrained weights
// only if they are the base of adapters. Reads directories only, no file contents.
std::vector<MissingFile> missing_files(const config::Config& config, bool resumes = false);

struct OpenedFiles {
  // RunData::bytes_in_memory() of the data.
  int64_t resident_data = 0;
  // The warnings with which a run of the recipe would begin; `help` is empty.
  std::vector<MissingFile> warnings;
};

// quick: reads the tokenizer, the indices of datasets and the beginning of fine-tuning files. full: opens the
// data as a run does, and compares the recipe with the checkpoints with which the run begins.
enum class Inspection : uint8_t { quick, full };

// Returns the files that exist but cannot be used: a tokenizer file that holds no tokenizer, is larger than
// the model's vocabulary, or is not the one with which the data were prepared; a damaged indexed dataset; and
// the placeholders that an incomplete download leaves. A full inspection also finds data without a sample,
// lines that cannot be read, weights of other shapes, and a checkpoint.load from which the recipe may not
// continue. Fields of `missing` (missing_files() of the recipe) are skipped, and so is everything that cannot
// be read without them. `options` are those of the run, for the comparison with checkpoint.load.
// opened: takes what a full inspection has learned from the files that can be used.
std::vector<MissingFile> unusable_files(const config::Config& config, const std::vector<MissingFile>& missing,
                                        Inspection inspection, const RunOptions& options = {},
                                        OpenedFiles* opened = nullptr);

// Returns the directories that a run writes but that cannot be created or written: its run directory,
// checkpoint.save, and those of dataset indices, events and traces. No directory is created.
std::vector<MissingFile> unwritable_directories(const config::Config& config, const RunOptions& options);

// Throws ErrorCode::not_found that names all of them, unless the list is empty.
void require_files(const std::vector<MissingFile>& missing);
// Throws ErrorCode::io that names all of them, unless the list is empty.
void require_writable(const std::vector<MissingFile>& unwritable);

}  // namespace capstan::train
