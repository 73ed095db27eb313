// Converts texts to values by the type of the field alone. A value is never guessed, and every error offers a
// remedy.
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
  // Replaces `${…}` in a scalar. Returns nullopt if an error was reported or the value waits for another
  // field. Empty: no interpolation.
  std::function<std::optional<Node>(const Node&)> expand;
};

// Converts the value of one field. `path` names it in messages. Returns nullopt after it has reported an
// error.
std::optional<Value> convert(const FieldInfo& field, const Node& node, const std::string& path,
                             const ConvertContext& context);

// Parse the text of a number, also for tests and tools. On failure, `problem` gets a message fragment ("is
// not an integer") and a help.
struct TextProblem {
  std::string message, help;
  bool warning = false;
  // The correct text, if only one text can have been meant.
  std::string replacement;
};
std::optional<int64_t> integer_from_text(std::string_view text, NumberForm form, TextProblem& problem);
std::optional<double> real_from_text(std::string_view text, const FieldInfo& field, TextProblem& problem);
std::optional<int64_t> bytes_from_text(std::string_view text, TextProblem& problem);
std::optional<double> duration_from_text(std::string_view text, std::string_view default_unit,
                                         TextProblem& problem);

// Describes a type for messages, explain and documentation: "an integer from 1 to 4096", "true or false",
// "one of gelu, silu".
std::string type_text(const Type& type, const FieldInfo& field);
// Describes the range of a field without its type: "from 0 to 1", "above 0" or "".
std::string range_text(const FieldInfo& field);

}  // namespace capstan::config
