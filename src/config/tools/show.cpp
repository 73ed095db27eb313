#include "config/tools/show.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/core/convert.hpp"
#include "config/core/emit.hpp"
#include "config/core/merge.hpp"
#include "config/core/override.hpp"

namespace capstan::config {

namespace {

std::string one_line(std::string text) {
  for (char& c : text)
    if (is_control(c)) c = ' ';
  return text;
}

// A field is part of the output when its section is on and it exists under the section's variant.
bool present(const Schema& schema, const void* root, const FieldInfo& field) {
  const SectionInfo& section = schema.sections()[field.section_index];
  if (!section.at(root)) return false;
  if (field.variants.empty() || section.variant_field.empty()) return true;
  const std::string variant = schema.load(root, *section.find(section.variant_field)).text;
  return std::find(field.variants.begin(), field.variants.end(), variant) != field.variants.end();
}

// A value that follows from another field which takes its place. The recipe states that field and shows the
// value as a comment, so that it goes on following what an override changes.
bool given_otherwise(const Schema& schema, const void* root, const Resolved& resolved,
                     const SectionInfo& section, const FieldInfo& field) {
  return resolved.origin(field.path).kind == Origin::Kind::derived &&
         std::any_of(section.fields.begin(), section.fields.end(), [&](const FieldInfo& other) {
           return other.instead_of == field.path && !schema.load(root, other).is_null();
         });
}

// A preset's value that another field switches off. As an own value of a recipe it would be an error.
bool without_effect(const Schema& schema, const void* root, const Resolved& resolved,
                    const SectionInfo& section, const FieldInfo& field) {
  if (field.effect != Effect::math || resolved.origin(field.path).kind == Origin::Kind::derived ||
      schema.load(root, field) == field.default_value)
    return false;
  const auto unmet = [&](const Condition& condition) { return !condition.holds(root); };
  return std::any_of(section.used_when.begin(), section.used_when.end(), unmet) ||
         std::any_of(field.used_when.begin(), field.used_when.end(), unmet);
}

std::string as_comment(std::string line) {
  return line.insert(line.find_first_not_of(' '), "# ");
}

// The text as written, where it says the same in other words: `4k` for 4000.
std::string written_comment(const FieldInfo& field, const Value& value, const Origin& origin) {
  if (origin.written.empty() || origin.written.size() > 60 || value.kind == Value::Kind::text) return {};
  const std::string text = scalar_text(*field.type, value);
  if (origin.written == text || value.kind == Value::Kind::boolean || value.is_null()) return {};
  if (value.kind == Value::Kind::real && field.type->type_for(value).kind == Type::Kind::real &&
      parse_double(origin.written) == value.real)
    return {};
  return "  # " + one_line(origin.written);
}

enum class Comments : unsigned char { written, origins };

std::string field_line(const Schema& schema, const void* root, const Resolved& resolved,
                       const FieldInfo& field, int indent, Comments comments, const EmitOptions& options) {
  const Value value = schema.load(root, field);
  std::string text = std::string(static_cast<size_t>(indent), ' ') + field.name + ":" +
                     yaml_block(*field.type, value, indent, options);
  const Origin& origin = resolved.origin(field.path);
  const std::string comment = comments == Comments::origins ? "  # " + one_line(origin.text) +
                                                                  (origin.environment ? " (environment)" : "")
                                                            : written_comment(field, value, origin);
  if (!comment.empty()) text.insert(text.find('\n'), comment);
  return text;
}

std::string recipe_text(const Schema& schema, const void* root, const Resolved& resolved, Comments comments,
                        const EmitOptions& options) {
  std::string out = "schema: capstan/1\n";
  for (const auto& section : schema.sections()) {
    const int indent = section.name.empty() ? 0 : 2;
    if (!section.at(root)) {
      out += section.name + ": null\n";
      continue;
    }
    std::string lines;
    for (const auto& field : section.fields) {
      if (!present(schema, root, field)) continue;
      if (!field.deprecated.empty() && schema.load(root, field) == field.default_value) continue;
      if (without_effect(schema, root, resolved, section, field)) continue;
      EmitOptions of_field = options;
      // The field may be a template's name, which has no directory.
      if (field.path == "tokenizer.chat_template") of_field.directory.clear();
      const std::string line = field_line(schema, root, resolved, field, indent, comments, of_field);
      lines += given_otherwise(schema, root, resolved, section, field) ? as_comment(line) : line;
    }
    if (!section.name.empty()) out += lines.empty() ? section.name + ": {}\n" : section.name + ":\n";
    out += lines;
  }
  return out;
}

// A field of the recipe's delta, as it was written where that holds more than the value.
std::string own_line(const Schema& schema, const void* root, const Resolved& resolved, const FieldInfo& field,
                     int indent) {
  const std::string& written = resolved.delta.fields.at(field.path);
  if (!written.empty())
    return std::string(static_cast<size_t>(indent), ' ') + field.name + ": " +
           (written == "null" ? written : yaml_text(written)) + "\n";
  EmitOptions options;
  // A chat template may be a name instead of a file.
  if (field.path != "tokenizer.chat_template") options.directory = resolved.delta.directory;
  const Value value = schema.load(root, field);
  // A list of one item is written without brackets.
  if (field.scalar_ok && value.kind == Value::Kind::list && value.items.size() == 1 &&
      !resolved.origin(field.path).written.empty())
    return std::string(static_cast<size_t>(indent), ' ') + field.name + ": " +
           yaml_inline(*field.type->element, value.items[0], options) + "\n";
  return field_line(schema, root, resolved, field, indent, Comments::written, options);
}

std::string list_text(const std::vector<std::string>& items) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ", ") + yaml_text(item, true);
  return items.size() == 1 ? items[0] : "[" + text + "]";
}

