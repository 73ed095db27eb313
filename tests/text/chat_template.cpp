// Compares chat templates with Transformers (tests/golden/make_chat_fixtures.py), and tests untrusted ones.
#include "text/chat/chat_template.hpp"

#include <doctest/doctest.h>

#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/utf8.hpp"
#include "chat_helpers.hpp"
#include "support/paths.hpp"
#include "text/chat/assistant_turns.hpp"
#include "text/chat/generation_tags.hpp"

using namespace capstan;
using namespace capstan::text::chat;
using nlohmann::ordered_json;
using testing::chat_value;
namespace fs = std::filesystem;

namespace {

const fs::path kFixtures = fs::path(capstan::test::kSourceDirectory) / "tests/text/chat";

ordered_json fixture(const char* name) {
  return capstan::ordered_json_of(read_file(kFixtures / name));
}

RenderOptions fixture_options(bool prompt) {
  RenderOptions options;
  options.add_generation_prompt = prompt;
  options.variables.set("bos_token", "<s>");
  options.variables.set("eos_token", "</s>");
  std::tm day{};
  day.tm_year = 124, day.tm_mon = 6, day.tm_mday = 26, day.tm_wday = 5, day.tm_hour = 12;
  options.now = day;
  return options;
}

// The message as Transformers passes it to the template, with reasoning under each of its names.
Conversation conversation_of(const ordered_json& json) {
  Conversation result;
  for (ordered_json message : json.at("messages")) {
    if (message.contains("reasoning_content")) message["thinking"] = message["reasoning_content"];
    result.messages.push_back(chat_value(message));
  }
  if (json.contains("tools")) result.tools = chat_value(json.at("tools"));
  if (json.contains("chat_template_kwargs"))
    result.variables = *chat_value(json.at("chat_template_kwargs")).map();
  return result;
}

std::string error_of(const std::string& text, const Conversation& conversation = {}, Limits limits = {}) {
  try {
    RenderOptions options;
    options.limits = limits;
    ChatTemplate::parse("t", text)->render(conversation, options);
  } catch (const Error& error) {
    CHECK(error.code() != ErrorCode::internal);
    return error.message();
  }
  return "no error";
}

std::string rendered(const std::string& text, const Conversation& conversation = {}) {
  return ChatTemplate::parse("t", text)->render(conversation, {}).text;
}

Conversation talk(std::initializer_list<std::pair<const char*, const char*>> messages) {
  Conversation result;
  for (const auto& [role, content] : messages) {
    Map message;
    message.set("role", Value(role));
    message.set("content", Value(content));
    result.messages.push_back(*Value::map(std::move(message)));
  }
  return result;
}

std::vector<std::string> turns_of(const ChatTemplate& chat_template, const Conversation& conversation,
                                  bool last_only = false) {
  const RenderOptions options = fixture_options(false);
  const Rendered complete = chat_template.render(conversation, options);
  // The test's tokens: one for `<…>`, and one for every other byte.
  const auto boundary = [&](size_t offset) {
    const size_t open = complete.text.rfind('<', offset - 1);
    if (open == std::string::npos) return offset;
    const size_t close = complete.text.find('>', open);
    return close != std::string::npos && close + 1 > offset ? open : offset;
  };
  std::vector<std::string> result;
  for (const AssistantTurn& turn :
       assistant_turns(chat_template, conversation, options, complete, boundary, last_only))
    result.push_back(complete.text.substr(turn.begin, turn.end - turn.begin));
  return result;
}

std::shared_ptr<const ChatTemplate> family(const std::string& name) {
  return ChatTemplate::load((kFixtures / "templates" / (name + ".jinja")).string());
}

Conversation conversation_from(const char* json) {
  return conversation_of(capstan::ordered_json_of(json));
}

using Texts = std::vector<std::string>;
constexpr const char* kCall =
    R"("tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}])";
const std::string kCalled =
    "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call><|im_end|>";
const std::string kNoThought = "<think>\n\n</think>\n\n";

std::string messages(std::initializer_list<std::string> all) {
  std::string text = R"({"messages": [)";
  for (const std::string& one : all) text += (text.ends_with('[') ? "" : ", ") + one;
  return text + "]}";
}
std::string says(const char* role, const std::string& content, const std::string& more = {}) {
  return R"({"role": ")" + std::string(role) + R"(", "content": )" +
         capstan::dump_json(ordered_json(content)) + (more.empty() ? "" : ", " + more) + "}";
}

}  // namespace

