#include "data/sft_record.hpp"

#include <simdjson.h>

#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "base/text.hpp"
#include "data/record_problem.hpp"

namespace capstan::data {

using simdjson::dom::element;
using simdjson::dom::element_type;
using text::chat::List;
using text::chat::Map;
using text::chat::Value;

namespace {

constexpr std::array<std::string_view, 6> kNames = {"auto",   "messages",          "sharegpt",
                                                    "alpaca", "prompt_completion", "text"};

[[noreturn]] void bad(const std::string& what, std::string help = {}) {
  fail(ErrorCode::format, what, std::move(help));
}

template <class T>
T as(element json) {
  T value;
  if (json.get(value)) bad("malformed JSON value");
  return value;
}

Value value_of(element json, int depth = 0) {
  if (depth > Value::kMaxDepth - 8)
    bad("values nested deeper than " + std::to_string(Value::kMaxDepth - 8) + " levels");
  switch (json.type()) {
    case element_type::ARRAY: {
      List items;
      for (const element item : as<simdjson::dom::array>(json)) items.push_back(value_of(item, depth + 1));
      auto list = Value::list(std::move(items));
      if (!list) bad("a list that is too large");
      return std::move(*list);
    }
    case element_type::OBJECT: {
      Map map;
      for (const auto field : as<simdjson::dom::object>(json))
        map.set(field.key, value_of(field.value, depth + 1));
      auto value = Value::map(std::move(map));
      if (!value) bad("an object that is too large");
      return std::move(*value);
    }
    case element_type::STRING:
      return Value(std::string(as<std::string_view>(json)));
    case element_type::INT64:
      return Value(as<int64_t>(json));
    case element_type::UINT64:
      return Value(static_cast<double>(as<uint64_t>(json)));
    case element_type::DOUBLE:
      return Value(as<double>(json));
    case element_type::BOOL:
      return Value(as<bool>(json));
    default:
      return Value(text::chat::None{});
  }
}

std::string a_kind(const Value& value) {
  return value.list()       ? "a list"
         : value.map()      ? "an object"
         : value.text()     ? "a string"
         : value.is_none()  ? "null"
         : value.as<bool>() ? "true or false"
                            : "a number";
}

// Returns a member; null counts as missing.
const Value* member(const Map& map, std::string_view key) {
  const Value* found = map.find(key);
  return found && !found->is_none() ? found : nullptr;
}
const std::string& text_member(const Map& map, std::string_view key, const std::string& where) {
  const Value* found = member(map, key);
  if (!found) bad(where + " has no `" + std::string(key) + "`");
  if (!found->text())
    bad("`" + std::string(key) + "` of " + where + " is " + a_kind(*found) + ", not a string");
  return *found->text();
}
std::string optional_text(const Map& map, std::string_view key, const std::string& where) {
  return member(map, key) ? text_member(map, key, where) : std::string();
}
const List& list_member(const Map& map, std::string_view key, const std::string& like) {
  const Value* found = member(map, key);
  if (!found || !found->list())
    bad("`" + std::string(key) + "` is " + (found ? a_kind(*found) : "missing") + ", not a list",
        "as in " + like);
  return *found->list();
}

const std::string
    kMessages = R"({"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]})",
    kShareGpt = R"({"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]})";

// Returns the content as one text: the text itself, or its text parts joined.
Value joined_content(const Value& content, const std::string& where) {
  if (content.text()) return content;
  if (!content.list()) bad("`content` of " + where + " is " + a_kind(content) + ", not a string");
  std::string text;
  for (const Value& part : *content.list()) {
    const Map* map = part.map();
    const Value* type = map ? map->find("type") : nullptr;
    if (!map || (type && (!type->text() || *type->text() != "text")))
      bad("`content` of " + where + " has a part of type " +
          (type && type->text() ? "`" + *type->text() + "`"
           : part.map()         ? "other than text"
                                : a_kind(part)) +
          "; this build learns text alone");
    text += text_member(*map, "text", "a part of " + where);
  }
  return Value(std::move(text));
}

// Whether the message counts in the loss, unless its `weight` or `train` excludes it.
bool in_loss(const Map& message, const std::string& where) {
  bool result = true;
  if (const Value* weight = member(message, "weight")) {
    const auto number = weight->number();
    if (!number || (*number != 0 && *number != 1))
      bad("`weight` of " + where + " is neither 0 nor 1", "1: the message is trained on, 0: it is not");
    result = *number == 1;
  }
  if (const Value* train = member(message, "train")) {
    if (!train->as<bool>()) bad("`train` of " + where + " is neither true nor false");
    result = result && *train->as<bool>();
  }
  return result;
}

