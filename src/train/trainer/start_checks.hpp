// Whether a new run can begin: what the trainer refuses of its data and of the checkpoints that its recipe
// names, without memory for the model and without reading tensors.
#pragma once

#include "config/sections/config.hpp"
#include "train/trainer/run_data.hpp"
#include "train/trainer/run_options.hpp"

namespace capstan::train {

// open_run_data() of a new run, without its reports.
RunData open_data(config::Config& config);

// checkpoint.load: recipe, schedule, samples, tokenizer and shapes. data: null where it cannot be opened;
// then shapes alone are compared.
void check_load(const config::Config& config, const RunOptions& options, const RunData* data);

// checkpoint.pretrained_checkpoint: shapes.
void check_pretrained(const config::Config& config);

// peft.adapter: what describes the adapters, shapes, and the weights beside which they were trained.
void check_adapter(const config::Config& config);

}  // namespace capstan::train
