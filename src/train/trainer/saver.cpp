#include "train/trainer/saver.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>

#include "base/error.hpp"
#include "checkpoint/writer.hpp"
#include "comm/collective_errors.hpp"
#include "comm/reduce.hpp"
#include "train/trainer/timers.hpp"

namespace capstan::train {

using Clock = std::chrono::steady_clock;

struct Saver::Save {
  explicit Save(StateWriter w) : writer(std::move(w)) {}
  enum class Phase : uint8_t { writing, committing } phase = Phase::writing;
  StateWriter writer;
  Clock::time_point begun = Clock::now();
  double stall_seconds = 0;
  std::thread thread;
  std::atomic<bool> done{true};
  // The writer thread owns these until `done`; after that, the trainer's thread does.
  std::string error, manifest;
  bool committed = false;
};

std::vector<PinnedBuffer> snapshot_buffers(Device& device, const std::vector<StateTensor>& tensors) {
  CategoryScope scope(MemoryCategory::snapshot);
  std::vector<PinnedBuffer> copies;
  for (const auto& t : tensors) {
    PinnedBuffer& copy = copies.emplace_back(device, t.bytes());
    if (!device.is_meta()) std::ranges::fill(copy.host_write(), std::byte{0});
  }
  return copies;
}

Saver::Saver(comm::World& world, const parallel::FlatStore& store, const optim::Optimizer& optimizer,
             bool with_optimizer, Device& device)
    : world_(world),
      optimizer_(optimizer),
      tensors_(state_tensors(store, with_optimizer ? &optimizer : nullptr)),
      copies_(snapshot_buffers(device, tensors_)) {}

Saver::~Saver() {
  join();
  // A commit that was under way has ended; uncommitted files are removed.
  if (save_ && world_.rank() == 0 && !save_->committed) save_->writer.abandon();
}

void Saver::start(std::function<void()> work) {
  save_->done = false;
  save_->thread = std::thread([save = save_.get(), work = std::move(work)] {
    try {
      work();
    } catch (const std::exception& error) {
      save->error = error.what();
      if (save->error.empty()) save->error = "unknown error";
    }
    save->done.store(true, std::memory_order_release);
  });
}

void Saver::join() {
  if (save_ && save_->thread.joinable()) save_->thread.join();
}

void Saver::begin(const SavePlan& plan, const TrainState& state) {
  CAPSTAN_ASSERT(!busy(), "one save at a time");
  const auto begun = Clock::now();
  // Offloaded state is on another device than the rest.
  std::map<Device*, std::unique_ptr<Event>> copied;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Tensor values = tensors_[i].values();
    Device& device = values.device();
    device.wait_for(Queue::device_to_host, *device.record(Queue::compute));
    device.start_copy_to_host(copies_[i].data(), values.address(), values.bytes(), Queue::device_to_host);
    // If `values` is a copy, its memory is reused after this transfer.
    std::unique_ptr<Event>& last = copied[&device];
    last = device.record(Queue::device_to_host);
    device.wait_for(Queue::compute, *last);
  }
  StateWriter writer(world_, plan, state, optimizer_);
  for (const auto& [device, last] : copied) last->wait();
  for (size_t i = 0; i < tensors_.size(); ++i) writer.add(tensors_[i], copies_[i].host_read());
  save_ = std::make_unique<Save>(std::move(writer));
  save_->begun = begun;
  start([save = save_.get()] { save->manifest = save->writer.write_rank(); });
  save_->stall_seconds = seconds_since(begun);
}

bool Saver::ready() const {
  return !save_ || save_->done.load(std::memory_order_acquire);
}

Saver::SaveResult Saver::save_result(std::string error) {
  SaveResult result{.step = save_->writer.step(),
                    .directory = save_->writer.final_directory(),
                    .error = std::move(error),
                    .problem = save_->writer.problem(),
                    .stall_seconds = save_->stall_seconds,
                    .seconds = seconds_since(save_->begun)};
  save_.reset();
  return result;
}

std::optional<Saver::SaveResult> Saver::advance() {
  if (!save_) return std::nullopt;
  const auto begun = Clock::now();
  join();
  comm::Communicator& group = world_.communicator();
  // The first character distinguishes a list from a reason.
  const auto texts =
      comm::gather_texts(group, save_->error.empty() ? "+" + save_->manifest : "-" + save_->error);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].starts_with('-')) continue;
    if (world_.rank() == 0) save_->writer.abandon();
    return save_result((texts.size() > 1 ? "rank " + std::to_string(rank) + ": " : "") +
                       texts[rank].substr(1));
  }
  if (save_->phase == Save::Phase::committing) return save_result({});
  save_->phase = Save::Phase::committing;
  save_->manifest.clear();
  if (world_.rank() == 0) {
    std::vector<std::string> manifests;
    for (const auto& text : texts) manifests.push_back(text.substr(1));
    start([save = save_.get(), manifests = std::move(manifests)] {
      save->writer.commit(manifests);
      save->committed = true;
    });
  }
  save_->stall_seconds += seconds_since(begun);
  return std::nullopt;
}

std::optional<Saver::SaveResult> Saver::finish() {
  const auto begun = Clock::now();
  std::optional<SaveResult> result;
  const double before = save_ ? save_->stall_seconds : 0;
  while (save_) result = advance();
  if (result) result->stall_seconds = before + seconds_since(begun);
  return result;
}

}  // namespace capstan::train
