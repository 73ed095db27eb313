// The processes that were launched together. MPI is started only when there is more than one.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.hpp"

namespace capstan::comm {

class World {
 public:
  // Looks at the launcher's environment (Open MPI, PMIx/PMI, Slurm steps, torchrun); one process without it is a world of
  // one. Contradicting variables and a launcher whose ranks MPI cannot join are ErrorCode::usage.
  static std::unique_ptr<World> join();
  virtual ~World() = default;

  virtual Communicator& communicator() = 0;
  int rank() { return communicator().rank(); }
  int size() { return communicator().size(); }
  virtual int local_rank() const = 0;  // among the ranks of this host
  virtual int local_size() const = 0;
  virtual const std::string& host() const = 0;
  // Ends all processes of the world with this exit code, at once. Does not return.
  [[noreturn]] virtual void abort(int exit_code) = 0;
};

// What the environment says without starting anything: {rank, size, source of that knowledge}.
struct LaunchedAs {
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
  std::string source;  // "Open MPI", "Slurm", … ; empty for a single process
};
LaunchedAs launched_as();

}  // namespace capstan::comm
