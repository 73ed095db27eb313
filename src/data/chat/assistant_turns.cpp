#include "data/chat/assistant_turns.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace capstan::data::chat {

namespace {

const std::string* text_at(const Value& message, std::string_view key) {
  const Value* found = message.map() ? message.map()->find(key) : nullptr;
  return found ? found->text() : nullptr;
}

size_t common_front(std::string_view a, std::string_view b) {
  const auto [x, y] = std::mismatch(
      a.begin(), a.begin() + static_cast<std::ptrdiff_t>(std::min(a.size(), b.size())), b.begin());
  return static_cast<size_t>(x - a.begin());
}
size_t common_back(std::string_view a, std::string_view b) {
  size_t count = 0;
  while (count < std::min(a.size(), b.size()) && a[a.size() - 1 - count] == b[b.size() - 1 - count]) ++count;
  return count;
}

constexpr size_t kMostTurns = 1000;

class Finder {
 public:
  Finder(const ChatTemplate& chat_template, const Conversation& conversation, const RenderOptions& options,
         std::string_view whole, FunctionRef<size_t(size_t)> boundary)
      : template_(chat_template),
        conversation_(conversation),
        options_(options),
        whole_(whole),
        boundary_(boundary) {}

  AssistantTurn turn(size_t message) {
    AssistantTurn result{message, 0, 0};
    const std::string before = render(message, true);
    if (!whole_.starts_with(before)) lost(message);
    result.begin = before.size();
    const std::string up_to = render(message + 1, false);
    if (up_to == whole_)
      result.end = end_of_last(message, result.begin);
    else if (whole_.starts_with(up_to))
      result.end = up_to.size();
    else
      result.end = end_by_content(message, up_to);
    if (result.end < result.begin) lost(message);
    without_blanks(result);
    return result;
  }

 private:
  std::string render(size_t messages, bool prompt) const {
    Conversation part;
    part.tools = conversation_.tools;
    part.messages.assign(conversation_.messages.begin(),
                         conversation_.messages.begin() + static_cast<std::ptrdiff_t>(messages));
    return render(part, prompt);
  }
  std::string render(const Conversation& part, bool prompt) const {
    RenderOptions options = options_;
    options.add_generation_prompt = prompt;
    return template_.render(part, options).text;
  }

  // The same conversation with another content in one message.
  Conversation replaced(size_t messages, size_t message, const std::string& content) const {
    Conversation result;
    result.tools = conversation_.tools;
    result.messages.assign(conversation_.messages.begin(),
                           conversation_.messages.begin() + static_cast<std::ptrdiff_t>(messages));
    Map changed = *result.messages[message].map();
    changed.set("content", Value(content));
    result.messages[message] = *Value::map(std::move(changed));
    return result;
  }

  struct Bounds {
    size_t begin, end;
  };
  // Where the content stands in `text`, the rendering of the first `messages` messages: what changes with it.
  Bounds content_in(std::string_view text, size_t messages, size_t message,
                    const std::string& content) const {
    // A replacement that begins and ends with other characters.
    std::string other = "#:#";
    for (const char c : {'#', '0', 'X', '@'}) {
      if (content.find(c) != std::string::npos) continue;
      other = std::string(1, c) + ":" + c;
      break;
    }
    const std::string changed = render(replaced(messages, message, other), false);
    const size_t front = common_front(text, changed);
    const size_t back = std::min(common_back(text, changed), std::min(text.size(), changed.size()) - front);
    if (changed.size() - front - back != other.size()) lost(message);
    return {front, text.size() - back};
  }

  // What would stand there as well if another turn followed: not the end of the whole text.
  size_t end_of_last(size_t message, size_t begin) const {
    const size_t end = boundary_(common_front(whole_, render(message + 1, true)));
    return end > begin ? end : whole_.size();
  }

  size_t end_by_content(size_t message, const std::string& up_to) const {
    const std::string* content = text_at(conversation_.messages[message], "content");
    const Value* calls = conversation_.messages[message].map()->find("tool_calls");
    if (!content || (calls && calls->truthy())) lost(message);
    const size_t in_whole = content_in(whole_, conversation_.messages.size(), message, *content).end,
                 in_part = content_in(up_to, message + 1, message, *content).end;
    const std::string_view ending = std::string_view(up_to).substr(in_part);
    const size_t end = in_whole + common_front(ending, whole_.substr(in_whole));
    return std::max(in_whole, boundary_(end));
  }

  void without_blanks(AssistantTurn& turn) const {
    const std::string_view said = whole_.substr(turn.begin, turn.end - turn.begin);
    const std::string_view bare = strip_back(said);
    // Where blanks are all that follows the content, they are the end of the turn.
    const std::string* content = text_at(conversation_.messages[turn.message], "content");
    const std::string_view words = content ? strip_back(*content) : std::string_view();
    if (!words.empty() && bare.ends_with(words)) return;
    turn.end = turn.begin + bare.size();
  }

  [[noreturn]] void lost(size_t message) const {
    fail(
        ErrorCode::format,
        template_.name() + ": what the assistant says in message " + std::to_string(message + 1) +
            " cannot be told from the rest: the conversation up to there is not rendered as the whole begins",
        "put {% generation %} … {% endgeneration %} around it in the template, or take "
        "dataset.loss_mode=last_turn or all");
  }

  const ChatTemplate& template_;
  const Conversation& conversation_;
  const RenderOptions& options_;
  std::string_view whole_;
  FunctionRef<size_t(size_t)> boundary_;
};

}  // namespace

bool is_assistant(const Value& message) {
  const std::string* role = text_at(message, "role");
  return role && *role == "assistant";
}

std::vector<AssistantTurn> assistant_turns(const ChatTemplate& chat_template,
                                           const Conversation& conversation, const RenderOptions& options,
                                           const Rendered& whole, FunctionRef<size_t(size_t offset)> boundary,
                                           bool last_only) {
  std::vector<size_t> messages;
  for (size_t i = 0; i < conversation.messages.size(); ++i)
    if (is_assistant(conversation.messages[i])) messages.push_back(i);
  std::vector<AssistantTurn> turns;
  if (!whole.generations.empty()) {
    if (whole.generations.size() != messages.size())
      fail(ErrorCode::format, chat_template.name() + ": it marks " +
                                  std::to_string(whole.generations.size()) +
                                  " texts with {% generation %}, but the assistant has " +
                                  std::to_string(messages.size()) + " messages");
    for (size_t i = last_only ? messages.size() - 1 : 0; i < messages.size(); ++i)
      turns.push_back({messages[i], whole.generations[i].first, whole.generations[i].second});
    return turns;
  }
  if (last_only && messages.size() > 1) messages.erase(messages.begin(), messages.end() - 1);
  if (messages.size() > kMostTurns)
    fail(ErrorCode::format,
         chat_template.name() + ": " + std::to_string(messages.size()) +
             " messages of the assistant in one conversation; each takes two renderings, for " +
             std::to_string(kMostTurns) + " at most",
         "put {% generation %} … {% endgeneration %} around what the assistant says in the template");
  Finder finder(chat_template, conversation, options, whole.text, boundary);
  for (const size_t message : messages) turns.push_back(finder.turn(message));
  return turns;
}

}  // namespace capstan::data::chat
