// From text to value, by the field's type alone: never guessed, every refusal with a way out.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/core/diagnostics.hpp"
#include "config/core/field.hpp"
#include "config/core/tree.hpp"

namespace capstan::config {

struct ConvertContext {
  const std::vector<Source>* sources = nullptr;
  std::vector<Diagnostic>* diagnostics = nullptr;
  // Replaces `${…}` in a scalar; nullopt: reported, or waits for another field. Empty: no interpolation.
  std::function<std::optional<Node>(const Node&)> expand;
};

// The value of one field. `path` names it in messages. nullopt: reported.
std::optional<Value> convert(const FieldInfo& field, const Node& node, const std::string& path,
                             const ConvertContext& context);

// The texts of numbers, for tests and tools. `problem` gets a message fragment ("is not an integer") and a
// help.
struct TextProblem {
  std::string message, help;
  bool warning = false;
  // Where only one text can have been meant.
  std::string replacement;
};
std::optional<int64_t> integer_from_text(std::string_view text, NumberForm form, TextProblem& problem);
std::optional<double> real_from_text(std::string_view text, const FieldInfo& field, TextProblem& problem);
std::optional<int64_t> bytes_from_text(std::string_view text, TextProblem& problem);
std::optional<double> duration_from_text(std::string_view text, std::string_view default_unit,
                                         TextProblem& problem);

// "an integer from 1 to 4096", "true or false", "one of gelu, silu": for messages, explain and documentation.
std::string type_text(const Type& type, const FieldInfo& field);
std::string range_text(const FieldInfo& field);  // "from 0 to 1", "above 0", ""; without the type

}  // namespace capstan::config