TEST_CASE("chat templates of the families render what Transformers renders") {
  const ordered_json conversations = fixture("conversations.json"), expected = fixture("rendered.json");
  CHECK(expected.size() >= 13);
  for (const auto& [name, results] : expected.items()) {
    const auto chat_template = family(name);
    for (size_t i = 0; i < conversations.size(); ++i)
      for (const bool prompt : {false, true}) {
        CAPTURE(name);
        CAPTURE(i);
        CAPTURE(prompt);
        const ordered_json& wanted = results[i][prompt ? 1 : 0];
        Rendered got;
        bool refused = false;
        try {
          got = chat_template->render(conversation_of(conversations[i]), fixture_options(prompt));
        } catch (const Error& error) {
          refused = true;
          CAPTURE(error.message());
          CHECK(wanted.is_null());
        }
        if (refused || wanted.is_null()) {
          CHECK(refused);
          continue;
        }
        CHECK(got.text == wanted.at("text").get<std::string>());
        if (!wanted.contains("spans")) continue;
        ordered_json spans = ordered_json::array();
        for (const auto& [begin, end] : got.generations)
          spans.push_back({count_code_points(std::string_view(got.text).substr(0, begin)),
                           count_code_points(std::string_view(got.text).substr(0, end))});
        CHECK(spans == wanted.at("spans"));
      }
  }
}

TEST_CASE("every construct of a chat template does what Jinja2 does") {
  const ordered_json fixtures = fixture("snippets.json");
  RenderOptions options = fixture_options(false);
  for (const auto& [name, value] : fixtures.at("variables").items())
    options.variables.set(name, chat_value(value));
  for (const auto& snippet : fixtures.at("snippets")) {
    const auto text = snippet[0].get<std::string>();
    CAPTURE(text);
    std::string got, error;
    try {
      got = ChatTemplate::parse("snippet", text)->render({}, options).text;
    } catch (const Error& caught) {
      error = caught.message();
    }
    CAPTURE(error);
    if (snippet[1].is_null())
      CHECK(!error.empty());
    else
      CHECK(got == snippet[1].get<std::string>());
  }
}

TEST_CASE("errors in a chat template name the location and the text") {
  CHECK(error_of("a\n  {{ x ") == "t:2:3: this tag has no `}}`: `{{ x`");
  CHECK(error_of("a\n  {{ x }") == "t:2:8: `}` closes nothing here: `{{ x }`");
  CHECK(error_of("{% include 'x' %}") ==
        "t:1:4: the statement `{% include %}` is not supported in chat templates here: `{% include 'x' %}`");
  CHECK(error_of("é {{ 1 | urlize }}").starts_with("t:1:8: the filter `urlize` is not supported"));
  CHECK(error_of("{{ 'x' is iterabel }}").find("(near: `iterable`)") != std::string::npos);
  CHECK(error_of("{{ messages.pop() }}").find("the method `pop` is not supported") != std::string::npos);
  CHECK(error_of("{{ f(*x) }}").find("unpacking of arguments") != std::string::npos);
  CHECK(error_of("{{ a.b }}") == "t:1:5: `a` is undefined and has no `b`: `{{ a.b }}`");
  CHECK(error_of("{% for x in y %}").find("is never closed with `{% endfor %}`") != std::string::npos);
  CHECK(error_of("{{ raise_exception('roles') }}").find("the template refuses the conversation: roles") !=
        std::string::npos);
  CHECK(error_of("{% break %}").find("outside of a loop") != std::string::npos);
  // An unsupported construct is no error unless it is reached.
  CHECK(rendered("{% if tools %}{{ tools | urlize }}{% endif %}ok") == "ok");
  // The message shows the part of a long line around the error.
  CHECK(error_of(std::string(300, 'x') + "{{ 1 + 'a' }}" + std::string(300, 'y')).size() < 300);
}

TEST_CASE("the clock exists only where one is given") {
  CHECK(rendered("{{ strftime_now is defined }}") == "False");
  CHECK(ChatTemplate::parse("t", "{{ strftime_now('%d %b %Y') }}")->render({}, fixture_options(false)).text ==
        "26 Jul 2024");
}