std::string minimal_text(const Schema& schema, const void* root, const Resolved& resolved) {
  const RecipeDelta& delta = resolved.delta;
  std::string out = "schema: capstan/1\n";
  if (!delta.extends.empty()) out += "extends: " + list_text(delta.extends) + "\n";
  if (!delta.unset.empty()) out += "unset: " + list_text(delta.unset) + "\n";
  for (const auto& section : schema.sections()) {
    const int indent = section.name.empty() ? 0 : 2;
    const auto choice = delta.sections.find(section.name);
    std::string lines;
    if (section.at(root))
      for (const auto& field : section.fields)
        if (delta.fields.count(field.path) && present(schema, root, field))
          lines += own_line(schema, root, resolved, field, indent);
    if (section.name.empty()) {
      out += lines;
    } else if (choice == delta.sections.end() || (choice->second == "{}" && !lines.empty())) {
      if (!lines.empty()) out += section.name + ":\n" + lines;
    } else {
      const bool preset = choice->second != "{}" && choice->second != "null";
      const std::string name = preset ? yaml_text(choice->second) : choice->second;
      out += section.name + (lines.empty() ? ": " + name + "\n" : ":\n  preset: " + name + "\n" + lines);
    }
  }
  return out;
}

// A node of the schema: the root, a section, or a field and a path below it.
struct SchemaNode {
  const SectionInfo* section = nullptr;
  const FieldInfo* field = nullptr;
  std::vector<Segment> rest;
};

SchemaNode find_node(const Schema& schema, const std::string& path) {
  SchemaNode node;
  if (path.empty()) return node;
  std::vector<Diagnostic> problems;
  const auto parsed = parse_path(path, {}, problems);
  if (!parsed)
    fail(ErrorCode::usage, "`" + path + "` is not a path: " + problems.back().message,
         problems.back().helps.empty() ? "" : problems.back().helps[0]);
  const auto& segments = parsed->segments;
  node.section = segments.size() == 1 ? schema.find_section(segments[0].name) : nullptr;
  if (node.section) return node;
  std::string spelling;
  for (size_t i = 0; i < segments.size() && i < 2; ++i) {
    spelling += (i ? "." : "") + segments[i].name;
    node.field = schema.find_spelling(spelling);
    if (!node.field) continue;
    node.rest.assign(segments.begin() + static_cast<std::ptrdiff_t>(i) + 1, segments.end());
    return node;
  }
  const bool in_section = segments.size() > 1;
  const Diagnostic problem =
      unknown_key(schema, in_section ? segments[0].name : "", segments[in_section ? 1 : 0].name, {});
  std::string help;
  for (const auto& line : problem.helps) help += (help.empty() ? "" : "; ") + line;
  fail(ErrorCode::usage, "there is no field `" + path + "`", help);
}

