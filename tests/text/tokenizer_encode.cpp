// Compares encoding and decoding with Hugging Face tokenizers.
#include <doctest/doctest.h>

#include <atomic>

#include "base/philox.hpp"
#include "base/thread_pool.hpp"
#include "base/utf8.hpp"
#include "text/tokenizer/bpe.hpp"
#include "text/tokenizer/tokenizer.hpp"
#include "tokenizer_fixtures.hpp"

using namespace capstan;
using namespace capstan::text;
namespace fixtures = tokenizer_fixtures;

static const char* const kVariants[] = {
    "gpt2",          "gpt2_prefix_added", "llama3_ignore_merges", "qwen2_nfc",
    "smollm_digits", "split_sequence",    "split_behaviors",      "unknown_fused"};

TEST_CASE("tokenizer: ids equal Hugging Face's on every sample") {
  const auto samples = fixtures::samples();
  for (const std::string variant : kVariants) {
    CAPTURE(variant);
    const auto tokenizer = Tokenizer::load(fixtures::path(variant + ".json"));
    const auto expected = fixtures::expected_ids(variant);
    REQUIRE(expected.size() == samples.size());
    for (int round = 0; round < 2; ++round)  // the second one from memory
      for (size_t i = 0; i < samples.size(); ++i) {
        CAPTURE(samples[i]);
        CHECK(tokenizer->encode(samples[i]) == expected[i]);
      }
  }
}

TEST_CASE("tokenizer: encode appends, decode reverses it") {
  const auto samples = fixtures::samples();
  for (const std::string variant : {"gpt2", "llama3_ignore_merges", "smollm_digits", "split_sequence"}) {
    CAPTURE(variant);
    const auto tokenizer = Tokenizer::load(fixtures::path(variant + ".json"));
    std::vector<int32_t> all;
    std::string text;
    for (const auto& sample : samples) {
      const auto ids = tokenizer->encode(sample);
      CHECK(tokenizer->decode(ids) == sample);
      CHECK(tokenizer->decode_bytes(ids) == sample);
      const size_t before = all.size();
      tokenizer->encode(sample, all);
      CHECK(std::vector<int32_t>(all.begin() + static_cast<ptrdiff_t>(before), all.end()) == ids);
      text += sample;
    }
    CHECK(tokenizer->decode(all) == text);
  }
}

TEST_CASE("tokenizer: names, sizes and special tokens") {
  const auto gpt2 = Tokenizer::load(fixtures::path("gpt2.json"));
  CHECK(gpt2->vocab_size() == 700);
  CHECK(gpt2->eod() == 0);
  CHECK(gpt2->token_of(0) == "<|endoftext|>");
  CHECK(gpt2->is_special(0));
  CHECK(!gpt2->is_special(1));
  CHECK(gpt2->id_of("!") == 1);
  CHECK(gpt2->bytes_of(*gpt2->id_of("Ġthe")) == " the");
  CHECK(!gpt2->id_of("no such token"));
  CHECK(gpt2->token_of(700).empty());
  CHECK(gpt2->token_of(-1).empty());
  const auto ids = gpt2->encode("a<|endoftext|>b");
  CHECK(gpt2->decode(ids) == "a<|endoftext|>b");
  CHECK(gpt2->decode(ids, true) == "ab");
  CHECK(gpt2->decode(std::vector<int32_t>{-1, 700, 1 << 30}) == "");
  const auto plain = gpt2->encode("a<|endoftext|>b", {.specials_as_text = true});
  CHECK(std::count(plain.begin(), plain.end(), 0) == 0);
  CHECK(gpt2->decode(plain) == "a<|endoftext|>b");

  const auto llama = Tokenizer::load(fixtures::path("llama3_ignore_merges.json"));
  CHECK(llama->bos() == llama->id_of("<|begin_of_text|>"));
  CHECK(!llama->eod());
}

TEST_CASE("tokenizer: bytes that are not UTF-8 survive") {
  for (const std::string variant :
       {"gpt2", "llama3_ignore_merges", "qwen2_nfc", "smollm_digits", "split_sequence"}) {
    CAPTURE(variant);
    const auto tokenizer = Tokenizer::load(fixtures::path(variant + ".json"));
    PhiloxSequence random(philox_key(7, purpose::test, 1));
    for (int round = 0; round < 200; ++round) {
      std::string text;
      const uint64_t length = random.below(80);
      for (uint64_t i = 0; i < length; ++i)
        text += static_cast<char>(random.below(3) ? random.below(256) : ' ' + random.below(95));
      const auto ids = tokenizer->encode(text);
      if (variant != "qwen2_nfc" ||
          std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0xCC; }))
        CHECK(tokenizer->decode_bytes(ids) == text);
    }
  }
  const auto tokenizer = Tokenizer::load(fixtures::path("gpt2.json"));
  CHECK(tokenizer->decode(tokenizer->encode("a\xFF\xE2\x82z\xF0\x9F\x98")) ==
        "a\xEF\xBF\xBD\xEF\xBF\xBDz\xEF\xBF\xBD");
  // The table of the Unicode Standard, 3.9: one U+FFFD for each maximal part.
  CHECK(byte_tokenizer()->decode(byte_tokenizer()->encode("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41")) ==
        "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"
        "A");
  CHECK(byte_tokenizer()->decode(byte_tokenizer()->encode("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41")) ==
        "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"
        "A");
}

