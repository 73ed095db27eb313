// Training: a resolved recipe in, a run directory with metrics and checkpoints out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "capstan/config.hpp"

namespace capstan {

// The processes that were launched together (mpirun, srun), as the launcher's environment tells: nothing is
// started. One process by itself is rank 0 of 1. Throws Error: usage for an environment that contradicts itself.
struct World {
  int rank = 0, size = 1;
};
World launched_world();

struct TrainOptions {
  std::filesystem::path run_dir;  // where the run is recorded; empty: runs/NAME of the recipe
  bool resume = false;            // go on from the newest checkpoint in it; start there when there is none
};

// What a run says, a line at a time and without a newline; on rank 0 only, in the thread that called
// run_training(). May be empty. An exception from it ends the run and is passed on.
enum class Message : uint8_t { line, warning };
using Progress = std::function<void(Message kind, const std::string& text)>;

enum class Ended : uint8_t {
  finished,  // all iterations done
  stopped,   // by a signal, train.exit_interval or train.exit_duration_in_mins; resume goes on from there
};

struct Outcome {
  Ended ended = Ended::finished;
  std::string reason;                         // why it stopped
  int64_t step = 0;                           // iterations done, those before a resume included
  std::filesystem::path run_dir, checkpoint;  // checkpoint: the last one, a directory
};

// Trains to the end of the recipe, or until asked to stop. While it runs, SIGINT, SIGTERM and SIGUSR1 mean: save,
// then return; a second SIGINT or SIGTERM ends the process. The handlers that were there come back afterwards.
// One run at a time in a process.
//
// In a launched world every rank calls it, with the same arguments. The first call starts MPI, the end of the process
// ends it: a program that runs MPI itself cannot host it, and all calls come from one thread. After an error in a
// world of several ranks no run can follow, since nobody knows where the others are: let the process end with a
// code other than 0, and the launcher ends the rest.
//
// Throws Error:
//   config, format         the recipe has errors; the text holds them
//   usage                  it is resolved for another number of ranks
//   unsupported            it asks for what this build cannot do; names each field
//   not_found, format, io  data, tokenizer, a checkpoint (before anything large is allocated); writing the run
//   failed                 the run exists and `resume` is not set, another process works on it, a resume with a
//                          recipe that alters the numbers, a loss or gradient that is not finite
//   rank_failure           the transport, or another rank
// A rank that is gone or silent for resilience.timeout, while this thread waits for it inside MPI, cannot be thrown: it is named
// on standard error, once for the world, and the processes end with code 4.
Outcome run_training(const Config& config, const TrainOptions& options = {}, const Progress& progress = {});

}  // namespace capstan
