#include "text/chat/assistant_turns.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.hpp"

namespace capstan::text::chat {

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

size_t count_of(std::string_view part, std::string_view text) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + part.size()))
    ++count;
  return count;
}

constexpr size_t kMaxTurns = 1000;

// A message with one text replaced; the rendering shows the field where it differs.
struct Variant {
  Value message;
  // The replacement text.
  std::string mark;
};

// Returns a text whose first and last characters do not occur in `answer`.
std::string mark_for(std::string_view answer) {
  for (const char c : {'#', '0', 'X', '@'})
    if (answer.find(c) == std::string_view::npos) return std::string(1, c) + ":" + c;
  return "\x7f:\x7f";
}

Value with(const Map& map, std::string_view key, Value value) {
  Map changed = map;
  changed.set(key, std::move(value));
  return *Value::map(std::move(changed));
}

// Changes the name of a tool call, or of the function in the call.
std::optional<Variant> other_call(const Map& message, const List& calls, size_t index) {
  const Map* call = calls[index].map();
  const Value* inner = call ? call->find("function") : nullptr;
  const bool nested = inner && inner->map();
  const std::string* name = nested ? text_at(*inner, "name") : text_at(calls[index], "name");
  if (!name) return std::nullopt;
  const std::string mark = mark_for(*name);
  List changed = calls;
  changed[index] =
      nested ? with(*call, "function", with(*inner->map(), "name", mark)) : with(*call, "name", mark);
  return Variant{with(message, "tool_calls", *Value::list(std::move(changed))), mark};
}

std::vector<Variant> variants_of(const Value& message) {
  std::vector<Variant> variants;
  if (!message.map()) return variants;
  const Map& map = *message.map();
  // The content is located even when it is empty or missing; a dict, which a tool may answer, is printed
  // otherwise than a text.
  if (const Value* content = map.find("content"); !content || !content->map()) {
    const std::string mark = mark_for(content && content->text() ? *content->text() : "");
    variants.push_back({with(map, "content", mark), mark});
  }
  for (const auto& [key, value] : map.items()) {
    if (key == "role" || key == "content" || !value.text() || value.text()->empty()) continue;
    const std::string other = mark_for(*value.text());
    variants.push_back({with(map, key, other), other});
  }
  const Value* calls = map.find("tool_calls");
  if (!calls || !calls->list() || calls->list()->empty()) return variants;
  const List& list = *calls->list();
  if (auto first = other_call(map, list, 0)) variants.push_back(std::move(*first));
  if (list.size() > 1)
    if (auto last = other_call(map, list, list.size() - 1)) variants.push_back(std::move(*last));
  return variants;
}

class Finder {
 public:
  Finder(const ChatTemplate& chat_template, const Conversation& conversation, const RenderOptions& options,
         std::string_view full, FunctionRef<size_t(size_t)> boundary)
      : template_(chat_template),
        conversation_(conversation),
        options_(options),
        full_(full),
        boundary_(boundary) {}

  AssistantTurn turn(size_t message) {
    message_ = message;
    AssistantTurn result{message, begin(), 0};
    result.end = end();
    if (result.begin < previous_end_ || result.end < result.begin) lost();
    without_blanks(result);
    previous_end_ = result.end;
    return result;
  }

