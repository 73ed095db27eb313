// Checks whether a new run can begin: throws the trainer's errors about the data and the checkpoints that the
// recipe names, without allocating the model or reading tensors.
#pragma once

#include <string>
#include <vector>

#include "config/sections/config.hpp"
#include "train/trainer/run_data.hpp"
#include "train/trainer/run_options.hpp"

namespace capstan::train {

// Texts of warnings that a run would report before its first step.
using Warnings = std::vector<std::string>;

// open_run_data() for a new run, without log lines. warnings: gets those about the data and the number of
// passes over them.
RunData open_data(config::Config& config, Warnings* warnings = nullptr);

struct ResidentData {
  // Bytes of data and of their indices that a run holds in memory, for `resident_data` of estimates.
  int64_t bytes = 0;
  // Data that `bytes` leaves out because it cannot be opened, with the reason; empty: none.
  std::string left_out;
};
// Opens the data of a run: tokenizes fine-tuning data, builds the indices of Megatron's order. Writes
// nothing.
ResidentData resident_data(const config::Config& config);
// resident_data().bytes if the recipe sets a memory limit; else 0, and nothing is opened.
int64_t data_bytes_under_limit(const config::Config& config);

// Checks recipe, schedule, samples, tokenizer and shapes against checkpoint.load. data: null if it cannot be
// opened; then only shapes are compared.
void check_load(const config::Config& config, const RunOptions& options, const RunData* data,
                Warnings& warnings);

// Checks the shapes of checkpoint.pretrained_checkpoint, and returns the path of the model that it names.
// warnings: gets differences of the model, and of the tokenizer from that of the data. data: null if it
// cannot be opened.
std::string check_pretrained(const config::Config& config, const RunData* data, Warnings& warnings);

// Checks the settings, the shapes and the base model of the adapters of peft.adapter. base: from
// check_pretrained().
void check_adapter(const config::Config& config, const std::string& base);

}  // namespace capstan::train
