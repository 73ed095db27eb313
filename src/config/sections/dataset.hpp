// Training text: indexed datasets (`gpt`) or generated tokens (`mock`). The sequence length is
// model.seq_length.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/types.hpp"

namespace capstan::config {

enum class DatasetKind : uint8_t { gpt, mock };

template <>
struct EnumNames<DatasetKind> {
  static constexpr EnumEntry<DatasetKind> list[] = {
      {DatasetKind::gpt, "gpt", "indexed datasets written by capstan data prepare"},
      {DatasetKind::mock, "mock", "generated tokens, no files"},
  };
};

// Dataset prefix (the path without .bin/.idx) and its weight, in the order written.
using Blend = std::vector<std::pair<std::string, double>>;

struct DatasetConfig {
  DatasetKind kind = DatasetKind::gpt;
  // gpt: exactly one of data_path, blend, or the three blends per split.
  std::vector<Path> data_path;  // prefixes, weighted by their number of samples
  Blend blend;
  Blend train_blend, valid_blend, test_blend;
  std::optional<std::string> split;   // "969,30,1": shares of train, validation, test
  std::optional<Path> path_to_cache;  // directory of the built indices; null: beside the dataset
  bool reset_position_ids = false;    // positions start at 0 after each end of document
  bool reset_attention_mask = false;  // attention does not cross documents
  bool eod_mask_loss = false;         // no loss on end-of-document tokens
  // both
  int64_t random_seed = 1234;
  int64_t num_workers = 2;  // threads that read ahead; 0: read in the step
};

}  // namespace capstan::config
