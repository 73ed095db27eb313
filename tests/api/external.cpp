// Models of other programs through the public header: logits as their own programs compute them, adapters,
// generation.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "capstan/model.hpp"
#include "support/fixture.hpp"
#include "support/paths.hpp"

using namespace capstan;

namespace {

const std::string kHere = std::string(test::kSourceDirectory) + "/tests/formats/";
const LoadOptions kExact{.overrides = {"mixed_precision=fp32", "train.threads=1"}};

// Largest difference from the logits of the fixture, as a fraction of the largest of them. Its tokens are
// [rows, length + 1]; the last of each row has no logits, and only the first rows have any.
double apart(Model& model, const test::Fixture& fixture) {
  const auto tokens = fixture.get<int32_t>("tokens");
  const auto length = static_cast<size_t>(fixture.shape("tokens")[1]);
  std::vector<std::vector<int32_t>> rows;
  for (size_t at = 0; rows.size() < static_cast<size_t>(fixture.shape("logits")[0]); at += length)
    rows.emplace_back(tokens.begin() + static_cast<std::ptrdiff_t>(at),
                      tokens.begin() + static_cast<std::ptrdiff_t>(at + length - 1));
  std::vector<float> logits;
  for (const auto& row : model.logits_batch(rows)) logits.insert(logits.end(), row.begin(), row.end());
  const auto truth = fixture.get<float>("logits");
  REQUIRE(logits.size() == truth.size());
  double difference = 0, largest = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    difference =
        std::max(difference, std::abs(static_cast<double>(logits[i]) - static_cast<double>(truth[i])));
    largest = std::max(largest, std::abs(static_cast<double>(truth[i])));
  }
  return difference / largest;
}

}  // namespace

TEST_CASE("a Hugging Face directory, with and without adapters") {
  Model base = Model::load("hf:" + kHere + "families/llama", kExact);
  CHECK(apart(base, test::Fixture(kHere + "families/llama/expected.safetensors")) < 1e-5);

  LoadOptions with_adapter = kExact;
  with_adapter.adapter = kHere + "adapters/lora";
  Model adapted = Model::load("hf:" + kHere + "families/llama", with_adapter);
  CHECK(apart(adapted, test::Fixture(kHere + "adapters/lora/expected.safetensors")) < 1e-5);
}

TEST_CASE("text from a Hugging Face directory and a GGUF file") {
  for (const std::string& name :
       {"hf:" + kHere + "families/smollm2", "gguf:" + kHere + "gguf/smollm2.gguf"}) {
    INFO(name);
    Model model = Model::load(name, kExact);
    CHECK(model.vocab_size() == 270);
    CHECK(model.context_length() == 64);
    REQUIRE(model.has_tokenizer());
    const std::vector<int32_t> ids = model.encode("the thin");
    CHECK(model.decode(ids) == "the thin");
    const Generated from_text = model.generate("the thin", {.max_tokens = 6, .temperature = 0});
    CHECK(from_text.ids == model.generate(ids, {.max_tokens = 6, .temperature = 0}).ids);
    CHECK(from_text.prompt_tokens == static_cast<int64_t>(ids.size()));
    const Generated answer = model.generate("the thin", {.max_tokens = 6, .temperature = 0, .chat = true});
    CHECK(answer.prompt_tokens > from_text.prompt_tokens);  // the template adds to it
  }
}
