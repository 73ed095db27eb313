#include "text/chat/chat_template.hpp"

#include <algorithm>
#include <filesystem>

#include "base/file.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "text/chat/interpreter.hpp"
#include "text/chat/syntax.hpp"

namespace capstan::text::chat {

struct ChatTemplate::Program {
  Program(std::string name, std::string_view given)
      : text(given), source(std::move(name), given), statements(chat::parse(source)) {}
  std::string text;
  Source source;
  Statements statements;
};

ChatTemplate::ChatTemplate(std::unique_ptr<Program> program) : program_(std::move(program)) {}
ChatTemplate::~ChatTemplate() = default;

std::shared_ptr<const ChatTemplate> ChatTemplate::parse(std::string name, std::string_view text) {
  return std::shared_ptr<const ChatTemplate>(
      new ChatTemplate(std::make_unique<Program>(std::move(name), text)));
}

std::shared_ptr<const ChatTemplate> ChatTemplate::load(const std::string& name_or_path) {
  std::vector<std::string> names;
  for (const KnownTemplate& known : known_templates()) {
    if (known.name == name_or_path) return parse("chat template " + name_or_path, known.text);
    names.emplace_back(known.name);
  }
  std::error_code ignored;
  if (!std::filesystem::exists(name_or_path, ignored)) {
    auto near = near_matches(std::filesystem::path(name_or_path).filename().string(), names, 2);
    for (std::string& file : near_paths(name_or_path)) near.push_back(std::move(file));
    fail(ErrorCode::not_found, not_found_text("chat template", name_or_path),
         near.empty() ? "a Jinja file, or one of the known templates: " + join(names, ", ")
                      : near_paths_help(near));
  }
  const std::string text = read_file(name_or_path, Source::kMaxBytes);
  refuse_placeholder(text, name_or_path);
  return parse(name_or_path, text);
}

const std::string& ChatTemplate::name() const {
  return program_->source.name();
}
const std::string& ChatTemplate::text() const {
  return program_->text;
}

Rendered ChatTemplate::render(const Conversation& conversation, const RenderOptions& options) const {
  Interpreter interpreter(program_->source, options.limits, options.now);
  Frame names;
  for (const Map* variables : {&options.variables, &conversation.variables})
    for (const auto& [name, value] : variables->items()) names.names[name] = value;
  names.names["messages"] = interpreter.runtime().list(conversation.messages);
  names.names["tools"] = conversation.tools;
  names.names["documents"] = None{};
  names.names["add_generation_prompt"] = Value(options.add_generation_prompt);
  Frame inside{&names, {}};
  interpreter.run(program_->statements, inside);
  return {interpreter.output(), interpreter.generations()};
}

}  // namespace capstan::text::chat