TEST_CASE("untrusted templates end within their budget") {
  const std::string range = "range(100000)";
  const std::string bombs[] = {
      "{% for a in " + range + " %}{% for b in " + range + " %}{% for c in " + range +
          " %}{% endfor %}{% endfor %}{% endfor %}",
      "{% set ns = namespace(s='x') %}{% for a in " + range + " %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
      "{% set ns = namespace(s='x') %}{% for a in " + range + " %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
      "{% set ns = namespace(s=['x']) %}{% for a in " + range +
          " %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}",
      "{% set ns = namespace(s=['x']) %}{% for a in " + range + " %}{% set ns.s = [ns.s] %}{% endfor %}",
      "{% set ns = namespace(s=[1]) %}{% for a in range(25) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{% "
      "for a in " +
          range + " %}{{ ns.s == ns.s }}{{ ns.s | tojson(indent=16) | length }}{% endfor %}",
      "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
      "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
      "{{ 'x' * 100000000000 }}",
      "{{ [0] * 100000000000 }}",
      "{{ ('x' * 1000000) | replace('x', 'y' * 1000000) }}",
      "{{ ('x' * 1000000) | join('y' * 1000000) }}",
      "{{ ('\\n' * 1000000) | indent('y' * 1000000) }}",
      "{% for a in " + range + " %}{{ 'x' * 1000000 }}{% endfor %}",
      "{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}",
      "{{ [namespace()] }}",
      "{{ " + std::string(100000, '(') + "1" + std::string(100000, ')') + " }}",
      "{{ 1" + std::string(100000, '~') + "1 }}",
      "{{ " + std::string(50000, '-') + "1 }}",
      "{{ 1" +
          [] {
            std::string s;
            for (int i = 0; i < 50000; ++i) s += " + 1";
            return s;
          }() +
          " }}",
      "{{ x" +
          [] {
            std::string s;
            for (int i = 0; i < 50000; ++i) s += "|e";
            return s;
          }() +
          " }}",
      "{{ ['a'] | map(" +
          [] {
            std::string s;
            for (int i = 0; i < 50000; ++i) s += "'map',";
            return s;
          }() +
          "'upper') | list }}",
      [] {
        std::string s;
        for (int i = 0; i < 20000; ++i) s += "{% if 1 %}";
        return s;
      }(),
      "{{ 9223372036854775807 + 1 }}",
      "{{ (-9223372036854775807 - 1) // -1 }}",
      "{{ 99999999999999999999 }}",
      "{{ 2 ** 64 }}",
      "{{ range(200000) | list }}",
      "{{ 'x' | tojson(indent=1000000) }}",
      std::string(2 << 20, 'x'),
  };
  Limits small;
  small.steps = 300'000, small.bytes = 16 << 20, small.output = 4 << 20;
  for (const std::string& bomb : bombs) {
    CAPTURE(bomb.substr(0, 120));
    CHECK(error_of(bomb, {}, small) != "no error");
  }
  // Templates just below the limits are accepted.
  CHECK(rendered("{% macro m(n) %}{% if n %}.{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}").size() ==
        40);
}

TEST_CASE("known templates load by name and mark what the assistant says") {
  CHECK(known_templates().size() == 9);
  const Conversation conversation =
      talk({{"user", "Q1"}, {"assistant", "A1"}, {"user", "Q2"}, {"assistant", "A2"}});
  for (const KnownTemplate& known : known_templates()) {
    CAPTURE(known.name);
    const auto chat_template = ChatTemplate::load(std::string(known.name));
    const auto turns = turns_of(*chat_template, conversation);
    REQUIRE(turns.size() == 2);
    // The words, before them the channel where the format has channels, and after them the end of the turn.
    const std::string channel = known.name == "harmony" ? "<|channel|>final<|message|>" : "";
    CHECK(turns[0].starts_with(channel + "A1"));
    CHECK(turns[0].size() > channel.size() + 2);
    const std::string last = known.name == "harmony" ? "<|return|>" : turns[0].substr(2);
    CHECK(turns[1] == channel + "A2" + last);
    // The turn begins where the generation prompt ends.
    const std::string complete = chat_template->render(conversation, fixture_options(false)).text,
                      prompt = chat_template->render(talk({{"user", "Q1"}}), fixture_options(true)).text;
    CHECK(complete.starts_with(prompt));
    CHECK(complete.substr(prompt.size()).find(channel + "A1") <= 1);
  }
  CHECK_THROWS_WITH_AS(ChatTemplate::load("lama3"), doctest::Contains("llama3"), Error);
}

