// Whose variables say which rank this is: the environment is set in this process.
#include <doctest/doctest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "base/error.hpp"
#include "comm/world.hpp"

using namespace capstan;
using namespace capstan::comm;
using Variables = std::map<std::string, std::string>;

namespace {

// Exactly these launchers' variables; what was there before comes back.
class Environment {
 public:
  explicit Environment(const Variables& wanted) {
    for (const char* name :
         {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
          "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
          "PMIX_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_LOCALID", "RANK",
          "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
      if (const char* value = std::getenv(name)) before_[name] = value;
      ::unsetenv(name);
    }
    for (const auto& [name, value] : wanted) ::setenv(name.c_str(), value.c_str(), 1);
    wanted_ = wanted;
  }
  ~Environment() {
    for (const auto& [name, value] : wanted_) ::unsetenv(name.c_str());
    for (const auto& [name, value] : before_) ::setenv(name.c_str(), value.c_str(), 1);
  }

 private:
  Variables wanted_, before_;
};

LaunchedAs launched(const Variables& variables) {
  const Environment environment(variables);
  return launched_as();
}
std::string refused(const Variables& variables) {
  try {
    const LaunchedAs as = launched(variables);
    return "rank " + std::to_string(as.rank) + " of " + std::to_string(as.size);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::usage);
    return error.message();
  }
}

const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "3"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kSlurm{
    {"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_STEP_ID", "0"}, {"SLURM_LOCALID", "1"}};

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

}  // namespace

TEST_CASE("each launcher's variables name the rank") {
  CHECK(launched({}).size == 1);
  CHECK(launched({}).source.empty());
  const LaunchedAs open_mpi = launched(kOpenMpi);
  CHECK(open_mpi.source == "Open MPI");
  CHECK(open_mpi.rank == 3);
  CHECK(open_mpi.size == 4);
  CHECK(open_mpi.local_rank == 1);
  CHECK(open_mpi.local_size == 2);
  CHECK(launched({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}).source == "PMI");
  CHECK(launched({{"MV2_COMM_WORLD_RANK", "1"}, {"MV2_COMM_WORLD_SIZE", "2"}}).source == "MVAPICH");
  CHECK(launched(kSlurm).source == "Slurm");
  CHECK(launched(kSlurm).rank == 2);
  CHECK(launched(kSlurm).local_rank == 1);
  CHECK(launched(with(kSlurm, {{"PMIX_RANK", "2"}})).rank == 2);
  // A world of one is still a launched world.
  CHECK(launched({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}).source == "Open MPI");
}

TEST_CASE("environments that are not a launch") {
  // A shell of salloc, a batch script, a step of one task, a notebook.
  CHECK(launched({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}}).size == 1);
  CHECK(launched(with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}})).size == 1);
  CHECK(launched({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).size == 1);
  // Slurm has started mpirun's daemons, one for each node.
  CHECK(
      launched(with(kOpenMpi, {{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_ID", "0"}}))
          .rank == 3);
}

TEST_CASE("contradictions name both variables") {
  CHECK(refused(with(kOpenMpi, {{"RANK", "1"}, {"WORLD_SIZE", "4"}})) ==
        "OMPI_COMM_WORLD_RANK=3 contradicts RANK=1");
  CHECK(refused(with(kOpenMpi, {{"RANK", "3"}, {"WORLD_SIZE", "8"}})) ==
        "OMPI_COMM_WORLD_SIZE=4 contradicts WORLD_SIZE=8");
  CHECK(refused(with(kOpenMpi, {{"RANK", "3"}, {"WORLD_SIZE", "4"}})) == "rank 3 of 4");
  CHECK(refused(with(kOpenMpi, {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}})) ==
        "OMPI_COMM_WORLD_RANK=3 contradicts PMI_RANK=2");
  CHECK(refused(with(kOpenMpi, {{"PMIX_RANK", "0"}})) == "PMIX_RANK=0 contradicts OMPI_COMM_WORLD_RANK=3");
  CHECK(refused(with(kSlurm, {{"PMIX_RANK", "1"}})) == "PMIX_RANK=1 contradicts SLURM_PROCID=2");
  CHECK(refused(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "4"}})) ==
        "OMPI_COMM_WORLD_RANK=4 contradicts OMPI_COMM_WORLD_SIZE=4: ranks count from 0");
  CHECK(refused(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}})) ==
        "OMPI_COMM_WORLD_LOCAL_RANK=2 contradicts OMPI_COMM_WORLD_LOCAL_SIZE=2");
  CHECK(refused(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "x"}})).find("is not a rank or size") !=
        std::string::npos);
}

TEST_CASE("launches that MPI cannot join") {
  CHECK(refused({{"RANK", "1"}, {"WORLD_SIZE", "4"}}).find("started by torchrun (WORLD_SIZE=4)") == 0);
  CHECK(refused({{"PMIX_RANK", "1"}}).find("PMIX_RANK=1 names a rank") == 0);
}
