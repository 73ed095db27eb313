// Fine-tuning data of one run. Every rank reads, renders and tokenizes the files when it opens them and keeps
// four bytes per token in memory.
//
// Epoch e takes the samples of a split in the order Permutation(N, key(seed, 2e)), kWindow at a time. With
// packing, the samples of a window are placed by best fit, from the longest to the shortest: each goes into
// the fullest row of the window that has space for it, else into a new row. Without packing each sample has
// its own row. Rows are read in the order Permutation(rows, key(seed, 2e + 1)). A sample of n tokens takes n
// - 1 positions of a row, because its last token is a label only. Documents of a row do not attend to each
// other, their position ids start at 0, and the padding of the row has no loss. A row therefore depends on
// (files, options, seed, row number) alone.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/blend.hpp"
#include "data/dataset.hpp"
#include "data/prepare.hpp"
#include "data/sft_encode.hpp"

namespace capstan::data {

struct SftOptions {
  std::vector<std::string> train_files;
  // Files of the other splits. If both are empty, `split` divides the samples of train_files.
  std::vector<std::string> valid_files, test_files;
  std::string split = "969,30,1";
  SftFormat format = SftFormat::automatic;
  SftLoss loss = SftLoss::assistant;
  bool packing = true;
  // Samples that are too long are truncated; false: they are dropped.
  bool truncate = true;
  std::optional<int64_t> max_train_samples;
  int64_t sequence_length = 0;
  uint64_t seed = 1234;
  OnBadLine on_bad_line = OnBadLine::fail;
  InputLimits limits;
  int64_t max_record_bytes = int64_t{256} << 20;
  const text::Tokenizer* tokenizer = nullptr;
  // Null selects the tokenizer's own template, if it has one.
  std::shared_ptr<const text::chat::ChatTemplate> chat_template;
  std::optional<int32_t> eod;
  // 0: the number of cores that this process may use.
  int threads = 0;
};

// The result of reading the records of one split.
struct SftCounts {
  // Records read, including bad ones.
  int64_t records = 0;
  // Samples that are kept.
  int64_t samples = 0;
  // The counts below, but for tokens, are those of files that are divided into several splits.
  bool of_all_splits = false;
  // Lines that are no sample.
  int64_t bad = 0;
  // Samples that were truncated.
  int64_t truncated = 0;
  // Samples that were dropped because they are too long.
  int64_t dropped = 0;
  // Samples dropped because none of their remaining tokens counts in the loss.
  int64_t without_loss = 0;
  // Dropped samples whose loss tokens lie beyond the sequence length.
  int64_t truncated_answers = 0;
  // Records with an answer that counts in the loss and has no text.
  int64_t empty_answers = 0;
  // Samples that are dialogues.
  int64_t dialogues = 0;
  // Tokens of all samples.
  int64_t tokens = 0;
  int64_t loss_tokens = 0;
  // "file:line:column: reason" of the first bad lines.
  std::vector<std::string> reports;
  // "file:line" of the first samples of each kind.
  std::vector<std::string> without_loss_locations, empty_locations;
  // Problem of the chat template with this tokenizer; empty: none, or no dialogues.
  std::string turn_end_problem;
};

// The samples of some files, stored contiguously.
class SftSamples {
 public:
  // Bit that marks a token id as counting in the loss.
  static constexpr uint32_t kLossToken = 0x80000000u;

  void add(const EncodedSample& sample, size_t tokens, int32_t file, int64_t line);
  int64_t count() const { return static_cast<int64_t>(samples_.size()); }
  // Token ids, with kLossToken set for tokens that count in the loss.
  std::span<const uint32_t> tokens(int64_t sample) const;
  // Location of the sample's record, "file:line".
  std::string location(int64_t sample) const;
  // Memory that the samples take.
  int64_t bytes() const;

  std::vector<std::string> files;

 private:
  struct Sample {
    const uint32_t* tokens;
    uint32_t count;
    int32_t file;
    int64_t line;
  };
  // Blocks and a deque, which grow without a copy of what is there.
  std::deque<Sample> samples_;
  std::vector<std::unique_ptr<uint32_t[]>> blocks_;
  size_t block_size_ = 0, block_used_ = 0;
  int64_t block_bytes_ = 0;
};

class SftDataset final : public Dataset {
 public:
  static constexpr int64_t kWindow = 4096;

  // Samples [begin, end), at least one, each of 2 to sequence_length + 1 tokens.
  SftDataset(std::shared_ptr<const SftSamples> samples, int64_t begin, int64_t end, SftCounts counts,
             const SftOptions& options);

  int64_t sequence_length() const override { return sequence_length_; }
  int64_t samples() const override { return SampleSource::kEndless; }
  int64_t epoch_samples() const override { return first_row_of(1); }
  // Overridden because packing gives each epoch its own number of rows.
  int64_t samples_in(double epochs) const override;
  void row(int64_t number, const RowView& out) const override;
  std::string fingerprint() const override;
  std::string summary() const override;
  std::vector<std::string> warnings() const override;
  void add_memory(std::map<const void*, int64_t>& held) const override;

  const SftCounts& counts() const { return counts_; }
  // The samples of a row, in their order; numbers within the split.
  std::vector<int64_t> samples_of(int64_t number) const;
  std::string location(int64_t sample) const { return all_->location(begin_ + sample); }
  std::span<const uint32_t> tokens(int64_t sample) const { return all_->tokens(begin_ + sample); }

 private:
  struct Epoch;
  std::shared_ptr<const Epoch> build(int64_t number) const;
  // The epoch of a row, and the row's number in it.
  std::pair<std::shared_ptr<const Epoch>, int64_t> epoch_of(int64_t number) const;
  int64_t first_row_of(int64_t epoch) const;

  std::shared_ptr<const SftSamples> all_;
  int64_t begin_, count_, sequence_length_;
  SftCounts counts_;
  bool packing_;
  uint64_t seed_;
  int32_t pad_;
  mutable std::mutex mutex_;
  // First row of each epoch built so far, and of the next epoch.
  mutable std::vector<int64_t> first_rows_ = {0};
  // The most recent epochs, indexed by parity as in CapstanOrder.
  mutable std::array<std::shared_ptr<const Epoch>, 2> recent_;
};

// Train, validation and test (Split as index); null for a split without samples. ErrorCode::not_found and
// ::format for files ("file:line:column: what"), ::failed for training data without a sample.
std::array<std::shared_ptr<const SftDataset>, 3> build_sft_datasets(const SftOptions& options);

}  // namespace capstan::data
