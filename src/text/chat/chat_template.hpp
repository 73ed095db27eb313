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
  // Dicts with `role` and `content`, and what else the template reads.
  List messages;
  Value tools = None{};  // a list of tools' schemas, or none
};

struct RenderOptions {
  bool add_generation_prompt = false;
  Map variables;  // bos_token, eos_token …
  // The clock of strftime_now; without one the function is not defined, which templates ask for.
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
  // `name` is what messages call it.
  static std::shared_ptr<const ChatTemplate> parse(std::string name, std::string_view text);
  // A known template's name, or a file. ErrorCode::not_found with the nearest names.
  static std::shared_ptr<const ChatTemplate> load(const std::string& name_or_path);

  ~ChatTemplate();
  ChatTemplate(const ChatTemplate&) = delete;
  ChatTemplate& operator=(const ChatTemplate&) = delete;

  const std::string& name() const;
  const std::string& text() const;  // as it was given
  // Thread-safe. ErrorCode::format for what the template refuses or cannot work with, and beyond the limits.
  Rendered render(const Conversation& conversation, const RenderOptions& options) const;

 private:
  struct Parts;
  explicit ChatTemplate(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

// Templates that are known by name: those of families, short, with {% generation %}.
struct KnownTemplate {
  std::string_view name, text;
};
std::span<const KnownTemplate> known_templates();

}  // namespace capstan::text::chat