TEST_CASE("known templates print what the families' own print") {
  const Conversation conversation =
      talk({{"user", "Q1"}, {"assistant", "A1"}, {"user", "Q2"}, {"assistant", "A2"}});
  for (const auto& [known, own] :
       {std::pair{"llama2", "llama2"}, {"llama3", "llama3"}, {"gemma", "gemma2"}, {"phi3", "phi3"}})
    for (const bool prompt : {false, true}) {
      CAPTURE(known);
      CHECK(ChatTemplate::load(known)->render(conversation, fixture_options(prompt)).text ==
            family(own)->render(conversation, fixture_options(prompt)).text);
    }
}

TEST_CASE("the known template of gpt-oss prints what the family's own prints") {
  // The family's has two line breaks after the instructions, which the one of the tests leaves out.
  const auto own = [](std::string text) {
    const size_t at = text.find("\n\n<|end|>");
    return at == std::string::npos ? text : text.erase(at, 2);
  };
  const auto conversations = {
      messages({says("user", "q"), says("assistant", "a")}),
      messages({says("developer", "Be brief."), says("user", "q"),
                says("assistant", "a1", R"("thinking": "t1")"), says("user", "q2"),
                says("assistant", "a2", R"("thinking": "")")}),
      messages({says("system", "s"), says("user", "q"), says("user", "q2"), says("assistant", "a1"),
                says("assistant", "a2", R"("thinking": "t2")")}),
      R"({"chat_template_kwargs": {"reasoning_effort": "low"}, )" + messages({says("user", "q")}).substr(1)};
  for (const std::string& conversation : conversations)
    for (const bool prompt : {false, true}) {
      CAPTURE(conversation);
      const auto rendered_by = [&](const char* name, const auto& chat_template) {
        CAPTURE(name);
        return own(
            chat_template->render(conversation_from(conversation.c_str()), fixture_options(prompt)).text);
      };
      CHECK(rendered_by("known", ChatTemplate::load("harmony")) == rendered_by("own", family("harmony")));
    }
  CHECK_THROWS_WITH_AS(ChatTemplate::load("harmony")->render(
                           conversation_from(messages({says("tool", "x")}).c_str()), fixture_options(false)),
                       doctest::Contains("not tool"), Error);
  const std::string raw = messages({says("user", "q"), says("assistant", "<|channel|>final<|message|>a")});
  for (const auto& chat_template : {ChatTemplate::load("harmony"), family("harmony")})
    CHECK_THROWS_WITH_AS(chat_template->render(conversation_from(raw.c_str()), fixture_options(false)),
                         doctest::Contains("goes into `thinking`"), Error);
}

TEST_CASE("without generation tags a template renders the same text, and marks nothing") {
  const ordered_json conversations = fixture("conversations.json"), expected = fixture("rendered.json");
  std::vector<std::shared_ptr<const ChatTemplate>> templates = {family("generation")};
  for (const KnownTemplate& known : known_templates())
    templates.push_back(ChatTemplate::load(std::string(known.name)));
  for (const auto& original : templates) {
    CAPTURE(original->name());
    const std::string plain_text = without_generation_tags(original->text());
    CHECK(plain_text != original->text());
    CHECK(plain_text.find(" generation") == std::string::npos);
    CHECK(plain_text.find("endgeneration") == std::string::npos);
    const auto plain = ChatTemplate::parse("plain", plain_text);
    for (const ordered_json& conversation : conversations)
      for (const bool prompt : {false, true}) {
        const auto render = [&](const ChatTemplate& one) {
          try {
            const Rendered got = one.render(conversation_of(conversation), fixture_options(prompt));
            if (&one == plain.get()) CHECK(got.generations.empty());
            return got.text;
          } catch (const Error&) {
            return std::string("refused");
          }
        };
        CHECK(render(*plain) == render(*original));
      }
  }
  // The expectation comes from Transformers' rendering of the tags.
  const auto plain = ChatTemplate::parse("plain", without_generation_tags(family("generation")->text()));
  const auto& wanted = expected.at("generation");
  for (size_t i = 0; i < conversations.size(); ++i)
    if (!wanted[i][0].is_null())
      CHECK(plain->render(conversation_of(conversations[i]), fixture_options(false)).text ==
            wanted[i][0].at("text").get<std::string>());

  const auto same = [](const std::string& text) { CHECK(without_generation_tags(text) == text); };
  same("");
  same("a\r\nb\n");
  same("{% if add_generation_prompt %}x{% endif %}\r\n");
  same("{% raw %}{% generation %}{% endraw %} {{ '{% generation %}' }} {# {% generation %} #}\n");
  same("generation {{ no template\n");
  CHECK(without_generation_tags("a\n  {%- generation -%}\n b{%generation%}{%+ endgeneration +%}\n") ==
        "a\n  {%- if true -%}\n b{%if true%}{%+ endif +%}");
}

