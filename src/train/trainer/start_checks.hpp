// Checks whether a new run can begin: throws the trainer's errors about the data and the checkpoints that the
// recipe names, without allocating the model or reading tensors.
#pragma once

#include "config/sections/config.hpp"
#include "train/trainer/run_data.hpp"
#include "train/trainer/run_options.hpp"

namespace capstan::train {

// open_run_data() for a new run, without log lines.
RunData open_data(config::Config& config);

// Bytes of fine-tuning data that a run holds in memory, for `held_data` of estimates; 0 where the recipe sets
// no memory limit, or where the data cannot be opened. Tokenizes the data.
int64_t data_bytes_under_limit(const config::Config& config);

// Checks recipe, schedule, samples, tokenizer and shapes against checkpoint.load. data: null if it cannot be
// opened; then only shapes are compared.
void check_load(const config::Config& config, const RunOptions& options, const RunData* data);

// Checks the shapes of checkpoint.pretrained_checkpoint.
void check_pretrained(const config::Config& config);

// Checks the settings, the shapes and the base model of the adapters of peft.adapter.
void check_adapter(const config::Config& config);

}  // namespace capstan::train
