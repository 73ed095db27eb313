#include "config/core/convert.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/text.hpp"
#include "config/core/external.hpp"
#include "config/core/list_expression.hpp"

namespace capstan::config {

namespace {

std::string number_text(double value) {
  if (std::floor(value) == value && std::abs(value) < 9e15)
    return std::to_string(static_cast<int64_t>(value));
  return to_text(value);
}

std::string shown(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 80)) out += c == '\n' ? ' ' : c;
  return out + (text.size() > 80 ? "..." : "");
}

const char* node_kind(const Node& node) {
  switch (node.kind) {
    case Node::Kind::null:
      return node.empty ? "nothing" : "null";
    case Node::Kind::scalar:
      return "a single value";
    case Node::Kind::list:
      return "a list";
    case Node::Kind::map:
      return "a mapping";
  }
  return "a value";
}

class Converter {
 public:
  Converter(const FieldInfo& field, const ConvertContext& context) : field_(field), context_(context) {}

  std::optional<Value> run(const Type& type, const Node& given, const std::string& path) {
    const Node* node = &given;
    std::optional<Node> expanded;
    if (given.kind == Node::Kind::scalar && !given.raw && type.kind != Type::Kind::secret &&
        context_.expand && given.text.find("${") != std::string::npos) {
      expanded = context_.expand(given);
      if (!expanded) return std::nullopt;
      node = &*expanded;
    }
    if (node->kind == Node::Kind::null) return null(type, *node, path);
    switch (type.kind) {
      case Type::Kind::list:
        return list(type, *node, path);
      case Type::Kind::map:
        return map(type, *node, path);
      case Type::Kind::record:
        return record(type, *node, path);
      default:
        break;
    }
    if (node->kind != Node::Kind::scalar) {
      error("C0206", "`" + path + "` takes " + type_text(type, field_) + ", not " + node_kind(*node), *node);
      return std::nullopt;
    }
    if (expanded && given.location.known()) node_label_ = "from `" + shown(given.text) + "`";
    auto value = scalar(type, *node, path);
    if (value && !check_range(type, *value, *node, path)) value.reset();
    node_label_.clear();
    return value;
  }

 private:
  Diagnostic& error(const char* code, std::string message, const Node& node, std::string help = {}) {
    Diagnostic diagnostic;
    diagnostic.code = code;
    diagnostic.message = std::move(message);
    diagnostic.location = node.location;
    diagnostic.label = node_label_;
    diagnostic.path = field_.path;
    diagnostic.help(std::move(help));
    context_.diagnostics->push_back(std::move(diagnostic));
    return context_.diagnostics->back();
  }

  std::optional<Value> null(const Type& type, const Node& node, const std::string& path) {
    if (node.empty) {
      error("C0203", "`" + path + "` has no value", node,
            type.optional ? "write `null` to leave it unset"
            : type.kind == Type::Kind::text || type.kind == Type::Kind::path ? "write \"\" for an empty text"
            : type.kind == Type::Kind::list && !type.one_or_more             ? "write [] for an empty list"
            : type.kind == Type::Kind::map || type.kind == Type::Kind::record
                ? "write {} for an empty mapping"
                : "it takes " + type_text(type, field_));
      return std::nullopt;
    }
    if (type.optional) return Value();
    error("C0205", "`" + path + "` cannot be null", node,
          type.kind == Type::Kind::text ? "write \"null\" for the text null"
                                        : "it takes " + type_text(type, field_));
    return std::nullopt;
  }

