// Compares every family with Hugging Face tokenizers and SentencePiece on every sample: ids, special tokens,
// offsets, text.
#include <doctest/doctest.h>

#include <ctime>

#include "base/philox.hpp"
#include "base/utf8.hpp"
#include "support/sanitized.hpp"
#include "text/tokenizer/tokenizer.hpp"
#include "tokenizer_fixtures.hpp"

using namespace capstan;
using namespace capstan::text;
namespace fixtures = tokenizer_fixtures;

namespace {

const char* const kFamilies[] = {"llama2",           "mistral",      "gemma",
                                 "some_bytes",       "subwords",     "t5",
                                 "unigram_bytes",    "bert_uncased", "bert_cased",
                                 "roberta",          "qwen2",        "llama3",
                                 "byte_level_lower", "llama2_added", "some_bytes_added",
                                 "t5_added",         "bert_added",   "subwords_added",
                                 "byte_level_added", "qwen2_added",  "gpt_oss"};
const char* const kModels[] = {"spm_bpe", "spm_bpe_unknown", "spm_unigram", "spm_unigram_bytes"};

std::vector<std::string> all_samples() {
  auto result = fixtures::samples();
  for (const auto& line : fixtures::lines("families/odd.txt"))
    result.push_back(capstan::json_of("\"" + line + "\"").get<std::string>());
  return result;
}

struct Expected {
  std::vector<int32_t> ids, around;
  std::string offsets, text;
};

std::vector<int32_t> numbers(std::string_view text) {
  std::vector<int32_t> result;
  for (const auto part : split(text, ' '))
    if (!part.empty()) result.push_back(static_cast<int32_t>(parse_int(part).value()));
  return result;
}

// The lines of make_tokenizer_families.py.
std::vector<Expected> expected_of(const std::string& name, const std::vector<std::string>& samples) {
  std::vector<Expected> result;
  const auto lines = fixtures::lines("families/" + name + ".expected");
  REQUIRE(lines.size() == samples.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto parts = split(lines[i], '|');
    REQUIRE(parts.size() >= 4);
    Expected& expected = result.emplace_back();
    expected.ids = numbers(parts[0]);
    for (const int32_t id : numbers(parts[1]))
      if (id < 0)
        expected.around.insert(expected.around.end(), expected.ids.begin(), expected.ids.end());
      else
        expected.around.push_back(id);
    expected.offsets = parts[2];
    const std::string_view text =
        std::string_view(lines[i]).substr(static_cast<size_t>(parts[3].data() - lines[i].data()));
    expected.text = text == "=" ? samples[i] : capstan::json_of(text).get<std::string>();
  }
  return result;
}

std::string written(const std::vector<OffsetRange>& offsets) {
  std::string result;
  size_t end = 0;
  for (const OffsetRange& place : offsets) {
    if (!result.empty()) result += ' ';
    if (place.begin != end)
      result += std::to_string(static_cast<int64_t>(place.begin) - static_cast<int64_t>(end)) + ":";
    result += std::to_string(place.end - place.begin);
    end = place.end;
  }
  return result;
}

std::string streamed(const std::shared_ptr<const Tokenizer>& tokenizer, const std::vector<int32_t>& ids) {
  IncrementalDecoder decoder(tokenizer);
  std::string text;
  for (const int32_t id : ids) {
    const std::string part = decoder.push(id);
    CHECK(!first_invalid_utf8(part));
    text += part;
  }
  return text + decoder.finish();
}

std::shared_ptr<const Tokenizer> family(const std::string& name) {
  return Tokenizer::load(fixtures::path("families/" + name + ".json"));
}
std::shared_ptr<const Tokenizer> model(const std::string& name) {
  return Tokenizer::load(fixtures::path("families/" + name + ".model"));
}

}  // namespace

TEST_CASE("families: ids, special tokens, offsets and text equal Hugging Face's on every sample") {
  const auto samples = all_samples();
  EncodeOptions around;
  around.add_special = true;
  for (const std::string name : kFamilies) {
    CAPTURE(name);
    const auto tokenizer = family(name);
    const auto expected = expected_of(name, samples);
    for (size_t i = 0; i < samples.size(); ++i) {
      CAPTURE(samples[i]);
      CHECK(tokenizer->encode(samples[i]) == expected[i].ids);
      CHECK(tokenizer->encode(samples[i]) == expected[i].ids);  // from memory
      CHECK(tokenizer->encode(samples[i], around) == expected[i].around);
      const Encoding encoding = tokenizer->encode_with_offsets(samples[i]);
      CHECK(encoding.ids == expected[i].ids);
      CHECK(written(encoding.offsets) == expected[i].offsets);
      const Encoding complete = tokenizer->encode_with_offsets(samples[i], around);
      CHECK(complete.ids == expected[i].around);
      CHECK(complete.offsets.size() == complete.ids.size());
      CHECK(tokenizer->decode(expected[i].ids) == expected[i].text);
      CHECK(streamed(tokenizer, expected[i].ids) == tokenizer->decode(expected[i].ids));
    }
  }
}

