// A sample: sequence_length + 1 consecutive tokens, and the row of a micro-batch that is made of it.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace capstan::data {

// A dataset that samples come from: of a blend each of its parts.
struct DatasetShare {
  // Prefix of the dataset; empty for generated data.
  std::string name;
  // Samples of one pass over the dataset.
  int64_t epoch_samples = 0;
  // Fraction of all samples.
  double share = 1;
};

// A source of samples. Thread-safe, because the loader's workers share one.
class SampleSource {
 public:
  static constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();

  virtual ~SampleSource() = default;
  // Sample numbers are [0, samples()). With kEndless, epochs follow each other without end.
  virtual int64_t samples() const = 0;
  // Samples of one pass over the data.
  virtual int64_t epoch_samples() const = 0;
  virtual std::vector<DatasetShare> parts() const { return {{{}, epoch_samples(), 1}}; }
  // Fills `text` with the sequence_length + 1 tokens of a sample. Its content depends on the source and the
  // number alone.
  virtual void read(int64_t number, std::span<int32_t> text) const = 0;
  // Adds the bytes of its indices, by the object that has them (Dataset::add_memory()).
  virtual void add_memory(std::map<const void*, int64_t>&) const {}
};

// The meaning of an end-of-document token inside a sample (Megatron's flags).
struct DocumentOptions {
  // Id of the end-of-document token; required by each of the other options.
  std::optional<int32_t> eod;
  // Position ids restart at 0 after an end-of-document token.
  bool reset_position_ids = false;
  // Attention does not cross an end-of-document token; cu_seqlens holds the boundaries.
  bool reset_attention_mask = false;
  // Masks the loss where the input is an end-of-document token.
  bool eod_mask_loss = false;

  // The field of the first option that is on and reads the document ends; null: none is.
  const char* reads_eod() const {
    return reset_attention_mask ? "dataset.reset_attention_mask"
           : reset_position_ids ? "dataset.reset_position_ids"
           : eod_mask_loss      ? "dataset.eod_mask_loss"
                                : nullptr;
  }
};

// One row of a micro-batch, T = sequence length.
struct RowView {
  // text[0 … T-1] and text[1 … T].
  std::span<int32_t> tokens;  // [T]
  std::span<int32_t> labels;  // [T]
  // 1 for labels that count in the loss, else 0.
  std::span<float> loss_mask;       // [T]
  std::span<int32_t> position_ids;  // [T]
  // Starts of the documents that attention keeps apart, then T: at least {0, T}.
  std::vector<int32_t>* cu_seqlens;
  // The tokens before the padding at the end of the row; it is T unless the dataset sets it.
  int32_t* length = nullptr;
};
void fill_row(std::span<const int32_t> text, const DocumentOptions& options, const RowView& row);

}  // namespace capstan::data
