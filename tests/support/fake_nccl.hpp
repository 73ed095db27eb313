// Communicators without NCCL, for tests of the NCCL channel: the ranks are processes of one host, which meet
// in shared memory, and a transfer is work of a stream of the fake CUDA backend (fake_cuda.hpp).
//
// It behaves as NCCL where programs can tell. Nothing is buffered: a transfer blocks its stream until the
// peer has come to it and takes the data. Sends and receives of two ranks, and collectives, are matched by
// order alone; transfers that do not match wait forever. The transfers of a group begin together. No call
// waits for other ranks: the first transfer between two ranks connects them, and is not on the stream until
// both have called it. Each rank has a GPU of its own. An error of the transport leaves streams blocked until
// abort.
#pragma once

#include <cstdint>
#include <string>

#include "support/fake_cuda.hpp"
#include "tensor/cuda_backend.hpp"

namespace capstan::test {

struct FakeNccl {
  // load() fails for this reason; empty: it does not.
  std::string missing;
  // The name of the function of cuda::Communicator that fails; empty: none does.
  std::string failing;
  // This process joins a communicator that nobody else joins.
  bool wrong_id = false;
  // The GPU of this process; two ranks of a communicator with the same one are refused. -1: its own.
  int32_t gpu = -1;
  // The transport fails in the group of transfers with this number, from 1, of this process; 0: never.
  int64_t fails_at = 0;
  // The calls that connect ranks return ok, as those of communicators that block.
  bool blocking = false;

  // Communicators that are open, and that were aborted. Groups of transfers so far.
  int64_t open = 0, aborted = 0, groups = 0;
};
FakeNccl& fake_nccl();
// Sets it to the defaults; for the beginning of a test.
FakeNccl& reset_fake_nccl();
// That of fake_cuda.hpp, with communicators.
const cuda::Backend& fake_nccl_backend();

}  // namespace capstan::test