struct TypedValue {
  const Type* type;
  Value value;
};
TypedValue descend(const FieldInfo& field, Value value, const std::vector<Segment>& rest,
                   const std::string& path) {
  const Type* type = field.type;
  for (const auto& segment : rest) {
    const Value* inner = nullptr;
    const Type* inner_type = type->element;
    if (value.kind == Value::Kind::list && segment.kind == Segment::Kind::index) {
      const auto size = static_cast<long long>(value.items.size());
      const long long at = segment.index < 0 ? size + segment.index : segment.index;
      if (at >= 0 && at < size) inner = &value.items[static_cast<size_t>(at)];
    } else if (value.kind == Value::Kind::list && segment.kind == Segment::Kind::id) {
      for (const auto& item : value.items)
        for (size_t i = 0; i < item.keys.size(); ++i)
          if (item.keys[i] == segment.name && item.items[i].text == segment.text) inner = &item;
    } else if (value.kind == Value::Kind::map) {
      for (size_t i = 0; i < value.keys.size(); ++i)
        if (value.keys[i] == segment.name) inner = &value.items[i];
      if (type->record && type->record->find(segment.name))
        inner_type = type->record->find(segment.name)->type;
    }
    if (!inner)
      fail(ErrorCode::usage, "`" + path + "` names nothing",
           "`" + field.path + "` is " + yaml_inline(*field.type, value));
    Value copy = *inner;
    value = std::move(copy);
    type = inner_type;
  }
  return {type, std::move(value)};
}

std::string json_section(const Schema& schema, const void* root, const SectionInfo& section, int level) {
  if (!section.at(root)) return "null";
  std::string out = "{";
  bool first = true;
  for (const auto& field : section.fields) {
    if (!present(schema, root, field)) continue;
    out += std::string(first ? "" : ",") + "\n" + std::string(static_cast<size_t>(2 * level + 2), ' ') +
           in_quotes(field.name) + ": " + json(*field.type, schema.load(root, field), 2, level + 1);
    first = false;
  }
  return out + "\n" + std::string(static_cast<size_t>(2 * level), ' ') + "}";
}

std::string json_all(const Schema& schema, const void* root) {
  std::string out = "{";
  bool first = true;
  const auto member = [&](const std::string& name, const std::string& value) {
    out += std::string(first ? "" : ",") + "\n  " + in_quotes(name) + ": " + value;
    first = false;
  };
  for (const auto& section : schema.sections()) {
    if (!section.name.empty()) {
      member(section.name, json_section(schema, root, section, 1));
      continue;
    }
    for (const auto& field : section.fields)
      member(field.name, json(*field.type, schema.load(root, field), 2, 1));
  }
  return out + "\n}\n";
}

std::string origin_lines(const Schema& schema, const void* root, const Resolved& resolved,
                         const SchemaNode& node) {
  std::string out;
  const EmitOptions options;
  for (const FieldInfo* field : schema.fields()) {
    if (node.field && field != node.field) continue;
    if (node.section && field->section_index != node.section->index) continue;
    if (!present(schema, root, *field)) continue;
    const Origin& origin = resolved.origin(field->path);
    std::string line = field->path + ": " + yaml_inline(*field->type, schema.load(root, *field), options);
    if (line.size() < 56) line.append(56 - line.size(), ' ');
    line += "  # " + one_line(origin.text);
    const std::string written = written_comment(*field, schema.load(root, *field), origin);
    if (!written.empty()) line += ", written" + written.substr(3);
    if (origin.environment) line += " (environment)";
    out += line + "\n";
  }
  return out;
}

}  // namespace

