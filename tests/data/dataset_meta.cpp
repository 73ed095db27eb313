#include "data/dataset_meta.hpp"

#include <doctest/doctest.h>

#include "base/json.hpp"
#include "data/gpt_dataset.hpp"
#include "data/inspect.hpp"
#include "data/prepare.hpp"
#include "dataset_helpers.hpp"
#include "text/tokenizer/tokenizer.hpp"

using namespace capstan;
using namespace capstan::data;
using namespace capstan::data::testing;

namespace {

// A tokenizer that differs from `bytes`: 256 bytes, <|endoftext|> and one more token.
std::shared_ptr<const text::Tokenizer> longer_tokenizer() {
  auto json = capstan::ordered_json_of(text::byte_tokenizer()->files().at(0).text);
  json["model"]["vocab"]["ab"] = 257;
  json["model"]["merges"].push_back("a b");
  return text::Tokenizer::from_json(capstan::dump_json(json));
}

GptDatasetOptions options_of(const std::vector<std::string>& prefixes, const text::Tokenizer* tokenizer) {
  GptDatasetOptions options;
  options.blend.prefixes = prefixes;
  options.split = "1,0,0";
  options.sequence_length = 4;
  options.vocab_size = 260;
  options.tokenizer = tokenizer;
  options.tokenizer_name = "the recipe's";
  return options;
}

std::string prepare_text(const TempDirectory& directory, const std::string& name,
                         const std::shared_ptr<const text::Tokenizer>& tokenizer, bool overwrite = false) {
  write_text(directory / "text.txt", "abc\n\nabcdefghijkl\n");
  PrepareOptions options;
  options.inputs = {directory / "text.txt"};
  options.output_prefix = directory / name;
  options.overwrite = overwrite;
  ThreadPool pool(1);
  return prepare(options, *tokenizer, "tok/" + name + ".json", pool).keys.at(0).prefix;
}

}  // namespace

TEST_CASE("data prepare records the tokenizer, and data of another one is refused by name") {
  const TempDirectory directory;
  const auto bytes = text::byte_tokenizer(), longer = longer_tokenizer();
  CHECK(bytes->identity() != longer->identity());
  const std::string a = prepare_text(directory, "a", bytes), b = prepare_text(directory, "b", longer);
  const auto meta = read_meta(IndexedDataset(b));
  REQUIRE(meta);
  CHECK(meta->tokenizer.name == "tok/b.json");
  CHECK(meta->tokenizer.vocab_size == 258);
  CHECK(meta->tokenizer.identity == longer->identity());
  CHECK(meta->documents == 2);

  const auto open = [](const std::vector<std::string>& prefixes, const text::Tokenizer* tokenizer) {
    return error_of([&] { build_gpt_datasets(options_of(prefixes, tokenizer)); });
  };
  CHECK(open({a}, bytes.get()) == "");
  CHECK(open({b}, longer.get()) == "");
  // Each prefix of a blend is checked.
  const std::string refused = open({a, b}, bytes.get());
  CHECK(refused.starts_with("config: "));
  for (const std::string& named :
       {b, std::string("\"tok/b.json\" (258 tokens"), std::string("\"the recipe's\" (257 tokens"),
        longer->identity().substr(0, 8), bytes->identity().substr(0, 8), b + ".meta.json"})
    CHECK_MESSAGE(refused.find(named) != std::string::npos, named, " in ", refused);
  CHECK(open({a, b}, longer.get()).find("`" + a + "`") != std::string::npos);

  // Without a tokenizer the model's vocabulary can be too small.
  auto small = options_of({b}, nullptr);
  small.vocab_size = 257;
  CHECK(error_of([&] { build_gpt_datasets(small); }).find("larger than the model's vocabulary of 257") !=
        std::string::npos);

  InspectOptions look;
  CHECK(to_text_report(inspect(b)).find("tokenizer     \"tok/b.json\" (258 tokens") != std::string::npos);
  CHECK(capstan::json_of(to_json_report(inspect(b)))["tokenizer"]["identity"] == longer->identity());
  look.tokenizer = bytes.get();
  CHECK(error_of([&] { inspect(b, look); }).find("was prepared with the tokenizer \"tok/b.json\"") !=
        std::string::npos);
}

TEST_CASE("without a record, a tokenizer that lacks an id of the data is refused before training") {
  const TempDirectory directory;
  const auto prefix = directory / "d";
  write_dataset(prefix, {{1, 2, 3, 4, 5}, {255, 256, 257, 7}});
  const auto bytes = text::byte_tokenizer(), longer = longer_tokenizer();
  CHECK(error_of([&] {
          build_gpt_datasets(options_of({prefix}, bytes.get()));
        }).find("d.bin: offset 14: token 257 is not below the vocabulary size 257") != std::string::npos);
  CHECK(error_of([&] { build_gpt_datasets(options_of({prefix}, longer.get())); }) == "");
  InspectOptions look;
  look.tokenizer = bytes.get();
  CHECK(error_of([&] { inspect(prefix, look); }).find("token 257") != std::string::npos);
}

