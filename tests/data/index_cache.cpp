#include "data/index_cache.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <thread>

#include "data/gpt_dataset.hpp"
#include "data/sample_order.hpp"
#include "dataset_helpers.hpp"

using namespace capstan;
using namespace capstan::data;
using namespace capstan::data::testing;
namespace fs = std::filesystem;

namespace {

std::vector<fs::path> files_in(const std::string& directory) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(directory)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<std::vector<int32_t>> samples_of(const SampleSource& source, int64_t count, int64_t length) {
  std::vector<std::vector<int32_t>> result;
  for (int64_t i = 0; i < count; ++i) {
    result.emplace_back(static_cast<size_t>(length + 1));
    source.read(i, result.back());
  }
  return result;
}

}  // namespace

TEST_CASE("an index comes back as it was kept; any damage and any other key count as absent") {
  const TempDirectory directory;
  const IndexCache cache(directory / "deep/cache");
  const std::vector<int32_t> a = {1, -2, 3};
  const std::vector<uint64_t> b(1000, 7);
  const auto load = [&](std::string_view key, size_t count = 3) {
    std::vector<int32_t> x(count);
    std::vector<uint64_t> y(1000);
    return cache.load(key, {std::as_writable_bytes(std::span(x)), std::as_writable_bytes(std::span(y))}) &&
           x == a && y == b;
  };
  CHECK(!load("key"));
  cache.store("key", {std::as_bytes(std::span(a)), std::as_bytes(std::span(b))});
  CHECK(load("key"));
  CHECK(!load("key 2"));
  CHECK(!load("key", 4));
  const fs::path file = cache.file_of("key");
  CHECK(files_in(directory / "deep/cache") == std::vector{file});
  const std::string good = read_file(file);
  for (size_t at = 0; at < good.size(); at += at < 64 ? 1 : 997) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    write_text(file.string(), bad);
    CHECK_MESSAGE(!load("key"), at);
  }
  write_text(file.string(), good.substr(0, good.size() - 1));
  CHECK(!load("key"));
  write_text(file.string(), good + "x");
  CHECK(!load("key"));
  // The file has this name but another key.
  cache.store("kez", {std::as_bytes(std::span(a)), std::as_bytes(std::span(b))});
  fs::rename(cache.file_of("kez"), file);
  CHECK(!load("key"));
  write_text(directory / "file", "");
  CHECK(error_of([&] { IndexCache(directory / "file"); }).starts_with("io: "));
}

TEST_CASE("both orders give the same samples from a cache; a damaged one is built again") {
  const TempDirectory directory;
  const auto dataset = counting_dataset(directory / "d", 500, [](int64_t i) { return i % 17 + 1; });
  const SequenceRange range{dataset, 20, 480};
  const auto cache = std::make_shared<const IndexCache>(directory / "cache");
  const CapstanOrder plain(range, 6, 5);
  const MegatronOrder megatron(range, 6, 5, 2000);
  // Reaches into the second epoch.
  const int64_t count = plain.epoch_samples() + 50;
  const auto expected = samples_of(plain, count, 6), expected_megatron = samples_of(megatron, 2000, 6);
  CHECK(samples_of(CapstanOrder(range, 6, 5, cache), count, 6) == expected);
  CHECK(samples_of(MegatronOrder(range, 6, 5, 2000, cache.get()), 2000, 6) == expected_megatron);
  const auto files = files_in(directory / "cache");
  // The cache holds two epochs of Capstan's order, and the indices and positions of Megatron's.
  CHECK(files.size() == 4);
  CHECK(samples_of(CapstanOrder(range, 6, 5, cache), count, 6) == expected);
  CHECK(samples_of(MegatronOrder(range, 6, 5, 2000, cache.get()), 2000, 6) == expected_megatron);
  CHECK(files_in(directory / "cache") == files);
  for (const fs::path& file : files) {
    std::string bad = read_file(file);
    bad.back() = static_cast<char>(bad.back() ^ 1);
    write_text(file.string(), bad);
  }
  CHECK(samples_of(CapstanOrder(range, 6, 5, cache), count, 6) == expected);
  CHECK(samples_of(MegatronOrder(range, 6, 5, 2000, cache.get()), 2000, 6) == expected_megatron);
  CHECK(files_in(directory / "cache") == files);  // written again
  // A different seed, length, range, number of samples or index file has its own cache files.
  samples_of(CapstanOrder(range, 6, 6, cache), 1, 6);
  samples_of(CapstanOrder(range, 5, 5, cache), 1, 5);
  samples_of(CapstanOrder({dataset, 20, 479}, 6, 5, cache), 1, 6);
  CHECK(files_in(directory / "cache").size() == 7);
  const auto other = counting_dataset(directory / "d", 500, [](int64_t i) { return i % 16 + 1; });
  CHECK(samples_of(CapstanOrder({other, 20, 480}, 6, 5, cache), 10, 6) ==
        samples_of(CapstanOrder({other, 20, 480}, 6, 5), 10, 6));
  CHECK(files_in(directory / "cache").size() == 8);
}

TEST_CASE("a cached index with a valid hash and impossible positions is not used") {
  const TempDirectory directory;
  const auto dataset = counting_dataset(directory / "d", 100, [](int64_t) { return 10; });
  const SequenceRange range{dataset, 0, 100};
  const auto cache = std::make_shared<const IndexCache>(directory / "cache");
  const auto expected = samples_of(CapstanOrder(range, 8, 1), 100, 8);
  CHECK(samples_of(CapstanOrder(range, 8, 1, cache), 100, 8) == expected);
  const auto file = files_in(directory / "cache").at(0);
  // In the file the key follows the header.
  const std::string content = read_file(file);
  const auto at = content.find("capstan index 1"), end = content.find("; epoch 0") + 9;
  const std::string key = content.substr(at, end - at);
  std::vector<SequenceOffset> starts((content.size() - end) / sizeof(SequenceOffset),
                                     SequenceOffset{99, 1000});
  cache->store(key, {std::as_bytes(std::span(starts))});
  CHECK(samples_of(CapstanOrder(range, 8, 1, cache), 100, 8) == expected);
}

TEST_CASE("several readers fill one cache at once") {
  const TempDirectory directory;
  counting_dataset(directory / "d", 300, [](int64_t i) { return i % 9 + 1; });
  std::vector<std::vector<std::vector<int32_t>>> read(4);
  std::vector<std::thread> threads;
  for (auto& samples : read)
    threads.emplace_back([&] {
      const auto dataset = std::make_shared<IndexedDataset>(directory / "d");
      const auto cache = std::make_shared<const IndexCache>(directory / "cache");
      samples = samples_of(CapstanOrder({dataset, 0, 300}, 5, 3, cache), 400, 5);
    });
  for (auto& thread : threads) thread.join();
  for (const auto& samples : read) CHECK(samples == read[0]);
  for (const fs::path& file : files_in(directory / "cache")) CHECK(file.extension() == ".index");
}