Value map_value(Map map) {
  auto value = Value::map(std::move(map));
  if (!value) bad("an object that is too large");
  return std::move(*value);
}

void add_message(SftDialogue& dialogue, const Value& message) {
  const std::string where = "message " + std::to_string(dialogue.conversation.messages.size() + 1);
  if (!message.map()) bad(where + " is " + a_kind(message) + ", not an object", "as in " + kMessages);
  Map made;
  // Reasoning text has several names in files, and templates read one of two. Tables have null where a
  // message has none, which the template of gpt-oss does not accept.
  const std::string_view names[] = {"reasoning_content", "thinking", "reasoning"};
  const Value* thoughts = nullptr;
  for (const std::string_view name : names)
    if (!thoughts) thoughts = member(*message.map(), name);
  if (thoughts) made.set("thinking", *thoughts);
  for (const auto& [key, value] : message.map()->items())
    if (!value.is_none() || std::find(std::begin(names), std::end(names), key) == std::end(names))
      made.set(key, value);
  if (thoughts) made.set("reasoning_content", *thoughts);
  text_member(made, "role", where);
  const Value *content = member(made, "content"), *calls = member(made, "tool_calls");
  if (content)
    made.set("content", joined_content(Value(*content), where));
  else if (!calls)
    bad(where + " has no `content`");
  dialogue.in_loss.push_back(in_loss(made, where));
  dialogue.conversation.messages.push_back(map_value(std::move(made)));
}

void add_message(SftDialogue& dialogue, const char* role, std::string content) {
  Map made;
  made.set("role", Value(role));
  made.set("content", Value(std::move(content)));
  dialogue.in_loss.push_back(true);
  dialogue.conversation.messages.push_back(map_value(std::move(made)));
}

}  // namespace

std::string_view name_of(SftFormat format) {
  return kNames[static_cast<size_t>(format)];
}

struct SftRecordParser::State {
  simdjson::dom::parser parser, inner;

  // Reads the variables of the template, and the tools, which are a list or its JSON text.
  void add_template_variables(const Map& record, SftDialogue& dialogue) {
    if (const Value* variables = member(record, "chat_template_kwargs")) {
      if (!variables->map())
        bad("`chat_template_kwargs` is " + a_kind(*variables) + ", not an object",
            R"(as in {"reasoning_effort": "high"})");
      dialogue.conversation.variables = *variables->map();
    }
    const Value* tools = member(record, "tools");
    if (!tools) return;
    if (tools->list()) {
      dialogue.conversation.tools = *tools;
      return;
    }
    element json;
    if (!tools->text() || inner.parse(*tools->text()).get(json) || json.type() != element_type::ARRAY)
      bad("`tools` is " + a_kind(*tools) + ", not a list of descriptions or the JSON text of one");
    dialogue.conversation.tools = value_of(json);
  }

  SftRecord messages(const Map& record) {
    SftDialogue dialogue;
    for (const Value& message : list_member(record, "messages", kMessages)) add_message(dialogue, message);
    if (dialogue.conversation.messages.empty()) bad("`messages` is empty");
    add_template_variables(record, dialogue);
    return {SftFormat::messages, std::move(dialogue)};
  }

  SftRecord sharegpt(const Map& record) {
    constexpr std::pair<std::string_view, const char*> kRoles[] = {{"human", "user"},
                                                                   {"user", "user"},
                                                                   {"gpt", "assistant"},
                                                                   {"assistant", "assistant"},
                                                                   {"chatgpt", "assistant"},
                                                                   {"model", "assistant"},
                                                                   {"function_call", "assistant"},
                                                                   {"system", "system"},
                                                                   {"observation", "tool"},
                                                                   {"tool", "tool"}};
    SftDialogue dialogue;
    if (const std::string system = optional_text(record, "system", "the sample"); !system.empty())
      add_message(dialogue, "system", system);
    for (const Value& turn : list_member(record, "conversations", kShareGpt)) {
      const std::string where = "message " + std::to_string(dialogue.conversation.messages.size() + 1);
      if (!turn.map()) bad(where + " is " + a_kind(turn) + ", not an object", "as in " + kShareGpt);
      const std::string& from = text_member(*turn.map(), "from", where);
      const auto role =
          std::find_if(std::begin(kRoles), std::end(kRoles), [&](const auto& r) { return r.first == from; });
      if (role == std::end(kRoles)) {
        std::string known;
        for (const auto& r : kRoles) known += (known.empty() ? "" : ", ") + std::string(r.first);
        bad("`from` of " + where + " is " + in_quotes(from), "known: " + known);
      }
      add_message(dialogue, role->second, text_member(*turn.map(), "value", where));
      dialogue.in_loss.back() = in_loss(*turn.map(), where);
    }
    if (dialogue.conversation.messages.empty()) bad("`conversations` is empty");
    add_template_variables(record, dialogue);
    return {SftFormat::sharegpt, std::move(dialogue)};
  }

