// The orders of samples of an indexed dataset. Both concatenate the sequences of a split in some order. With
// T = sequence length, sample i holds the tokens [i·T, i·T + T] of the concatenated sequences, so neighbors
// share one token: the last label of one is the first input of the next. No separator is put between
// sequences; an end-of-document token is there only if preparation appended one.
//
// CapstanOrder: epoch e orders the sequences by Permutation(N, key(seed, e, 0)), takes the n = (tokens - 1)/T
// complete samples of the concatenated sequences and shuffles them by Permutation(n, key(seed, e, 1)). Sample
// number i belongs to epoch i / n. The content of a sample therefore depends on (data, seed, T, i) and not on
// the number of samples that the run needs: a longer run begins with the samples of a shorter one. The fewer
// than T tokens that remain at the end of an epoch differ from epoch to epoch. A split with at most T tokens
// gives one sample per epoch, which continues at the first token after the last one.
//
// MegatronOrder: Megatron-LM's indices, bit for bit (numpy.random.RandomState(seed); the documents of all
// epochs are shuffled together, but the last epoch separately if less than 80 % of it is used). They depend
// on num_samples and so on the length of the run.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/function_ref.hpp"
#include "data/index_cache.hpp"
#include "data/indexed_dataset.hpp"
#include "data/sample.hpp"

namespace capstan::data {

// Sequences [begin, end) of a dataset: one split.
struct SequenceRange {
  std::shared_ptr<const IndexedDataset> dataset;
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
  int64_t tokens() const { return dataset->first_token(end) - dataset->first_token(begin); }
};

// A token of the concatenated sequences.
struct SequenceOffset {
  // Index in the order of sequences.
  int64_t position;
  // Token within that sequence.
  int64_t offset;
  bool operator==(const SequenceOffset&) const = default;
};

// The first token of each sample. Keeps that of every 8th sample (16 bytes) and finds the others by adding up
// sequence lengths from there.
class SampleTable {
 public:
  // Sequence number in the dataset.
  using SequenceAt = FunctionRef<int64_t(int64_t position)>;
  // `at` gives the sequence at each of `positions` positions of the order. With a cache, `key` identifies
  // this order, and the table is read from the cache or written to it.
  SampleTable(const IndexedDataset& dataset, int64_t positions, SequenceAt at, int64_t samples,
              int64_t sequence_length, const IndexCache* cache = nullptr, const std::string& key = {});

  // Returns the first token of a sample; `sample` is in [0, samples].
  SequenceOffset start_of(int64_t sample, const IndexedDataset& dataset, SequenceAt at) const;
  // Memory of a table of that many samples.
  static int64_t bytes_of(int64_t samples) {
    return rows_of(samples) * static_cast<int64_t>(sizeof(SequenceOffset));
  }

 private:
  static constexpr int64_t kStride = 8;
  static int64_t rows_of(int64_t samples) { return samples / kStride + 1; }
  void build(const IndexedDataset& dataset, SequenceAt at);
  // Whether offsets that were read from a cache file can belong to `dataset`.
  bool possible(const IndexedDataset& dataset, SequenceAt at) const;
  int64_t positions_, sequence_length_;
  std::vector<SequenceOffset> starts_;
};

// Fills `text` with the tokens from `start` on. After the last sequence it continues with the first one.
void read_tokens(const IndexedDataset& dataset, int64_t positions, SampleTable::SequenceAt at,
                 SequenceOffset start, std::span<int32_t> text);

class CapstanOrder final : public SampleSource {
 public:
  CapstanOrder(SequenceRange range, int64_t sequence_length, uint64_t seed,
               std::shared_ptr<const IndexCache> cache = nullptr);
  int64_t samples() const override { return kEndless; }
  int64_t epoch_samples() const override { return per_epoch_; }
  std::vector<DatasetShare> parts() const override { return {{range_.dataset->prefix(), per_epoch_, 1}}; }
  void read(int64_t number, std::span<int32_t> text) const override;
  void add_memory(std::map<const void*, int64_t>& held) const override;

 private:
  struct Epoch;
  std::shared_ptr<const Epoch> epoch(int64_t number) const;

  SequenceRange range_;
  int64_t sequence_length_, per_epoch_;
  uint64_t seed_;
  std::shared_ptr<const IndexCache> cache_;
  std::string cache_key_;
  mutable std::mutex mutex_;
  // The two most recent epochs, indexed by parity, because concurrent readers may be on both sides of the end
  // of an epoch.
  mutable std::array<std::shared_ptr<const Epoch>, 2> recent_;
};

class MegatronOrder final : public SampleSource {
 public:
  // num_samples: nullopt builds one epoch. seed < 2^32.
  MegatronOrder(SequenceRange range, int64_t sequence_length, uint64_t seed,
                std::optional<int64_t> num_samples, const IndexCache* cache = nullptr);
  int64_t samples() const override { return static_cast<int64_t>(shuffle_index_.size()); }
  int64_t epoch_samples() const override { return per_epoch_; }
  std::vector<DatasetShare> parts() const override { return {{range_.dataset->prefix(), per_epoch_, 1}}; }
  void read(int64_t number, std::span<int32_t> text) const override;
  void add_memory(std::map<const void*, int64_t>& held) const override;

  // Sequence numbers in the order of all epochs, epochs · N of them.
  std::span<const int32_t> document_index() const { return document_index_; }
  // The first token of a row; `row` is in [0, samples()].
  SequenceOffset sample_index(int64_t row) const;
  std::span<const uint32_t> shuffle_index() const { return shuffle_index_; }

 private:
  // The last epoch is shuffled apart from the others where less than 80 % of it is used.
  void build(int64_t epochs, bool separate_last_epoch, int64_t samples_without_last, uint64_t seed);
  // Whether indices that were read from a cache file are in range.
  bool possible() const;

  SequenceRange range_;
  int64_t per_epoch_;
  std::vector<int32_t> document_index_;
  std::vector<uint32_t> shuffle_index_;
  std::optional<SampleTable> table_;
};

}  // namespace capstan::data
