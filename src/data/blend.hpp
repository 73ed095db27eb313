// Blends several datasets into one, and divides one dataset into three splits.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/sample.hpp"

namespace capstan::data {

enum class Split : uint8_t { train, valid, test };
inline constexpr std::array<const char*, 3> kSplitNames = {"train", "valid", "test"};

// Converts "969,30,1" to shares of [0, 1] as (begin, end), with nullopt for a split without a share. Takes
// one to three non-negative numbers, where missing ones are 0, and throws ErrorCode::config for other texts.
using SplitShares = std::array<std::optional<std::pair<double, double>>, 3>;
SplitShares parse_split(std::string_view text);
// Elements [begin, end) of `count`: share · count rounded half to even, as Python's round() does.
std::pair<int64_t, int64_t> split_range(std::pair<double, double> share, int64_t count);

// Prefixes and their weights. Without weights each dataset is weighted by its size.
struct Blend {
  std::vector<std::string> prefixes;
  std::optional<std::vector<double>> weights;
  bool empty() const { return prefixes.empty(); }
};

// Sample k of a blend comes from the dataset that is furthest behind its share, argmax over i of weight_i ·
// max(k, 1) - taken_i, the lowest i among equals (Megatron's greedy rule). The choice depends on k and the
// weights, not on a total.
class BlendOrder {
 public:
  // weights: finite, >= 0, not all 0, and at most 32767 of them; the constructor normalizes them. limits:
  // number of samples after which a dataset drops out; empty: never.
  explicit BlendOrder(std::vector<double> weights, std::vector<int64_t> limits = {});

  struct Choice {
    // -1 when every dataset has dropped out.
    int32_t dataset;
    // Sample number within that dataset.
    int64_t sample;
  };
  // Returns the choice for sample k. Thread-safe.
  Choice at(int64_t k) const;
  const std::vector<double>& weights() const { return weights_; }

 private:
  // Choices are computed in order, one block at a time. The counts before every 64th block are kept, so that
  // earlier blocks can be computed again.
  static constexpr int64_t kBlock = 4096, kKeptEvery = 64;
  using Counts = std::vector<int64_t>;
  struct Decoded {
    int64_t block = -1;
    std::vector<Choice> choices;
  };
  void advance(Counts& counts, int64_t block, std::vector<Choice>* choices) const;

  std::vector<double> weights_;
  std::vector<int64_t> limits_;
  mutable std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();
  // Counts of the samples taken before a block, by block.
  mutable std::map<int64_t, Counts> kept_;
  // The block that counts_ precede.
  mutable int64_t next_block_ = 0;
  mutable Counts counts_;
  mutable std::array<Decoded, 4> decoded_;
};

class BlendedSource final : public SampleSource {
 public:
  BlendedSource(std::vector<std::shared_ptr<const SampleSource>> parts, BlendOrder order,
                int64_t samples = kEndless);
  int64_t samples() const override { return samples_; }
  int64_t epoch_samples() const override;
  std::vector<DatasetShare> parts() const override;
  void read(int64_t number, std::span<int32_t> text) const override;
  void add_memory(std::map<const void*, int64_t>& held) const override {
    for (const auto& part : parts_) part->add_memory(held);
  }

 private:
  std::vector<std::shared_ptr<const SampleSource>> parts_;
  BlendOrder order_;
  int64_t samples_;
};

}  // namespace capstan::data
