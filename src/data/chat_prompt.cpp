#include "data/chat_prompt.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "text/chat/assistant_turns.hpp"

namespace capstan::data {

namespace {

text::chat::Value message(const char* role, const std::string& content) {
  text::chat::Map map;
  map.set("role", text::chat::Value(role));
  map.set("content", text::chat::Value(content));
  return *text::chat::Value::map(std::move(map));
}

// Returns the text after an answer that ends its turn; empty if the template does not show it.
std::string behind_answer(const text::chat::ChatTemplate& chat_template,
                          text::chat::Conversation conversation, const text::chat::RenderOptions& options) {
  const std::string words = "answer";
  conversation.messages.push_back(message("assistant", words));
  try {
    const text::chat::Rendered rendered = chat_template.render(conversation, options);
    const auto turns = text::chat::assistant_turns(
        chat_template, conversation, options, rendered, [](size_t offset) { return offset; }, true);
    const std::string turn = rendered.text.substr(turns.back().begin, turns.back().end - turns.back().begin);
    const size_t at = turn.rfind(words);
    return at == std::string::npos ? "" : turn.substr(at + words.size());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::format) throw;
    return "";
  }
}

}  // namespace

text::chat::RenderOptions chat_rendering(const text::Tokenizer& tokenizer, std::optional<int32_t> eod) {
  text::chat::RenderOptions options;
  const auto name = [&](const char* variable, std::optional<int32_t> id) {
    if (id) options.variables.set(variable, text::chat::Value(std::string(tokenizer.token_of(*id))));
  };
  name("bos_token", tokenizer.bos());
  name("eos_token", tokenizer.eos() ? tokenizer.eos() : eod);
  // The date that the templates of Llama 3 fall back to.
  std::tm day{};
  day.tm_year = 2024 - 1900, day.tm_mon = 6, day.tm_mday = 26, day.tm_wday = 5, day.tm_yday = 207;
  options.now = day;
  return options;
}

ChatPrompt chat_prompt(const text::Tokenizer& tokenizer, const text::chat::ChatTemplate& chat_template,
                       std::optional<int32_t> eod, const std::string& system, const std::string& user) {
  text::chat::RenderOptions options = chat_rendering(tokenizer, eod);
  text::chat::Conversation conversation;
  if (!system.empty()) conversation.messages.push_back(message("system", system));
  conversation.messages.push_back(message("user", user));
  const std::string end = behind_answer(chat_template, conversation, options);
  options.add_generation_prompt = true;
  ChatPrompt prompt;
  prompt.ids = tokenizer.encode(chat_template.render(conversation, options).text);
  const std::vector<int32_t> ids = tokenizer.encode(end);
  const auto special =
      std::find_if(ids.begin(), ids.end(), [&](int32_t id) { return tokenizer.is_special(id); });
  const std::string_view bare = trim(end);
  if (special != ids.end())
    prompt.end_token = *special;
  else if (const auto token = tokenizer.id_of(bare); token && !bare.empty())
    prompt.end_token = token;
  else
    prompt.end_text = bare;
  prompt.learns_end = prompt.end_token && std::find(ids.begin(), ids.end(), *prompt.end_token) != ids.end();
  return prompt;
}

std::string turn_end_problem(const text::Tokenizer& tokenizer, const text::chat::ChatTemplate& chat_template,
                             std::optional<int32_t> eod) {
  try {
    const ChatPrompt prompt = chat_prompt(tokenizer, chat_template, eod, "", "text");
    if (prompt.learns_end) return "";
    const std::string end =
        prompt.end_token ? std::string(tokenizer.token_of(*prompt.end_token)) : prompt.end_text;
    // For example "chat template chatml".
    const std::string& name = chat_template.name();
    if (end.empty()) return name + " puts nothing after an answer: the model does not learn where to stop";
    return name + " ends an answer with `" + end +
           "`, which the tokenizer does not encode as one token: other programs that read an export of this "
           "model do not stop there; choose a template whose end is a token, or a tokenizer that has it as a "
           "special token";
  } catch (const Error& error) {
    if (error.code() != ErrorCode::format) throw;
    // The template rejects such a conversation.
    return "";
  }
}

}  // namespace capstan::data
