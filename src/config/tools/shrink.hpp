// A recipe scaled down until it runs on a laptop in seconds, to see that it works: the same family of model
// (norms, activation, grouped queries, scaled positions, capped logits, windows, tied head), method
// (adapters, optimizer, schedule, precision) and kind of layout, with narrower and fewer layers, fewer ids,
// tokens, samples and steps, and made-up data and weights.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "config/resolve/resolve.hpp"

namespace capstan::config {

struct Shrunk {
  // `path=value`, each field once.
  std::vector<Override> overrides;
  // Ranks of the small layout.
  int64_t world = 1;
};

// The overrides that shrink `recipe`, whose fields all have a value. Every axis of parallelism above 1
// becomes 2, in the order tensor, pipeline, context, as long as `ranks` (null: as many as it takes) are
// divided by them, and data parallelism has the rest. Sizes and lengths that the command line gives stay as
// they are given; data, tokenizer and weights do not.
Shrunk shrink(const Resolution& recipe, std::optional<int64_t> ranks);

struct ShrunkFrom {
  Resolution full;
  // The layout that its axes of parallelism need, where the request has fewer ranks.
  std::optional<DistConfig> layout;
};

// The recipe of the request, shrunk to its `ranks` by values of the origin `imposed_by`, and what it was. A
// recipe with errors comes back as it is, and `from` is left; sizes of the command line that do not fit the
// large recipe are no errors.
Resolution resolve_shrunk(const Request& request, ShrunkFrom* from = nullptr);

}  // namespace capstan::config
