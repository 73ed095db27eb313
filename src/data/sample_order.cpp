#include "data/sample_order.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "data/numpy_random.hpp"
#include "data/permutation.hpp"

namespace capstan::data {

namespace {

// The beginning of a cache key: the data, range, sequence length, seed and order that an index depends on.
// Each order appends its own parameters.
std::string key_of(const SequenceRange& range, int64_t sequence_length, uint64_t seed, const char* order) {
  return std::string("capstan index 1; order ") + order + "; index file " + range.dataset->index_hash() +
         "; sequences " + std::to_string(range.begin) + " to " + std::to_string(range.end) +
         "; sequence length " + std::to_string(sequence_length) + "; seed " + std::to_string(seed);
}

template <class T>
std::span<std::byte> writable(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}
template <class T>
std::span<const std::byte> readable(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

}  // namespace

SampleTable::SampleTable(const IndexedDataset& dataset, int64_t positions, SequenceAt at, int64_t samples,
                         int64_t sequence_length, const IndexCache* cache, const std::string& key)
    : positions_(positions), sequence_length_(sequence_length) {
  starts_.resize(static_cast<size_t>(rows_of(samples)));
  if (cache && cache->load(key, {writable(starts_)}) && possible(dataset, at)) return;
  build(dataset, at);
  if (cache) cache->store(key, {readable(starts_)});
}

bool SampleTable::possible(const IndexedDataset& dataset, SequenceAt at) const {
  int64_t previous = 0;
  for (const SequenceOffset& start : starts_) {
    if (start.position < previous || start.position >= positions_ || start.offset < 0) return false;
    if (start.offset > 0 && start.offset >= dataset.length(at(start.position))) return false;
    previous = start.position;
  }
  return true;
}

void SampleTable::build(const IndexedDataset& dataset, SequenceAt at) {
  const auto rows = static_cast<int64_t>(starts_.size());
  const int64_t positions = positions_, step = kStride * sequence_length_;
  starts_.clear();
  // Number of tokens before the current position.
  int64_t before = 0;
  // Index of the token at which the next entry of starts_ begins.
  int64_t target = 0;
  constexpr int64_t kAhead = 256;
  std::array<int64_t, kAhead> sequences;
  for (int64_t begin = 0; begin < positions && static_cast<int64_t>(starts_.size()) < rows; begin += kAhead) {
    const int64_t end = std::min(begin + kAhead, positions);
    for (int64_t position = begin; position < end; ++position) {
      const int64_t sequence = at(position);
      sequences[static_cast<size_t>(position - begin)] = sequence;
      dataset.prefetch_length(sequence);
    }
    for (int64_t position = begin; position < end; ++position) {
      const int64_t after = before + dataset.length(sequences[static_cast<size_t>(position - begin)]);
      while (target < after && static_cast<int64_t>(starts_.size()) < rows) {
        starts_.push_back({position, target - before});
        target += step;
      }
      before = after;
    }
  }
  if (static_cast<int64_t>(starts_.size()) < rows)
    fail(ErrorCode::format, dataset.prefix() + ".idx: the lengths of the sequences sum to " +
                                std::to_string(before) +
                                " tokens, fewer than their offsets in the .bin file allow for");
}

SequenceOffset SampleTable::start_of(int64_t sample, const IndexedDataset& dataset, SequenceAt at) const {
  SequenceOffset start = starts_[static_cast<size_t>(sample / kStride)];
  // Megatron's very first row is (0, 0) even if the first sequences are empty; the walk below never stops at
  // an empty one.
  int64_t remaining = sample % kStride * sequence_length_;
  while (remaining > 0) {
    CAPSTAN_ASSERT(start.position < positions_, "a sample after the last token");
    const int64_t left = dataset.length(at(start.position)) - start.offset;
    if (remaining < left) {
      start.offset += remaining;
      break;
    }
    remaining -= left;
    start = {start.position + 1, 0};
    if (remaining == 0)
      while (start.position < positions_ && dataset.length(at(start.position)) == 0) ++start.position;
  }
  return start;
}

void read_tokens(const IndexedDataset& dataset, int64_t positions, SampleTable::SequenceAt at,
                 SequenceOffset start, std::span<int32_t> text) {
  while (!text.empty()) {
    const int64_t sequence = at(start.position);
    const int64_t left = dataset.length(sequence) - start.offset;
    const auto part = std::min(left, static_cast<int64_t>(text.size()));
    dataset.read(sequence, start.offset, text.first(static_cast<size_t>(part)));
    text = text.subspan(static_cast<size_t>(part));
    start = {start.position + 1 == positions ? 0 : start.position + 1, 0};
  }
}

namespace {

void check_split(const SequenceRange& range, int64_t sequence_length) {
  CAPSTAN_ASSERT(sequence_length > 0, "a sequence length");
  if (range.tokens() <= 0)
    fail(ErrorCode::failed,
         "sequences " + std::to_string(range.begin) + " to " + std::to_string(range.end) + " of dataset `" +
             range.dataset->prefix() + "` hold no tokens",
         "the split gives this part none of the dataset's " + std::to_string(range.dataset->documents()) +
             " documents: use a larger share or more text, or disable this split (validation: "
             "validation.eval_interval=null)");
}

}  // namespace

// --- Capstan's order

struct CapstanOrder::Epoch {
  int64_t number;
  Permutation sequences, samples;
  std::optional<SampleTable> table;
};

CapstanOrder::CapstanOrder(SequenceRange range, int64_t sequence_length, uint64_t seed,
                           std::shared_ptr<const IndexCache> cache)
    : range_(std::move(range)), sequence_length_(sequence_length), seed_(seed), cache_(std::move(cache)) {
  check_split(range_, sequence_length);
  per_epoch_ = std::max<int64_t>(1, (range_.tokens() - 1) / sequence_length);
  if (cache_) cache_key_ = key_of(range_, sequence_length, seed, "capstan");
}

std::shared_ptr<const CapstanOrder::Epoch> CapstanOrder::epoch(int64_t number) const {
  std::lock_guard lock(mutex_);
  auto& slot = recent_[static_cast<size_t>(number % 2)];
  if (slot && slot->number == number) return slot;
  const auto key = [&](uint64_t use) {
    return philox_key(seed_, purpose::data_shuffle, 2 * static_cast<uint64_t>(number) + use);
  };
  auto built = std::make_shared<Epoch>(
      Epoch{number, Permutation(range_.count(), key(0)), Permutation(per_epoch_, key(1)), std::nullopt});
  // per_epoch_ - 1 is the last sample: with at most T tokens in the split there is one, and it begins at
  // token 0.
  built->table.emplace(
      *range_.dataset, range_.count(),
      [&](int64_t position) { return range_.begin + built->sequences(position); }, per_epoch_ - 1,
      sequence_length_, cache_.get(), cache_key_ + "; epoch " + std::to_string(number));
  slot = std::move(built);
  return slot;
}

void CapstanOrder::read(int64_t number, std::span<int32_t> text) const {
  CAPSTAN_ASSERT(number >= 0, "a sample number");
  const auto of = epoch(number / per_epoch_);
  const auto at = [&](int64_t position) { return range_.begin + of->sequences(position); };
  const SequenceOffset start = of->table->start_of(of->samples(number % per_epoch_), *range_.dataset, at);
  read_tokens(*range_.dataset, range_.count(), at, start, text);
}

// The tables of the two epochs that it keeps.
void CapstanOrder::add_memory(std::map<const void*, int64_t>& held) const {
  held[this] = 2 * SampleTable::bytes_of(per_epoch_ - 1);
}

// --- Megatron's order

MegatronOrder::MegatronOrder(SequenceRange range, int64_t sequence_length, uint64_t seed,
                             std::optional<int64_t> num_samples, const IndexCache* cache)
    : range_(std::move(range)) {
  check_split(range_, sequence_length);
  if (seed > UINT32_MAX)
    fail(ErrorCode::config,
         "seed " + std::to_string(seed) +
             " is above 4294967295, the largest seed that dataset.sample_order=megatron accepts");
  const int64_t per_epoch = range_.tokens(), count = range_.count();
  // The samples need one more token, the last label.
  int64_t epochs = 1;
  if (num_samples)
    epochs =
        std::max<int64_t>(1, ceil_div(checked_add(checked_mul(*num_samples, sequence_length), 1), per_epoch));
  const int64_t total = (checked_mul(epochs, per_epoch) - 1) / sequence_length;
  if (total >= int64_t{UINT32_MAX} - 1 || range_.end > INT32_MAX || checked_mul(epochs, count) > INT32_MAX)
    fail(ErrorCode::unsupported,
         "Megatron's order over " + std::to_string(epochs) + " epochs of " + std::to_string(count) +
             " sequences and " + std::to_string(total) + " samples is larger than its 32-bit indices",
         "dataset.sample_order=capstan");
  if (total == 0)
    fail(ErrorCode::failed, "dataset `" + range_.dataset->prefix() + "` has " + std::to_string(per_epoch) +
                                " tokens in this split, fewer than one sample of " +
                                std::to_string(sequence_length + 1));
  per_epoch_ = (per_epoch - 1) / sequence_length;

  bool separate_last_epoch = false;
  int64_t samples_without_last = total;
  if (epochs > 1) {
    samples_without_last = ((epochs - 1) * per_epoch - 1) / sequence_length;
    const int64_t from_last = *num_samples - samples_without_last;
    separate_last_epoch = from_last < static_cast<int64_t>(0.80 * static_cast<double>(per_epoch_));
    if (!separate_last_epoch) samples_without_last = total;
  }

  document_index_.resize(static_cast<size_t>(epochs * count));
  shuffle_index_.resize(static_cast<size_t>(total));
  const std::string key = !cache ? std::string()
                                 : key_of(range_, sequence_length, seed, "megatron") + "; epochs " +
                                       std::to_string(epochs) + "; samples " + std::to_string(total) +
                                       " and " + std::to_string(samples_without_last) +
                                       (separate_last_epoch ? "; last epoch shuffled separately" : "");
  if (!cache || !cache->load(key, {writable(document_index_), writable(shuffle_index_)}) || !possible()) {
    build(epochs, separate_last_epoch, samples_without_last, seed);
    if (cache) cache->store(key, {readable(document_index_), readable(shuffle_index_)});
  }
  table_.emplace(
      *range_.dataset, epochs * count,
      [&](int64_t position) { return int64_t{document_index_[static_cast<size_t>(position)]}; }, total,
      sequence_length, cache, key + "; positions");
}

void MegatronOrder::build(int64_t epochs, bool separate_last_epoch, int64_t samples_without_last,
                          uint64_t seed) {
  const int64_t count = range_.count();
  const auto total = static_cast<int64_t>(shuffle_index_.size());
  NumpyRandomState random(static_cast<uint32_t>(seed));
  for (int64_t i = 0; i < epochs * count; ++i)
    document_index_[static_cast<size_t>(i)] = static_cast<int32_t>(range_.begin + i % count);
  const auto documents = std::span(document_index_);
  const auto first = static_cast<size_t>((separate_last_epoch ? epochs - 1 : epochs) * count);
  random.shuffle(documents.first(first));
  if (separate_last_epoch) random.shuffle(documents.subspan(first));

  std::iota(shuffle_index_.begin(), shuffle_index_.end(), 0u);
  const auto samples = std::span(shuffle_index_);
  random.shuffle(samples.first(static_cast<size_t>(samples_without_last)));
  if (samples_without_last < total)
    random.shuffle(samples.subspan(static_cast<size_t>(samples_without_last)));
}

bool MegatronOrder::possible() const {
  return std::all_of(document_index_.begin(), document_index_.end(),
                     [&](int32_t sequence) { return sequence >= range_.begin && sequence < range_.end; }) &&
         std::all_of(shuffle_index_.begin(), shuffle_index_.end(),
                     [&](uint32_t sample) { return sample < shuffle_index_.size(); });
}

SequenceOffset MegatronOrder::sample_index(int64_t row) const {
  if (row == 0) return {0, 0};
  return table_->start_of(row, *range_.dataset, [&](int64_t position) {
    return int64_t{document_index_[static_cast<size_t>(position)]};
  });
}

void MegatronOrder::add_memory(std::map<const void*, int64_t>& held) const {
  held[this] =
      static_cast<int64_t>(std::as_bytes(document_index()).size() + std::as_bytes(shuffle_index()).size()) +
      SampleTable::bytes_of(samples());
}

void MegatronOrder::read(int64_t number, std::span<int32_t> text) const {
  if (number < 0 || number >= samples())
    fail(ErrorCode::failed, "sample " + std::to_string(number) + " of dataset `" + range_.dataset->prefix() +
                                "` was asked for, but Megatron's order was built for " +
                                std::to_string(samples()));
  read_tokens(
      *range_.dataset, static_cast<int64_t>(document_index_.size()),
      [&](int64_t position) { return int64_t{document_index_[static_cast<size_t>(position)]}; },
      sample_index(shuffle_index_[static_cast<size_t>(number)]), text);
}

}  // namespace capstan::data
