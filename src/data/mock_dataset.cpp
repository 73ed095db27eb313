#include "data/mock_dataset.hpp"

#include "base/error.hpp"
#include "base/philox.hpp"

namespace capstan::data {

MockSource::MockSource(int64_t vocab_size, int32_t eod, uint64_t seed, Split split, int64_t max_document)
    : vocab_size_(vocab_size), max_document_(max_document), eod_(eod), seed_(seed), split_(split) {
  if (vocab_size < 2 || eod < 0 || eod >= vocab_size)
    fail(ErrorCode::config,
         "mock data needs a vocabulary of at least 2 with the end-of-document token inside it, not " +
             std::to_string(vocab_size) + " and token " + std::to_string(eod));
  CAPSTAN_ASSERT(max_document >= 2, "the length of mock documents");
}

void MockSource::read(int64_t number, std::span<int32_t> text) const {
  PhiloxSequence random(philox_key(seed_, purpose::mock_data, static_cast<uint64_t>(split_)),
                        static_cast<uint64_t>(number) << 20);
  // Number of tokens without the end-of-document token.
  const auto kinds = static_cast<uint64_t>(vocab_size_ - 1);
  int64_t left = 0;
  uint64_t next = 0;
  for (int32_t& token : text) {
    if (left == 0) {
      left = 2 + static_cast<int64_t>(random.below(static_cast<uint64_t>(max_document_ - 1)));
      next = random.below(kinds);
    }
    if (--left == 0) {
      token = eod_;
      continue;
    }
    token = static_cast<int32_t>(next) + (static_cast<int32_t>(next) >= eod_ ? 1 : 0);
    next = next + 1 == kinds ? 0 : next + 1;
  }
}

}  // namespace capstan::data
