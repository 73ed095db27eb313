#include "config/sections/data_sources.hpp"

#include <cmath>

#include "base/text.hpp"

namespace capstan::config {

namespace {
std::vector<WeightedPrefix> weighted_prefixes(const Blend& blend) {
  std::vector<WeightedPrefix> result;
  for (const auto& [prefix, weight] : blend) result.push_back({prefix, weight});
  return result;
}
}  // namespace

std::string data_path_problem(const std::vector<Path>& data_path) {
  size_t numbers = 0;
  for (const Path& item : data_path)
    if (parse_double(item.text)) ++numbers;
  if (numbers == 0) return {};
  if (data_path.size() % 2 != 0 || numbers * 2 != data_path.size())
    return "has " + std::to_string(numbers) + " weights among " + std::to_string(data_path.size()) + " items";
  for (size_t i = 0; i < data_path.size(); ++i) {
    const auto weight = parse_double(data_path[i].text);
    if (weight.has_value() != (i % 2 == 0)) return "does not alternate between weights and prefixes";
    if (weight && (!(*weight > 0) || !std::isfinite(*weight)))
      return "has the weight " + data_path[i].text + ", which is not positive";
  }
  return {};
}

std::optional<std::array<double, 3>> split_shares(std::string_view text) {
  const auto parts = split(text, ',');
  if (parts.size() != 3) return std::nullopt;
  std::array<double, 3> shares{};
  double sum = 0;
  for (size_t i = 0; i < 3; ++i) {
    const auto share = parse_double(trim(parts[i]));
    if (!share || !(*share >= 0) || !std::isfinite(*share)) return std::nullopt;
    shares[i] = *share;
    sum += *share;
  }
  if (!(sum > 0) || !std::isfinite(sum)) return std::nullopt;
  for (double& share : shares) share /= sum;
  return shares;
}

DataSources data_sources(const DatasetConfig& dataset) {
  DataSources result;
  if (!dataset.train_blend.empty()) {
    result.splits = {weighted_prefixes(dataset.train_blend), weighted_prefixes(dataset.valid_blend),
                     weighted_prefixes(dataset.test_blend)};
    return result;
  }
  result.shares = split_shares(dataset.split.value_or("969,30,1"));
  if (!dataset.blend.empty()) {
    result.splits[0] = weighted_prefixes(dataset.blend);
    return result;
  }
  std::optional<double> weight;
  for (const Path& item : dataset.data_path) {
    if (const auto number = parse_double(item.text)) {
      weight = number;
    } else {
      result.splits[0].push_back({item.resolved.empty() ? item.text : item.resolved, weight});
    }
  }
  return result;
}

}  // namespace capstan::config
