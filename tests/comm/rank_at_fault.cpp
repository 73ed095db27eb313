// rank_at_fault none|late|lost|wrong_size: two ranks of a world of short patience; the collectives of rank 1
// have that fault. rank_at_fault slow_end FILE: the ranks return 75, all but rank 1 are slow in MPI_Finalize;
// reports go to the file, because mpirun no longer reads what a rank prints then. Started by the tests of the
// status of the ranks.
#include <mpi.h>
#include <signal.h>
#include <stdio.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "comm/world.hpp"
#include "tests/support/faulty_communicator.hpp"

using namespace capstan;
using namespace std::chrono_literals;

static std::chrono::milliseconds slow_end = 0ms;

// Called in place of the library's.
extern "C" int MPI_Finalize() {
  const int code = PMPI_Finalize();
  std::this_thread::sleep_for(slow_end);
  return code;
}

int main(int, char** arguments) {
  const std::string wanted = arguments[1];
  const auto report = [&](const Error& error) {
    FILE* const out = wanted == "slow_end" ? ::fopen(arguments[2], "a") : stderr;
    ::fprintf(out, "error: %s\n", error.what());
    if (out != stderr) ::fclose(out);
  };
  const auto world = comm::World::join({.timeout = 1.5, .report = report});
  const auto fault = wanted == "late"   ? test::Fault::late
                     : wanted == "lost" ? test::Fault::lost
                                        : test::Fault::wrong_size;
  if (wanted == "slow_end") {
    // The launcher sends SIGTERM a second after the first exit, and SIGKILL another second later.
    if (world->rank() != 1) slow_end = 5s;
    // Sees the end of rank 0.
    if (world->rank() == 2) ::signal(SIGTERM, SIG_IGN);
    return 75;
  }
  const bool faulty = world->rank() == 1 && wanted != "none";
  try {
    world->publish_step(4);
    world->publish_phase("reduce");
    const auto group = world->communicator().split(0, world->rank(), "dp");
    test::FaultyCommunicator used(*group, fault, faulty ? 6 : -1, 60s);
    std::vector<char> mine(64), all(128);
    for (int i = 0; i < 5; ++i) {
      used.all_gather(mine.data(), all.data(), 64);
      used.all_to_all(all.data(), all.data() + 64, 32);
      if (wanted == "lost") continue;
      used.broadcast(mine.data(), 64, 0);
    }
  } catch (const Error& error) {
    if (!world->failure_reported()) report(error);
    world->abort(exit_code_of(error.code()));
  }
}
