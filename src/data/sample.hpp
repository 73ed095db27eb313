// A sample: sequence_length + 1 consecutive tokens, and the row of a micro-batch that is made of it.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace capstan::data {

// A dataset that samples come from: of a blend each of its parts.
struct SourcePart {
  std::string name;           // its prefix; empty: generated
  int64_t epoch_samples = 0;  // of one pass over it
  double share = 1;           // of all samples
};

// Where samples come from. Thread-safe: the loader's workers share one.
class SampleSource {
 public:
  static constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();

  virtual ~SampleSource() = default;
  // Sample numbers are [0, samples()); kEndless: as many epochs as asked for.
  virtual int64_t samples() const = 0;
  virtual int64_t epoch_samples() const = 0;  // samples of one pass over the data
  virtual std::vector<SourcePart> parts() const { return {{{}, epoch_samples(), 1}}; }
  // text: sequence_length + 1 tokens. What sample `number` holds depends on nothing but the source and the
  // number.
  virtual void read(int64_t number, std::span<int32_t> text) const = 0;
};

// What an end-of-document token means inside a sample (Megatron's flags).
struct DocumentOptions {
  std::optional<int32_t> eod;         // its id; required by each of the others
  bool reset_position_ids = false;    // positions start at 0 after it
  bool reset_attention_mask = false;  // attention does not look across it: cu_seqlens has its boundaries
  bool eod_mask_loss = false;         // no loss where it is the input
};

// One row of a micro-batch, T = sequence length.
struct RowView {
  std::span<int32_t> tokens;        // [T] text[0 … T-1]
  std::span<int32_t> labels;        // [T] text[1 … T]
  std::span<float> loss_mask;       // [T] 0 or 1
  std::span<int32_t> position_ids;  // [T]
  // Starts of the documents that attention keeps apart, then T: at least {0, T}.
  std::vector<int32_t>* cu_seqlens;
};
void fill_row(std::span<const int32_t> text, const DocumentOptions& options, const RowView& row);

}  // namespace capstan::data
