// The files that `dataset` names, as lists of weighted prefixes for each split.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/sections/dataset.hpp"

namespace capstan::config {

struct WeightedPrefix {
  // A resolved file name without .bin or .idx.
  std::string prefix;
  // Weight of the source. None: sources are weighted by their number of samples.
  std::optional<double> weight;
};

struct DataSources {
  // Sources of train, validation and test. If `shares` is set, only the first list is used, and `shares`
  // splits its documents.
  std::array<std::vector<WeightedPrefix>, 3> splits;
  // Fractions of the splits, which add up to 1.
  std::optional<std::array<double, 3>> shares;
};

// Describes what is wrong with a list of prefixes, which may have a weight before each prefix. Empty: the
// list is correct.
std::string data_path_problem(const std::vector<Path>& data_path);

// Parses a split such as "969,30,1" into three fractions that add up to 1. Returns nullopt unless the text is
// three non-negative numbers with a positive sum.
std::optional<std::array<double, 3>> split_shares(std::string_view text);

// Returns the data sources of a checked recipe with dataset.kind gpt.
DataSources data_sources(const DatasetConfig& dataset);

}  // namespace capstan::config
