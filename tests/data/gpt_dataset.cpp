#include "data/gpt_dataset.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <set>

#include "base/json.hpp"
#include "data/mock_dataset.hpp"
#include "dataset_helpers.hpp"

using namespace capstan;
using namespace capstan::data;
using namespace capstan::data::testing;

namespace {

struct Row {
  std::vector<int32_t> tokens, labels, position_ids, cu_seqlens;
  std::vector<float> loss_mask;
  explicit Row(int64_t length)
      : tokens(static_cast<size_t>(length)), labels(tokens), position_ids(tokens), loss_mask(tokens.size()) {}
  RowView view() { return {tokens, labels, loss_mask, position_ids, &cu_seqlens}; }
};

std::vector<int32_t> text_of(const GptDataset& dataset, int64_t number) {
  std::vector<int32_t> text(static_cast<size_t>(dataset.sequence_length() + 1));
  dataset.text(number, text);
  return text;
}

GptDatasetOptions options_for(Blend blend) {
  GptDatasetOptions options;
  options.blend = std::move(blend);
  options.sequence_length = 6;
  options.vocab_size = 100;
  return options;
}

}  // namespace

TEST_CASE("masks, positions and document bounds are megatron-core's") {
  const auto fixtures = capstan::json_of(read_file(fixture("megatron.json")));
  for (const auto& test : fixtures["masks"]) {
    auto text = test["tokens"].get<std::vector<int32_t>>();
    const auto length = static_cast<int64_t>(text.size());
    text.push_back(42);
    DocumentOptions options{99, test["flags"][0], test["flags"][1], test["flags"][2]};
    Row row(length);
    fill_row(text, options, row.view());
    CAPTURE(capstan::dump_json(test));
    CHECK(row.tokens == test["tokens"].get<std::vector<int32_t>>());
    CHECK(row.labels == std::vector<int32_t>(text.begin() + 1, text.end()));
    CHECK(row.loss_mask == test["loss_mask"].get<std::vector<float>>());
    CHECK(row.position_ids == test["position_ids"].get<std::vector<int32_t>>());
    // The fixture says for each row of the attention mask where its document starts.
    std::vector<int32_t> bounds;
    for (size_t i = 0; i < test["starts"].size(); ++i) {
      const int32_t start = test["starts"][i];
      if (bounds.empty() || bounds.back() != start) bounds.push_back(start);
    }
    bounds.push_back(static_cast<int32_t>(length));
    CHECK(row.cu_seqlens == bounds);
  }
}

TEST_CASE("complete builds in Megatron's order: blends by weight, by size, per split") {
  const auto fixtures = capstan::json_of(read_file(fixture("megatron.json")));
  const std::string a = fixture("a"), b = fixture("b");
  for (const auto& test : fixtures["builds"]) {
    const std::string what = test["what"];
    CAPTURE(what);
    GptDatasetOptions options = options_for({});
    options.order = DataOrder::megatron;
    options.split = "8,1,1";
    if (what == "weights") options.blend = {{a, b}, std::vector{3.0, 1.0}};
    if (what == "sizes" || what == "all") options.blend = {{a, b}, std::nullopt};
    if (what == "one with weight") options.blend = {{a}, std::vector{1.0}};
    if (what == "per split")
      options.blend_per_split = {Blend{{a, b}, std::vector{0.5, 0.5}}, Blend{{b}, std::nullopt},
                                 Blend{{a}, std::vector{2.0}}};
    for (size_t i = 0; i < 3; ++i)
      if (!test["sizes"][i].is_null()) options.num_samples[i] = test["sizes"][i].get<int64_t>();
    const auto splits = build_gpt_datasets(options);
    for (size_t i = 0; i < 3; ++i) {
      REQUIRE(splits[i]);
      CHECK(splits[i]->samples() == test["lengths"][i].get<int64_t>());
      for (size_t row = 0; row < test["texts"][i].size(); ++row)
        CHECK(text_of(*splits[i], static_cast<int64_t>(row)) ==
              test["texts"][i][row].get<std::vector<int32_t>>());
    }
  }
}

TEST_CASE("our order: splits do not share tokens, absent splits are null, blends keep their shares") {
  const TempDirectory directory;
  const auto dataset = counting_dataset(directory / "c", 200, [](int64_t i) { return i % 13 + 1; });
  auto options = options_for({{directory / "c"}, std::nullopt});
  options.vocab_size = 0;
  options.split = "8,2";
  const auto splits = build_gpt_datasets(options);
  REQUIRE(splits[0]);
  REQUIRE(splits[1]);
  CHECK(!splits[2]);
  CHECK(splits[0]->samples() == SampleSource::kEndless);
  const int32_t boundary = static_cast<int32_t>(dataset->first_token(160));
  for (int64_t i = 0; i < 3 * splits[0]->epoch_samples(); ++i)
    for (const int32_t token : text_of(*splits[0], i)) REQUIRE(token < boundary);
  for (int64_t i = 0; i < 3 * splits[1]->epoch_samples(); ++i)
    for (const int32_t token : text_of(*splits[1], i)) REQUIRE(token >= boundary);

  // Two datasets with different tokens, 0… and 1000000….
  std::vector<std::vector<int32_t>> high;
  for (int i = 0; i < 100; ++i) high.push_back(std::vector<int32_t>(20, 1'000'000 + i));
  write_dataset(directory / "h", high, TokenType::i32);
  options.blend = {{directory / "c", directory / "h"}, std::vector{1.0, 3.0}};
  options.split = "1";
  const auto blend = build_gpt_datasets(options)[0];
  int64_t from_high = 0;
  for (int64_t i = 0; i < 400; ++i) from_high += text_of(*blend, i)[0] >= 1'000'000;
  CHECK(from_high == 300);
  options.blend.weights.reset();  // by tokens: 1391 and 2000
  const auto by_size = build_gpt_datasets(options)[0];
  from_high = 0;
  for (int64_t i = 0; i < 1000; ++i) from_high += text_of(*by_size, i)[0] >= 1'000'000;
  CHECK(std::abs(static_cast<double>(from_high) -
                 1000.0 * 2000 / (2000 + static_cast<double>(dataset->tokens()))) < 2);
  CHECK(by_size->epoch_samples() == (2000 - 1) / 6 + (dataset->tokens() - 1) / 6);
}