TEST_CASE("without a record, a tokenizer clearly smaller than the model's vocabulary is refused") {
  const TempDirectory directory;
  const auto prefix = directory / "d";
  write_dataset(prefix, {{1, 2, 3, 4, 5}, {255, 7}});
  const auto bytes = text::byte_tokenizer();
  const IndexedDataset dataset(prefix);
  const auto refusal = [&](int64_t vocab_size) {
    return error_of([&] { TokenizerCheck(bytes.get(), "bytes", vocab_size).check(dataset); });
  };
  CHECK(refusal(0) == "");  // the model's vocabulary is not known
  CHECK(refusal(257) == "");
  for (const int64_t padded : {258, 259, 260, 264, 272, 288, 320, 384}) CHECK(refusal(padded) == "");
  for (const int64_t other : {261, 300, 383, 385, 512}) CHECK(refusal(other) != "");
  const std::string refused = refusal(386);
  CHECK(refused.starts_with("config: "));
  CHECK_MESSAGE(refused.find("has 257 tokens, model.vocab_size is 386") != std::string::npos, refused);
  // With a record, the identity of the tokenizer decides.
  const IndexedDataset recorded(prepare_text(directory, "r", bytes));
  CHECK(error_of([&] { TokenizerCheck(bytes.get(), "bytes", 50'000).check(recorded); }) == "");
}

TEST_CASE("options that read document ends refuse data that has none, or other ones") {
  const TempDirectory directory;
  const auto bytes = text::byte_tokenizer();
  write_text(directory / "text.txt", "abc\n\nabcdefghijkl\n");
  const auto prepared = [&](const std::string& name, bool append, std::optional<int32_t> eod) {
    PrepareOptions options;
    options.inputs = {directory / "text.txt"};
    options.output_prefix = directory / name;
    options.append_eod = append;
    options.eod = eod;
    ThreadPool pool(1);
    return prepare(options, *bytes, "bytes", pool).keys.at(0).prefix;
  };
  const std::string none = prepared("none", false, {}), own = prepared("own", true, {}),
                    other = prepared("other", true, 'b');
  const int64_t eod = *bytes->eod();
  CHECK(*read_meta(IndexedDataset(none))->end_of_document == DatasetMeta::kNone);
  CHECK(*read_meta(IndexedDataset(own))->end_of_document == eod);
  CHECK(*read_meta(IndexedDataset(other))->end_of_document == 'b');
  CHECK(to_text_report(inspect(none)).find("no token") != std::string::npos);

  GptDatasetOptions options = options_of({none}, bytes.get());
  options.documents.eod = bytes->eod();
  CHECK(error_of([&] { build_gpt_datasets(options); }) == "");
  options.documents.eod_mask_loss = true;
  std::string error = error_of([&] { build_gpt_datasets(options); });
  CHECK_MESSAGE(error.starts_with("config: dataset.eod_mask_loss has no effect on dataset `" + none), error);
  CHECK_MESSAGE(error.find("with the token appended") != std::string::npos, error);
  options.blend.prefixes = {own};
  CHECK(error_of([&] { build_gpt_datasets(options); }) == "");
  options.blend.prefixes = {other};
  error = error_of([&] { build_gpt_datasets(options); });
  CHECK_MESSAGE(error.find("end with `b` (98), but the run's end-of-document token is") != std::string::npos,
                error);
  CHECK_MESSAGE(error.find("tokenizer.eod_token=b") != std::string::npos, error);
  // Without such an option it is a warning, of the first split alone.
  options.documents.eod_mask_loss = false;
  options.split = "1,1,0";
  const auto splits = build_gpt_datasets(options);
  REQUIRE(splits[1]);
  CHECK(splits[0]->warnings().size() == 1);
  CHECK(splits[1]->warnings().empty());

  // Without a record the tokens are searched.
  for (const std::string& prefix : {none, own}) std::filesystem::remove(meta_path(prefix));
  options.documents.reset_attention_mask = true;
  options.split = "1,0,0";
  options.blend.prefixes = {own};
  CHECK(error_of([&] { build_gpt_datasets(options); }) == "");
  options.blend.prefixes = {none};
  error = error_of([&] { build_gpt_datasets(options); });
  CHECK_MESSAGE(error.find("no token of it is the end-of-document token") != std::string::npos, error);
}

TEST_CASE("without a tokenizer, the datasets of a blend must have been prepared with one") {
  const TempDirectory directory;
  const std::string a = prepare_text(directory, "a", text::byte_tokenizer()),
                    b = prepare_text(directory, "b", longer_tokenizer());
  CHECK(error_of([&] { build_gpt_datasets(options_of({a, a}, nullptr)); }) == "");
  const std::string error = error_of([&] { build_gpt_datasets(options_of({a, b}, nullptr)); });
  CHECK_MESSAGE(error.find("another dataset of the run with \"tok/a.json\"") != std::string::npos, error);
}

TEST_CASE("the largest token of a file: all of a small one, distributed blocks of a large one") {
  const TempDirectory directory;
  const int64_t count = 300'000;
  const auto dataset = counting_dataset(directory / "d", 3, [&](int64_t) { return count / 3; });
  CHECK(dataset->largest_token(count) == count - 1);
  CHECK(dataset->largest_token(1 << 16) == (1 << 16) - 1);
  CHECK(dataset->largest_token(2 << 16) == (3 << 16) - 1);  // the first block and the third of five
  write_dataset(directory / "none", {});
  CHECK(IndexedDataset(directory / "none").largest_token(10) == -1);
}

TEST_CASE("a damaged record is an error that names the file") {
  const TempDirectory directory;
  const std::string prefix = prepare_text(directory, "d", text::byte_tokenizer());
  const std::string path = meta_path(prefix), good = read_file(path);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const auto at = text.find(from);
    REQUIRE(at != std::string::npos);
    return text.replace(at, from.size(), to);
  };
  const std::string identity = text::byte_tokenizer()->identity();
  const std::pair<std::string, const char*> cases[] = {
      {"", "not a JSON object"},
      {"[]", "not a JSON object"},
      {good.substr(0, good.size() / 2), "not a JSON object"},
      {std::string(5000, '['), "not a JSON object"},
      {"{}", "no `schema`"},
      {with("dataset_meta/1", "dataset_meta/2"), "is not capstan.dataset_meta/1"},
      {with("\"tokenizer\"", "\"other\""), "no `tokenizer`"},
      {with(identity, identity.substr(1)), "not 32 hexadecimal digits"},
      {with(identity, std::string(32, 'x')), "not 32 hexadecimal digits"},
      {with("\"vocab_size\": 257", "\"vocab_size\": -1"), "`vocab_size` is not a number"},
      {with("\"vocab_size\": 257", "\"vocab_size\": 1e99"), "`vocab_size` is not a number"},
      {with("\"vocab_size\": 257", "\"vocab_size\": 99999999999"), "`vocab_size` is not a number"},
      {with("tok/d.json", std::string(5000, 'x')), "`name` has more than"},
      {with("\"documents\": 2", "\"documents\": 3"), "describes other data, with 3 documents"},
      {with("\"tokens\": ", "\"tokens\": 1"), "describes other data"}};
  for (const auto& [text, reason] : cases) {
    write_text(path, text);
    const std::string error = error_of([&] { read_meta(IndexedDataset(prefix)); });
    CHECK_MESSAGE(error.starts_with("format: "), error);
    CHECK_MESSAGE(error.find(path) != std::string::npos, error);
    CHECK_MESSAGE(error.find(reason) != std::string::npos, reason, " in ", error);
  }
  write_text(path, std::string(70'000, ' ') + good);
  CHECK(error_of([&] { read_meta(IndexedDataset(prefix)); }).starts_with("format: "));
}

TEST_CASE("data prepare replaces a dataset only when asked to, and its record with it") {
  const TempDirectory directory;
  const std::string prefix = prepare_text(directory, "d", text::byte_tokenizer());
  const std::string before = read_file(prefix + ".bin");
  const std::string refused = error_of([&] { prepare_text(directory, "d", longer_tokenizer()); });
  CHECK(refused.starts_with("usage: `" + prefix + ".bin` exists already"));
  CHECK(refused.find("allow it to be replaced") != std::string::npos);
  CHECK(read_file(prefix + ".bin") == before);
  prepare_text(directory, "d", longer_tokenizer(), true);
  CHECK(read_meta(IndexedDataset(prefix))->tokenizer.vocab_size == 258);
  // An incomplete dataset counts as existing; a record without files does not.
  std::filesystem::remove(prefix + ".idx");
  CHECK(error_of([&] { prepare_text(directory, "d", text::byte_tokenizer()); }).find(".bin` exists") !=
        std::string::npos);
  std::filesystem::remove(prefix + ".bin");
  prepare_text(directory, "d", text::byte_tokenizer());
  CHECK(read_meta(IndexedDataset(prefix))->tokenizer.vocab_size == 257);
  // A writer without a tokenizer removes the record of an earlier one.
  write_dataset(prefix, {{1, 2, 3}});
  CHECK(!read_meta(IndexedDataset(prefix)));
}
