// The datasets of a recipe, and the length of the run where it depends on them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "config/sections/config.hpp"
#include "data/dataset.hpp"
#include "data/sft_dataset.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::train {

// Opens training, validation and test data. Null: the split is empty or is not evaluated.
std::array<std::shared_ptr<const data::Dataset>, 3> open_datasets(const config::Config& config,
                                                                  const text::Tokenizer* tokenizer);

// The options of a dataset of kind sft. The tokenizer must outlive the options.
data::SftOptions sft_options(const config::Config& config, const text::Tokenizer& tokenizer);

// Number of iterations in train.epochs passes over the training data, rounded up.
int64_t steps_of_epochs(const config::Config& config, const data::Dataset& data);

// Iterations of a run that has consumed `consumed` samples in `steps` steps. With
// train.decrease_batch_size_if_needed a run whose length is given in samples or passes may have continued on
// another number of ranks, with another size of the batch.
int64_t total_iterations_after(const config::Config& config, const data::Dataset& data, int64_t steps,
                               int64_t consumed);

// Returns total_iterations(). If train.epochs defines the length, opens the training data, with the errors of
// open_datasets().
int64_t total_iterations_of_data(const config::Config& config);

}  // namespace capstan::train
