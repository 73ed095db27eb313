// Worlds of real processes whose devices transfer by the stand-in for NCCL, or by NCCL on two GPUs: a fault
// ends them with code 4 and one report, which names rank, collective and group.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/support/processes.hpp"

using namespace capstan;

namespace {

int64_t count_of(const std::string& text, const std::string& part) {
  int64_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

#ifdef CAPSTAN_SEVERAL_GPUS
constexpr bool kRealNccl = true;
#else
constexpr bool kRealNccl = false;
#endif

}  // namespace

TEST_CASE("faults of transfers between devices: a world ends by itself and names rank, batch and group") {
  // fault: the arguments of nccl_rank_at_fault.
  struct Case {
    std::string fault;
    std::vector<std::string> named;
  };
  const std::string gather = " of group `dp` (all_gather of 32 bytes)";
  std::vector<Case> cases{
      {"late_host",
       {"rank 1 on host `",
        " lags at step 4, reduce: the device of rank 0 waits for it in transfer batch 2" + gather,
        "which its host has not started; it has been working after ",
        kRealNccl ? "(resilience.timeout 15" : "(resilience.timeout 1.5 s)",
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
  // On the blocking channels of the checked device the others are found by the channels themselves.
  for (const size_t late : {0, 1}) cases.push_back({cases[late].fault + " blocking", cases[late].named});
  // The others are of the stand-in: host functions that occupy a device, the moment at which ranks connect,
  // and an error of the transport.
  if (kRealNccl) cases = {cases[0]};
  std::vector<std::string> arguments{"none", "none blocking", "killed"};
  for (const Case& one : cases) arguments.push_back(one.fault);
  const std::vector<test::Ended> worlds = test::run_worlds(2, CAPSTAN_NCCL_RANK_AT_FAULT, arguments);

  for (const size_t i : {0, 1}) {
    CHECK_MESSAGE(worlds[i].code == 0, worlds[i].text);
    CHECK_MESSAGE(count_of(worlds[i].text, "error: ") == 0, worlds[i].text);
  }
  // mpirun ends with the signal.
  const test::Ended& killed = worlds[2];
  CHECK_MESSAGE(killed.code == 137, killed.text);
  CHECK_MESSAGE(count_of(killed.text, "rank 1 on host `") == 1, killed.text);
  CHECK_MESSAGE(count_of(killed.text, " is gone at step 4, reduce") == 1, killed.text);
  for (size_t i = 0; i < cases.size(); ++i) {
    CAPTURE(cases[i].fault);
    const test::Ended& ended = worlds[3 + i];
    CHECK_MESSAGE(ended.code == 4, ended.text);
    CHECK_MESSAGE(count_of("\n" + ended.text, "\nerror: ") == 1, ended.text);
    for (const std::string& part : cases[i].named) CHECK_MESSAGE(count_of(ended.text, part) > 0, ended.text);
  }
}