TEST_CASE("the assistant's turns are found without marks") {
  const Conversation conversation =
      talk({{"user", "Q1"}, {"assistant", "A1"}, {"user", "A1"}, {"assistant", "  A2  "}});
  const auto turns = [&](const char* name) { return turns_of(*family(name), conversation); };
  CHECK(turns("smollm2") == Texts{"A1<|im_end|>", "  A2  <|im_end|>"});
  CHECK(turns("llama3") == Texts{"A1<|eot_id|>", "A2<|eot_id|>"});
  CHECK(turns("llama2") == Texts{" A1 </s>", " A2 </s>"});
  CHECK(turns("mistral") == Texts{" A1</s>", " A2</s>"});
  CHECK(turns("gemma2") == Texts{"A1<end_of_turn>", "A2<end_of_turn>"});
  CHECK(turns("olmo2") == Texts{"A1</s>", "  A2  </s>"});
  CHECK(turns("zephyr") == Texts{"A1</s>", "  A2  </s>"});
  CHECK(turns("qwen2") == Texts{"A1<|im_end|>", "  A2  <|im_end|>"});
  // Every text ends with a token that differs from the end of a turn.
  CHECK(turns("phi3") == Texts{"A1<|end|>", "  A2  <|end|>"});
  // Only the last turn contains reasoning.
  CHECK(turns("qwen3") == Texts{"A1<|im_end|>", "<think>\n\n</think>\n\n  A2  <|im_end|>"});
  // Qwen 1.5 omits the end of the last turn, so the end of any turn serves for it.
  CHECK(turns("qwen1.5") == Texts{"A1", "  A2  "});
  CHECK(turns_of(*family("smollm2"), conversation, true) == Texts{"  A2  <|im_end|>"});
  CHECK(turns_of(*family("smollm2"), talk({{"user", "Q"}})).empty());
  // The template reorders messages, so no method finds the turns.
  const auto backwards =
      ChatTemplate::parse("t", "{% for m in messages[::-1] %}{{ m.role }}{{ m.content }};{% endfor %}");
  CHECK_THROWS_WITH_AS(turns_of(*backwards, conversation),
                       doctest::Contains("cannot be separated from the rest"), Error);
}

