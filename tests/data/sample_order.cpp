#include "data/sample_order.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "base/json.hpp"
#include "data/blend.hpp"
#include "data/numpy_random.hpp"
#include "dataset_helpers.hpp"

using namespace capstan;
using namespace capstan::data;
using namespace capstan::data::testing;

namespace {

std::vector<int32_t> text_of(const SampleSource& source, int64_t number, int64_t sequence_length) {
  std::vector<int32_t> text(static_cast<size_t>(sequence_length + 1));
  source.read(number, text);
  return text;
}

}  // namespace

TEST_CASE("numpy's shuffles") {
  const auto fixtures = capstan::json_of(read_file(fixture("megatron.json")));
  for (const auto& test : fixtures["shuffles"]) {
    NumpyRandomState random(test["seed"].get<uint32_t>());
    for (const auto& expected : test["shuffled"]) {
      std::vector<int32_t> values(expected.size());
      std::iota(values.begin(), values.end(), 0);
      random.shuffle(values);
      CHECK(values == expected.get<std::vector<int32_t>>());
    }
    for (const auto& word : test["words"]) CHECK(random.next32() == word.get<uint32_t>());
  }
}

TEST_CASE("Megatron's order: its three indices and its samples") {
  const auto fixtures = capstan::json_of(read_file(fixture("megatron.json")));
  for (const auto& test : fixtures["orders"]) {
    CAPTURE(capstan::dump_json(test["name"]) + capstan::dump_json(test["split"]) +
            capstan::dump_json(test["samples"]));
    const auto dataset = std::make_shared<IndexedDataset>(fixture(test["name"]), 100);
    const auto share = parse_split(test["split"].get<std::string>())[test["part"].get<size_t>()];
    const auto [begin, end] = split_range(*share, dataset->sequences());
    std::optional<int64_t> samples;
    if (!test["samples"].is_null()) samples = test["samples"].get<int64_t>();
    const int64_t length = test["seq"];
    const MegatronOrder order({dataset, begin, end}, length, test["seed"], samples);

    const auto documents = order.document_index();
    CHECK(std::vector<int32_t>(documents.begin(), documents.end()) ==
          test["document_index"].get<std::vector<int32_t>>());
    const auto shuffle = order.shuffle_index();
    CHECK(std::vector<uint32_t>(shuffle.begin(), shuffle.end()) ==
          test["shuffle_index"].get<std::vector<uint32_t>>());
    REQUIRE(order.samples() + 1 == static_cast<int64_t>(test["sample_index"].size()));
    for (int64_t row = 0; row <= order.samples(); ++row) {
      const auto& expected = test["sample_index"][static_cast<size_t>(row)];
      CHECK(order.sample_index(row) ==
            SequenceOffset{expected[0].get<int64_t>(), expected[1].get<int64_t>()});
    }
    for (size_t i = 0; i < test["texts"].size(); ++i)
      CHECK(text_of(order, static_cast<int64_t>(i), length) == test["texts"][i].get<std::vector<int32_t>>());
    CHECK(error_of([&] { text_of(order, order.samples(), length); }).starts_with("failed: "));
  }
}

TEST_CASE(
    "an epoch of Capstan's order has every complete sample once, over the documents in a permuted order") {
  const TempDirectory directory;
  for (const int64_t length : {1, 3, 8, 31}) {
    // In a counting dataset the token values show where they come from.
    const auto dataset = counting_dataset(directory / ("c" + std::to_string(length)), 101,
                                          [](int64_t i) { return (i * 37) % 23; });
    const SequenceRange range{dataset, 3, 97};
    const CapstanOrder order(range, length, 1234);
    const int64_t n = order.epoch_samples(), tokens = range.tokens();
    CHECK(n == (tokens - 1) / length);
    std::vector<std::vector<int32_t>> epochs[2];
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      std::multiset<int32_t> inputs;
      for (int64_t i = 0; i < n; ++i) {
        const auto text = text_of(order, epoch * n + i, length);
        epochs[epoch].push_back(text);
        inputs.insert(text.begin(), text.end() - 1);
      }
      // No token is an input twice, all tokens come from the range, and at most `length` tokens are unused.
      const std::set<int32_t> distinct(inputs.begin(), inputs.end());
      CHECK(distinct.size() == inputs.size());
      CHECK(static_cast<int64_t>(distinct.size()) == n * length);
      CHECK(*distinct.begin() >= dataset->first_token(3));
      CHECK(*distinct.rbegin() < dataset->first_token(97));
      // Within a document tokens are consecutive; at every other place a document begins.
      std::set<int32_t> begins;
      for (int64_t s = range.begin; s < range.end; ++s)
        begins.insert(static_cast<int32_t>(dataset->first_token(s)));
      for (const auto& text : epochs[epoch])
        for (size_t i = 1; i < text.size(); ++i)
          CHECK((text[i] == text[i - 1] + 1 || begins.count(text[i]) == 1));
      // The samples cover the concatenated sequences: the last label of each is the first input of another
      // one, except at the end.
      std::set<int32_t> firsts;
      for (const auto& text : epochs[epoch]) firsts.insert(text.front());
      int64_t open = 0;
      for (const auto& text : epochs[epoch]) open += firsts.count(text.back()) == 0;
      CHECK(open <= 1);
    }
    if (n > 20) {
      CHECK(epochs[0] != epochs[1]);
      auto sorted = epochs[0];
      std::sort(sorted.begin(), sorted.end());
      CHECK(sorted != epochs[0]);
    }
  }
}

