// What `dataset` names, as lists of weighted prefixes for each split.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/sections/dataset.hpp"

namespace capstan::config {

struct WeightedPrefix {
  // A file name without .bin/.idx, resolved.
  std::string prefix;
  // none: by the number of samples.
  std::optional<double> weight;
};

struct DataSources {
  // One source that `shares` splits by documents (shares set), or one for each split.
  // Train, validation, test; with shares only the first.
  std::array<std::vector<WeightedPrefix>, 3> splits;
  std::optional<std::array<double, 3>> shares;  // sum 1
};

// Empty when the list is prefixes, or a weight before each prefix; else what is wrong.
std::string data_path_problem(const std::vector<Path>& data_path);

// "969,30,1" → three shares with sum 1; nothing when the text is not three non-negative numbers with a
// positive sum.
std::optional<std::array<double, 3>> split_shares(std::string_view text);

// For kind gpt of a checked recipe.
DataSources data_sources(const DatasetConfig& dataset);

}  // namespace capstan::config
