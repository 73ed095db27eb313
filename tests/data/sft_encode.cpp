// Fine-tuning samples as tokens against apply_chat_template of Transformers
// (tests/golden/make_sft_fixtures.py).
#include "data/sft_encode.hpp"

#include <doctest/doctest.h>

#include "base/error.hpp"
#include "data/chat_prompt.hpp"
#include "support/paths.hpp"
#include "tests/text/chat_helpers.hpp"
#include "tests/text/tokenizer_fixtures.hpp"

using namespace capstan;
using namespace capstan::data;
using capstan::testing::chat_value;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

namespace {

const fs::path kFixtures = fs::path(capstan::test::kSourceDirectory) / "tests/text/chat";

SftRecord record_of(const ordered_json& conversation) {
  SftDialogue dialogue;
  // Transformers passes reasoning under each of its names.
  for (ordered_json message : conversation.at("messages")) {
    if (message.contains("reasoning_content")) message["thinking"] = message["reasoning_content"];
    dialogue.conversation.messages.push_back(chat_value(message));
    dialogue.in_loss.push_back(true);
  }
  if (conversation.contains("tools")) dialogue.conversation.tools = chat_value(conversation.at("tools"));
  if (conversation.contains("chat_template_kwargs"))
    dialogue.conversation.variables = *chat_value(conversation.at("chat_template_kwargs")).map();
  return {SftFormat::messages, dialogue};
}

std::shared_ptr<const text::Tokenizer> family(const std::string& name) {
  return text::Tokenizer::load(tokenizer_fixtures::path("families/" + name + ".json"));
}

// The texts of consecutive tokens that count in the loss.
std::vector<std::string> learned_texts(const text::Tokenizer& tokenizer, const EncodedSample& sample) {
  std::vector<std::string> texts;
  std::vector<int32_t> run;
  for (size_t i = 0; i <= sample.ids.size(); ++i) {
    if (i < sample.ids.size() && sample.loss_mask[i]) {
      run.push_back(sample.ids[i]);
    } else if (!run.empty()) {
      texts.push_back(tokenizer.decode(run));
      run.clear();
    }
  }
  return texts;
}

}  // namespace

TEST_CASE(
    "conversations are the ids that Transformers makes of them, whatever the tokenizer does to a text") {
  const auto conversations = capstan::ordered_json_of(read_file(kFixtures / "conversations.json"));
  const auto pairs = capstan::ordered_json_of(read_file(kFixtures / "encoded.json"));
  for (const auto& pair : pairs) {
    const auto text = [&](const char* key) { return pair.at(key).get<std::string>(); };
    CAPTURE(text("tokenizer"));
    CAPTURE(text("template"));
    const auto tokenizer = family(text("tokenizer"));
    const bool marked = text("template") == "generation";
    const SftEncoder encoder(
        *tokenizer,
        text::chat::ChatTemplate::load((kFixtures / "templates" / (text("template") + ".jinja")).string()),
        marked ? SftLoss::assistant : SftLoss::all, tokenizer->id_of(text("eos")));
    for (size_t i = 0; i < conversations.size(); ++i) {
      CAPTURE(i);
      const auto& expected = pair.at("samples")[i];
      const auto encode = [&] { return encoder.encode(record_of(conversations[i])); };
      if (expected.is_null()) {
        CHECK_THROWS_AS(encode(), Error);
        continue;
      }
      const EncodedSample sample = encode();
      CHECK(sample.ids == expected.at("ids").get<std::vector<int32_t>>());
      if (!marked) continue;
      std::vector<bool> learned;
      for (const auto& one : expected.at("learned")) learned.push_back(one.get<int>() != 0);
      CHECK(sample.loss_mask == learned);
    }
  }
}

