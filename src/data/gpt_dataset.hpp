// GPT training data of one run: for each split a source of samples and what makes rows of them. src/train
// fills GptDatasetOptions from the recipe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "data/blend.hpp"
#include "data/dataset.hpp"
#include "data/dataset_meta.hpp"
#include "data/sample.hpp"

namespace capstan::data {

enum class DataOrder : uint8_t { capstan, megatron };  // sample_order.hpp

enum class Wanted : uint8_t {
  no,
  if_possible,  // not built where its share of the data holds no sample
  yes,
};

struct GptDatasetOptions {
  // One of: `mock`; `blend` with `split`; `blend_per_split` (each of its datasets is used in full).
  bool mock = false;
  Blend blend;
  std::string split = "969,30,1";
  std::array<Blend, 3> blend_per_split;

  int64_t sequence_length = 0;
  // Of the model; a token at or above it is an error. 0: not checked (mock: required).
  int64_t vocab_size = 0;
  // Null: none. Every dataset must have been prepared with it (TokenizerCheck); the name is for messages.
  const text::Tokenizer* tokenizer = nullptr;
  std::string tokenizer_name;
  uint64_t seed = 1234;
  std::array<Wanted, 3> wanted = {Wanted::yes, Wanted::yes, Wanted::yes};
  DataOrder order = DataOrder::capstan;
  std::string cache;  // directory of built indices (index_cache.hpp); empty: none
  // DataOrder::megatron only: how many samples each split will be asked for (nullopt: one epoch).
  std::array<std::optional<int64_t>, 3> num_samples;
  DocumentOptions documents;  // mock: without an eod, vocab_size - 1
};

class GptDataset final : public Dataset {
 public:
  GptDataset(std::shared_ptr<const SampleSource> source, int64_t sequence_length, DocumentOptions documents);

  int64_t sequence_length() const override { return sequence_length_; }
  int64_t samples() const override {
    return source_->samples();
  }  // SampleSource::kEndless unless the order is Megatron's
  std::vector<SourcePart> parts() const override { return source_->parts(); }
  int64_t epoch_samples() const override { return source_->epoch_samples(); }  // of one pass over all parts
  void text(int64_t number, std::span<int32_t> out) const { source_->read(number, out); }  // [T + 1]
  void row(int64_t number, const RowView& out) const override;
  // The length of an epoch and the tokens of up to 64 samples spread over the first one: other files, another
  // blend, split, seed or length give another one.
  std::string fingerprint() const override;

 private:
  std::shared_ptr<const SampleSource> source_;
  int64_t sequence_length_;
  DocumentOptions documents_;
};

// Opens every dataset once and builds the three splits (Split as index); null for a split that gets no share
// or is not wanted. Cheap: the order of an epoch is worked out when its first sample is read.
// ErrorCode::not_found and ::format for files, ::config for contradictory options, ::failed for a split
// without tokens.
std::array<std::shared_ptr<const GptDataset>, 3> build_gpt_datasets(const GptDatasetOptions& options);

}  // namespace capstan::data
