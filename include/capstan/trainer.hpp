// Training: a resolved recipe in, a run directory with metrics and checkpoints out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "capstan/config.hpp"
#include "capstan/run.hpp"

namespace capstan {

// The processes that were launched together (mpirun, srun), as the launcher's environment says; nothing is
// started. A single process is rank 0 of 1. Throws Error: usage for an environment that contradicts itself.
struct World {
  int rank = 0, size = 1;
};
World launched_world();

struct TrainOptions {
  // The run directory. Empty: runs/NAME of the recipe.
  std::filesystem::path run_dir;
  // Continues from the newest checkpoint in run_dir. If there is none, the run starts there.
  bool resume = false;
  // Trains also where the estimate says that a step does not fit the memory, with a warning. False: such a
  // run ends with ErrorCode::no_fit before anything is allocated.
  bool force = false;

  // Called on every rank after each step, in the thread that called run_training(). Not called for a step
  // whose spike makes the run rewind to a checkpoint (loss_spike_action=rewind); the next report is then of
  // the step after that checkpoint, so that steps are reported again. False on any rank asks all ranks to
  // save a checkpoint and stop after this step. An exception ends the run and is passed on; in a world of
  // several ranks it has to be thrown on all of them.
  std::function<bool(const StepReport&)> on_step;

  // True: while the run lasts, SIGINT, SIGTERM and SIGUSR1 mean "save, then return", and a second SIGINT or
  // SIGTERM ends the process. The handlers that were there come back afterward. False: signals are left to
  // the program.
  bool handle_signals = false;

  // For a program that initializes MPI itself (MPI_THREAD_FUNNELED or higher): points to the MPI_Comm whose
  // ranks train. It is duplicated for the run, and Capstan neither initializes nor finalizes MPI. Null:
  // Capstan joins the launched processes; it initializes MPI in the first run of a world of several ranks,
  // and finalizes it at the end of the process.
  const void* mpi_communicator = nullptr;

  // Called on one rank of all, on a thread of its own, when a rank is gone or silent for longer than
  // resilience.timeout. The threads that wait for that rank inside MPI cannot be woken: the handler should
  // report the error and end the process (std::_Exit(exit_code_of(error.code()))), upon which the launcher
  // ends the others. Empty: nothing is reported and the other ranks keep waiting.
  std::function<void(const Error&)> on_rank_failure;
};

// The lines of the run's log as they are written, without a newline; on rank 0 only, in the thread that
// called run_training(). May be empty. An exception from it ends the run and is passed on.
enum class Message : uint8_t { line, warning };
using Progress = std::function<void(Message kind, const std::string& text)>;

// Trains to the end of the recipe, or until asked to stop. One run at a time in a process. Nothing is printed
// and the process is never ended, except by a second signal with handle_signals.
//
// In a world of several ranks every rank calls it with the same arguments, always from the thread that made
// the first call. After an error there, no run can follow in a launched world, because the ranks may be out
// of step: let the process end with a code other than 0, and the launcher ends the rest. With
// mpi_communicator, the next run needs ranks that the program has brought back into step.
//
// Throws Error:
//   config, format         the recipe has errors; the text holds them
//   usage                  it is resolved for another number of ranks; MPI is not running, or this thread
//                          may not use it
//   unsupported            the recipe asks for what this build cannot do; names each field
//   no_fit                 a step needs more memory than this rank has, or than resilience.memory_limit
//                          allows
//   not_found, format, io  data, tokenizer or checkpoint, before anything large is allocated; writing the run
//   failed                 the run exists and `resume` is not set, or another process works on it; a resume
//                          whose recipe alters the numerics; a loss or gradient that is not finite
//   rank_failure           the transport, or another rank
Outcome run_training(const Config& config, const TrainOptions& options = {}, const Progress& progress = {});

}  // namespace capstan
