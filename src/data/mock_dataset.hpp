// Generated tokens, for runs without data. Documents of random length (2 to max_document tokens) count
// upward, 0, 1, 2, … modulo the vocabulary without the end-of-document token, from a random start, and end
// with that token: the next token follows from the last one, so the loss falls from ln(vocabulary) toward
// the little that document ends and starts leave. Sample i depends on (seed, split, i) alone.
#pragma once

#include <cstdint>

#include "data/blend.hpp"
#include "data/sample.hpp"

namespace capstan::data {

class MockSource final : public SampleSource {
 public:
  // 1 <= vocab_size - 1, 0 <= eod < vocab_size
  MockSource(int64_t vocab_size, int32_t eod, uint64_t seed, Split split, int64_t max_document = 512);
  int64_t samples() const override { return kEndless; }
  int64_t epoch_samples() const override { return kEndless; }
  void read(int64_t number, std::span<int32_t> text) const override;

 private:
  int64_t vocab_size_, max_document_;
  int32_t eod_;
  uint64_t seed_;
  Split split_;
};

}  // namespace capstan::data