  std::optional<Value> list(const Type& type, const Node& node, const std::string& path) {
    Value result = Value::list();
    if (node.kind == Node::Kind::scalar && type.element->kind == Type::Kind::integer) {
      const std::string full = list_in_full(node.text);
      if (!full.empty()) {
        error("C0206", "`" + path + "` takes a list, not the text `" + shown(node.text) + "`", node,
              "write " + full)
            .replace(node.location, full);
        return std::nullopt;
      }
    }
    if (node.kind == Node::Kind::scalar && field_.scalar_ok) {
      if (node.text.find(',') != std::string::npos && !node.quoted &&
          type.element->kind != Type::Kind::text && type.element->kind != Type::Kind::path) {
        comma(node, path, true);
        return std::nullopt;
      }
      auto item = run(*type.element, node, path);
      if (!item || type.one_or_more) return item;
      result.items.push_back(std::move(*item));
      return result;
    }
    if (node.kind != Node::Kind::list) {
      const bool scalar = node.kind == Node::Kind::scalar;
      if (scalar && node.text.find(',') != std::string::npos && !node.quoted) {
        comma(node, path, true);
      } else {
        error("C0206", "`" + path + "` takes a list, not " + node_kind(node), node,
              scalar ? "write [" + shown(node.text) + "]" + append_help(node, path) : "");
      }
      return std::nullopt;
    }
    bool good = !type.one_or_more || !node.items.empty();
    if (!good) error("C0206", "`" + path + "` is an empty list", node, "it takes one value or more");
    for (size_t i = 0; i < node.items.size(); ++i) {
      auto item = run(*type.element, node.items[i], path + "[" + std::to_string(i) + "]");
      if (item)
        result.items.push_back(std::move(*item));
      else
        good = false;
    }
    if (good && type.element->kind == Type::Kind::record && !type.element->record->id_field.empty())
      good = unique_ids(result, node, path, *type.element->record);
    if (!good) return std::nullopt;
    return type.one_or_more && result.items.size() == 1 ? std::move(result.items[0]) : result;
  }