// The texts are those of Transformers' apply_chat_template; the parts that the model writes are marked by
// hand.
TEST_CASE("turns that a template renders otherwise at the end of a conversation are found within it") {
  const auto turns = [&](std::initializer_list<std::string> all) {
    return turns_of(*family("qwen3"), conversation_from(messages(all).c_str()));
  };
  const std::string q = says("user", "q"), more = says("user", "more"), tool = says("tool", "21");

  // Tool calls: with words, without, several, and without content at all.
  CHECK(turns({q, says("assistant", "", kCall), tool, says("assistant", "a2")}) ==
        Texts{kCalled, kNoThought + "a2<|im_end|>"});
  CHECK(turns({q, says("assistant", "wait", kCall), tool, tool, says("assistant", "a2"), more,
               says("assistant", "a3")}) ==
        Texts{"wait\n" + kCalled, "a2<|im_end|>", kNoThought + "a3<|im_end|>"});
  CHECK(
      turns(
          {q,
           R"({"role": "assistant", "content": null, "tool_calls": [{"name": "f", "arguments": "{}"}, {"name": "f",
               "arguments": {"x": 1}}]})",
           tool, says("assistant", "")}) ==
      Texts{"<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n" + kCalled,
            kNoThought + "<|im_end|>"});

  // Earlier turns are rendered without reasoning, those after the last question with it.
  const std::string thought = "<think>\nhm\n</think>\n\n";
  CHECK(turns({q, says("assistant", thought + "a1"), more, says("assistant", thought + "a2")}) ==
        Texts{"a1<|im_end|>", thought + "a2<|im_end|>"});
  CHECK(turns({q, says("assistant", "#0X@ a1 @X0#", R"("reasoning_content": "hm")"), more,
               says("assistant", "a2", R"("reasoning_content": "hm")")}) ==
        Texts{"#0X@ a1 @X0#<|im_end|>", thought + "a2<|im_end|>"});
  CHECK(turns({q, says("assistant", thought + "a1", kCall), tool, says("assistant", thought + "a2")}) ==
        Texts{thought + "a1\n" + kCalled, thought + "a2<|im_end|>"});
  CHECK(turns({q, says("assistant", thought + "a1", kCall), tool, says("assistant", thought + "a2"), more,
               says("assistant", "a3")}) ==
        Texts{"a1\n" + kCalled, "a2<|im_end|>", kNoThought + "a3<|im_end|>"});

  // Several messages in a row, also of the same words.
  CHECK(turns({q, says("assistant", "a1"), says("assistant", "a2")}) ==
        Texts{"a1<|im_end|>", kNoThought + "a2<|im_end|>"});
  CHECK(turns({q, says("assistant", "a"), says("assistant", "a"), says("assistant", ""), more}) ==
        Texts{"a<|im_end|>", "a<|im_end|>", "<|im_end|>"});

  const auto twice = [&](const char* name) {
    return turns_of(*family(name), talk({{"user", "q"}, {"assistant", "a1"}, {"assistant", "a2"}}));
  };
  CHECK(twice("phi3") == Texts{"a1<|end|>", "a2<|end|>"});
  CHECK(twice("olmo2") == Texts{"a1</s>", "a2</s>"});  // one prompt joins the last turn without a line break
  CHECK(twice("llama3.2") == Texts{"a1<|eot_id|>", "a2<|eot_id|>"});
  // Blanks that end a turn stay.
  const auto blank = ChatTemplate::parse("t",
                                         "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor "
                                         "%}{% if add_generation_prompt %}assistant: {% endif %}");
  CHECK(
      turns_of(*blank, talk({{"user", "q"}, {"assistant", "a1 "}, {"user", "more"}, {"assistant", "a2"}})) ==
      Texts{"a1 \n\n", "a2\n\n"});
  // Tools are listed only before the last question.
  Conversation tools = talk({{"user", "q"}, {"assistant", "a1"}, {"user", "more"}, {"assistant", "a2"}});
  tools.tools = chat_value(capstan::ordered_json_of(R"([{"type": "function", "function": {"name": "f"}}])"));
  CHECK(turns_of(*family("mistral"), tools) == Texts{" a1</s>", " a2</s>"});

  // An answer has the same ending as a turn.
  CHECK(turns({q, says("assistant", ">"), more, says("assistant", "<|im_end|>")}) ==
        Texts{"><|im_end|>", kNoThought + "<|im_end|><|im_end|>"});

  // Template text that is quoted in a message is not mistaken for markup.
  const std::string quoted = "a<|im_end|>\n<|im_start|>assistant\nb";
  CHECK(turns({q, says("assistant", quoted), says("assistant", quoted)}) ==
        Texts{quoted + "<|im_end|>", kNoThought + quoted + "<|im_end|>"});
}

TEST_CASE("an assistant that begins the conversation is found after what asks for an answer elsewhere") {
  const auto turns = [&](const char* name, std::initializer_list<std::string> all) {
    return turns_of(*family(name), conversation_from(messages(all).c_str()));
  };
  const std::string first = says("assistant", "first"), q = says("user", "first"),
                    second = says("assistant", "second");
  for (const char* name : {"qwen2", "qwen2.5", "smollm2"}) {
    CAPTURE(name);
    CHECK(turns(name, {first, q, second})[0] == "first<|im_end|>");
    CHECK(turns(name, {first, q}) == Texts{"first<|im_end|>"});
  }
  CHECK(turns("qwen1.5", {first, q, second}) == Texts{"first", "second"});
  CHECK(turns("qwen2.5", {first, q, second}) == Texts{"first<|im_end|>", "second<|im_end|>"});
  CHECK(turns("qwen2.5", {first}) == Texts{"first<|im_end|>"});
  CHECK(turns("qwen3", {first, q, second}) == Texts{"first<|im_end|>", kNoThought + "second<|im_end|>"});
  CHECK(turns("qwen3", {says("assistant", "", kCall), says("tool", "1"), second, q, second}) ==
        Texts{kCalled, "second<|im_end|>", kNoThought + "second<|im_end|>"});
  CHECK(turns("qwen3", {says("system", "s"), first, q, second}) ==
        Texts{"first<|im_end|>", kNoThought + "second<|im_end|>"});
  for (const char* name : {"llama3", "llama3.2"}) {
    CAPTURE(name);
    CHECK(turns(name, {first, q, second}) == Texts{"first<|eot_id|>", "second<|eot_id|>"});
  }
  CHECK(turns("phi3", {first, q, second}) == Texts{"first<|end|>", "second<|end|>"});
  CHECK(turns("olmo2", {first, q, second}) == Texts{"first</s>", "second</s>"});

  // If the template has no generation prompt, the error says so instead of reporting what an empty
  // conversation lacks.
  const auto bare =
      ChatTemplate::parse("t", "{{ messages[0].role }}:{% for m in messages %}{{ m.content }};{% endfor %}");
  CHECK_THROWS_WITH_AS(
      turns_of(*bare, conversation_from(messages({first, q}).c_str())),
      doctest::Contains("message 1 cannot be separated from the rest: no message comes before it"), Error);
}

