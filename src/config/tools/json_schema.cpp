#include "config/tools/json_schema.hpp"

#include <algorithm>
#include <functional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.hpp"
#include "base/text.hpp"
#include "config/core/convert.hpp"
#include "config/core/emit.hpp"

namespace capstan::config {

namespace {

// The text of a schema: indented by two blanks, with lists of plain values on one line.
std::string schema_text(const OrderedJson& value, int level = 0) {
  const bool one_line = !value.is_object() && std::none_of(value.begin(), value.end(), [](const auto& item) {
    return item.is_structured();
  });
  if (!value.is_structured() || value.empty()) return dump_json(value);
  const std::string blank(static_cast<size_t>(2 * level + 2), ' ');
  std::string out(1, value.is_object() ? '{' : '[');
  bool first = true;
  for (const auto& [key, item] : value.items()) {
    out += one_line ? (first ? "" : ", ") : (first ? "\n" : ",\n") + blank;
    if (value.is_object()) out += in_quotes(key) + ": ";
    out += schema_text(item, level + 1);
    first = false;
  }
  if (!one_line) out += "\n" + std::string(static_cast<size_t>(2 * level), ' ');
  return out + (value.is_object() ? '}' : ']');
}

// An integral limit as an integer: 1, not 1.0.
OrderedJson number(double value) {
  return ordered_json_of(to_text(value));
}

OrderedJson default_value(const FieldInfo& field) {
  return ordered_json_of(json(*field.type, field.default_value));
}

std::string regex(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (std::string_view("\\^$.|?*+()[]{}").find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

OrderedJson type_schema(OrderedJson type) {
  OrderedJson schema;
  schema["type"] = std::move(type);
  return schema;
}

// Allows any value for the keys that match the pattern.
OrderedJson any_value_of(const std::string& pattern) {
  OrderedJson schema;
  schema[pattern] = OrderedJson::object();
  return schema;
}

OrderedJson string_pattern(std::string_view pattern) {
  return {{"type", "string"}, {"pattern", pattern}};
}

// Texts that many fields accept, as definitions that every file has.
constexpr std::pair<std::string_view, std::string_view> kTextDefinitions[] = {
    {"interpolation", "\\$\\{"},
    {"count", "^[+-]?[0-9][0-9_]*(\\.[0-9]*)?([eE][+-]?[0-9]+)?([kMBGT]|[KMGT]i)?$"},
    {"grouped_digits", "^[+-]?[0-9]+(_[0-9]+)+$"},
    // YAML 1.1 reads 1e-4 as text.
    {"real", "^[+-]?([0-9][0-9_]*\\.?[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?$"},
    {"fraction", "^[+-]?([0-9][0-9_]*\\.?[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?%?$"},
};

OrderedJson text_ref(std::string_view name) {
  return {{"$ref", "#/$defs/" + std::string(name)}};
}

void add_text_definitions(OrderedJson& definitions) {
  for (const auto& [name, pattern] : kTextDefinitions)
    definitions[std::string(name)] = string_pattern(pattern);
}

// Returns the JSON pointer to the definition of a field in the file. Empty: the file does not define it.
using FieldPointer = std::function<std::string(const FieldInfo& field)>;

void add_limits(OrderedJson& schema, const FieldInfo& field) {
  if (field.min) schema[field.min_open ? "exclusiveMinimum" : "minimum"] = number(*field.min);
  if (field.max) schema[field.max_open ? "exclusiveMaximum" : "maximum"] = number(*field.max);
  if (field.multiple_of > 1) schema["multipleOf"] = field.multiple_of;
  if (!field.one_of.empty()) schema["enum"] = field.one_of;
}

OrderedJson record_schema(const RecordInfo& record);

std::vector<OrderedJson> forms(const Type& type, const FieldInfo& field);

std::vector<OrderedJson> number_forms(const Type& type, const FieldInfo& field) {
  const bool real = type.kind == Type::Kind::real;
  std::vector<OrderedJson> out(1);
  out[0]["type"] = real ? "number" : "integer";
  add_limits(out[0], field);
  if (type.kind == Type::Kind::bytes)
    out.push_back(string_pattern("^[0-9][0-9_]*(\\.[0-9]+)?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$"));
  else if (!real && field.form == NumberForm::hex)
    out.push_back(string_pattern("^0[xX][0-9a-fA-F]+$"));
  else if (!real)
    out.push_back(text_ref(field.form == NumberForm::tokens ? "grouped_digits" : "count"));
  else if (field.form == NumberForm::count)
    out.push_back(
        string_pattern("^[+-]?([0-9][0-9_]*\\.?[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?([kMBGT]|[KMGT]i)?$"));
  else
    out.push_back(text_ref(field.form == NumberForm::fraction ? "fraction" : "real"));
  if (real && (field.allow_inf || field.allow_nan))
    out.push_back(string_pattern("^[+-]?\\.?([iI]nf|[nN]a[nN]|NAN|INF)$"));
  return out;
}

OrderedJson enumeration_form(const EnumTable& table) {
  OrderedJson schema, docs;
  for (const auto& entry : table.entries) {
    schema["enum"].push_back(entry.name);
    for (const auto& alias : entry.aliases) schema["enum"].push_back(alias);
    if (!entry.doc.empty()) docs[std::string(entry.name)] = entry.doc;
  }
  if (!docs.empty()) schema["x-enum-docs"] = docs;
  return schema;
}

// The forms of one item, interpolation included.
OrderedJson item_schema(const Type& element, const FieldInfo& field) {
  OrderedJson schema;
  schema["anyOf"] = forms(element, field);
  schema["anyOf"].push_back(text_ref("interpolation"));
  return schema;
}

// The forms in which a value of this type may be written, except null and `${…}`.
std::vector<OrderedJson> forms(const Type& type, const FieldInfo& field) {
  switch (type.kind) {
    case Type::Kind::boolean:
      return {type_schema("boolean")};
    case Type::Kind::integer:
    case Type::Kind::real:
    case Type::Kind::bytes:
      return number_forms(type, field);
    case Type::Kind::duration: {
      std::vector<OrderedJson> out;
      if (!field.duration_unit.empty()) out.push_back(type_schema("number"));
      out.push_back(string_pattern("^([0-9][0-9_]*(\\.[0-9]+)?(ms|s|m|h|d))+$"));
      return out;
    }
    case Type::Kind::text:
      // Text is taken as written: 007 and 2026-11-21 are text, too.
      return {type_schema({"string", "number", "boolean"})};
    case Type::Kind::path:
      return {type_schema("string")};
    case Type::Kind::secret:
      return {string_pattern("^(\\$\\{(oc\\.)?env:[A-Za-z_][A-Za-z0-9_]*\\}|file:/.*)$")};
    case Type::Kind::enumeration:
      return {enumeration_form(*type.names)};
    case Type::Kind::list: {
      std::vector<OrderedJson> out = {type_schema("array")};
      out[0]["items"] = item_schema(*type.element, field);
      if (type.one_or_more) out[0]["minItems"] = 1;
      if (field.scalar_ok)
        for (auto& form : forms(*type.element, field)) out.push_back(std::move(form));
      return out;
    }
    case Type::Kind::map: {
      OrderedJson schema = type_schema("object");
      schema["additionalProperties"] = item_schema(*type.element, field);
      return {std::move(schema)};
    }
    case Type::Kind::record:
      return {record_schema(*type.record)};
  }
  return {};
}

OrderedJson field_schema(const FieldInfo& field, const std::string& description) {
  OrderedJson schema;
  schema["description"] = description;
  OrderedJson& any = schema["anyOf"] = forms(*field.type, field);
  if (field.type->optional) any.push_back(type_schema("null"));
  if (field.type->kind != Type::Kind::secret) any.push_back(text_ref("interpolation"));
  if (!field.required) schema["default"] = default_value(field);
  if (!field.examples.empty()) schema["examples"] = field.examples;
  if (!field.deprecated.empty()) schema["deprecated"] = true;
  if (!field.unit.empty()) schema["x-unit"] = field.unit;
  schema["x-effect"] = enum_name(field.effect);
  schema["x-since"] = field.since;
  if (!field.formula.empty()) schema["x-derived"] = field.formula;
  return schema;
}

OrderedJson record_schema(const RecordInfo& record) {
  OrderedJson schema = type_schema("object"), required;
  for (const auto& field : record.fields) {
    schema["properties"][field.name] = field_schema(field, field.doc);
    if (field.required) required.push_back(field.name);
  }
  if (!required.empty()) schema["required"] = required;
  schema["additionalProperties"] = false;
  return schema;
}

bool appends(const FieldInfo& field) {
  return field.type->kind == Type::Kind::list || field.type->kind == Type::Kind::map;
}

// Every spelling under which a section accepts a field: its own names, short forms, names that belong to
// other sections. The second and further spellings refer to the definition of the field.
OrderedJson section_properties(const Schema& schema, const std::string& section,
                               const FieldPointer& pointer) {
  OrderedJson properties = OrderedJson::object();
  std::set<std::string> seen;
  const auto add = [&](const std::string& name, const FieldInfo& field, bool alias) {
    if (!seen.insert(name).second) return;
    const std::string text = alias ? field.doc + " (another name of `" + field.path + "`)" : field.doc;
    const std::string defined = pointer(field);
    if (alias && !defined.empty())
      properties[name] = {{"description", text}, {"$ref", defined}};
    else
      properties[name] = field_schema(field, text);
    if (!appends(field)) return;
    std::vector<OrderedJson> items;
    if (defined.empty())
      items = forms(*field.type, field);
    else
      items.push_back({{"$ref", defined}});
    if (field.type->kind == Type::Kind::list && !field.scalar_ok)
      for (auto& form : forms(*field.type->element, field)) items.push_back(std::move(form));
    properties[name + "+"] = {{"description", "adds to `" + field.path + "`"}, {"anyOf", items}};
  };
  for (const FieldInfo* field : schema.fields())
    if (field->section == section) add(field->name, *field, false);
  for (const FieldInfo* field : schema.fields()) {
    for (const auto* names : {&field->aliases, &field->old_names})
      for (const auto& name : *names) {
        const size_t dot = name.find('.');
        if (dot == std::string::npos ? field->section == section : name.substr(0, dot) == section)
          add(dot == std::string::npos ? name : name.substr(dot + 1), *field, true);
      }
  }
  return properties;
}

// Returns the pointer to a field in recipe.schema.json.
std::string pointer_in_recipe(const FieldInfo& field) {
  return "#/" + (field.section.empty() ? "" : "$defs/" + field.section + "/") + "properties/" + field.name;
}

OrderedJson section_object(const Schema& schema, const SectionInfo& section) {
  OrderedJson properties = section_properties(schema, section.name, pointer_in_recipe);
  if (!section.find("preset"))
    properties["preset"] = {
        {"description", "a preset of this section, whose fields yield to those written here"},
        {"type", "string"}};
  return {{"description", section.doc},
          {"type", "object"},
          {"properties", std::move(properties)},
          {"additionalProperties", false}};
}

constexpr const char* kDialect = "https://json-schema.org/draft/2020-12/schema";

// Adds `extends`, `unset` and `models`.
void add_lists_of_names(OrderedJson& properties, const Library& library) {
  const OrderedJson names = {{"type", "array"}, {"items", type_schema("string")}};
  OrderedJson recipe = type_schema("string");
  for (const auto methods = library.methods(); const auto& entries : {methods, library.recipes(methods)})
    for (const auto& entry : entries) recipe["examples"].push_back(entry.name);
  properties["extends"] = {{"description", "recipes to start from, by name or path; later ones win"},
                           {"anyOf", std::vector{recipe, names}}};
  properties["unset"] = {{"description", "paths that go back to preset or default"},
                         {"anyOf", std::vector{type_schema("string"), names}}};
  properties["models"] = {
      {"description", "presets of `model`, and the sections and fields that hold for each"},
      {"type", "object"},
      {"additionalProperties", type_schema("object")}};
}

// A mapping of fields, a preset or its file, or null for a section that may be switched off.
OrderedJson section_choice(const SectionInfo& section, const Library& library) {
  std::vector<OrderedJson> any = {text_ref(section.name)};
  std::vector<std::string> presets;
  for (const auto& preset : library.presets(section.name)) presets.push_back(preset.name);
  if (section.optional) presets.emplace_back("none");
  if (!presets.empty()) any.push_back({{"description", "a preset"}, {"enum", presets}});
  any.push_back(string_pattern("(/|\\.ya?ml$|^@)"));
  if (section.optional) any.push_back(type_schema("null"));
  return {{"description", section.doc}, {"anyOf", any}};
}

// The first parts of aliases that are no sections: `parallel` of `parallel.tp`.
std::set<std::string> alias_prefixes(const Schema& schema) {
  std::set<std::string> prefixes;
  for (const FieldInfo* field : schema.fields())
    for (const auto& alias : field->aliases)
      if (const size_t dot = alias.find('.');
          dot != std::string::npos && !schema.find_section(alias.substr(0, dot)))
        prefixes.insert(alias.substr(0, dot));
  return prefixes;
}

}  // namespace

std::string recipe_json_schema(const Schema& schema, const Library& library) {
  OrderedJson properties, definitions;
  properties["schema"] = {{"description", "version of the recipe format"}, {"const", "capstan/1"}};
  add_lists_of_names(properties, library);
  add_text_definitions(definitions);
  for (const auto& section : schema.sections()) {
    if (section.name.empty()) {
      for (const auto& field : section.fields) properties[field.name] = field_schema(field, field.doc);
      continue;
    }
    properties[section.name] = section_choice(section, library);
    definitions[section.name] = section_object(schema, section);
  }
  const std::set<std::string> prefixes = alias_prefixes(schema);
  for (const auto& prefix : prefixes)
    properties[prefix] = {{"description", "other names of fields"},
                          {"type", "object"},
                          {"properties", section_properties(schema, prefix, pointer_in_recipe)},
                          {"additionalProperties", false}};
  // Dotted keys are allowed at the top only; `capstan check` checks the fields that they name.
  std::string dotted;
  for (const auto& section : schema.sections())
    if (!section.name.empty()) dotted += (dotted.empty() ? "" : "|") + regex(section.name);
  for (const auto& prefix : prefixes) dotted += "|" + regex(prefix);
  const OrderedJson root = {{"$schema", kDialect},
                            {"$id", "urn:capstan:recipe:1"},
                            {"title", "Capstan recipe"},
                            {"type", "object"},
                            {"properties", std::move(properties)},
                            {"patternProperties", any_value_of("^(" + dotted + ")\\.")},
                            {"additionalProperties", false},
                            {"$defs", std::move(definitions)}};
  return schema_text(root) + "\n";
}

std::string section_json_schema(const Schema& schema, const SectionInfo& section) {
  const auto pointer = [&](const FieldInfo& field) {
    return field.section == section.name ? "#/properties/" + field.name : std::string();
  };
  OrderedJson properties = section_properties(schema, section.name, pointer);
  properties["extends"] = {{"description", "in a preset file: the preset to start from"}, {"type", "string"}};
  if (!section.find("preset"))
    properties["preset"] = {{"description", "a preset of this section"}, {"type", "string"}};
  OrderedJson definitions;
  add_text_definitions(definitions);
  const OrderedJson root = {{"$schema", kDialect},
                            {"$id", "urn:capstan:section:" + section.name + ":1"},
                            {"title", "Capstan section " + section.name},
                            {"description", section.doc},
                            {"type", "object"},
                            {"properties", std::move(properties)},
                            {"patternProperties", any_value_of("^[a-z_]+\\.")},
                            {"additionalProperties", false},
                            {"$defs", std::move(definitions)}};
  return schema_text(root) + "\n";
}

std::map<std::string, std::string> schema_files(const Schema& schema, const Library& library) {
  std::map<std::string, std::string> files;
  files["recipe.schema.json"] = recipe_json_schema(schema, library);
  for (const auto& section : schema.sections())
    if (!section.name.empty()) files[section.name + ".schema.json"] = section_json_schema(schema, section);
  return files;
}

}  // namespace capstan::config
