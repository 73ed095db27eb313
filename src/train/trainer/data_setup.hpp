// The datasets of a recipe, and the length of the run where it depends on them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "config/core/config.hpp"
#include "data/dataset.hpp"
#include "data/sft_dataset.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::train {

// Training, validation and test data; null where a split has no share, or is not evaluated.
std::array<std::shared_ptr<const data::Dataset>, 3> open_datasets(const config::Config& config,
                                                                  const text::Tokenizer* tokenizer);

// For dataset.kind sft. The tokenizer has to outlive the options.
data::SftOptions sft_options(const config::Config& config, const text::Tokenizer& tokenizer);

// Iterations of train.epochs passes over the training data, rounded up.
int64_t steps_of_epochs(const config::Config& config, const data::Dataset& data);

// total_iterations(); where train.epochs gives the length, after opening the training data. Throws as a run
// does that cannot open it.
int64_t total_iterations_of_data(const config::Config& config);

}  // namespace capstan::train
