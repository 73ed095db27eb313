// The GPT datasets of one run: for each split a source of samples, from which GptDataset makes rows.
// src/train fills GptDatasetOptions from the recipe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "data/blend.hpp"
#include "data/dataset.hpp"
#include "data/dataset_meta.hpp"
#include "data/sample.hpp"

namespace capstan::data {

// The order of samples: CapstanOrder or MegatronOrder of sample_order.hpp.
enum class DataOrder : uint8_t { capstan, megatron };

// Whether a split of the data is built.
enum class BuildSplit : uint8_t {
  no,
  // The split is null if its share of the data holds no sample.
  if_possible,
  yes,
};

struct GptDatasetOptions {
  // The source of the data is one of: `mock`; `blend` with `split`; `blend_per_split`, of which each dataset
  // is used in full.
  bool mock = false;
  Blend blend;
  std::string split = "969,30,1";
  std::array<Blend, 3> blend_per_split;

  int64_t sequence_length = 0;
  // Size of the model's vocabulary; a token at or above it is an error. 0: not checked (mock: required).
  int64_t vocab_size = 0;
  // Every dataset must have been prepared with this tokenizer (TokenizerCheck); null: no check. The name is
  // for messages.
  const text::Tokenizer* tokenizer = nullptr;
  std::string tokenizer_name;
  uint64_t seed = 1234;
  std::array<BuildSplit, 3> build = {BuildSplit::yes, BuildSplit::yes, BuildSplit::yes};
  DataOrder order = DataOrder::capstan;
  // Directory of built indices (index_cache.hpp); empty: none.
  std::string cache;
  // DataOrder::megatron only: how many samples each split will be asked for (nullopt: one epoch).
  std::array<std::optional<int64_t>, 3> num_samples;
  // For mock data, eod defaults to vocab_size - 1.
  DocumentOptions documents;
};

class GptDataset final : public Dataset {
 public:
  GptDataset(std::shared_ptr<const SampleSource> source, int64_t sequence_length, DocumentOptions documents,
             std::vector<std::string> warnings = {});

  int64_t sequence_length() const override { return sequence_length_; }
  // SampleSource::kEndless unless the order is Megatron's.
  int64_t samples() const override { return source_->samples(); }
  std::vector<DatasetShare> parts() const override { return source_->parts(); }
  // Samples of one pass over all datasets of the blend.
  int64_t epoch_samples() const override { return source_->epoch_samples(); }
  // Fills `out`, [T + 1], with the tokens of a sample.
  void text(int64_t number, std::span<int32_t> out) const { source_->read(number, out); }
  void row(int64_t number, const RowView& out) const override;
  // A hash of the epoch length and of the tokens of up to 64 samples at even distances in the first epoch. It
  // changes with the files, the blend, the split, the seed and the sequence length.
  std::string fingerprint() const override;
  std::vector<std::string> warnings() const override { return warnings_; }
  void add_memory(std::map<const void*, int64_t>& held) const override { source_->add_memory(held); }

 private:
  std::shared_ptr<const SampleSource> source_;
  int64_t sequence_length_;
  DocumentOptions documents_;
  std::vector<std::string> warnings_;
};

// Opens every dataset once and builds the three splits (Split as index); null for a split that gets no share
// or is not wanted. This is cheap, because the order of an epoch is computed when its first sample is read.
// ErrorCode::not_found and ::format for files, ::config for contradictory options, ::failed for a split
// without tokens.
std::array<std::shared_ptr<const GptDataset>, 3> build_gpt_datasets(const GptDatasetOptions& options);

}  // namespace capstan::data
