#include "data/loader.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "data/gpt_dataset.hpp"
#include "dataset_helpers.hpp"

using namespace capstan;
using namespace capstan::data;
using namespace capstan::data::testing;

namespace {

std::shared_ptr<const GptDataset> fixture_dataset(int64_t length = 8) {
  GptDatasetOptions options;
  options.blend = {{fixture("a"), fixture("b")}, std::vector{2.0, 1.0}};
  options.split = "1";
  options.sequence_length = length;
  options.vocab_size = 100;
  options.documents = {99, true, true, true};
  return build_gpt_datasets(options)[0];
}

bool equal(const MicroBatch& a, const MicroBatch& b) {
  return a.rows == b.rows && a.tokens == b.tokens && a.labels == b.labels && a.loss_mask == b.loss_mask &&
         a.position_ids == b.position_ids && a.cu_seqlens == b.cu_seqlens && a.sample_ids == b.sample_ids;
}

// Sample k is k, k + 1, …. A chosen sample fails, and a delay makes workers overtake each other.
class CountingSource final : public SampleSource {
 public:
  int64_t bad = -1;
  mutable std::atomic<int64_t> reads{0};
  int64_t samples() const override { return kEndless; }
  int64_t epoch_samples() const override { return 1000; }
  void read(int64_t number, std::span<int32_t> text) const override {
    ++reads;
    if (number % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (number == bad) fail(ErrorCode::format, "sample is broken");
    for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<int32_t>(number) + static_cast<int32_t>(i);
  }
};

}  // namespace

TEST_CASE("the same micro-batches for 0, 1 and 4 workers, over several epochs") {
  const auto dataset = fixture_dataset();
  std::vector<MicroBatch> expected;
  for (const int workers : {0, 1, 4}) {
    LoaderOptions options;
    options.micro_batch_size = 3;
    options.global_batch_size = 12;
    options.num_workers = workers;
    Loader loader(dataset, options);
    for (size_t step = 0; step < 150; ++step) {
      auto batch = loader.next();
      CHECK(batch.tokens.size() == 24);
      if (workers == 0)
        expected.push_back(std::move(batch));
      else
        CHECK(equal(batch, expected[step]));
      CHECK(loader.consumed_samples() == static_cast<int64_t>(step + 1) * 3);
    }
  }
  CHECK(150 * 3 > 2 * dataset->epoch_samples());
}

TEST_CASE("a loader continues where another one stood") {
  const auto dataset = fixture_dataset();
  LoaderOptions options;
  options.micro_batch_size = 2;
  options.global_batch_size = 4;
  Loader uninterrupted(dataset, options);
  for (int i = 0; i < 37; ++i) uninterrupted.next();
  options.consumed_samples = uninterrupted.consumed_samples();
  CHECK(options.consumed_samples == 74);
  for (const int workers : {0, 3}) {
    options.num_workers = workers;
    Loader resumed(dataset, options);
    LoaderOptions from_start = options;
    from_start.consumed_samples = 0;
    Loader reference(dataset, from_start);
    for (int i = 0; i < 37; ++i) reference.next();
    for (int i = 0; i < 40; ++i) CHECK(equal(resumed.next(), reference.next()));
  }
}

TEST_CASE("ranks take contiguous rows; together they are the single rank's batch") {
  const auto dataset = std::make_shared<GptDataset>(std::make_shared<CountingSource>(), 4, DocumentOptions{});
  LoaderOptions options;
  options.global_batch_size = 24;
  options.consumed_samples = 5;
  options.micro_batch_size = 2;
  options.data_parallel_size = 3;
  std::vector<uint64_t> seen;
  for (int64_t rank = 0; rank < 3; ++rank) {
    options.data_parallel_rank = rank;
    Loader loader(dataset, options);
    const auto first = loader.next(), second = loader.next();
    const auto base = static_cast<uint64_t>(5 + 2 * rank);
    CHECK(first.sample_ids == std::vector<uint64_t>{base, base + 1});
    CHECK(second.sample_ids == std::vector<uint64_t>{base + 6, base + 7});
    CHECK(first.tokens[0] == static_cast<int32_t>(base));
    CHECK(first.labels[0] == static_cast<int32_t>(base) + 1);
    CHECK(first.tokens[4] == static_cast<int32_t>(base) + 1);
    CHECK(first.cu_seqlens == std::vector<std::vector<int32_t>>{{0, 4}, {0, 4}});
    CHECK(loader.consumed_samples() == 17);
    for (const auto& batch : {first, second})
      seen.insert(seen.end(), batch.sample_ids.begin(), batch.sample_ids.end());
  }
  std::sort(seen.begin(), seen.end());
  for (size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == 5 + i);
}

TEST_CASE("next() throws a worker's error at the position of the failed micro-batch, and names it") {
  for (const int workers : {0, 1, 4}) {
    auto source = std::make_shared<CountingSource>();
    source->bad = 21;
    LoaderOptions options;
    options.micro_batch_size = 2;
    options.global_batch_size = 2;
    options.num_workers = workers;
    Loader loader(std::make_shared<GptDataset>(source, 4, DocumentOptions{}), options);
    for (uint64_t i = 0; i < 10; ++i) CHECK(loader.next().sample_ids[0] == 2 * i);
    for (int again = 0; again < 2; ++again) {
      const auto error = error_of([&] { loader.next(); });
      CHECK(error.starts_with("format: sample is broken"));
      CHECK(error.find("while reading sample 21 (row 1 of a micro-batch on data-parallel rank 0)") !=
            std::string::npos);
    }
    CHECK(loader.consumed_samples() == 20);
  }
}

TEST_CASE("workers prefetch two micro-batches each and no more, and stop at any time") {
  for (int repeat = 0; repeat < 20; ++repeat) {
    auto source = std::make_shared<CountingSource>();
    LoaderOptions options;
    options.num_workers = 4;
    Loader loader(std::make_shared<GptDataset>(source, 4, DocumentOptions{}), options);
    for (int i = 0; i < repeat % 5; ++i) loader.next();
    if (repeat % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      CHECK(source->reads.load() <= repeat % 5 + 8);
    }
  }
}

TEST_CASE("an invalid loader is refused") {
  const auto dataset = fixture_dataset();
  const auto refused = [&](auto change) {
    LoaderOptions options;
    change(options);
    return error_of([&] { Loader loader(dataset, options); }).starts_with("config: ");
  };
  CHECK(refused([](LoaderOptions& o) { o.micro_batch_size = 0; }));
  CHECK(refused([](LoaderOptions& o) { o.data_parallel_rank = 1; }));
  CHECK(refused([](LoaderOptions& o) { o.micro_batch_size = 3, o.global_batch_size = 4; }));
  CHECK(refused([](LoaderOptions& o) { o.global_batch_size = 0; }));
  CHECK(refused([](LoaderOptions& o) { o.consumed_samples = -1; }));
}

TEST_CASE("longer runs begin with shorter ones") {
  // The loader does not know the length of the run. The test reads the order of a longer run at once, and
  // that of a shorter one in parts with other batch shapes.
  const auto dataset = fixture_dataset();
  LoaderOptions options;
  options.global_batch_size = 1;
  Loader uninterrupted(dataset, options);
  std::vector<int32_t> expected;
  for (int i = 0; i < 240; ++i) {
    const auto batch = uninterrupted.next();
    expected.insert(expected.end(), batch.tokens.begin(), batch.tokens.end());
  }
  std::vector<int32_t> found;
  int64_t consumed = 0;
  for (const int64_t rows : {5, 1, 8}) {
    options.micro_batch_size = options.global_batch_size = rows;
    options.consumed_samples = consumed;
    Loader loader(fixture_dataset(), options);
    for (int i = 0; i < 10; ++i) {
      const auto batch = loader.next();
      found.insert(found.end(), batch.tokens.begin(), batch.tokens.end());
    }
    consumed = loader.consumed_samples();
  }
  CHECK(std::equal(found.begin(), found.end(), expected.begin()));
}
