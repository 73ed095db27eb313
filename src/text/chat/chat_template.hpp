// Chat templates render a conversation to the text format that a model was trained on. A template is an
// untrusted Jinja2 program. This interpreter runs a subset of the language within limits and renders the same
// text as Transformers' apply_chat_template(tokenize=False).
//
// The subset: if/elif/else, for (with if and else, break and continue), set (also of namespaces and of
// blocks), macro, {% generation %}, raw, comments, white space control under trim_blocks and lstrip_blocks;
// every operator; the filters, tests, methods and functions of functions.cpp. Anything else throws
// ErrorCode::unsupported with its location: an unknown statement when the template is parsed, the others when
// they are reached.
#pragma once

#include <ctime>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/chat/runtime.hpp"

namespace capstan::text::chat {

struct Conversation {
  // Dicts with `role`, `content` and whatever other keys the template reads.
  List messages;
  // A list of tool schemas, or None.
  Value tools = None{};
  // Further variables of the template for this conversation, such as reasoning_effort of gpt-oss.
  Map variables;
};

struct RenderOptions {
  bool add_generation_prompt = false;
  // Variables of the template, such as bos_token and eos_token.
  Map variables;
  // The time that strftime_now() formats. Without a value the function is undefined, which templates can test
  // for.
  std::optional<std::tm> now;
  Limits limits;
};

struct Rendered {
  std::string text;
  // Bytes [first, second) that the template itself marks as the assistant's, in order.
  std::vector<std::pair<size_t, size_t>> generations;
};

class ChatTemplate {
 public:
  // Parses a template. Messages refer to it as `name`.
  static std::shared_ptr<const ChatTemplate> parse(std::string name, std::string_view text);
  // Loads a known template by name, or a file. Throws ErrorCode::not_found with the nearest names.
  static std::shared_ptr<const ChatTemplate> load(const std::string& name_or_path);

  ~ChatTemplate();
  ChatTemplate(const ChatTemplate&) = delete;
  ChatTemplate& operator=(const ChatTemplate&) = delete;

  const std::string& name() const;
  // The source text that was passed to parse().
  const std::string& text() const;
  // Renders a conversation; thread-safe. Throws ErrorCode::format if the template rejects the conversation,
  // fails on it or exceeds the limits.
  Rendered render(const Conversation& conversation, const RenderOptions& options) const;

 private:
  struct Program;
  explicit ChatTemplate(std::unique_ptr<Program> program);
  std::unique_ptr<Program> program_;
};

// A template that is known by name: a short version of a model family's, with {% generation %} tags.
struct KnownTemplate {
  std::string_view name, text;
};
std::span<const KnownTemplate> known_templates();

}  // namespace capstan::text::chat
