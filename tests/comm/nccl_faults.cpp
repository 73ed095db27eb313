// Worlds of real processes whose devices transfer by the stand-in for NCCL: a fault ends them with code 4 and
// one report, which names rank, collective and group.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/support/processes.hpp"

using namespace capstan;

namespace {

// fault: the arguments of nccl_rank_at_fault.
test::Ended run_nccl_fault(const std::string& fault) {
  return test::run_ranks(2, CAPSTAN_NCCL_RANK_AT_FAULT, fault);
}
int64_t count_of(const std::string& text, const std::string& part) {
  int64_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE("faults of transfers between devices: a world ends by itself and names rank, batch and group") {
  const test::Ended fine = run_nccl_fault("none");
  CHECK_MESSAGE(fine.code == 0, fine.text);
  CHECK_MESSAGE(count_of(fine.text, "error: ") == 0, fine.text);

  struct Case {
    const char* fault;
    std::vector<std::string> named;
  };
  const std::string gather = " of group `dp` (all_gather of 32 bytes)";
  const std::vector<Case> cases{
      {"late_host",
       {"rank 1 on host `",
        " lags at step 4, reduce: the device of rank 0 waits for it in transfer batch 2" + gather,
        "which its host has not started; it has been working after ", "(resilience.timeout 1.5 s)",
        " s in transfer batch 2" + gather + ", step 4, reduce"}},
      {"late_device",
       {"rank 1 on host `", "waits for it in transfer batch 2" + gather, "which its device has not reached"}},
      {"receive_first",
       {"transfer batch 2 of group `dp` makes no progress for 1.",
        "at step 4, reduce although all its ranks have begun it: ", "in receive of 32 bytes from rank 1",
        "in receive of 32 bytes from rank 0"}},
      {"unconnected",
       {"transfer batch 1 of group `dp` makes no progress", "in receive of 32 bytes from rank 1",
        "in receive of 32 bytes from rank 0"}},
      {"another_collective",
       {"transfer batch 2 of group `dp` makes no progress", "in all_gather of 32 bytes",
        "in all_to_all of 64 bytes"}},
      {"crossed_groups",
       {"devices wait for each other: ", "in transfer batch 2" + gather,
        "in transfer batch 2 of group `tp` (all_gather of 32 bytes)"}},
      {"transport",
       {"rank 1 on host `",
        "at step 4, reduce: in transfer batch 2" + gather + ", NCCL reports: fake_nccl_get_async_error: ",
        "remote process exited or there was a network error"}},
  };
  for (const auto& [fault, named] : cases) {
    CAPTURE(fault);
    const test::Ended ended = run_nccl_fault(fault);
    CHECK_MESSAGE(ended.code == 4, ended.text);
    CHECK_MESSAGE(count_of("\n" + ended.text, "\nerror: ") == 1, ended.text);
    for (const std::string& part : named) CHECK_MESSAGE(count_of(ended.text, part) > 0, ended.text);
  }
  // On the blocking channels of the checked device the others are found by the channels themselves.
  CHECK(run_nccl_fault("none blocking").code == 0);
  for (const auto& [fault, named] : cases) {
    if (std::string(fault) != "late_host" && std::string(fault) != "late_device") continue;
    CAPTURE(fault);
    const test::Ended ended = run_nccl_fault(fault + std::string(" blocking"));
    CHECK_MESSAGE(ended.code == 4, ended.text);
    CHECK_MESSAGE(count_of("\n" + ended.text, "\nerror: ") == 1, ended.text);
    for (const std::string& part : named) CHECK_MESSAGE(count_of(ended.text, part) > 0, ended.text);
  }
  // mpirun ends with the signal.
  const test::Ended killed = run_nccl_fault("killed");
  CHECK_MESSAGE(killed.code == 137, killed.text);
  CHECK_MESSAGE(count_of(killed.text, "rank 1 on host `") == 1, killed.text);
  CHECK_MESSAGE(count_of(killed.text, " is gone at step 4, reduce") == 1, killed.text);
}