TEST_CASE("loss tokens are found in text that a tokenizer changes") {
  const auto conversations = capstan::ordered_json_of(read_file(kFixtures / "conversations.json"));
  const auto learned = [&](const char* name, const char* chat_template, size_t conversation,
                           SftLoss loss = SftLoss::assistant) {
    const auto tokenizer = family(name);
    const SftEncoder encoder(
        *tokenizer, text::chat::ChatTemplate::load((kFixtures / "templates" / chat_template).string()), loss,
        tokenizer->id_of("</s>"));
    return learned_texts(*tokenizer, encoder.encode(record_of(conversations[conversation])));
  };
  using Texts = std::vector<std::string>;
  // The template of Llama 2 puts a blank before the end.
  CHECK(learned("llama2", "llama2.jinja", 0) == Texts{"Hi there. </s>"});
  CHECK(learned("llama2", "llama2.jinja", 1) == Texts{"4 </s>", "6 </s>"});
  CHECK(learned("llama2", "llama2.jinja", 1, SftLoss::last_turn) == Texts{"6 </s>"});
  CHECK(learned("mistral", "mistral.jinja", 0) == Texts{"Hi there.</s>"});
  CHECK(learned("gemma", "gemma2.jinja", 0) == Texts{"Hi there.<end_of_turn>"});
  // gpt-oss: the last turn with its reasoning and <|return|>, earlier ones with <|end|>.
  const std::string last =
      "<|channel|>analysis<|message|>second thought<|end|><|start|>assistant<|channel|>final<|message|>Yes."
      "<|return|>";
  CHECK(learned("gpt_oss", "harmony.jinja", 1) ==
        Texts{"<|channel|>final<|message|>4<|end|>", "<|channel|>final<|message|>6<|return|>"});
  CHECK(learned("gpt_oss", "harmony.jinja", 13) ==
        Texts{"<|channel|>final<|message|><think>\nhm\n</think>\n\nDone.<|end|>", last});
  CHECK(learned("gpt_oss", "harmony.jinja", 13, SftLoss::last_turn) == Texts{last});
  CHECK(
      learned("gpt_oss", "harmony.jinja", 11) ==
      Texts{" to=functions.get_weather<|channel|>commentary json<|message|>{\"place\": \"Zürich\", \"days\": "
            "2}<|call|>",
            "<|channel|>final<|message|>Sunny.<|return|>"});
  // Turns are found with the variables of the conversation, too.
  CHECK(learned("gpt_oss", "harmony.jinja", 15).back() ==
        "<|channel|>analysis<|message|>A farewell.<|end|><|start|>assistant<|channel|>final<|message|>With "
        "pleasure<|return|>");

  // A prompt and its completion are one text: ids of both with the end after them.
  const auto tokenizer = family("llama2");
  const SftEncoder encoder(*tokenizer, nullptr, SftLoss::assistant, tokenizer->id_of("</s>"));
  const EncodedSample sample =
      encoder.encode({SftFormat::prompt_completion, SftText{"What is this?", " A cat."}});
  std::vector<int32_t> both = tokenizer->encode("What is this? A cat.");
  both.push_back(2);
  CHECK(sample.ids == both);
  CHECK(learned_texts(*tokenizer, sample) == Texts{"A cat.</s>"});
}

TEST_CASE("a prompt of gpt-oss ends where the model names its channel, and its answer with <|return|>") {
  const auto tokenizer = family("gpt_oss");
  for (const std::string& name : {(kFixtures / "templates/harmony.jinja").string(), std::string("harmony")}) {
    CAPTURE(name);
    const auto chat_template = text::chat::ChatTemplate::load(name);
    const ChatPrompt prompt = chat_prompt(*tokenizer, *chat_template, {}, "Be kind.", "Hello");
    CHECK(tokenizer->decode(prompt.ids).ends_with("<|start|>user<|message|>Hello<|end|><|start|>assistant"));
    CHECK(prompt.end_token == tokenizer->id_of("<|return|>"));
    CHECK(prompt.learns_end);
    CHECK(turn_end_problem(*tokenizer, *chat_template, {}).empty());
  }
}
