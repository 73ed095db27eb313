// Which tokens a sample of an indexed dataset holds. Both orders lay the sequences of a split end to end, in
// some order, and sample i of that stream is its tokens [i·T, i·T + T], T = sequence length (neighbors share
// one token: the last label of one is the first input of the next). No separator is put between sequences: an
// end-of-document token is there if preparation appended one.
//
// CapstanOrder: epoch e orders the sequences by Permutation(N, key(seed, e, 0)), takes the n = (tokens - 1)/T
// whole samples of that stream and deals them by Permutation(n, key(seed, e, 1)). Sample number i belongs to
// epoch i / n. What a sample holds therefore depends on (data, seed, T, i) and never on how many samples will
// be asked for: a longer run begins with the shorter one. The fewer than T tokens that remain at the end of
// an epoch differ from epoch to epoch. A split with at most T tokens gives one sample per epoch, read around
// the end of the stream.
//
// MegatronOrder: Megatron-LM's indices, bit for bit (numpy.random.RandomState(seed); documents of all epochs
// shuffled together; the last epoch apart when less than 80 % of it is used). They depend on num_samples and
// so on the length of the run.
#pragma once

#include <array>
#include <cstdint>
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

// A token of a stream of sequences.
struct SequenceOffset {
  int64_t position;  // in the order of sequences
  int64_t offset;    // token within that sequence
  bool operator==(const SequenceOffset&) const = default;
};

// Where each sample of a stream of sequences begins. Keeps the start of every 8th sample (16 bytes) and walks
// from there.
class SampleTable {
 public:
  using SequenceAt = FunctionRef<int64_t(int64_t position)>;  // sequence number in the dataset
  // With a cache, `key` says which sequences `at` gives; the table is kept there, or taken from there.
  SampleTable(const IndexedDataset& dataset, int64_t positions, SequenceAt at, int64_t samples,
              int64_t sequence_length, const IndexCache* cache = nullptr, const std::string& key = {});

  SequenceOffset start_of(int64_t sample, const IndexedDataset& dataset,
                          SequenceAt at) const;  // sample in [0, samples]

 private:
  static constexpr int64_t kStride = 8;
  void build(const IndexedDataset& dataset, SequenceAt at);
  bool possible(const IndexedDataset& dataset, SequenceAt at) const;  // of places from a file
  int64_t positions_, sequence_length_;
  std::vector<SequenceOffset> starts_;
};

// Fills `text` from `start` on, sequence after sequence; past the last one it goes on at the first.
void read_stream(const IndexedDataset& dataset, int64_t positions, SampleTable::SequenceAt at,
                 SequenceOffset start, std::span<int32_t> text);

class CapstanOrder final : public SampleSource {
 public:
  CapstanOrder(SequenceRange range, int64_t sequence_length, uint64_t seed,
               std::shared_ptr<const IndexCache> cache = nullptr);
  int64_t samples() const override { return kEndless; }
  int64_t epoch_samples() const override { return per_epoch_; }
  std::vector<SourcePart> parts() const override { return {{range_.dataset->prefix(), per_epoch_, 1}}; }
  void read(int64_t number, std::span<int32_t> text) const override;

 private:
  struct Epoch;
  std::shared_ptr<const Epoch> epoch(int64_t number) const;

  SequenceRange range_;
  int64_t sequence_length_, per_epoch_;
  uint64_t seed_;
  std::shared_ptr<const IndexCache> cache_;
  std::string cache_key_;
  mutable std::mutex mutex_;
  // By parity: readers that work ahead of each other straddle the end of an epoch.
  mutable std::array<std::shared_ptr<const Epoch>, 2> recent_;
};

class MegatronOrder final : public SampleSource {
 public:
  // num_samples: nullopt builds one epoch. seed < 2^32.
  MegatronOrder(SequenceRange range, int64_t sequence_length, uint64_t seed,
                std::optional<int64_t> num_samples, const IndexCache* cache = nullptr);
  int64_t samples() const override { return static_cast<int64_t>(shuffle_index_.size()); }
  int64_t epoch_samples() const override { return per_epoch_; }
  std::vector<SourcePart> parts() const override { return {{range_.dataset->prefix(), per_epoch_, 1}}; }
  void read(int64_t number, std::span<int32_t> text) const override;

  std::span<const int32_t> document_index() const { return document_index_; }  // sequence numbers, epochs · N
  SequenceOffset sample_index(int64_t row) const;                              // row in [0, samples()]
  std::span<const uint32_t> shuffle_index() const { return shuffle_index_; }

 private:
  // The last epoch is shuffled apart from the others where less than 80 % of it is used.
  void build(int64_t epochs, bool last_apart, int64_t without_last, uint64_t seed);
  bool possible() const;  // of indices from a file

  SequenceRange range_;
  int64_t per_epoch_;
  std::vector<int32_t> document_index_;
  std::vector<uint32_t> shuffle_index_;
  std::optional<SampleTable> table_;
};

}  // namespace capstan::data