  SftRecord alpaca(const Map& record) {
    SftDialogue dialogue;
    if (const std::string system = optional_text(record, "system", "the sample"); !system.empty())
      add_message(dialogue, "system", system);
    if (member(record, "history"))
      for (const Value& pair : list_member(record, "history", R"([["question", "answer"], …])")) {
        if (!pair.list() || pair.list()->size() != 2 || !(*pair.list())[0].text() ||
            !(*pair.list())[1].text())
          bad("`history` holds something else than pairs of texts", R"(as in [["question", "answer"], …])");
        add_message(dialogue, "user", *(*pair.list())[0].text());
        add_message(dialogue, "assistant", *(*pair.list())[1].text());
      }
    const std::string& instruction = text_member(record, "instruction", "the sample");
    const std::string input = optional_text(record, "input", "the sample");
    add_message(dialogue, "user", input.empty() ? instruction : instruction + "\n\n" + input);
    // Both fields are also set separately, for a template that reads them.
    Map asked = *dialogue.conversation.messages.back().map();
    asked.set("instruction", Value(instruction));
    asked.set("input", Value(input));
    dialogue.conversation.messages.back() = map_value(std::move(asked));
    add_message(dialogue, "assistant", text_member(record, "output", "the sample"));
    return {SftFormat::alpaca, std::move(dialogue)};
  }

  SftRecord prompt_completion(const Map& record) {
    const Value *prompt = member(record, "prompt"), *completion = member(record, "completion");
    if (!prompt || !completion)
      bad(std::string("the sample has no `") + (prompt ? "completion" : "prompt") + "`");
    if (prompt->text() && completion->text())
      return {SftFormat::prompt_completion, SftText{*prompt->text(), *completion->text()}};
    if (!prompt->list() || !completion->list())
      bad("`prompt` is " + a_kind(*prompt) + " and `completion` " + a_kind(*completion),
          "two strings, or two lists of messages");
    SftDialogue dialogue;
    for (const Value& message : *prompt->list()) {
      add_message(dialogue, message);
      dialogue.in_loss.back() = false;
    }
    for (const Value& message : *completion->list()) add_message(dialogue, message);
    if (dialogue.conversation.messages.empty()) bad("`prompt` and `completion` are empty");
    add_template_variables(record, dialogue);
    return {SftFormat::prompt_completion, std::move(dialogue)};
  }

  static SftRecord text(const Map& record) {
    return {
        SftFormat::text,
        SftText{{},
                text_member(record, member(record, "text") || !member(record, "content") ? "text" : "content",
                            "the sample")}};
  }

  static SftFormat format_of(const Map& record) {
    if (member(record, "messages")) return SftFormat::messages;
    if (member(record, "conversations")) return SftFormat::sharegpt;
    if (member(record, "instruction")) return SftFormat::alpaca;
    if (member(record, "prompt") && member(record, "completion")) return SftFormat::prompt_completion;
    if (member(record, "text") || member(record, "content")) return SftFormat::text;
    std::string keys;
    constexpr size_t kShownKeys = 8;
    for (size_t i = 0; i < std::min(kShownKeys, record.size()); ++i)
      keys += (i > 0 ? ", " : "") + in_quotes(record.items()[i].first);
    if (record.size() > kShownKeys) keys += ", …";
    bad("a sample of no known form: its keys are " + (keys.empty() ? "none" : keys),
        "messages, conversations, instruction with output, prompt with completion, or text");
  }
};

SftRecordParser::SftRecordParser() : state_(std::make_unique<State>()) {}
SftRecordParser::~SftRecordParser() = default;

SftRecord SftRecordParser::parse(std::string_view json, SftFormat format, size_t* byte) {
  element root;
  if (const auto error = state_->parser.parse(json.data(), json.size(), false).get(root)) {
    const RecordProblem problem = json_problem(json, error);
    if (byte) *byte = problem.byte;
    bad(problem.reason);
  }
  if (root.type() != element_type::OBJECT)
    bad("expected an object, not " + std::string(kind_of(root.type())), "one sample on each line");
  const Value value = value_of(root);
  const Map& record = *value.map();
  if (format == SftFormat::automatic) format = State::format_of(record);
  switch (format) {
    case SftFormat::messages:
      return state_->messages(record);
    case SftFormat::sharegpt:
      return state_->sharegpt(record);
    case SftFormat::alpaca:
      return state_->alpaca(record);
    case SftFormat::prompt_completion:
      return state_->prompt_completion(record);
    default:
      return State::text(record);
  }
}

}  // namespace capstan::data
