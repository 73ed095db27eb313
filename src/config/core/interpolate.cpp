#include "config/core/interpolate.hpp"

#include <algorithm>
#include <ctime>
#include <utility>

#include "base/text.hpp"
#include "base/utf8.hpp"

namespace capstan::config {

namespace {

// Greatest depth of ${…} inside ${…}.
constexpr int kMaxReferences = 16;
// Maximum size of one text after replacement.
constexpr size_t kBytes = 1 << 20;

class Expander {
 public:
  Expander(const Node& scalar, const Interpolation& context) : scalar_(scalar), context_(context) {}

  std::optional<Node> run() {
    const std::string_view text = scalar_.text;
    if (text.starts_with("${") && closing(text, 0) == text.size() - 1) {
      auto node = expression(text.substr(2, text.size() - 3), 0, 0);
      if (!node) return std::nullopt;
      node->location = scalar_.location;
      node->raw = true;
      if (node->base.empty()) node->base = scalar_.base;
      return node;
    }
    const auto expanded = embedded(text, 0, 0);
    if (!expanded) return std::nullopt;
    Node node = scalar_;
    node.text = *expanded;
    node.raw = true;
    return node;
  }

 private:
  // Offset of the `}` that closes the `${` at `begin`; npos when there is none.
  static size_t closing(std::string_view text, size_t begin) {
    int depth = 0;
    for (size_t i = begin; i < text.size(); ++i) {
      if (text[i] == '$' && i + 1 < text.size() && text[i + 1] == '{')
        ++depth, ++i;
      else if (text[i] == '}' && --depth == 0)
        return i;
    }
    return std::string_view::npos;
  }

  SourceLocation location(size_t begin, size_t length) const {
    SourceLocation result = scalar_.location;
    const auto characters = static_cast<int>(count_code_points(scalar_.text));
    // The value is written on several lines, or escaped.
    if (scalar_.quoted || characters != result.length || depth_ > 0) return result;
    result.column += static_cast<int>(count_code_points(std::string_view(scalar_.text).substr(0, begin)));
    result.length = std::max(
        1, static_cast<int>(count_code_points(std::string_view(scalar_.text).substr(begin, length))));
    return result;
  }

  Diagnostic& error(const char* code, std::string message, SourceLocation where) {
    Diagnostic diagnostic;
    diagnostic.code = code;
    diagnostic.message = std::move(message);
    diagnostic.location = where;
    diagnostic.path = context_.path;
    context_.diagnostics->push_back(std::move(diagnostic));
    return context_.diagnostics->back();
  }

  std::optional<std::string> embedded(std::string_view text, size_t origin, int depth) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
      if (text.substr(i).starts_with("\\${")) {
        out += "${";
        i += 3;
      } else if (text.substr(i).starts_with("${")) {
        const size_t end = closing(text, i);
        if (end == std::string_view::npos) {
          error("C0401", "`${` is never closed", location(origin + i, 2))
              .help("for the text itself write `\\${`");
          return std::nullopt;
        }
        const auto node = expression(text.substr(i + 2, end - i - 2), origin + i, depth);
        if (!node) return std::nullopt;
        if (node->kind != Node::Kind::scalar) {
          error("C0405",
                std::string(node->kind == Node::Kind::null ? "null" : "a list or a mapping") +
                    " cannot be part of a text",
                location(origin + i, end - i + 1));
          return std::nullopt;
        }
        out += node->text;
        i = end + 1;
      } else {
        out += text[i++];
      }
      if (out.size() > kBytes) {
        error("C0405", "a text of more than 1 MiB after `${…}` is replaced", scalar_.location);
        return std::nullopt;
      }
    }
    return out;
  }

