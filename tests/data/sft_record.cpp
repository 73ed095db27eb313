#include "data/sft_record.hpp"

#include <doctest/doctest.h>

#include "base/error.hpp"
#include "dataset_helpers.hpp"

using namespace capstan;
using namespace capstan::data;
using namespace capstan::data::testing;

namespace {

SftRecord parsed(const std::string& json, SftFormat format = SftFormat::automatic) {
  SftRecordParser parser;
  std::string padded = json + std::string(64, '\0');
  return parser.parse(std::string_view(padded).substr(0, json.size()), format);
}

// "system: S | user: U"
std::string dialogue_text(const SftRecord& record) {
  std::string out;
  const auto& dialogue = std::get<SftDialogue>(record.what);
  for (size_t i = 0; i < dialogue.conversation.messages.size(); ++i) {
    const auto& message = *dialogue.conversation.messages[i].map();
    out += (i > 0 ? " | " : "") + *message.find("role")->text() + ": " +
           (message.find("content") && message.find("content")->text() ? *message.find("content")->text()
                                                                       : "-") +
           (dialogue.in_loss[i] ? "" : " (not learned)");
  }
  return out;
}

std::string error_for(const std::string& json, SftFormat format = SftFormat::automatic) {
  try {
    parsed(json, format);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::format);
    return error.message() + (error.help().empty() ? "" : " / " + error.help());
  }
  return "no error";
}

}  // namespace

TEST_CASE("samples of every form are recognized by their keys") {
  const auto messages =
      parsed(R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"},
      {"role": "assistant", "content": "A", "weight": 0}, {"role": "user", "content": [{"type": "text", "text": "x"},
      {"type": "text", "text": "y"}]}, {"role": "assistant", "content": "B", "train": true}]})");
  CHECK(messages.format == SftFormat::messages);
  CHECK(dialogue_text(messages) ==
        "system: S | user: U | assistant: A (not learned) | user: xy | assistant: B");

  const auto sharegpt = parsed(
      R"({"system": "S", "conversations": [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"},
      {"from": "observation", "value": "O"}, {"from": "gpt", "value": "B", "weight": 0}]})");
  CHECK(sharegpt.format == SftFormat::sharegpt);
  CHECK(dialogue_text(sharegpt) ==
        "system: S | user: U | assistant: A | tool: O | assistant: B (not learned)");

  const auto alpaca = parsed(
      R"({"instruction": "Add", "input": "1 2", "output": "3", "history": [["q", "a"]], "system": "S"})");
  CHECK(alpaca.format == SftFormat::alpaca);
  CHECK(dialogue_text(alpaca) == "system: S | user: q | assistant: a | user: Add\n\n1 2 | assistant: 3");
  CHECK(dialogue_text(parsed(R"({"instruction": "Go", "input": "", "output": "gone"})")) ==
        "user: Go | assistant: gone");

  const auto texts = parsed(R"({"prompt": "P", "completion": " C"})");
  CHECK(texts.format == SftFormat::prompt_completion);
  CHECK(std::get<SftText>(texts.what).prompt == "P");
  CHECK(std::get<SftText>(texts.what).completion == " C");
  const auto lists =
      parsed(R"({"prompt": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"},
      {"role": "user", "content": "V"}], "completion": [{"role": "assistant", "content": "B"}]})");
  CHECK(dialogue_text(lists) ==
        "user: U (not learned) | assistant: A (not learned) | user: V (not learned) | assistant: B");

  CHECK(std::get<SftText>(parsed(R"({"text": "T"})").what).completion == "T");
  CHECK(std::get<SftText>(parsed(R"({"content": "T"})").what).completion == "T");
  // A requested format has precedence over the keys.
  CHECK(std::get<SftText>(parsed(R"({"messages": [], "text": "T"})", SftFormat::text).what).completion ==
        "T");
}

