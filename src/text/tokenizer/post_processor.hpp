// The post-processor: adds special tokens around the ids of a text and trims spaces from their byte ranges.
#pragma once

#include <cstdint>
#include <vector>

namespace capstan::text {

struct PostStep {
  // Offsets exclude the spaces at the ends of their tokens (ByteLevel, RobertaProcessing).
  bool trim = false;
  // A single space at the front stays with the first token.
  bool add_prefix_space = true;
  // Added if EncodeOptions::add_special is set.
  std::vector<int32_t> before, after;
};

}  // namespace capstan::text
