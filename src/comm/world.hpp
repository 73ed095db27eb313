// The processes that were launched together. Starts MPI only when there is more than one.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "comm/communicator.hpp"

namespace capstan::comm {

// How rank failures are handled. The first rank that detects a dead rank, or a rank that keeps others waiting
// for longer than `timeout`, reports it once for all ranks. Every process then ends with exit code 4.
struct FailureWatch {
  double timeout = 600;  // seconds
  // Called on the rank that detected the failure, from the watchdog's thread. Not called where a parent
  // process reports failures.
  std::function<void(const Error&)> report;
  // Called after the report, on each rank that notices the failure, instead of ending the process. Empty:
  // exit code 4.
  std::function<void()> leave;
};
// The environment variable in which a parent process names the rank status table that it reads after the
// ranks have ended.
inline constexpr const char* kStatusTableVariable = "CAPSTAN_RANK_STATUS";

class World {
 public:
  // Reads the launcher's environment (Open MPI, PMIx/PMI, Slurm steps, torchrun); a process without one is a
  // world of one. Contradicting variables and a launcher whose ranks MPI cannot join are ErrorCode::usage.
  static std::unique_ptr<World> join(const FailureWatch& watch = {});
  // The ranks of a communicator of the program that embeds Capstan, which initializes and finalizes MPI
  // itself. `communicator` points to its MPI_Comm and is duplicated, which separates messages and error
  // handlers. Collective over it. ErrorCode::usage where MPI is not running or the calling thread may not use
  // it; ::unsupported for an MPI initialized below MPI_THREAD_FUNNELED.
  static std::unique_ptr<World> over(const void* communicator, const FailureWatch& watch = {});
  // A world of one, whatever launched this process.
  static std::unique_ptr<World> alone();
  virtual ~World() = default;

  virtual Communicator& communicator() = 0;
  int rank() { return communicator().rank(); }
  int size() { return communicator().size(); }
  // Among the ranks of this host.
  virtual int local_rank() const = 0;
  virtual int local_size() const = 0;
  virtual const std::string& host() const = 0;
  // Publishes the training step and the phase within it (up to 16 characters); failure reports of other ranks
  // show them.
  virtual void at_step(int64_t) {}
  virtual void at_phase(std::string_view) {}
  // Publishes in how many seconds from now the run could stop on request; 0: unknown. A parent shows it after
  // ctrl-C.
  virtual void expect(double) {}
  // Shares rank status between hosts through files in this directory, which all hosts can access. No effect
  // on one host. Collective.
  virtual void share_rank_status(const std::filesystem::path&) {}
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
// ErrorCode::usage for a variable that is no number, a rank outside of its world, launchers that contradict
// each other (both variables are named), and processes that MPI cannot join.
LaunchedAs launched_as();

}  // namespace capstan::comm