std::string show(const Schema& schema, const void* root, const Resolved& resolved,
                 const ShowOptions& options) {
  const SchemaNode node = find_node(schema, options.path);
  EmitOptions emit;
  if (options.format == ShowFormat::origin) return origin_lines(schema, root, resolved, node);
  if (node.field) {
    const TypedValue part = descend(*node.field, schema.load(root, *node.field), node.rest, options.path);
    if (options.format == ShowFormat::json) return json(*part.type, part.value, 2) + "\n";
    return yaml_inline(*part.type, part.value, emit) + "\n";
  }
  if (node.section) {
    if (options.format == ShowFormat::json) return json_section(schema, root, *node.section, 0) + "\n";
    if (!node.section->at(root)) return "null\n";
    std::string out;
    for (const auto& field : node.section->fields)
      if (!present(schema, root, field))
        continue;
      else if (options.format != ShowFormat::minimal)
        out += field_line(schema, root, resolved, field, 0, Comments::written, emit);
      else if (resolved.delta.fields.count(field.path))
        out += own_line(schema, root, resolved, field, 0);
    return out.empty() ? "{}\n" : out;
  }
  switch (options.format) {
    case ShowFormat::json:
      return json_all(schema, root);
    case ShowFormat::minimal:
      return minimal_text(schema, root, resolved);
    default:
      // Relative to the recipe, whichever file that it extends has the path.
      emit.directory = resolved.delta.directory;
      return recipe_text(schema, root, resolved, Comments::written, emit);
  }
}
std::string show(const Resolution& resolution, const ShowOptions& options) {
  return show(schema(), &resolution.config, resolution, options);
}

std::string resolved_recipe(const Schema& schema, const void* root, const Resolved& resolved) {
  EmitOptions options;
  options.absolute_paths = true;
  return recipe_text(schema, root, resolved, Comments::origins, options);
}
std::string resolved_recipe(const Resolution& resolution) {
  return resolved_recipe(schema(), &resolution.config, resolution);
}

std::vector<Change> diff(const Schema& schema, const void* before_root, const Resolved& before,
                         const void* after_root, const Resolved& after) {
  std::vector<Change> changes;
  for (const FieldInfo* field : schema.fields()) {
    const bool was = present(schema, before_root, *field), is = present(schema, after_root, *field);
    if (!was && !is) continue;
    const Value a = schema.load(before_root, *field), b = schema.load(after_root, *field);
    if (was == is && a == b) continue;
    changes.push_back({field->path, field->effect, was ? yaml_inline(*field->type, a) : "",
                       is ? yaml_inline(*field->type, b) : "", was ? before.origin(field->path).text : "",
                       is ? after.origin(field->path).text : ""});
  }
  std::stable_sort(changes.begin(), changes.end(),
                   [](const Change& a, const Change& b) { return a.effect < b.effect; });
  return changes;
}
std::vector<Change> diff(const Resolution& before, const Resolution& after) {
  return diff(schema(), &before.config, before, &after.config, after);
}

std::string render_diff(const std::vector<Change>& changes) {
  std::string out;
  for (size_t i = 0; i < changes.size(); ++i) {
    const Change& change = changes[i];
    if (i == 0 || changes[i - 1].effect != change.effect)
      out += (i ? "\n" : "") + std::string(effect_text(change.effect)) + "\n";
    const auto side = [](const std::string& value, const std::string& origin) {
      return value.empty() ? std::string("(off)") : value + "  (" + origin + ")";
    };
    out += "  " + change.path + "\n    - " + side(change.before, change.before_origin) + "\n    + " +
           side(change.after, change.after_origin) + "\n";
  }
  return out;
}

}  // namespace capstan::config