  bool unique_ids(const Value& list, const Node& node, const std::string& path, const RecordInfo& record) {
    for (size_t i = 0; i < list.items.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        const auto id = [&](size_t k) -> const std::string* {
          for (size_t f = 0; f < list.items[k].keys.size(); ++f)
            if (list.items[k].keys[f] == record.id_field) return &list.items[k].items[f].text;
          return nullptr;
        };
        const std::string *a = id(i), *b = id(j);
        if (!a || !b || a->empty() || *a != *b) continue;
        error("C0206", "`" + path + "` has two items with " + record.id_field + " `" + *a + "`",
              node.items[i])
            .related(node.items[j].location, "the first one");
        return false;
      }
    }
    return true;
  }

  std::optional<Value> map(const Type& type, const Node& node, const std::string& path) {
    if (node.kind != Node::Kind::map) {
      error("C0206", "`" + path + "` takes a mapping, not " + node_kind(node), node, "write {key: value}");
      return std::nullopt;
    }
    Value result = Value::map();
    bool good = true;
    for (size_t i = 0; i < node.items.size(); ++i) {
      const size_t opens = node.keys[i].find("${");
      if (opens != std::string::npos && node.keys[i].find('}', opens) != std::string::npos) {
        auto& warning =
            error("C0605", "`" + shown(node.keys[i]) + "` is a key, and keys are taken as written", node,
                  "only values are interpolated; write the key itself");
        if (i < node.key_locations.size()) warning.location = node.key_locations[i];
        warning.level = Level::warning;
        warning.name = "interpolated_key";
      }
      auto item = run(*type.element, node.items[i], path + "." + node.keys[i]);
      if (item)
        result.add(node.keys[i], std::move(*item));
      else
        good = false;
    }
    if (!good) return std::nullopt;
    return result;
  }

  std::optional<Value> record(const Type& type, const Node& node, const std::string& path) {
    const RecordInfo& info = *type.record;
    if (node.kind != Node::Kind::map) {
      error("C0206", "`" + path + "` takes a mapping, not " + node_kind(node), node);
      return std::nullopt;
    }
    Value result = Value::map();
    bool good = true;
    std::vector<std::string> names;
    for (const auto& field : info.fields) names.push_back(field.name);
    for (size_t i = 0; i < node.items.size(); ++i) {
      const FieldInfo* field = info.find(node.keys[i]);
      for (const auto& candidate : info.fields)
        if (!field && std::find(candidate.aliases.begin(), candidate.aliases.end(), node.keys[i]) !=
                          candidate.aliases.end())
          field = &candidate;
      if (!field) {
        auto& problem = error("C0102", "unknown key `" + path + "." + shown(node.keys[i]) + "`", node);
        problem.location = node.key_locations[i];
        const auto near = near_matches(node.keys[i], names);
        for (const auto& name : near) problem.help("a field with a similar name exists: `" + name + "`");
        if (near.size() == 1) problem.replace(node.key_locations[i], near[0]);
        good = false;
        continue;
      }
      Converter inner(*field, context_);
      auto value = inner.run(*field->type, node.items[i], path + "." + field->name);
      if (value)
        result.add(field->name, std::move(*value));
      else
        good = false;
    }
    for (const auto& field : info.fields) {
      if (!field.required ||
          std::find(result.keys.begin(), result.keys.end(), field.name) != result.keys.end())
        continue;
      if (good) error("C0210", "`" + path + "` lacks `" + field.name + "`", node, field.doc);
      good = false;
    }
    if (!good) return std::nullopt;
    return result;
  }

  void comma(const Node& node, const std::string& path, bool list) {
    std::vector<std::string> helps;
    // `0,001` was meant as 0.001, and `1,024` as 1024.
    TextProblem decimal;
    const Type::Kind kind = (field_.type->one_or_more ? field_.type->element : field_.type)->kind;
    if (kind == Type::Kind::real) real_from_text(node.text, field_, decimal);
    if (kind == Type::Kind::integer) integer_from_text(node.text, field_.form, decimal);
    if (decimal.help.starts_with("write ")) helps.push_back(decimal.help);
    if (list) helps.push_back("use `[" + shown(node.text) + "]` for a list");
    if (on_command_line(node))
      helps.push_back("for a trial of each value: `capstan sweep plan RECIPE " + path + "=" +
                      shown(node.text) + "`");
    auto& problem =
        error("C0201",
              "`" + shown(node.text) + "` is not " + (list ? "a list" : "one value") + " for `" + path + "`",
              node, join(helps, "; "));
    if (!decimal.replacement.empty()) problem.replace(node.location, decimal.replacement);
  }

  // Python's None is a text here, and hardly the name of a directory.
  void none_as_text(const Type& type, const Node& node, const std::string& path) {
    if (node.quoted || node.raw || !type.optional || (node.text != "None" && node.text != "none")) return;
    auto& warning = error("C0601", "`" + path + "` is the text `" + node.text + "`", node,
                          "to leave it unset write `null`; for the text write it in quotes");
    warning.level = Level::warning;
    warning.name = "none_as_text";
  }

  std::optional<Value> scalar(const Type& type, const Node& node, const std::string& path) {
    const std::string& text = node.text;
    const bool numeric =
        type.kind == Type::Kind::boolean || type.kind == Type::Kind::integer || type.kind == Type::Kind::real;
    const bool unit = type.kind == Type::Kind::bytes || type.kind == Type::Kind::duration;
    if (node.quoted && (numeric || (unit && !text.empty() &&
                                    text.find_first_not_of("0123456789.+-_eE") == std::string::npos))) {
      // "0,001" was meant as 0.001.
      TextProblem decimal;
      if (type.kind == Type::Kind::real) real_from_text(text, field_, decimal);
      const std::string number = decimal.replacement.empty() ? text : decimal.replacement;
      auto& problem = error("C0204", "`" + path + "` takes " + type_text(type, field_) + ", not quoted text",
                            node, "remove the quotes: " + shown(number));
      problem.replace(node.location, number);
      return std::nullopt;
    }
    if (text.empty() && type.kind == Type::Kind::secret && node.quoted) return Value::of(std::string());
    if (text.empty() && type.kind != Type::Kind::text && type.kind != Type::Kind::path) {
      error("C0203", "`" + path + "` has no value", node, "it takes " + type_text(type, field_));
      return std::nullopt;
    }
    if (numeric || unit || type.kind == Type::Kind::enumeration) {
      const bool list_like = text.find(',') != std::string::npos && on_command_line(node);
      const bool known = type.kind == Type::Kind::enumeration && type.names->find(text);
      if (list_like && !known) {
        comma(node, path, false);
        return std::nullopt;
      }
    }
    TextProblem problem;
    std::optional<Value> result;
    switch (type.kind) {
      case Type::Kind::boolean:
        return boolean(node, path);
      case Type::Kind::integer:
        if (const auto value = integer_from_text(text, field_.form, problem)) result = Value::of(*value);
        break;
      case Type::Kind::real:
        if (const auto value = real_from_text(text, field_, problem)) result = Value::of(*value);
        break;
      case Type::Kind::bytes:
        if (const auto value = bytes_from_text(text, problem)) result = Value::of(*value);
        break;
      case Type::Kind::duration:
        if (const auto value = duration_from_text(text, field_.duration_unit, problem))
          result = Value::of(*value);
        break;
      case Type::Kind::text:
        none_as_text(type, node, path);
        return Value::of(text);
      case Type::Kind::enumeration:
        return enumeration(type, node, path);
      case Type::Kind::path:
        none_as_text(type, node, path);
        return file_path(node);
      case Type::Kind::secret:
        return secret(node, path);
      default:
        return std::nullopt;
    }
    if (!result || problem.warning) {
      auto& reported =
          error("C0201",
                "`" + shown(text) + "` " + (problem.message.empty() ? "is not a value" : problem.message) +
                    " (`" + path + "` takes " + type_text(type, field_) + ")",
                node, problem.help);
      if (!problem.replacement.empty()) reported.replace(node.location, problem.replacement);
      if (problem.warning) {
        reported.level = Level::warning;
        reported.name = "underflow";
      }
    }
    return result;
  }

  // How an item is appended where this value is written. Only fields of a recipe can be appended to.
  std::string append_help(const Node& node, const std::string& path) const {
    if (field_.path.empty()) return {};
    return "; to append an item: " + (on_command_line(node) ? path + "+=" + shown(node.text)
                                                            : field_.name + "+: [" + shown(node.text) + "]");
  }

  bool on_command_line(const Node& node) const {
    return node.location.known() &&
           (*context_.sources)[static_cast<size_t>(node.location.source)].kind == Source::Kind::cli;
  }

  std::optional<Value> boolean(const Node& node, const std::string& path) {
    const std::string word = lower_case(node.text);
    if (word == "true" || word == "false") return Value::of(word == "true");
    static constexpr std::string_view yes[] = {"yes", "on", "y", "1", "enable", "enabled"};
    static constexpr std::string_view no[] = {"no", "off", "n", "0", "disable", "disabled"};
    std::string help = "write true or false";
    std::string meant;
    for (const auto candidate : yes)
      if (word == candidate) meant = "true";
    for (const auto candidate : no)
      if (word == candidate) meant = "false";
    if (!meant.empty()) help = "write " + meant;
    auto& problem =
        error("C0201", "`" + shown(node.text) + "` is not a boolean (`" + path + "` takes true or false)",
              node, help);
    if (!meant.empty()) problem.replace(node.location, meant);
    return std::nullopt;
  }

  std::optional<Value> enumeration(const Type& type, const Node& node, const std::string& path) {
    if (const auto* entry = type.names->find(node.text)) return Value::of(std::string(entry->name));
    auto& problem = error("C0207", "`" + shown(node.text) + "` is not a value of `" + path + "`", node);
    std::vector<std::string> names;
    for (const auto& entry : type.names->entries) names.emplace_back(entry.name);
    std::vector<std::string> candidates = names;
    for (const auto& entry : type.names->entries)
      for (const auto& alias : entry.aliases) candidates.push_back(alias);
    const std::string word = lower_case(node.text);
    for (const auto& candidate : candidates) {
      if (lower_case(candidate) != word) continue;
      problem.help("names are case-sensitive: write `" + candidate + "`").replace(node.location, candidate);
      return std::nullopt;
    }
    const auto near = near_matches(node.text, candidates, 2);
    if (!near.empty()) problem.help("did you mean `" + near[0] + "`?").replace(node.location, near[0]);
    if (near.size() > 1) problem.suggestions.back().machine_applicable = false;
    std::string all;
    for (size_t i = 0; i < names.size() && i < 12; ++i) all += (i ? ", " : "") + names[i];
    if (names.size() > 12) all += ", and others: `capstan explain " + path + "`";
    problem.help("one of " + all);
    return std::nullopt;
  }

  Value file_path(const Node& node) const {
    Value value = Value::of(node.text);
    if (node.text.empty()) return value;
    std::string base = node.base;
    if (base.empty() && node.location.known())
      base = (*context_.sources)[static_cast<size_t>(node.location.source)].directory;
    value.resolved = absolute_name(node.text, base);
    return value;
  }

  std::optional<Value> secret(const Node& node, const std::string& path) {
    const std::string_view text = node.text;
    if (text.starts_with("file:/")) return Value::of(std::string(text));
    for (const std::string_view prefix : {"${env:", "${oc.env:"}) {
      if (!text.starts_with(prefix) || !text.ends_with("}")) continue;
      const std::string_view name = text.substr(prefix.size(), text.size() - prefix.size() - 1);
      if (!name.empty() && name.find_first_of(",${}") == std::string_view::npos)
        return Value::of("env:" + std::string(name));
    }
    auto& problem = error("C0208", "`" + path + "` is a secret and cannot be written here", node,
                          "write ${env:NAME} or file:/path/to/secret");
    problem.label = "";
    return std::nullopt;
  }

  bool check_range(const Type& type, const Value& value, const Node& node, const std::string& path) {
    if (type.kind != Type::Kind::integer && type.kind != Type::Kind::real && type.kind != Type::Kind::bytes &&
        type.kind != Type::Kind::duration)
      return true;
    const double number = value.number();
    const auto refuse = [&](std::string message, std::string help) {
      error("C0202", "`" + path + "` is " + shown(node.text) + ": " + message, node, std::move(help));
      return false;
    };
    if (std::isnan(number)) return true;
    if (field_.form == NumberForm::fraction && field_.max == 1.0 && number > 1 && number <= 100 &&
        node.text.find('%') == std::string::npos)
      return refuse("a fraction is at most 1", "write " + to_text(number / 100) + " or " + node.text + "%");
    if (field_.min && (number < *field_.min || (field_.min_open && number == *field_.min)))
      return refuse(
          std::string("it must be ") + (field_.min_open ? "above " : "at least ") + number_text(*field_.min),
          field_.range_help);
    if (field_.max && (number > *field_.max || (field_.max_open && number == *field_.max)))
      return refuse(
          std::string("it must be ") + (field_.max_open ? "below " : "at most ") + number_text(*field_.max),
          field_.range_help);
    if (!field_.one_of.empty() && type.kind == Type::Kind::integer &&
        std::find(field_.one_of.begin(), field_.one_of.end(), value.integer) == field_.one_of.end())
      return refuse("it must be " + range_text(field_), "");
    if (field_.multiple_of > 1 && type.kind == Type::Kind::integer &&
        value.integer % field_.multiple_of != 0) {
      const int64_t below = value.integer / field_.multiple_of * field_.multiple_of;
      return refuse("it must be a multiple of " + std::to_string(field_.multiple_of),
                    "nearest: " + (below > 0 ? std::to_string(below) + " and " : "") +
                        std::to_string(below + field_.multiple_of));
    }
    return true;
  }

  const FieldInfo& field_;
  const ConvertContext& context_;
  std::string node_label_;
};

}  // namespace

