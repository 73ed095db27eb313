// The processes that were launched together. MPI is started only when there is more than one.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "comm/communicator.hpp"

namespace capstan::comm {

// What becomes of a world whose ranks fail: a rank that is gone is told at once, one that keeps others waiting for longer than
// `timeout` seconds then, in both cases once for the whole world; every process then ends with exit code 4.
struct FailureWatch {
  double timeout = 600;  // resilience.timeout
  std::function<void(const Error&)>
      report;  // by the rank that found it, on a thread of its own; not where a parent tells it
  // Called after the report, on each rank that notices the failure, instead of ending the process. Empty: exit code 4.
  std::function<void()> leave;
};
// The variable in which a parent names the rank status table that it reads when the ranks have ended.
inline constexpr const char* kStatusTableVariable = "CAPSTAN_RANK_STATUS";

class World {
 public:
  // Looks at the launcher's environment (Open MPI, PMIx/PMI, Slurm steps, torchrun); one process without it is a world of
  // one. Contradicting variables and a launcher whose ranks MPI cannot join are ErrorCode::usage.
  static std::unique_ptr<World> join(const FailureWatch& watch = {});
  // The ranks of a communicator of the program that embeds Capstan, which initializes and finalizes MPI itself. `communicator`
  // points to its MPI_Comm, which is duplicated: messages and error handlers of the two do not meet. Collective over it.
  // ErrorCode::usage where MPI is not running or the calling thread may not use it; ::unsupported for an MPI
  // initialized below MPI_THREAD_FUNNELED.
  static std::unique_ptr<World> over(const void* communicator, const FailureWatch& watch = {});
  // This process by itself, whatever it was launched into.
  static std::unique_ptr<World> alone();
  virtual ~World() = default;

  virtual Communicator& communicator() = 0;
  int rank() { return communicator().rank(); }
  int size() { return communicator().size(); }
  virtual int local_rank() const = 0;  // among the ranks of this host
  virtual int local_size() const = 0;
  virtual const std::string& host() const = 0;
  // What the other ranks are told of this one when it lags: the step, and up to 16 characters of what it does in it.
  virtual void at_step(int64_t) {}
  virtual void at_phase(std::string_view) {}
  // In how many seconds from now the run can stop if it is asked to; 0: unknown. For the answer of a parent to ctrl-C.
  virtual void expect(double) {}
  // Ranks of several hosts see each other's posts through files in this directory, which all of them see (of the run); nothing
  // where all are on one host. Collective.
  virtual void share_rank_status(const std::filesystem::path&) {}
  // The failure of a rank has been told, or is being told: nobody else should speak of what follows from it.
  virtual bool failure_reported() const { return false; }
  // Ends all processes of the world with this exit code, at once. Does not return.
  [[noreturn]] virtual void abort(int exit_code) = 0;
};

// What the environment says without starting anything: {rank, size, source of that knowledge}.
struct LaunchedAs {
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
  std::string source;  // "Open MPI", "Slurm", … ; empty for a single process
};
// ErrorCode::usage for a variable that is no number, a rank outside of its world, launchers that contradict each other
// (both variables are named), and processes that MPI cannot join.
LaunchedAs launched_as();

}  // namespace capstan::comm