TEST_CASE("tokenizer: the incremental decoder gives what decode gives, character by character") {
  const auto tokenizer = Tokenizer::load(fixtures::path("gpt2.json"));
  for (const auto& sample : fixtures::samples()) {
    IncrementalDecoder decoder(tokenizer);
    std::string text;
    for (const int32_t id : tokenizer->encode(sample)) {
      const std::string part = decoder.push(id);
      CHECK(!first_invalid_utf8(part));
      text += part;
    }
    text += decoder.finish();
    CHECK(text == sample);
  }
  IncrementalDecoder decoder(byte_tokenizer());
  CHECK(decoder.push(0xE2) == "");
  CHECK(decoder.push(0x82) == "");
  CHECK(decoder.push(0xAC) == "€");
  CHECK(decoder.push(0xF0) == "");
  CHECK(decoder.push('a') ==
        "\xEF\xBF\xBD"
        "a");
  CHECK(decoder.push(0xE2) == "");
  CHECK(decoder.finish() == "\xEF\xBF\xBD");
  CHECK(decoder.finish() == "");
}

TEST_CASE("tokenizer: the byte tokenizer") {
  const auto bytes = byte_tokenizer();
  CHECK(bytes->vocab_size() == 257);
  CHECK(bytes->eod() == 256);
  CHECK(bytes->encode(std::string_view("A\0\xFF z", 5)) == std::vector<int32_t>{'A', 0, 255, ' ', 'z'});
  CHECK(bytes->encode("x<|endoftext|>") == std::vector<int32_t>{'x', 256});
  std::string text;
  for (int i = 0; i < 100'000; ++i)
    text += static_cast<char>(static_cast<unsigned>(i) * static_cast<unsigned>(i) >> 3);
  CHECK(bytes->decode_bytes(bytes->encode(text)) == text);
  CHECK(Tokenizer::load("bytes") == bytes);
}

TEST_CASE("tokenizer: many threads share one tokenizer") {
  const auto tokenizer = Tokenizer::load(fixtures::path("qwen2_nfc.json"));
  const auto samples = fixtures::samples();
  const auto expected = fixtures::expected_ids("qwen2_nfc");
  std::atomic<int> wrong{0};
  ThreadPool pool(4);
  pool.parallel_for(static_cast<int64_t>(samples.size()) * 8, [&](int64_t tile, int) {
    const auto i = static_cast<size_t>(tile) % samples.size();
    if (tokenizer->encode(samples[i]) != expected[i]) ++wrong;
  });
  CHECK(wrong == 0);
}

// Merges by definition: repeatedly merges the leftmost pair of the lowest rank.
static std::vector<int32_t> merge_by_definition(const std::vector<std::array<int32_t, 3>>& merges,
                                                std::vector<int32_t> ids) {
  for (;;) {
    size_t best = merges.size(), place = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i)
      for (size_t r = 0; r < best; ++r)
        if (merges[r][0] == ids[i] && merges[r][1] == ids[i + 1]) best = r, place = i;
    if (best == merges.size()) return ids;
    ids[place] = merges[best][2];
    ids.erase(ids.begin() + static_cast<ptrdiff_t>(place) + 1);
  }
}

TEST_CASE("bpe: merging short, long and remembered pieces follows the definition") {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    PhiloxSequence random(philox_key(seed, purpose::test, 2));
    // Letters a-d; tokens are strings, merges join two known tokens.
    std::vector<std::string> tokens = {"a", "b", "c", "d"};
    std::vector<std::array<int32_t, 3>> merges;
    while (merges.size() < 40) {
      const auto left = static_cast<int32_t>(random.below(tokens.size())),
                 right = static_cast<int32_t>(random.below(tokens.size()));
      const std::string joined = tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)];
      if (joined.size() > 12) continue;
      bool twice = false;
      for (const auto& merge : merges) twice = twice || (merge[0] == left && merge[1] == right);
      if (twice) continue;
      auto found = std::find(tokens.begin(), tokens.end(), joined);
      if (found == tokens.end()) found = tokens.insert(tokens.end(), joined);
      merges.push_back({left, right, static_cast<int32_t>(found - tokens.begin())});
    }
    Vocabulary vocabulary(static_cast<int64_t>(tokens.size()));
    for (size_t i = 0; i < tokens.size(); ++i)
      REQUIRE(vocabulary.add(tokens[i], static_cast<int32_t>(i)) == Vocabulary::Added::yes);
    BpeModel model(vocabulary, 40);
    model.byte_ids.fill(-1);
    for (int i = 0; i < 4; ++i) model.byte_ids[static_cast<size_t>('a' + i)] = i;
    for (size_t r = 0; r < merges.size(); ++r)
      model.add_merge(merges[r][0], merges[r][1], static_cast<uint32_t>(r), merges[r][2]);
    BpeModel::Scratch scratch;
    for (int round = 0; round < 60; ++round) {
      std::string piece;
      const uint64_t length = 1 + random.below(round % 3 == 0 ? 300 : round % 3 == 1 ? 40 : 8);
      std::vector<int32_t> ids;
      for (uint64_t i = 0; i < length; ++i) {
        ids.push_back(static_cast<int32_t>(random.below(1 + random.below(4))));
        piece += static_cast<char>('a' + ids.back());
      }
      const auto expected = merge_by_definition(merges, ids);
      const std::string_view view = piece;
      for (int again = 0; again < 2; ++again) {
        std::vector<int32_t> got = {77};
        model.encode({{&view, 1}, piece.data() + piece.size()}, scratch, got);
        got.erase(got.begin());
        CHECK(got == expected);
      }
    }
  }
}
