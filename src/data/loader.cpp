#include "data/loader.hpp"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace capstan::data {

MicroBatch MicroBatch::zeros(int64_t rows, int64_t sequence_length) {
  const auto elements = static_cast<size_t>(checked_mul(rows, sequence_length));
  MicroBatch batch;
  batch.rows = rows;
  batch.sequence_length = sequence_length;
  batch.tokens.resize(elements);
  batch.labels.resize(elements);
  batch.loss_mask.resize(elements);
  batch.position_ids.resize(elements);
  return batch;
}

struct Loader::State {
  std::shared_ptr<const Dataset> dataset;
  LoaderOptions options;
  // Number of micro-batches that next() has returned.
  int64_t taken = 0;

  // Workers claim micro-steps in order; the result of step m goes to slot m % slots.size(). A step is claimed
  // only when its slot is free, that is when step m - slots.size() has been taken.
  struct Slot {
    bool ready = false;
    MicroBatch batch;
    std::exception_ptr error;
  };
  std::mutex mutex;
  std::condition_variable slot_free, slot_ready;
  std::vector<Slot> slots;
  int64_t claimed = 0;
  bool stop = false;
  std::vector<std::thread> workers;

  MicroBatch read(int64_t step) const {
    const int64_t rows = options.micro_batch_size, length = dataset->sequence_length();
    const int64_t first = options.consumed_samples + step * rows * options.data_parallel_size +
                          options.data_parallel_rank * rows;
    MicroBatch batch = MicroBatch::zeros(rows, length);
    const auto row_elements = static_cast<size_t>(length);
    batch.cu_seqlens.resize(static_cast<size_t>(rows));
    batch.sample_ids.resize(static_cast<size_t>(rows));
    batch.lengths.assign(static_cast<size_t>(rows), static_cast<int32_t>(length));
    for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
      const size_t at = row * row_elements;
      const int64_t sample = first + static_cast<int64_t>(row);
      batch.sample_ids[row] = static_cast<uint64_t>(sample);
      try {
        dataset->row(sample, {std::span(batch.tokens).subspan(at, row_elements),
                              std::span(batch.labels).subspan(at, row_elements),
                              std::span(batch.loss_mask).subspan(at, row_elements),
                              std::span(batch.position_ids).subspan(at, row_elements), &batch.cu_seqlens[row],
                              &batch.lengths[row]});
      } catch (Error& error) {
        throw error.in("while reading sample " + std::to_string(sample) + " (row " + std::to_string(row) +
                       " of a micro-batch on data-parallel rank " +
                       std::to_string(options.data_parallel_rank) + ")");
      }
    }
    return batch;
  }

  Slot& slot(int64_t step) { return slots[static_cast<size_t>(step) % slots.size()]; }

  void work() {
    for (;;) {
      int64_t step;
      {
        std::unique_lock lock(mutex);
        slot_free.wait(lock, [&] { return stop || claimed < taken + static_cast<int64_t>(slots.size()); });
        if (stop) return;
        step = claimed++;
      }
      MicroBatch batch;
      std::exception_ptr error;
      try {
        batch = read(step);
      } catch (...) {
        error = std::current_exception();
      }
      std::lock_guard lock(mutex);
      slot(step).batch = std::move(batch);
      slot(step).error = std::move(error);
      slot(step).ready = true;
      slot_ready.notify_all();
    }
  }
};

Loader::Loader(std::shared_ptr<const Dataset> dataset, const LoaderOptions& options)
    : state_(std::make_unique<State>()) {
  CAPSTAN_ASSERT(dataset != nullptr, "a loader needs a dataset");
  const int64_t rows = options.micro_batch_size, ranks = options.data_parallel_size;
  if (rows <= 0 || ranks <= 0 || options.data_parallel_rank < 0 || options.data_parallel_rank >= ranks ||
      options.consumed_samples < 0 || options.num_workers < 0)
    fail(ErrorCode::config, "invalid loader: micro-batches of " + std::to_string(rows) + " for rank " +
                                std::to_string(options.data_parallel_rank) + " of " + std::to_string(ranks) +
                                " with " + std::to_string(options.num_workers) + " workers");
  if (options.global_batch_size <= 0 || options.global_batch_size % checked_mul(rows, ranks) != 0)
    fail(ErrorCode::config, "the global batch of " + std::to_string(options.global_batch_size) +
                                " samples is not a multiple of micro-batch " + std::to_string(rows) + " × " +
                                std::to_string(ranks) + " data-parallel ranks");
  state_->dataset = std::move(dataset);
  state_->options = options;
  if (options.num_workers == 0) return;
  state_->slots.resize(2 * static_cast<size_t>(options.num_workers));
  try {
    for (int i = 0; i < options.num_workers; ++i)
      state_->workers.emplace_back([state = state_.get()] { state->work(); });
  } catch (const std::system_error& error) {
    // The destructor does not run after an exception, so the started threads must be stopped here.
    {
      std::lock_guard lock(state_->mutex);
      state_->stop = true;
    }
    state_->slot_free.notify_all();
    for (auto& worker : state_->workers) worker.join();
    fail(ErrorCode::io, std::string("cannot start a data worker: ") + error.what());
  }
}

Loader::~Loader() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->slot_free.notify_all();
  for (auto& worker : state_->workers) worker.join();
}

MicroBatch Loader::next() {
  State& state = *state_;
  if (state.workers.empty()) {
    MicroBatch batch = state.read(state.taken);
    ++state.taken;
    return batch;
  }
  std::unique_lock lock(state.mutex);
  auto& slot = state.slot(state.taken);
  state.slot_ready.wait(lock, [&] { return slot.ready; });
  if (slot.error) std::rethrow_exception(slot.error);
  MicroBatch batch = std::move(slot.batch);
  slot = {};
  ++state.taken;
  lock.unlock();
  state.slot_free.notify_one();
  return batch;
}

int64_t Loader::consumed_samples() const {
  std::lock_guard lock(state_->mutex);
  return state_->options.consumed_samples +
         state_->taken * state_->options.micro_batch_size * state_->options.data_parallel_size;
}

}  // namespace capstan::data