TEST_CASE("passes are counted for the part of a blend that is repeated most") {
  const TempDirectory directory;
  counting_dataset(directory / "small", 10, [](int64_t) { return 7; });    // 11 samples of 6 tokens
  counting_dataset(directory / "large", 1000, [](int64_t) { return 7; });  // 1166
  auto options = options_for({{directory / "small", directory / "large"}, std::vector{1.0, 3.0}});
  options.vocab_size = 0;
  options.split = "1,0,0";
  const auto blend = build_gpt_datasets(options)[0];
  const auto most = most_passes(*blend, 880);
  REQUIRE(most);
  CHECK(most->part.name == directory / "small");
  CHECK(most->part.epoch_samples == 11);
  CHECK(most->count == doctest::Approx(220.0 / 11));
  CHECK(blend->samples_in(2) == 2 * (11 + 1166));
  CHECK(blend->samples_in(0.5) == 589);  // of 1177, rounded up
  options.blend = {{directory / "small"}, std::nullopt};
  CHECK(most_passes(*build_gpt_datasets(options)[0], 22)->count == doctest::Approx(2));
  options.order = DataOrder::megatron;
  options.num_samples[0] = 50;
  CHECK(most_passes(*build_gpt_datasets(options)[0], 22)->count == doctest::Approx(2));
  GptDatasetOptions mock;
  mock.mock = true;
  mock.sequence_length = 6;
  mock.vocab_size = 50;
  CHECK(!most_passes(*build_gpt_datasets(mock)[0], 1000));
}

TEST_CASE("options that contradict each other, and errors with their split and dataset") {
  CHECK(error_of([] { build_gpt_datasets({}); }).starts_with("config: "));
  auto options = options_for({{fixture("a")}, std::nullopt});
  options.mock = true;
  CHECK(error_of([&] { build_gpt_datasets(options); }).find("either mock") != std::string::npos);
  options = options_for({{fixture("a")}, std::vector{1.0, 2.0}});
  CHECK(error_of([&] { build_gpt_datasets(options); }).find("1 datasets and 2 weights") != std::string::npos);
  options = options_for({{fixture("a")}, std::nullopt});
  options.documents.reset_attention_mask = true;
  CHECK(error_of([&] { build_gpt_datasets(options); }).find("reset_attention_mask needs to know") !=
        std::string::npos);
  options = options_for({{fixture("missing")}, std::nullopt});
  CHECK(error_of([&] { build_gpt_datasets(options); }).starts_with("not_found: "));
  options = options_for({{fixture("small_u16")}, std::nullopt});
  options.split = "969,30,1";
  const auto error = error_of([&] { build_gpt_datasets(options); });
  CHECK(error.find("in the valid split of") != std::string::npos);
  CHECK(error.find("small_u16") != std::string::npos);
  // A split without data is no error if it is not wanted, or wanted only if possible.
  options.build = {BuildSplit::yes, BuildSplit::no, BuildSplit::if_possible};
  const auto some = build_gpt_datasets(options);
  CHECK(some[0]);
  CHECK(!some[1]);
  CHECK(!some[2]);
  // The dataset contains a token of another tokenizer.
  options.split = "1";
  options.vocab_size = 60000;
  options.sequence_length = 10;
  const auto split = build_gpt_datasets(options)[0];
  CHECK(error_of([&] { text_of(*split, 0); }).find("token 65499 is not below the vocabulary size 60000") !=
        std::string::npos);
}

TEST_CASE("mock data can be learned, end their documents, and depend on seed, split and number alone") {
  const MockSource train(50, 49, 1234, Split::train, 64), valid(50, 49, 1234, Split::valid, 64),
      middle(50, 7, 1, Split::train, 64);
  std::vector<int32_t> text(257), again(257);
  int64_t follows = 0, ends = 0, total = 0;
  std::map<int32_t, int64_t> counts;
  for (int64_t i = 0; i < 200; ++i) {
    for (const MockSource* source : {&train, &middle}) {
      const int32_t eod = source == &train ? 49 : 7;
      source->read(i, text);
      for (size_t t = 0; t + 1 < text.size(); ++t) {
        REQUIRE((text[t] >= 0 && text[t] < 50));
        int32_t next = (text[t] + 1) % 50;
        if (next == eod) next = (next + 1) % 50;
        ends += text[t + 1] == eod;
        follows += text[t + 1] == next || text[t] == eod;
        ++total;
        ++counts[text[t]];
      }
    }
  }
  CHECK(follows + ends == total);
  CHECK(ends > total / 50);
  CHECK(ends < total / 25);
  CHECK(counts.size() == 50);
  train.read(17, text);
  train.read(17, again);
  CHECK(text == again);
  valid.read(17, again);
  CHECK(text != again);
  train.read(18, again);
  CHECK(text != again);

  GptDatasetOptions options;
  options.mock = true;
  options.sequence_length = 16;
  options.vocab_size = 32;
  options.documents.reset_attention_mask = true;  // the mock knows its own end of document
  CHECK(build_gpt_datasets(options)[2]);
  options.vocab_size = 0;
  CHECK(error_of([&] { build_gpt_datasets(options); }).find("mock data needs a vocabulary") !=
        std::string::npos);
}
