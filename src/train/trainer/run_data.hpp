// The data of a run: tokenizer, datasets, and how often the run repeats them.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "config/sections/config.hpp"
#include "data/dataset.hpp"
#include "data/dataset_meta.hpp"
#include "text/tokenizer/tokenizer.hpp"
#include "train/trainer/run_log.hpp"

namespace capstan::train {

struct RunData {
  // Null with mock data.
  std::shared_ptr<const text::Tokenizer> tokenizer;
  // The tokenizer's; without one, that of the training data, if it has a record.
  std::optional<data::TokenizerRecord> tokenizer_record;
  // The result of open_datasets().
  std::array<std::shared_ptr<const data::Dataset>, 3> datasets;
  // Fingerprint of the training samples.
  std::string fingerprint;

  // Bytes of data that every rank holds in its host's memory.
  int64_t bytes_in_memory() const;
  const std::shared_ptr<const data::Dataset>& training() const { return datasets[0]; }
  const std::shared_ptr<const data::Dataset>& validation() const { return datasets[1]; }
  const std::shared_ptr<const data::Dataset>& test() const { return datasets[2]; }
};

// Opens tokenizer and data, and sets train.train_iters if train.epochs gives the length. Throws
// ErrorCode::not_found for missing files. For `resumes`, see missing_files().
RunData open_run_data(config::Config& config, bool resumes, RunLog& log);

// Reports the number of epochs over the training data, with a warning if there are many.
void report_epochs(const config::Config& config, const data::Dataset& training, int64_t steps, RunLog& log);

// "mock data", "gpt data/a, data/b: 120 samples a pass".
std::string data_text(const config::DatasetConfig& config, const data::Dataset& training);

}  // namespace capstan::train