 private:
  Conversation first(size_t messages) const {
    Conversation part;
    part.tools = conversation_.tools;
    part.variables = conversation_.variables;
    part.messages.assign(conversation_.messages.begin(),
                         conversation_.messages.begin() + static_cast<std::ptrdiff_t>(messages));
    return part;
  }
  std::string render(const Conversation& part, bool prompt) const {
    RenderOptions options = options_;
    options.add_generation_prompt = prompt;
    return template_.render(part, options).text;
  }
  // Returns nullopt if the template rejects the conversation, which is a part of the full one or has replaced
  // texts.
  std::optional<std::string> try_render(const Conversation& part, bool prompt) const {
    try {
      return render(part, prompt);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::format) throw;
      return std::nullopt;
    }
  }

  struct LocatedText {
    size_t begin, end;
    // What the other rendering has in place of [begin, end).
    std::string changed;
  };
  // The range of `text`, the rendering of `part`, that changes when a message is replaced; nullopt where
  // nothing changes.
  std::optional<LocatedText> locate_in(std::string_view text, Conversation part, bool prompt, size_t message,
                                       const Variant& variant) const {
    part.messages[message] = variant.message;
    const auto changed = try_render(part, prompt);
    if (!changed || *changed == text) return std::nullopt;
    const size_t front = common_front(text, *changed);
    const size_t back = std::min(common_back(text, *changed), std::min(text.size(), changed->size()) - front);
    // Blanks that come with a text where there was none may stand on either side of it.
    std::string region = changed->substr(front, changed->size() - back - front);
    if (!strip_back(region).ends_with(variant.mark)) lost();
    return LocatedText{front, text.size() - back, std::move(region)};
  }
  struct LocatedVariant {
    // Replaces the last text of the message that the template shows.
    Variant variant;
    LocatedText text;
    // Where the first text of the message begins.
    size_t begin;
  };
  std::optional<LocatedVariant> locate_in_full(size_t message) const {
    std::optional<LocatedVariant> found;
    for (Variant& variant : variants_of(conversation_.messages[message])) {
      auto text = locate_in(full_, conversation_, false, message, variant);
      if (!text) continue;
      const size_t begin = found ? std::min(found->begin, text->begin) : text->begin;
      if (!found || text->end >= found->text.end)
        found = LocatedVariant{std::move(variant), std::move(*text), begin};
      found->begin = begin;
    }
    return found;
  }

  struct TextEnds {
    size_t in_full, in_part;
  };
  // Where the last text of a message ends in the full text and in `text`, the rendering of `part`. Messages
  // after `part` may show the text again: the answer of a tool begins with the name in the call.
  std::optional<TextEnds> text_ends(const LocatedVariant& shown, std::string_view text,
                                    const Conversation& part, bool prompt, size_t message) const {
    const auto in_part = locate_in(text, part, prompt, message, shown.variant);
    if (!in_part) return std::nullopt;
    const LocatedText& in_full = shown.text;
    const std::string& mark = shown.variant.mark;
    const size_t own = count_of(mark, in_part->changed), all = count_of(mark, in_full.changed);
    if (own >= all) return TextEnds{in_full.end, in_part->end};
    const size_t range = in_full.end - in_full.begin, between = in_full.changed.size() - all * mark.size();
    if (range < between || (range - between) % all != 0) lost();
    const size_t bytes = (range - between) / all;
    size_t end = 0;
    for (size_t i = 0; i < own; ++i) end = in_full.changed.find(mark, end) + mark.size();
    return TextEnds{in_full.begin + end - own * mark.size() + own * bytes, in_part->end};
  }

  size_t begin() const {
    const Conversation part = first(message_);
    const auto before = try_render(part, true);
    // No message precedes the first one for a generation prompt to follow; some templates render part of the
    // prompt even so.
    if (message_ == 0)
      if (const auto found = after_prompt(0)) return *found;
    if (before && full_.starts_with(*before)) return before->size();
    // The text between this message and the last visible one before it.
    size_t from = 0;
    for (size_t earlier = message_; earlier-- > 0;) {
      const auto shown = locate_in_full(earlier);
      if (!shown) continue;
      from = shown->text.end;
      const auto ends = before ? text_ends(*shown, *before, part, true, earlier) : std::optional<TextEnds>();
      if (!ends) break;
      from = ends->in_full;
      const std::string_view opening = std::string_view(*before).substr(ends->in_part);
      const auto own = locate_in_full(message_);
      if (!own || !full_.substr(from).starts_with(opening) || own->begin < from + opening.size()) break;
      return from + opening.size();
    }
    const auto found = after_prompt(from);
    if (!found) lost();
    return *found;
  }

  // The generation prompt that the template renders for a question after the preceding messages; empty if it
  // renders none.
  std::string question_prompt() const {
    Conversation part = first(message_);
    if (message_ == 0 || is_assistant(part.messages.back())) {
      Map question;
      question.set("role", Value("user"));
      question.set("content", Value("#:#"));
      part.messages.push_back(*Value::map(std::move(question)));
    }
    const auto asked = try_render(part, true), unasked = try_render(part, false);
    return asked && unasked ? asked->substr(common_front(*asked, *unasked)) : "";
  }

  // The end of the generation prompt, searched from `from` on.
  std::optional<size_t> after_prompt(size_t from) const {
    const std::string prompt = question_prompt();
    const auto own = locate_in_full(message_);
    if (prompt.empty() || !own || own->begin < from) return std::nullopt;
    const size_t at = full_.substr(from, own->begin - from).rfind(prompt);
    return at == std::string_view::npos ? std::nullopt : std::optional(from + at + prompt.size());
  }

  size_t end() const {
    const auto up_to = try_render(first(message_ + 1), false);
    if (!up_to) lost();
    const bool last = *up_to == full_;
    if (!last && full_.starts_with(*up_to)) return up_to->size();
    const auto prompted = try_render(first(message_ + 1), true);
    if (last && (!prompted || prompted->starts_with(full_))) return full_.size();
    if (const auto found = prompted ? end_before_prompt(*prompted) : std::nullopt) return *found;
    return last ? full_.size() : end_by_location(*up_to);
  }

  // The end of the turn if the text between it and the generation prompt of `prompted`, the messages up to
  // and including it, also follows it in the full text. Some templates end the last turn of a text
  // otherwise: gpt-oss with <|return|> in place of <|end|>, Phi-3 with <|endoftext|> after <|end|>.
  std::optional<size_t> end_before_prompt(std::string_view prompted) const {
    const auto shown = locate_in_full(message_);
    const auto ends =
        shown ? text_ends(*shown, prompted, first(message_ + 1), true, message_) : std::optional<TextEnds>();
    if (!ends) return std::nullopt;
    std::string_view ending = prompted.substr(ends->in_part);
    const std::string prompt = question_prompt();
    if (ending.ends_with(prompt)) ending.remove_suffix(prompt.size());
    if (!full_.substr(ends->in_full).starts_with(ending)) return std::nullopt;
    return std::max(ends->in_full, boundary_(ends->in_full + ending.size()));
  }

  // The end of the turn with the part of the ending of `up_to`, the messages up to and including it, that the
  // full text also has there.
  size_t end_by_location(std::string_view up_to) const {
    const auto shown = locate_in_full(message_);
    if (!shown) lost();
    const auto ends = text_ends(*shown, up_to, first(message_ + 1), false, message_);
    if (!ends) lost();
    const size_t end = ends->in_full + common_front(up_to.substr(ends->in_part), full_.substr(ends->in_full));
    return std::max(ends->in_full, boundary_(end));
  }

  void without_blanks(AssistantTurn& turn) const {
    const std::string_view answer = full_.substr(turn.begin, turn.end - turn.begin);
    const std::string_view bare = strip_back(answer);
    // If only white space follows the content, it ends the turn.
    const std::string* content = text_at(conversation_.messages[turn.message], "content");
    const std::string_view words = content ? strip_back(*content) : std::string_view();
    if (!words.empty() && bare.ends_with(words)) {
      // An answer `>` has the same last character as an end token.
      const auto shown = locate_in_full(turn.message);
      if (shown && shown->text.end >= turn.begin + bare.size()) return;
    }
    turn.end = turn.begin + bare.size();
  }

  [[noreturn]] void lost() const {
    fail(
        ErrorCode::format,
        template_.name() + ": the text of the assistant in message " + std::to_string(message_ + 1) +
            " cannot be separated from the rest: " +
            (message_ == 0 ? "no message comes before it, nor does the text that asks for an answer elsewhere"
                           : "the conversation up to there is not rendered as the beginning of the full one"),
        "put {% generation %} … {% endgeneration %} around it in the template, or take "
        "dataset.loss_mode=last_turn or all");
  }

  const ChatTemplate& template_;
  const Conversation& conversation_;
  const RenderOptions& options_;
  std::string_view full_;
  FunctionRef<size_t(size_t)> boundary_;
  // The message whose turn is searched.
  size_t message_ = 0;
  // The end of the preceding turn.
  size_t previous_end_ = 0;
};

}  // namespace

