// Micro-batches of one data-parallel rank, in order, read ahead by threads.
//
// With c = consumed_samples, B = micro_batch_size and R = data_parallel_size, micro-step m of the run takes
// samples [c + m·B·R, c + (m + 1)·B·R) of the dataset, and rank r gets rows [r·B, (r + 1)·B) of them, as
// Megatron's `single` sampler does. The rows do not depend on the number of workers, and a loader that starts
// at consumed_samples continues exactly after the last sample that an earlier loader returned.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "data/dataset.hpp"

namespace capstan::data {

// B rows of T tokens, row-major.
struct MicroBatch {
  int64_t rows = 0, sequence_length = 0;
  std::vector<int32_t> tokens;  // [B, T]
  std::vector<int32_t> labels;  // [B, T]
  // 1 for labels that count in the loss, else 0.
  std::vector<float> loss_mask;       // [B, T]
  std::vector<int32_t> position_ids;  // [B, T]
  // [B] starts of the documents of a row, between which there is no attention, then T.
  std::vector<std::vector<int32_t>> cu_seqlens;
  // [B] tokens of a row before the padding at its end; empty: T of each.
  std::vector<int32_t> lengths;
  // [B] consumed-sample number of each row, which is the same in every parallel layout.
  std::vector<uint64_t> sample_ids;

  // A micro-batch whose [B, T] arrays are zero; the other arrays are empty.
  static MicroBatch zeros(int64_t rows, int64_t sequence_length);
};

struct LoaderOptions {
  int64_t data_parallel_rank = 0, data_parallel_size = 1;
  int64_t micro_batch_size = 1;
  // A multiple of micro_batch_size · data_parallel_size.
  int64_t global_batch_size = 1;
  // Samples that all ranks have consumed before.
  int64_t consumed_samples = 0;
  // Threads that prefetch two micro-batches each. 0: next() reads the rows itself.
  int num_workers = 2;
};

class Loader {
 public:
  Loader(std::shared_ptr<const Dataset> dataset, const LoaderOptions& options);
  // Stops the workers; safe at any time.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next micro-batch. An error of reading it is thrown here, with the micro-batch in the
  // context; the same call may be made again and fails again.
  MicroBatch next();

  // Samples, over all ranks, of the micro-batches that next() has returned, plus those before this loader.
  int64_t consumed_samples() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace capstan::data
