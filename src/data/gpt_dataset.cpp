#include "data/gpt_dataset.hpp"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "data/document_ends.hpp"
#include "data/mock_dataset.hpp"
#include "data/sample_order.hpp"

namespace capstan::data {

GptDataset::GptDataset(std::shared_ptr<const SampleSource> source, int64_t sequence_length,
                       DocumentOptions documents, std::vector<std::string> warnings)
    : source_(std::move(source)),
      sequence_length_(sequence_length),
      documents_(documents),
      warnings_(std::move(warnings)) {
  if (const char* field = documents_.reads_eod(); field && !documents_.eod)
    fail(ErrorCode::config,
         std::string(field) + " needs to know the end-of-document token, but the tokenizer has none",
         "name it with `tokenizer.eod_token`, or switch the option off");
}

void GptDataset::row(int64_t number, const RowView& out) const {
  std::vector<int32_t> text(static_cast<size_t>(sequence_length_ + 1));
  source_->read(number, text);
  fill_row(text, documents_, out);
}

std::string GptDataset::fingerprint() const {
  std::vector<int32_t> tokens(static_cast<size_t>(sequence_length_) + 1);
  const int64_t epoch = epoch_samples(), wanted = std::min<int64_t>(64, epoch);
  uint64_t hash = XXH3_64bits_withSeed(&epoch, sizeof epoch, static_cast<XXH64_hash_t>(sequence_length_));
  for (int64_t i = 0; i < wanted; ++i) {
    text(static_cast<int64_t>(static_cast<double>(epoch) * static_cast<double>(i) /
                              static_cast<double>(wanted)),
         tokens);
    hash = XXH3_64bits_withSeed(tokens.data(), tokens.size() * sizeof(int32_t), hash);
  }
  return hex(hash);
}

namespace {

// Megatron's surplus of samples in each part of a weighted blend (mid_level_dataset_surplus).
constexpr double kSurplus = 0.005;

class Builder {
 public:
  explicit Builder(const GptDatasetOptions& options)
      : options_(options), tokenizer_(options.tokenizer, options.tokenizer_name, options.vocab_size) {
    if (!options.cache.empty()) cache_ = std::make_shared<IndexCache>(options.cache);
  }

  std::shared_ptr<const SampleSource> split(const Blend& blend, size_t split,
                                            std::optional<std::pair<double, double>> share) {
    if (blend.weights && blend.weights->size() != blend.prefixes.size())
      fail(ErrorCode::config, "a blend has " + std::to_string(blend.prefixes.size()) + " datasets and " +
                                  std::to_string(blend.weights->size()) + " weights");
    return options_.order == DataOrder::capstan ? capstan_split(blend, split, share)
                                                : megatron_split(blend, split, share);
  }

  // Warnings about the datasets that were opened since the last call.
  std::vector<std::string> take_warnings() { return std::exchange(warnings_, {}); }

 private:
  SequenceRange range(const std::string& prefix, std::optional<std::pair<double, double>> share) {
    auto& dataset = open_[prefix];
    if (!dataset) {
      dataset = std::make_shared<IndexedDataset>(prefix, tokenizer_.token_limit());
      tokenizer_.check(*dataset);
      if (std::string warning = check_document_ends(*dataset, options_.documents, options_.tokenizer);
          !warning.empty())
        warnings_.push_back(std::move(warning));
    }
    const auto [begin, end] = share ? split_range(*share, dataset->sequences())
                                    : std::pair<int64_t, int64_t>{0, dataset->sequences()};
    return {dataset, begin, end};
  }

  template <class Build>
  static std::shared_ptr<const SampleSource> in_split(size_t split, const std::string& prefix, Build build) {
    try {
      return build();
    } catch (Error& error) {
      throw error.in(std::string("in the ") + kSplitNames[split] + " split of `" + prefix + "`");
    }
  }

  std::shared_ptr<const SampleSource> capstan_split(const Blend& blend, size_t split,
                                                    std::optional<std::pair<double, double>> share) {
    std::vector<std::shared_ptr<const SampleSource>> parts;
    std::vector<double> weights;
    for (size_t i = 0; i < blend.prefixes.size(); ++i) {
      const auto part = range(blend.prefixes[i], share);
      // A dataset that is too small for this split is dropped from a blend by size. If it has a weight, this
      // is an error.
      if (!blend.weights && blend.prefixes.size() > 1 && part.tokens() == 0) continue;
      if (blend.weights && (*blend.weights)[i] == 0) continue;
      weights.push_back(blend.weights ? (*blend.weights)[i] : static_cast<double>(part.tokens()));
      parts.push_back(in_split(split, blend.prefixes[i], [&] {
        return std::make_shared<CapstanOrder>(part, options_.sequence_length, options_.seed, cache_);
      }));
    }
    if (parts.empty())
      fail(ErrorCode::failed,
           std::string("no dataset of the blend has tokens in the ") + kSplitNames[split] + " split");
    if (parts.size() == 1) return parts[0];
    return std::make_shared<BlendedSource>(std::move(parts), BlendOrder(std::move(weights)));
  }

