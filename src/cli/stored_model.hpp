// The model of a checkpoint, for eval and generate.
#pragma once

#include <string>

#include "base/function_ref.hpp"
#include "checkpoint/reader.hpp"
#include "cli/context.hpp"
#include "train/inference/loaded_model.hpp"

namespace capstan::cli {

inline constexpr Option kServingRanks = {"nproc", 0, "N",
                                         "shard the model over N ranks, started with mpirun"};
// How a launch lays out the model, for the help of both commands.
inline constexpr const char* kServingLayout =
    "Overrides apply to the recipe in the checkpoint: train.threads=1.\n"
    "One process holds the full model, whatever layout trained it; --nproc N and mpirun shard it over N "
    "ranks\n"
    "by dist.tp and dist.pp of the recipe or of overrides: --nproc 4 dist.tp=2 dist.pp=2. dist.ep=N shards "
    "the\n"
    "experts instead of dist.tp.\n"
    "The first token that the tokenizer adds (<bos> of Llama and Gemma) is added once, at the beginning.\n";

// The number of ranks of this launch; with --nproc of those that it starts.
int64_t serving_ranks(const Context& context);

inline constexpr Option kAdapter = {"adapter", 0, "DIR",
                                    "adapters for its weights: a PEFT directory, or a run with `peft`"};

inline constexpr Option kNoBos = {"no-bos", 0, "", "do not add the first token of the tokenizer (<bos>)"};

// Warns of a checkpoint whose chat template ends a turn with text that is no token.
void warn_of_turn_end(const checkpoint::Reader& reader, const config::Config& config);

// Loads the model over the ranks of this launch, or starts those of --nproc, and runs `body` on every rank.
// Only rank 0 prints. name: a checkpoint, a directory of checkpoints, or a run; the overrides of the command
// line apply to its recipe, --adapter to its weights.
int run_stored_model(const Context& context, const std::string& name,
                     FunctionRef<int(train::LoadedModel& model, bool is_rank0)> body);

}  // namespace capstan::cli