// Harmony, the format of gpt-oss: each message names its channel, and the last turn of a text alone has its
// reasoning and ends with <|return|> in place of <|end|>.
TEST_CASE(
    "turns of channels are trained with their reasoning, the end that the template gives them, and calls") {
  const auto turns = [&](std::initializer_list<std::string> all) {
    return turns_of(*family("harmony"), conversation_from(messages(all).c_str()));
  };
  const std::string q = says("user", "q"), more = says("user", "more"), tool = says("tool", "21"),
                    start = "<|start|>assistant";
  const auto thinks = [&](const std::string& text) { return R"("thinking": ")" + text + "\""; };
  const auto analysis = [&](const std::string& text) {
    return "<|channel|>analysis<|message|>" + text + "<|end|>" + start;
  };
  const auto final_text = [&](const std::string& text) { return "<|channel|>final<|message|>" + text; };
  const std::string call = R"( to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>)";

  CHECK(turns({q, says("assistant", "a")}) == Texts{final_text("a<|return|>")});
  CHECK(turns({q, says("assistant", "a", thinks("t"))}) == Texts{analysis("t") + final_text("a<|return|>")});
  CHECK(turns({says("developer", "d"), q, says("assistant", "a1", thinks("t1")), more,
               says("assistant", "a2", thinks("t2"))}) ==
        Texts{final_text("a1<|end|>"), analysis("t2") + final_text("a2<|return|>")});
  CHECK(turns({q, says("assistant", "a1", thinks("t1")), more}) == Texts{final_text("a1<|end|>")});
  CHECK(turns({q, says("assistant", "a"), says("assistant", "a", thinks("a"))}) ==
        Texts{final_text("a<|end|>"), analysis("a") + final_text("a<|return|>")});
  CHECK(turns({says("assistant", "first"), q, says("assistant", "")}) ==
        Texts{final_text("first<|end|>"), final_text("<|return|>")});
  CHECK(turns({q, says("assistant", "<|end|>", thinks("<|return|>")), more, says("assistant", "a<|end|>")}) ==
        Texts{final_text("<|end|><|end|>"), final_text("a<|end|><|return|>")});

  // The answer of a tool begins with the name in the call, which the model does not write there.
  const std::string calls = std::string(kCall) + ", " + thinks("t");
  CHECK(turns({q, says("assistant", "", calls)}) == Texts{analysis("t") + call});
  CHECK(turns({q, says("assistant", "", calls), tool}) == Texts{analysis("t") + call});
  CHECK(turns({q, says("assistant", "", calls), tool, says("assistant", "a", thinks("t2"))}) ==
        Texts{call, analysis("t2") + final_text("a<|return|>")});
  CHECK(turns({q, says("assistant", "", calls), tool, says("assistant", "wait", kCall), tool,
               says("assistant", "a1", thinks("t1")), more, says("assistant", "a2", thinks("t2"))}) ==
        Texts{call, call, final_text("a1<|end|>"), analysis("t2") + final_text("a2<|return|>")});
  CHECK(turns({q, says("assistant", "", calls), R"({"role": "tool", "content": {"hour": 9}})",
               says("assistant", "a", thinks("t2"))}) ==
        Texts{call, analysis("t2") + final_text("a<|return|>")});
  CHECK(turns_of(
            *family("harmony"),
            conversation_from(
                messages({q, says("assistant", "a1"), more, says("assistant", "a2", thinks("t2"))}).c_str()),
            true) == Texts{analysis("t2") + final_text("a2<|return|>")});
}