TEST_CASE("an order counts the memory of its indices") {
  const TempDirectory directory;
  const auto dataset = counting_dataset(directory / "c", 50, [](int64_t i) { return i % 11; });
  const SequenceRange range{dataset, 0, 50};
  const auto held = [](const SampleSource& source) {
    std::map<const void*, int64_t> bytes;
    source.add_memory(bytes);
    source.add_memory(bytes);  // once for each object
    REQUIRE(bytes.size() == 1);
    return bytes.begin()->second;
  };
  const MegatronOrder megatron(range, 7, 5, 1000);
  // Four bytes a document of each epoch and a sample, 16 for the first token of every 8th one.
  CHECK(held(megatron) ==
        static_cast<int64_t>(4 * megatron.document_index().size() + 4 * megatron.shuffle_index().size()) +
            16 * (megatron.samples() / 8 + 1));
  const CapstanOrder ours(range, 7, 5);
  CHECK(held(ours) == 2 * 16 * ((ours.epoch_samples() - 1) / 8 + 1));
  std::map<const void*, int64_t> blended;
  const auto part = std::make_shared<CapstanOrder>(range, 7, 5),
             other = std::make_shared<CapstanOrder>(range, 7, 6);
  BlendedSource({part, other}, BlendOrder({1, 2})).add_memory(blended);
  CHECK(blended.size() == 2);
}

TEST_CASE("our order does not depend on what was read before, and differs by seed") {
  const TempDirectory directory;
  const auto dataset = counting_dataset(directory / "c", 50, [](int64_t i) { return i % 11; });
  const SequenceRange range{dataset, 0, 50};
  const CapstanOrder straight(range, 7, 5), jumping(range, 7, 5), other(range, 7, 6);
  const int64_t n = straight.epoch_samples();
  std::vector<std::vector<int32_t>> rows;
  for (int64_t i = 0; i < 4 * n; ++i) rows.push_back(text_of(straight, i, 7));
  int64_t same = 0;
  for (const int64_t i : {4 * n - 1, int64_t{0}, 3 * n, n, n - 1, 2 * n + 1, int64_t{1}}) {
    CHECK(text_of(jumping, i, 7) == rows[static_cast<size_t>(i)]);
    same += text_of(other, i, 7) == rows[static_cast<size_t>(i)];
  }
  CHECK(same < 4);
  const std::set<std::vector<int32_t>> first(rows.begin(), rows.begin() + n),
      last(rows.end() - n, rows.end());
  CHECK(first != last);  // epochs split the text elsewhere
}

TEST_CASE("a split smaller than a sample is read around its end") {
  const TempDirectory directory;
  write_dataset(directory / "tiny", {{1, 2}, {}, {3}});
  const auto dataset = std::make_shared<IndexedDataset>(directory / "tiny");
  const CapstanOrder order({dataset, 0, dataset->sequences()}, 8, 1);
  CHECK(order.epoch_samples() == 1);
  for (int64_t i = 0; i < 5; ++i) {
    const auto text = text_of(order, i, 8);
    const bool forward = text == std::vector<int32_t>{1, 2, 3, 1, 2, 3, 1, 2, 3};
    CHECK((forward || text == std::vector<int32_t>{3, 1, 2, 3, 1, 2, 3, 1, 2}));
  }
  write_dataset(directory / "none", {{}});
  const auto none = std::make_shared<IndexedDataset>(directory / "none");
  CHECK(error_of([&] {
          CapstanOrder(SequenceRange{none, 0, none->sequences()}, 8, 1);
        }).find("hold no tokens") != std::string::npos);
  CHECK(error_of([&] {
          MegatronOrder({dataset, 0, 2}, 8, 1, std::nullopt);
        }).find("fewer than one sample") != std::string::npos);
  CHECK(error_of([&] { MegatronOrder({dataset, 0, 2}, 1, uint64_t{1} << 32, 1); }).starts_with("config: "));
  CHECK(error_of([&] {
          MegatronOrder({dataset, 0, 2}, 1, 1, int64_t{1} << 40);
        }).starts_with("unsupported: "));
}

TEST_CASE("the data of seed 1234 stay what they are") {
  const auto dataset = std::make_shared<IndexedDataset>(fixture("a"), 100);
  const CapstanOrder order({dataset, 0, dataset->sequences()}, 8, 1234);
  CHECK(text_of(order, 0, 8) == std::vector<int32_t>{23, 22, 66, 99, 92, 40, 60, 70, 49});
  CHECK(text_of(order, 250, 8) == std::vector<int32_t>{77, 3, 0, 77, 6, 52, 85, 70, 2});
}