bool is_assistant(const Value& message) {
  const std::string* role = text_at(message, "role");
  return role && *role == "assistant";
}

std::vector<AssistantTurn> assistant_turns(const ChatTemplate& chat_template,
                                           const Conversation& conversation, const RenderOptions& options,
                                           const Rendered& full, FunctionRef<size_t(size_t offset)> boundary,
                                           bool last_only) {
  std::vector<size_t> messages;
  for (size_t i = 0; i < conversation.messages.size(); ++i)
    if (is_assistant(conversation.messages[i])) messages.push_back(i);
  std::vector<AssistantTurn> turns;
  if (!full.generations.empty()) {
    if (full.generations.size() != messages.size())
      fail(ErrorCode::format, chat_template.name() + ": it marks " + std::to_string(full.generations.size()) +
                                  " texts with {% generation %}, but the assistant has " +
                                  std::to_string(messages.size()) + " messages");
    for (size_t i = last_only ? messages.size() - 1 : 0; i < messages.size(); ++i)
      turns.push_back({messages[i], full.generations[i].first, full.generations[i].second});
    return turns;
  }
  if (last_only && messages.size() > 1) messages.erase(messages.begin(), messages.end() - 1);
  if (messages.size() > kMaxTurns)
    fail(ErrorCode::format,
         chat_template.name() + ": " + std::to_string(messages.size()) +
             " messages of the assistant in one conversation; each takes several renderings, for " +
             std::to_string(kMaxTurns) + " at most",
         "put {% generation %} … {% endgeneration %} around what the assistant says in the template");
  Finder finder(chat_template, conversation, options, full.text, boundary);
  for (const size_t message : messages) turns.push_back(finder.turn(message));
  return turns;
}

}  // namespace capstan::text::chat
