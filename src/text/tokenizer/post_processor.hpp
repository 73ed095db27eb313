// The post-processor: adds special tokens around the ids of a text and trims spaces from their byte ranges.
#pragma once

#include <cstdint>
#include <vector>

namespace capstan::text {

struct PostStep {
  // Places lose the spaces at their tokens' ends (ByteLevel, RobertaProcessing).
  bool trim = false;
  bool add_prefix_space = true;        // a single space at the front stays with the first token
  std::vector<int32_t> before, after;  // added where special tokens are asked for
};

}  // namespace capstan::text
