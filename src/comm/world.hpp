// The processes that were launched together. Starts MPI only when there is more than one.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "comm/communicator.hpp"
#include "comm/watchdog/failure_watch.hpp"

namespace capstan::comm {

class TransferWatch;

// The environment variable in which a parent process names the rank status table that it reads after the
// ranks have ended.
inline constexpr const char* kStatusTableVariable = "CAPSTAN_RANK_STATUS";

class World {
 public:
  // Reads the launcher's environment (Open MPI, PMIx/PMI, Slurm steps, torchrun); a process without one is a
  // world of one. Contradicting variables and a launcher whose ranks MPI cannot join are ErrorCode::usage.
  static std::unique_ptr<World> join(const FailureWatch& watch = {});
  // The ranks of a communicator of the program that embeds Capstan, which initializes and finalizes MPI
  // itself. `communicator` points to its MPI_Comm, which is duplicated to separate messages and error
  // handlers. Collective over it. ErrorCode::usage where MPI is not running or the calling thread may not use
  // it; ::unsupported for an MPI initialized below MPI_THREAD_FUNNELED.
  static std::unique_ptr<World> from_mpi(const void* communicator, const FailureWatch& watch = {});
  // A world of one process, without reading the launcher's environment.
  static std::unique_ptr<World> single_process();
  virtual ~World() = default;

  virtual Communicator& communicator() = 0;
  int rank() { return communicator().rank(); }
  int size() { return communicator().size(); }
  // Rank and number of ranks on this host.
  virtual int local_rank() const = 0;
  virtual int local_size() const = 0;
  virtual const std::string& host() const = 0;
  // Publishes the training step and the phase within it (up to 16 characters); failure reports of other ranks
  // show them.
  virtual void publish_step(int64_t) {}
  virtual void publish_phase(std::string_view) {}
  // Publishes when the run could stop on request (see Slot::expected_end) and the step of its newest
  // checkpoint. The parent process of several ranks prints them after ctrl-C.
  virtual void publish_expected_end(int64_t) {}
  virtual void publish_saved_step(int64_t) {}
  // Shares rank status between hosts through files in this directory, which all hosts can access. No effect
  // on one host. Collective.
  virtual void share_rank_status(const std::filesystem::path&) {}
  // The channels of this process that its watchdog observes, and aborts where a rank fails; null: a world
  // without a watchdog.
  virtual std::shared_ptr<TransferWatch> transfer_watch() { return nullptr; }
  // True once a rank failure is being reported. Errors that follow from it should not be reported again.
  virtual bool failure_reported() const { return false; }
  // Ends all processes of the world with this exit code, at once. Does not return.
  [[noreturn]] virtual void abort(int exit_code) = 0;
};

// Rank and world size as the launcher's environment states them.
struct LaunchedAs {
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
  // "Open MPI", "Slurm", … ; empty for a single process.
  std::string source;
};
// ErrorCode::usage for a variable that is not a number, a rank outside of its world, variables of launchers
// that contradict each other, and processes that MPI cannot join.
LaunchedAs launched_as();

}  // namespace capstan::comm
