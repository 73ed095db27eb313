// The model of a checkpoint, for eval and generate.
#pragma once

#include <string>

#include "base/function_ref.hpp"
#include "cli/context.hpp"
#include "train/inference/loaded_model.hpp"

namespace capstan::cli {

inline constexpr Option kServingRanks = {"nproc", 0, "N",
                                         "share the model between N ranks, started with mpirun"};
// How the layout of a launch comes about, for the verbs' details.
inline constexpr const char* kServingLayout =
    "Overrides apply to the recipe that the checkpoint carries: train.threads=1.\n"
    "One process holds the whole model, whatever layout trained it; --nproc N and mpirun share it between N "
    "ranks\n"
    "by the recipe's dist.tp and dist.pp, or those given: --nproc 4 dist.tp=2 dist.pp=2.\n"
    "What the tokenizer puts before a text (<bos> of Llama and Gemma) stands once, at its beginning.\n";

// The ranks of this launch; with --nproc those that it starts.
int64_t serving_ranks(const Context& context);

inline constexpr Option kAdapter = {"adapter", 0, "DIR",
                                    "adapters beside its weights: of PEFT, or of a run with `peft`"};

inline constexpr Option kNoBos = {"no-bos", 0, "", "leave out what the tokenizer puts before a text"};

// Loads the model over the ranks of this launch, or starts those of --nproc, and runs `body` on every rank. Only rank 0 (`chief`)
// prints. name: a checkpoint, a directory of checkpoints, or a run; the overrides of the command line apply to its recipe, --adapter to its weights.
int run_stored_model(const Context& context, const std::string& name,
                     FunctionRef<int(train::LoadedModel& model, bool is_rank0)> body);

}  // namespace capstan::cli