TEST_CASE("families: SentencePiece's models give SentencePiece's ids and text") {
  const auto samples = all_samples();
  for (const std::string name : kModels) {
    CAPTURE(name);
    const auto tokenizer = model(name);
    const auto expected = expected_of(name, samples);
    for (size_t i = 0; i < samples.size(); ++i) {
      CAPTURE(samples[i]);
      CHECK(tokenizer->encode(samples[i]) == expected[i].ids);
      CHECK(tokenizer->encode_with_offsets(samples[i]).ids == expected[i].ids);
      CHECK(tokenizer->decode(expected[i].ids) == expected[i].text);
      CHECK(streamed(tokenizer, expected[i].ids) == expected[i].text);
    }
  }
  const auto bpe = model("spm_bpe");
  CHECK(bpe->bos() == bpe->id_of("<s>"));
  CHECK(bpe->eos() == bpe->id_of("</s>"));
  CHECK(bpe->unk() == bpe->id_of("<unk>"));
  CHECK(!bpe->pad());
  CHECK(model("spm_unigram_bytes")->pad() == 3);
  CHECK(bpe->files().size() == 1);
  CHECK(bpe->files()[0].name == "tokenizer.model");
}

TEST_CASE("families: bytes that are not UTF-8 survive where there are tokens for bytes, and crash nothing") {
  PhiloxSequence random(philox_key(11, purpose::test, 1));
  std::vector<std::string> texts;
  for (int round = 0; round < 60; ++round) {
    std::string& text = texts.emplace_back();
    for (uint64_t i = random.below(60); i > 0; --i)
      text += static_cast<char>(random.below(3) ? random.below(256) : ' ' + random.below(95));
  }
  const auto check = [&](const std::shared_ptr<const Tokenizer>& tokenizer) {
    for (const auto& text : texts) {
      const auto ids = tokenizer->encode(text);
      const Encoding encoding = tokenizer->encode_with_offsets(text);
      CHECK(encoding.ids == ids);
      for (const OffsetRange& place : encoding.offsets)
        CHECK((place.begin <= place.end && place.end <= text.size()));
      CHECK(!first_invalid_utf8(tokenizer->decode(ids)));
      CHECK(streamed(tokenizer, ids) == tokenizer->decode(ids));
    }
  };
  for (const std::string name : kFamilies) {
    CAPTURE(name);
    check(family(name));
  }
  for (const std::string name : kModels) {
    CAPTURE(name);
    check(model(name));
  }
  for (const std::string name : {"llama2", "gemma"}) {
    const auto tokenizer = family(name);
    for (const auto& text : texts) CHECK(tokenizer->decode_bytes(tokenizer->encode(text)) == text);
  }
}

TEST_CASE("families: no text takes quadratic time") {
  // Under a sanitizer, times mean nothing.
  constexpr int kRepeats = test::kSanitized ? 3'000 : 30'000;
  std::string runs, words;
  for (int i = 0; i < kRepeats; ++i) {
    runs += i % 2 ? "a" : "ab";
    words += "word ";
  }
  const std::string marks = [] {
    std::string text = "a";
    for (int i = 0; i < kRepeats; ++i) text += i % 2 ? "\xCC\xA3" : "\xCC\x81";
    return text;
  }();
  const auto check = [&](const std::shared_ptr<const Tokenizer>& tokenizer) {
    // Measures processor time, so that other programs on the machine do not matter.
    const std::clock_t start = std::clock();
    for (const std::string& text :
         {runs, words, std::string(2 * kRepeats, ' '), std::string(2 * kRepeats, 'a'), marks}) {
      const auto ids = tokenizer->encode(text);
      CHECK(tokenizer->encode_with_offsets(text).ids == ids);
      tokenizer->decode(ids);
    }
    CHECK(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC < 30);
  };
  for (const std::string name : kFamilies) {
    CAPTURE(name);
    check(family(name));
  }
  for (const std::string name : kModels) {
    CAPTURE(name);
    check(model(name));
  }
}

TEST_CASE("families: names of special tokens") {
  const auto llama = family("llama2");
  CHECK(llama->bos() == 1);
  CHECK(llama->unk() == 0);
  CHECK(!llama->eos());  // a bare tokenizer.json does not tell
  const auto bert = family("bert_uncased");
  CHECK(bert->unk() == 1);
  CHECK(bert->bytes_of(bert->id_of("h").value()) == " h");
  CHECK(bert->bytes_of(bert->id_of("##h").value()) == "h");
  CHECK(llama->bytes_of(*llama->id_of("<0x0A>")) == "\n");
  CHECK(llama->bytes_of(*llama->id_of("▁the")) == " the");
}
