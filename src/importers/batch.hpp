// Batch sizes of other trainers, which count the samples of one rank.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "importers/rule.hpp"

namespace capstan::importers {

// The layout of the recipe that a draft extends, with the draft's own parallelism.
struct Layout {
  // 1 where it is not known.
  int64_t data_parallel_size = 1;
  // Ranks of one replica of the model.
  int64_t ranks_of_replica = 1;
};
Layout layout_of_base(const Draft& draft);

// Sets train.global_batch_size to `each` samples of one data-parallel rank times the data-parallel size of
// the base recipe. Where that is 1 or not known, the value is listed as assumed too. `product` names the
// factors of `each`. `key` is the key that gives it; empty: the value follows from defaults alone.
void set_global_batch(Reader& reader, int64_t each, const std::string& product, std::string_view key);

}  // namespace capstan::importers
