// Compares a trained vocabulary with the one that Hugging Face's BpeTrainer learns from the same samples.
#include <doctest/doctest.h>

#include <fstream>
#include <map>

#include "base/philox.hpp"
#include "text/tokenizer/tokenizer.hpp"
#include "text/tokenizer/train_bpe.hpp"
#include "tokenizer_fixtures.hpp"

using namespace capstan;
using namespace capstan::text;
namespace fixtures = tokenizer_fixtures;

static std::string train(const std::vector<std::string>& documents, const TrainOptions& options,
                         int threads = 2, const TrainProgressSink& progress = {}) {
  ThreadPool pool(threads);
  size_t next = 0;
  return train_bpe(
      [&](std::string& document) {
        if (next == documents.size()) return false;
        document = documents[next++];
        return true;
      },
      options, pool, progress);
}

TEST_CASE("train_bpe: the tokenizer.json that Hugging Face learns and saves") {
  const auto samples = fixtures::samples();
  CHECK(train(samples, {.vocab_size = 700}) == read_file(fixtures::path("trained_gpt2.json")));
  const auto compact = [](const std::string& json) {
    return capstan::dump_json(capstan::ordered_json_of(json));
  };
  CHECK(compact(train(samples, {.vocab_size = 700,
                                .pre_tokenizer = PreTokenizerChoice::llama3,
                                .special_tokens = {"<|begin_of_text|>", "<|end_of_text|>"}})) ==
        read_file(fixtures::path("trained_llama3.json")));
  CHECK(compact(train(samples, {.vocab_size = 700, .pre_tokenizer = PreTokenizerChoice::qwen2})) ==
        read_file(fixtures::path("trained_qwen2.json")));
}

TEST_CASE("train_bpe: the number of threads changes nothing, progress ends at the total") {
  const auto samples = fixtures::samples();
  const TrainOptions options{.vocab_size = 600};
  std::map<std::string, TrainProgress> last;
  const std::string one = train(
      samples, options, 1, [&](const TrainProgress& p) { last.insert_or_assign(std::string(p.phase), p); });
  CHECK(last.count("reading") == 1);
  CHECK(last.count("counting") == 1);
  CHECK(last.at("merging").done == 600);
  for (const int threads : {2, 3, 5}) CHECK(train(samples, options, threads) == one);
}

TEST_CASE("train_bpe: files are one text each, however they are split") {
  const auto directory = std::filesystem::temp_directory_path() / "capstan_tokenizer_train";
  std::filesystem::create_directories(directory);
  const auto samples = fixtures::samples();
  std::string text;
  PhiloxSequence random(philox_key(3, purpose::test, 3));
  while (text.size() < (3 << 20)) {
    text += samples[random.below(samples.size())];
    text += std::string(random.below(3), '\n');
  }
  const std::vector<std::filesystem::path> files = {directory / "a.txt", directory / "empty.txt"};
  std::ofstream(files[0], std::ios::binary) << text;
  std::ofstream(files[1], std::ios::binary) << "";
  for (const auto choice :
       {PreTokenizerChoice::gpt2, PreTokenizerChoice::llama3, PreTokenizerChoice::qwen2}) {
    const TrainOptions options{.vocab_size = 900, .pre_tokenizer = choice};
    ThreadPool pool(3);
    CHECK(train_bpe(files, options, pool) == train({text}, options));
  }
  std::ofstream(files[1], std::ios::binary) << "version https://git-lfs.github.com/spec/v1\noid sha256:00\n";
  ThreadPool pool(1);
  CHECK_THROWS_WITH_AS(train_bpe(files, {.vocab_size = 900}, pool), doctest::Contains("is a Git LFS pointer"),
                       Error);
  std::filesystem::remove_all(directory);
}

TEST_CASE("train_bpe: small and strange cases") {
  // Without data the vocabulary holds the bytes and the special token.
  const auto empty = Tokenizer::from_json(train({}, {.vocab_size = 1000}));
  CHECK(empty->vocab_size() == 257);
  CHECK(empty->decode(empty->encode("any text")) == "any text");
  // A pair must be frequent enough.
  CHECK(Tokenizer::from_json(train({"abab"}, {.vocab_size = 1000, .min_frequency = 3}))->vocab_size() == 257);
  CHECK(
      Tokenizer::from_json(train({"abab"}, {.vocab_size = 1000, .min_frequency = 2}))->encode("ab").size() ==
      1);
  // A special token that is a byte of the alphabet; text that is not UTF-8; a long run.
  const auto odd = Tokenizer::from_json(train({std::string(5000, 'a'), "\xFF\xFE\xFF\xFE\xFF\xFE"},
                                              {.vocab_size = 300, .special_tokens = {"!", "\"q\"\\"}}));
  CHECK(odd->id_of("!") == 0);
  CHECK(odd->id_of("\"q\"\\") == 1);
  CHECK(odd->encode(std::string(5000, 'a')).size() < 20);
  CHECK(odd->encode("\xFF\xFE").size() == 1);
  const auto prefixed = Tokenizer::from_json(
      train({"ab ab ab"},
            {.vocab_size = 300, .pre_tokenizer = PreTokenizerChoice::llama3, .add_prefix_space = true}));
  CHECK(prefixed->encode("ab") == prefixed->encode(" ab"));

  CHECK_THROWS_WITH_AS(train({}, {.vocab_size = 256}), doctest::Contains("at least 257"), Error);
  CHECK_THROWS_AS(train({}, {.vocab_size = -1}), Error);
  CHECK_THROWS_AS(train({}, {.vocab_size = 400, .special_tokens = {"x", "x"}}), Error);
  CHECK_THROWS_AS(train({}, {.vocab_size = 400, .special_tokens = {""}}), Error);
  CHECK_THROWS_AS(pre_tokenizer_by_name("gpt3"), Error);
}