  // Requests samples as Megatron's builder does: a single prefix without weights gives all samples; weighted
  // datasets give their share and a surplus; datasets without weights give one epoch each and are weighted by
  // their samples.
  std::shared_ptr<const SampleSource> megatron_split(const Blend& blend, size_t split,
                                                     std::optional<std::pair<double, double>> share) {
    const auto wanted = options_.num_samples[split];
    const auto order = [&](const std::string& prefix, std::optional<int64_t> samples) {
      return in_split(split, prefix, [&] {
        return std::make_shared<MegatronOrder>(range(prefix, share), options_.sequence_length, options_.seed,
                                               samples, cache_.get());
      });
    };
    const size_t parts_count = blend.prefixes.size();
    if (parts_count == 1 && (!blend.weights || !share)) return order(blend.prefixes[0], wanted);
    std::vector<std::shared_ptr<const SampleSource>> parts;
    if (!blend.weights) {
      std::vector<double> sizes;
      // Without a number of samples, every sample is used once.
      std::vector<int64_t> limits;
      int64_t total = 0;
      for (const auto& prefix : blend.prefixes) {
        parts.push_back(order(prefix, std::nullopt));
        sizes.push_back(static_cast<double>(parts.back()->samples()));
        if (!wanted) limits.push_back(parts.back()->samples());
        total += parts.back()->samples();
      }
      return std::make_shared<BlendedSource>(std::move(parts),
                                             BlendOrder(std::move(sizes), std::move(limits)),
                                             wanted ? std::min(*wanted, total) : total);
    }
    if (!wanted)
      fail(ErrorCode::config, "Megatron's order needs the number of samples to blend datasets by weight",
           "dataset.sample_order=capstan, or leave the weights out");
    const BlendOrder normalized(*blend.weights);
    int64_t total = 0;
    for (size_t i = 0; i < parts_count; ++i) {
      const double target = std::ceil(static_cast<double>(*wanted) * normalized.weights()[i]);
      parts.push_back(order(blend.prefixes[i], static_cast<int64_t>(std::ceil(target * (1 + kSurplus)))));
      total += static_cast<int64_t>(target);
    }
    // Megatron normalizes twice; the second time may move a weight by one unit in the last place.
    return std::make_shared<BlendedSource>(std::move(parts), BlendOrder(normalized.weights()), total);
  }

  const GptDatasetOptions& options_;
  TokenizerCheck tokenizer_;
  std::shared_ptr<const IndexCache> cache_;
  std::map<std::string, std::shared_ptr<IndexedDataset>> open_;
  std::vector<std::string> warnings_;
};

}  // namespace

std::array<std::shared_ptr<const GptDataset>, 3> build_gpt_datasets(const GptDatasetOptions& options) {
  if (options.sequence_length <= 0)
    fail(ErrorCode::config,
         "the sequence length " + std::to_string(options.sequence_length) + " is not positive");
  DocumentOptions documents = options.documents;
  std::array<std::shared_ptr<const GptDataset>, 3> result;
  const bool per_split = !options.blend_per_split[0].empty() || !options.blend_per_split[1].empty() ||
                         !options.blend_per_split[2].empty();
  if (int{options.mock} + int{!options.blend.empty()} + int{per_split} != 1)
    fail(ErrorCode::config, "training data is either mock, one blend with a split, or a blend for each split",
         "set `dataset=mock`, or name prepared datasets with `dataset.data_path=[PREFIX]`");

  Builder builder(options);
  SplitShares shares;
  if (!options.mock && !per_split) shares = parse_split(options.split);
  for (size_t split = 0; split < 3; ++split) {
    if (options.build[split] == BuildSplit::no) continue;
    std::shared_ptr<const SampleSource> source;
    if (options.mock) {
      if (!documents.eod) documents.eod = checked_cast<int32_t>(options.vocab_size - 1);
      source = std::make_shared<MockSource>(options.vocab_size, *documents.eod, options.seed,
                                            static_cast<Split>(split));
    } else if (per_split) {
      if (!options.blend_per_split[split].empty())
        source = builder.split(options.blend_per_split[split], split, std::nullopt);
    } else if (shares[split]) {
      try {
        source = builder.split(options.blend, split, shares[split]);
      } catch (const Error& error) {
        if (options.build[split] != BuildSplit::if_possible || error.code() != ErrorCode::failed) throw;
      }
    }
    if (source)
      result[split] = std::make_shared<GptDataset>(std::move(source), options.sequence_length, documents,
                                                   builder.take_warnings());
  }
  return result;
}

}  // namespace capstan::data