  // The text between `${` and `}`; `origin`: byte offset of the `${`.
  std::optional<Node> expression(std::string_view written, size_t origin, int depth) {
    const SourceLocation where = location(origin, written.size() + 3);
    if (depth >= kMaxReferences) {
      error("C0401", "`${…}` nested more than 16 deep", where);
      return std::nullopt;
    }
    std::string inner(written);
    if (inner.find("${") != std::string::npos) {
      const int before = std::exchange(depth_, depth + 1);
      auto expanded = embedded(written, origin + 2, depth + 1);
      depth_ = before;
      if (!expanded) return std::nullopt;
      inner = std::move(*expanded);
    }
    const std::string_view text = trim(inner);
    if (text.empty()) {
      error("C0401", "`${}` does not name a field", where).help("for the text itself write `\\${}`");
      return std::nullopt;
    }
    if (text[0] == '=') {
      error("C0401", "arithmetic in `${= …}` is not part of recipes", where)
          .help("write the number, or leave the field out where it is derived");
      return std::nullopt;
    }
    if (text == "hash") {
      auto hash = context_.hash(where);
      if (!hash) return std::nullopt;
      return Node::scalar(std::move(*hash), where, true);
    }
    if (text == "recipe.name") return Node::scalar(context_.recipe_name, where, true);
    if (const size_t colon = text.find(':'); colon != std::string_view::npos)
      return function(text, colon, where);
    return reference(text, where);
  }

  std::optional<Node> function(std::string_view text, size_t colon, SourceLocation where) {
    const std::string_view name = text.substr(0, colon), argument = text.substr(colon + 1);
    if (name == "env" || name == "oc.env") {
      const size_t comma = argument.find(',');
      const std::string variable(trim(argument.substr(0, comma)));
      if (variable.empty()) {
        error("C0401", "`${env:}` names no variable", where);
        return std::nullopt;
      }
      if (context_.used_environment) *context_.used_environment = true;
      std::string value;
      if (const char* found = context_.environment(variable)) {
        value = found;
        if (first_invalid_utf8(value)) {
          error("C0404", "the environment variable `" + variable + "` is not valid UTF-8", where);
          return std::nullopt;
        }
      } else if (comma != std::string_view::npos) {
        value = trim(argument.substr(comma + 1));
      } else {
        error("C0404", "the environment variable `" + variable + "` is not set", where)
            .help("export it, or give a default: ${env:" + variable + ",value}");
        return std::nullopt;
      }
      Node node = Node::scalar(value, where);
      if (value == "null") node.kind = Node::Kind::null;
      return node;
    }
    if (name == "now") {
      std::string format(argument.empty() ? "%Y-%m-%dT%H:%M:%SZ" : argument);
      std::time_t time = static_cast<std::time_t>(context_.now);
      std::tm parts{};
      gmtime_r(&time, &parts);
      std::string buffer(256, '\0');
      const size_t length =
          format.size() > 64 ? 0 : std::strftime(buffer.data(), buffer.size(), format.c_str(), &parts);
      if (length == 0) {
        error("C0401", "`" + format.substr(0, 80) + "` is not a time format", where)
            .help("for example, write ${now:%Y-%m-%d}");
        return std::nullopt;
      }
      return Node::scalar(buffer.substr(0, length), where, true);
    }
    auto& problem = error("C0401", "`${" + std::string(name) + ":…}` is not known", where);
    const std::vector<std::string> known{"env", "oc.env", "now"};
    const auto near = near_matches(name, known, 1);
    if (!near.empty())
      problem.help("did you mean `${" + near[0] + ":…}`?");
    else
      problem.help(
          "known are ${env:NAME}, ${env:NAME,default}, ${now:%Y-%m-%d}, ${recipe.name}, ${hash} and "
          "${section.field}");
    return std::nullopt;
  }

  std::optional<Node> reference(std::string_view text, SourceLocation where) {
    std::string path(text);
    if (text[0] == '.') {
      size_t dots = 0;
      while (dots < text.size() && text[dots] == '.') ++dots;
      const std::string rest(text.substr(dots));
      // One dot: beside this field. Two: one level up, the top of the recipe.
      if (dots == 1)
        path = context_.section.empty() ? rest : context_.section + "." + rest;
      else if (dots == 2 && !context_.section.empty())
        path = rest;
      else {
        error("C0402", "`${" + std::string(text) + "}` leads above the top of the recipe", where);
        return std::nullopt;
      }
    }
    return context_.field_value(path, where);
  }

  const Node& scalar_;
  const Interpolation& context_;
  int depth_ = 0;
};

}  // namespace

std::optional<Node> interpolate(const Node& scalar, const Interpolation& context) {
  return Expander(scalar, context).run();
}

bool mentions_hash(const Node& node) {
  if (node.kind == Node::Kind::scalar && !node.raw && node.text.find("${hash}") != std::string::npos)
    return true;
  return std::any_of(node.items.begin(), node.items.end(), mentions_hash);
}

}  // namespace capstan::config
