// The data of a run: tokenizer, datasets, and how often the run repeats them.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "config/core/config.hpp"
#include "data/dataset.hpp"
#include "text/tokenizer/tokenizer.hpp"
#include "train/trainer/run_log.hpp"

namespace capstan::train {

struct RunData {
  std::shared_ptr<const text::Tokenizer> tokenizer;              // null with mock data
  std::array<std::shared_ptr<const data::Dataset>, 3> datasets;  // as open_datasets()
  std::string fingerprint;                                       // of the training samples

  const std::shared_ptr<const data::Dataset>& training() const { return datasets[0]; }
  const std::shared_ptr<const data::Dataset>& validation() const { return datasets[1]; }
  const std::shared_ptr<const data::Dataset>& test() const { return datasets[2]; }
};

// Opens tokenizer and data, and sets train.train_iters where train.epochs gives the length.
// ErrorCode::not_found for files that are missing. `resumes`: see missing_files().
RunData open_run_data(config::Config& config, bool resumes, RunLog& log);

// Reports how often the run goes over its data, with a warning where it is often.
void report_epochs(const config::Config& config, const data::Dataset& training, int64_t steps, RunLog& log);

// "mock data", "gpt data/a, data/b: 120 samples a pass".
std::string data_text(const config::DatasetConfig& config, const data::Dataset& training);

}  // namespace capstan::train