std::optional<Value> convert(const FieldInfo& field, const Node& node, const std::string& path,
                             const ConvertContext& context) {
  return Converter(field, context).run(*field.type, node, path);
}

std::string range_text(const FieldInfo& field) {
  if (!field.one_of.empty()) {
    std::string out = "one of ";
    for (size_t i = 0; i < field.one_of.size(); ++i) out += (i ? ", " : "") + std::to_string(field.one_of[i]);
    return out;
  }
  std::string out;
  if (field.min && field.max && !field.min_open && !field.max_open)
    out = "from " + number_text(*field.min) + " to " + number_text(*field.max);
  else {
    if (field.min) out = (field.min_open ? "above " : "at least ") + number_text(*field.min);
    if (field.max)
      out += (out.empty() ? "" : " and ") + std::string(field.max_open ? "below " : "at most ") +
             number_text(*field.max);
  }
  if (field.multiple_of > 1)
    out += (out.empty() ? "" : ", ") + std::string("a multiple of ") + std::to_string(field.multiple_of);
  return out;
}

std::string type_text(const Type& type, const FieldInfo& field) {
  const auto ranged = [&](std::string what) {
    const std::string range = range_text(field);
    return range.empty() ? what : what + " " + range;
  };
  switch (type.kind) {
    case Type::Kind::boolean:
      return "true or false";
    case Type::Kind::integer:
      return field.one_of.empty() ? ranged("an integer") : range_text(field);
    case Type::Kind::real:
      return ranged(field.form == NumberForm::fraction ? "a fraction" : "a number");
    case Type::Kind::text:
      return "text";
    case Type::Kind::enumeration: {
      std::string out = "one of ";
      for (size_t i = 0; i < type.names->entries.size(); ++i)
        out += (i ? ", " : "") + std::string(type.names->entries[i].name);
      return out;
    }
    case Type::Kind::path:
      return "a path";
    case Type::Kind::bytes:
      return ranged("a number of bytes");
    case Type::Kind::duration:
      return "a duration";
    case Type::Kind::secret:
      return "a reference to a secret";
    case Type::Kind::list:
      return "a list of values, each " + type_text(*type.element, field);
    case Type::Kind::map:
      return "a mapping of names to values, each " + type_text(*type.element, field);
    case Type::Kind::record:
      return "a mapping";
  }
  return "a value";
}

}  // namespace capstan::config