TEST_CASE("tools, calls and thoughts reach the template") {
  const auto record =
      parsed(R"({"tools": "[{\"name\": \"f\"}]", "messages": [{"role": "user", "content": "U"},
      {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1, "a": 2}}}]},
      {"role": "assistant", "content": "A", "thinking": "hm"}]})");
  const auto& dialogue = std::get<SftDialogue>(record.what);
  REQUIRE(dialogue.conversation.tools.list());
  const auto render = [&](const char* text) {
    return text::chat::ChatTemplate::parse("t", text)->render(dialogue.conversation, {}).text;
  };
  CHECK(render("{{ tools[0].name }}") == "f");
  CHECK(render("{{ messages[1].tool_calls[0].function.arguments | tojson }}") == R"({"b": 1, "a": 2})");
  CHECK(render("{{ messages[2].reasoning_content }}{{ messages[2].thinking }}") == "hmhm");
  const SftRecord effort = parsed(R"({"messages": [{"role": "user", "content": "Q"}],
      "chat_template_kwargs": {"reasoning_effort": "high", "messages": 3}})");
  CHECK(text::chat::ChatTemplate::parse("t", "{{ reasoning_effort }} {{ messages[0].content }}")
            ->render(std::get<SftDialogue>(effort.what).conversation, {})
            .text == "high Q");
  // null is no reasoning, and `content` stays where a message has it.
  const SftRecord nulls = parsed(R"({"messages": [{"role": "user", "content": "Q", "thinking": null},
      {"role": "assistant", "content": null, "reasoning": null, "tool_calls": [{"name": "f"}]}]})");
  CHECK(text::chat::ChatTemplate::parse(
            "t", "{% for m in messages %}{{ m.keys() | list }}{{ m.content }}{% endfor %}")
            ->render(std::get<SftDialogue>(nulls.what).conversation, {})
            .text == "['role', 'content']Q['role', 'content', 'tool_calls']None");
}

TEST_CASE("a wrong sample is reported with what would be right") {
  CHECK(error_for("[]").starts_with("expected an object, not a list / one sample on each line"));
  CHECK(error_for("{\"a\": 1,").find("not JSON") != std::string::npos);
  CHECK(error_for(R"({"a": 1, "b": 2})") ==
        "a sample of no known form: its keys are \"a\", \"b\" / messages, conversations, instruction with "
        "output, prompt with "
        "completion, or text");
  CHECK(error_for(R"({"messages": "hello"})")
            .starts_with("`messages` is a string, not a list / as in {\"messages\""));
  CHECK(error_for(R"({"messages": []})") == "`messages` is empty");
  CHECK(error_for(R"({"messages": [1]})").starts_with("message 1 is a number, not an object"));
  CHECK(error_for(R"({"messages": [{"role": "user", "content": "a"}, {"content": "b"}]})") ==
        "message 2 has no `role`");
  CHECK(error_for(R"({"messages": [{"role": "user"}]})") == "message 1 has no `content`");
  CHECK(error_for(R"({"messages": [{"role": "user", "content": 5}]})") ==
        "`content` of message 1 is a number, not a string");
  CHECK(error_for(R"({"messages": [{"role": "user", "content": [{"type": "image"}]}]})")
            .find("a part of type `image`") != std::string::npos);
  CHECK(error_for(R"({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]})")
            .find("neither 0 nor 1") != std::string::npos);
  CHECK(
      error_for(R"({"conversations": [{"from": "alien", "value": "x"}]})").find("known: human, user, gpt") !=
      std::string::npos);
  CHECK(error_for(R"({"instruction": "x"})") == "the sample has no `output`");
  CHECK(error_for(R"({"prompt": "x", "completion": [1]})").find("two strings, or two lists") !=
        std::string::npos);
  CHECK(error_for(R"({"text": 1})") == "`text` of the sample is a number, not a string");
  CHECK(error_for(R"({"text": "a"})", SftFormat::messages).starts_with("`messages` is missing, not a list"));
  CHECK(error_for(R"({"tools": 3, "messages": [{"role": "user", "content": "a"}]})")
            .find("`tools` is a number") != std::string::npos);
  CHECK(error_for(R"({"chat_template_kwargs": ["high"], "messages": [{"role": "user", "content": "a"}]})") ==
        "`chat_template_kwargs` is a list, not an object / as in {\"reasoning_effort\": \"high\"}");
  // Half of a surrogate pair is no valid text, and the depth of nesting is limited.
  CHECK(error_for(R"({"text": "\ud800"})").find("not JSON") != std::string::npos);
  CHECK(error_for("{\"text\": " + std::string(500, '[') + std::string(500, ']') + "}") != "no error");
  CHECK(error_for("{\"text\": " + std::string(100000, '[')) != "no error");
}
