// Rank and world size from the environment variables of launchers.
#include <array>
#include <cstdlib>
#include <optional>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/world.hpp"

namespace capstan::comm {

namespace {

std::optional<int> number_in(const char* variable) {
  const char* text = variable ? std::getenv(variable) : nullptr;
  if (!text || !*text) return std::nullopt;
  const auto value = parse_int(text);
  if (!value || *value < 0 || *value > 1'000'000)
    fail(ErrorCode::usage,
         std::string("environment variable ") + variable + "=" + text + " is not a rank or size");
  return static_cast<int>(*value);
}

struct Launcher {
  const char *name, *rank, *size, *local_rank, *local_size;
};
// Launchers whose ranks MPI_Init can connect.
constexpr std::array<Launcher, 3> kMpi{{
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE"},
    {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
}};
constexpr Launcher kSlurm{"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr};
constexpr Launcher kTorchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
// PMIx has no variable for the size.
constexpr const char* kPmixRank = "PMIX_RANK";

struct LauncherRank {
  const Launcher* launcher;
  int rank, size;
};

std::string assignment(const char* variable, int value) {
  return std::string(variable) + "=" + std::to_string(value);
}

// The variables of one launcher, checked independently of others.
std::optional<LauncherRank> look_at(const Launcher& launcher) {
  const auto rank = number_in(launcher.rank), size = number_in(launcher.size);
  if (!rank || !size) return std::nullopt;
  if (*rank >= *size)
    fail(ErrorCode::usage, assignment(launcher.rank, *rank) + " contradicts " +
                               assignment(launcher.size, *size) + ": ranks count from 0");
  return LauncherRank{&launcher, *rank, *size};
}

[[noreturn]] void contradict(const char* a, int value_a, const char* b, int value_b) {
  fail(ErrorCode::usage, assignment(a, value_a) + " contradicts " + assignment(b, value_b),
       "unset the variables of the launcher that did not start this process");
}

void require_same(const LauncherRank& a, const LauncherRank& b) {
  if (a.size != b.size) contradict(a.launcher->size, a.size, b.launcher->size, b.size);
  if (a.rank != b.rank) contradict(a.launcher->rank, a.rank, b.launcher->rank, b.rank);
}

}  // namespace

LaunchedAs launched_as() {
  std::optional<LauncherRank> by;
  for (const Launcher& launcher : kMpi)
    if (const auto one = look_at(launcher)) {
      if (by) require_same(*by, *one);
      if (!by) by = one;
    }
  // Slurm may have started the MPI launcher, and its step then counts the launcher's daemons. So Slurm's
  // variables apply only without another launcher's. An salloc shell and a batch script have SLURM_PROCID=0
  // too, but no step of several tasks.
  if (!by && std::getenv("SLURM_STEP_ID"))
    if (const auto step = look_at(kSlurm); step && step->size > 1) by = step;
  if (const auto rank = number_in(kPmixRank); rank && by && *rank != by->rank)
    contradict(kPmixRank, *rank, by->launcher->rank, by->rank);
  if (const auto torchrun = look_at(kTorchrun); torchrun && torchrun->size > 1) {
    if (!by)
      fail(ErrorCode::usage,
           "started by torchrun (" + assignment(kTorchrun.size, torchrun->size) +
               "), whose processes MPI cannot join",
           "unset " + std::string(kTorchrun.rank) + " and " + kTorchrun.size +
               ", and start it with `mpirun -n " + std::to_string(torchrun->size) + " PROGRAM …`");
    require_same(*by, *torchrun);
  }
  if (!by) {
    if (const auto rank = number_in(kPmixRank); rank && *rank > 0)
      fail(ErrorCode::usage, assignment(kPmixRank, *rank) + " names a rank, but no variable says of how many",
           "start the processes with mpirun, or with srun in a step of several tasks");
    return {};
  }

  const Launcher& launcher = *by->launcher;
  LaunchedAs launched{by->rank, by->size, number_in(launcher.local_rank).value_or(0),
                      number_in(launcher.local_size).value_or(1), launcher.name};
  if (number_in(launcher.local_rank) && number_in(launcher.local_size) &&
      launched.local_rank >= launched.local_size)
    contradict(launcher.local_rank, launched.local_rank, launcher.local_size, launched.local_size);
  return launched;
}

}  // namespace capstan::comm
