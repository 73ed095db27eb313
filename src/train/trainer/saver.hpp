// Saves that training goes on beside (checkpoint.async_save): the step waits for a copy of the state, a
// thread of this rank writes it, and a later step boundary commits it.
//
//   begin()    copies this rank's share of the state into buffers that live as long as the saver;
//              starts the writer
//   ready()    this rank's writer is idle: no communication, called at every step boundary
//   advance()  collective, once all ranks are ready: the ranks' manifests go to rank 0, whose writer commits;
//              the next time all are ready the save has ended, everywhere with the same result
//
// The writer thread touches files only, never the transport and never the device.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "train/trainer/state.hpp"

namespace capstan::train {

class Saver {
 public:
  struct Ended {
    int64_t step = 0;
    std::filesystem::path directory;
    // Not empty: nothing was committed, what was there before is unchanged.
    std::string error;
    std::string problem;       // rank 0: committed, but old checkpoints could not be deleted
    double stall_seconds = 0;  // the steps waited so long: the copy, and what finish() waited
    double seconds = 0;        // from begin() to the commit
  };

  // Takes the memory of the copies (MemoryCategory::snapshot) at once and touches it, so that no step pays
  // for that.
  Saver(comm::World& world, const parallel::FlatStore& store, const optim::Optimizer& optimizer,
        bool with_optimizer, Device& device);
  // Waits for the writer. What was not committed is removed; nothing is communicated.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  bool busy() const { return save_ != nullptr; }
  void begin(const SavePlan& plan, const TrainState& state);  // collective; not while busy()
  bool ready() const;                                         // also when nothing is under way
  std::optional<Ended> advance();                             // collective, when ready() on all ranks
  std::optional<Ended> finish();                              // collective: waits for the save under way

 private:
  struct Save;
  void start(std::function<void()> work);
  void join();
  Ended ended(std::string error);

  comm::World& world_;
  const parallel::FlatStore& store_;
  const optim::Optimizer& optimizer_;
  Device& device_;
  std::vector<StateTensor> tensors_;                 // that this rank writes
  std::vector<Tensor> copies_;                       // where the host may read the device's memory,
  std::vector<std::vector<std::byte>> host_copies_;  // and where not
  std::unique_ptr<Save> save_;
};

// The buffers of a saver's copies on `device` (meta: for the memory estimate).
std::vector<Tensor> snapshot_buffers(Device& device, const std::vector<StateTensor>& tensors);

}  // namespace capstan::train
