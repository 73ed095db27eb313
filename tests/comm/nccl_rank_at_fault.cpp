// nccl_rank_at_fault FAULT [blocking]: two ranks whose devices transfer by NCCL's channels on a backend
// without CUDA or on two GPUs, or by the blocking channels of the checked device, in a world of short
// patience; something is wrong with rank 1, or with the order of both. Started by nccl_faults.cpp.
#include <signal.h>
#include <stdio.h>

#include <chrono>
#include <string>
#include <thread>

#include "base/error.hpp"
#include "comm/blocking_channel.hpp"
#include "comm/nccl_channel.hpp"
#include "comm/world.hpp"
#include "kernels/table.hpp"
#include "tensor/tensor.hpp"
#include "tests/support/nccl_gpus.hpp"

using namespace capstan;
using namespace capstan::comm;
using namespace std::chrono_literals;

namespace {

struct Ranks {
  World& world;
  Device& device;
  Communicator &dp, &tp;
  Tensor small, large;
  int other() const { return 1 - world.rank(); }
  bool is_faulty() const { return world.rank() == 1; }

  void gather(Communicator& group) const {
    group.channel().start(TransferBatch("").all_gather(small, large)).wait();
  }
  void receive(Communicator& group) const {
    group.channel().start(TransferBatch("").receive(small, other())).wait();
  }
  void send(Communicator& group) const {
    group.channel().start(TransferBatch("").send(small, other())).wait();
  }
};

void run_fault(const std::string& fault, const Ranks& on) {
  // Connects the ranks, unless that is the fault.
  if (fault != "unconnected") {
    on.dp.channel()
        .start(
            TransferBatch("").receive(on.small, on.other()).send(on.large.flat_range(0, 8, {8}), on.other()))
        .wait();
    on.gather(on.tp);
    on.device.synchronize();
  }
  if (fault == "receive_first" || fault == "unconnected") {
    on.receive(on.dp);
    on.send(on.dp);
  } else if (fault == "another_collective" && on.is_faulty()) {
    const Tensor received = Tensor::zeros(on.device, {16});
    on.dp.channel().start(TransferBatch("").all_to_all(on.large, received)).wait();
  } else if (fault == "crossed_groups") {
    // The compute queue of each rank waits for one group before the other's batch begins.
    on.gather(on.is_faulty() ? on.tp : on.dp);
    on.gather(on.is_faulty() ? on.dp : on.tp);
  } else {
    if (fault == "late_host" && on.is_faulty()) std::this_thread::sleep_for(60s);
    if (fault == "late_device" && on.is_faulty())
      on.device.enqueue(Queue::compute, [] { std::this_thread::sleep_for(60s); });
    if (fault == "killed" && on.is_faulty()) ::raise(SIGKILL);
    if (fault == "transport" && on.is_faulty()) test::fake_nccl().fails_at = test::fake_nccl().groups + 1;
    on.gather(on.dp);
  }
  on.device.synchronize();
}

}  // namespace

int main(int count, char** arguments) {
  const auto report = [](const Error& error) { ::fprintf(stderr, "error: %s\n", error.what()); };
  // GPUs need longer to connect.
  const auto world = World::join({.timeout = test::kRealNccl ? 15 : 1.5, .report = report});
  try {
    world->publish_step(4);
    world->publish_phase("reduce");
    const bool blocking = count > 2;
    const auto gpu = test::make_nccl_gpu(test::kRealNccl ? world->local_rank() : 0);
    const auto checked = make_checked_device(kernels::cpu_table(), 1);
    Device& device = blocking ? *checked : *gpu;
    const auto status = std::make_shared<TransferStatus>(world->communicator());
    const auto dp = world->communicator().split(0, world->rank(), "dp"),
               tp = world->communicator().split(0, world->rank(), "tp");
    for (Communicator* group : {dp.get(), tp.get()})
      group->use_channel(
          blocking ? make_blocking_channel(*group, device, status)
                   : make_nccl_channel(
                         *group, *gpu,
                         {.world_rank = world->rank(), .timeout = 60, .watch = world->transfer_watch()}));
    run_fault(arguments[1],
              {*world, device, *dp, *tp, Tensor::zeros(device, {8}), Tensor::zeros(device, {16})});
  } catch (const Error& error) {
    if (!world->failure_reported()) report(error);
    world->abort(exit_code_of(error.code()));
  }
}
