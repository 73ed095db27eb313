// Asynchronous saves (checkpoint.async_save): the step waits for a copy of the state, a thread of this rank
// writes it, and a later step boundary commits it.
//
//   begin()    copies this rank's share of the state into buffers that live as long as the saver;
//              starts the writer
//   ready()    whether this rank's writer is idle; without communication, called at every step boundary
//   advance()  collective, once all ranks are ready: rank 0 gathers the manifests, and its writer commits;
//              once all ranks are ready again, a second call returns the result of the save on every rank
//
// The writer thread accesses only files, neither the transport nor the device.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tensor/pinned_buffer.hpp"
#include "train/setup/state.hpp"

namespace capstan::train {

class Saver {
 public:
  // Result of a save that has ended.
  struct SaveResult {
    int64_t step = 0;
    std::filesystem::path directory;
    // If not empty, nothing was committed and the files on disk are unchanged.
    std::string error;
    // Rank 0: committed, but old checkpoints could not be deleted.
    std::string problem;
    // Time that training steps waited: for the copy of the state, and in finish().
    double stall_seconds = 0;
    // Time from begin() to the commit.
    double seconds = 0;
  };

  // Allocates the memory of the copies (MemoryCategory::snapshot) and touches its pages, so that no step is
  // slowed down by page faults.
  Saver(comm::World& world, const parallel::FlatStore& store, const optim::Optimizer& optimizer,
        bool with_optimizer, Device& device);
  // Waits for the writer and removes an uncommitted checkpoint; nothing is communicated.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  bool busy() const { return save_ != nullptr; }
  // Collective. Must not be called while busy().
  void begin(const SavePlan& plan, const TrainState& state);
  // Whether this rank's writer is idle. This is also true if no save is in progress.
  bool ready() const;
  // Collective. Continues the save once ready() is true on all ranks.
  std::optional<SaveResult> advance();
  // Collective. Waits for the save in progress.
  std::optional<SaveResult> finish();

 private:
  struct Save;
  void start(std::function<void()> work);
  void join();
  SaveResult save_result(std::string error);

  comm::World& world_;
  const optim::Optimizer& optimizer_;
  // The tensors that this rank writes.
  std::vector<StateTensor> tensors_;
  // Copies of the tensors.
  std::vector<PinnedBuffer> copies_;
  std::unique_ptr<Save> save_;
};

// Allocates the buffers of a saver's copies (on the meta device for the memory estimate).
std::vector<PinnedBuffer> snapshot_buffers(Device& device, const std::vector<StateTensor>& tensors);

}  // namespace capstan::train
