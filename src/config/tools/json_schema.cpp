#include "config/tools/json_schema.hpp"

#include <algorithm>
#include <functional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "config/core/convert.hpp"
#include "config/tools/emit.hpp"

namespace capstan::config {

namespace {

// A JSON value under construction; members keep their order, so that the files are stable.
class Json {
 public:
  static Json object() { return Json(true); }
  static Json array() { return Json(false); }
  Json& raw(const std::string& key, std::string value) {
    members_.emplace_back(key, std::move(value));
    return *this;
  }
  Json& text(const std::string& key, std::string_view value) { return raw(key, quoted(value)); }
  Json& child(const std::string& key, const Json& value) {
    children_.emplace_back(members_.size(), value);
    members_.emplace_back(key, "");
    return *this;
  }
  Json& item(const Json& value) { return child("", value); }
  Json& item_text(std::string_view value) { return raw("", quoted(value)); }
  bool empty() const { return members_.empty(); }
  std::string print(int level = 0) const {
    const bool flat = children_.empty() && !object_;
    if (members_.empty()) return object_ ? "{}" : "[]";
    std::string out(1, object_ ? '{' : '[');
    const std::string blank(static_cast<size_t>(2 * level + 2), ' ');
    for (size_t i = 0; i < members_.size(); ++i) {
      out += flat ? (i ? ", " : "") : (i ? ",\n" : "\n") + blank;
      if (object_) out += quoted(members_[i].first) + ": ";
      const auto found = std::find_if(children_.begin(), children_.end(),
                                      [&](const auto& child) { return child.first == i; });
      out += found == children_.end() ? members_[i].second : found->second.print(level + 1);
    }
    if (!flat) out += "\n" + std::string(static_cast<size_t>(2 * level), ' ');
    return out + (object_ ? '}' : ']');
  }

 private:
  explicit Json(bool object) : object_(object) {}
  bool object_;
  std::vector<std::pair<std::string, std::string>> members_;
  std::vector<std::pair<size_t, Json>> children_;
};

std::string regex(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (std::string_view("\\^$.|?*+()[]{}").find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

Json string_pattern(std::string_view pattern) {
  return Json::object().text("type", "string").text("pattern", pattern);
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

Json text_ref(std::string_view name) {
  return Json::object().text("$ref", "#/$defs/" + std::string(name));
}

void add_text_definitions(Json& definitions) {
  for (const auto& [name, pattern] : kTextDefinitions)
    definitions.child(std::string(name), string_pattern(pattern));
}

// Where a file defines a field, as a JSON pointer; empty: not in this file.
using FieldPointer = std::function<std::string(const FieldInfo& field)>;

void add_limits(Json& schema, const FieldInfo& field) {
  if (field.min) schema.raw(field.min_open ? "exclusiveMinimum" : "minimum", to_text(*field.min));
  if (field.max) schema.raw(field.max_open ? "exclusiveMaximum" : "maximum", to_text(*field.max));
  if (field.multiple_of > 1) schema.raw("multipleOf", std::to_string(field.multiple_of));
  if (!field.one_of.empty()) {
    Json values = Json::array();
    for (const int64_t value : field.one_of) values.raw("", std::to_string(value));
    schema.child("enum", values);
  }
}

Json record_schema(const RecordInfo& record);

std::vector<Json> forms(const Type& type, const FieldInfo& field);

std::vector<Json> number_forms(const Type& type, const FieldInfo& field) {
  const bool real = type.kind == Type::Kind::real;
  Json number = Json::object().text("type", real ? "number" : "integer");
  add_limits(number, field);
  std::vector<Json> out = {number};
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

Json enumeration_form(const EnumTable& table) {
  Json names = Json::array(), docs = Json::object();
  for (const auto& entry : table.entries) {
    names.item_text(entry.name);
    for (const auto& alias : entry.aliases) names.item_text(alias);
    if (!entry.doc.empty()) docs.text(std::string(entry.name), entry.doc);
  }
  Json schema = Json::object().child("enum", names);
  if (!docs.empty()) schema.child("x-enum-docs", docs);
  return schema;
}

// The forms of one item, interpolation included.
Json item_schema(const Type& element, const FieldInfo& field) {
  Json items = Json::array();
  for (const auto& form : forms(element, field)) items.item(form);
  items.item(text_ref("interpolation"));
  return Json::object().child("anyOf", items);
}

// The forms in which a value of this type may be written, except null and `${…}`.
std::vector<Json> forms(const Type& type, const FieldInfo& field) {
  switch (type.kind) {
    case Type::Kind::boolean:
      return {Json::object().text("type", "boolean")};
    case Type::Kind::integer:
    case Type::Kind::real:
    case Type::Kind::bytes:
      return number_forms(type, field);
    case Type::Kind::duration: {
      std::vector<Json> out;
      if (!field.duration_unit.empty()) out.push_back(Json::object().text("type", "number"));
      out.push_back(string_pattern("^([0-9][0-9_]*(\\.[0-9]+)?(ms|s|m|h|d))+$"));
      return out;
    }
    case Type::Kind::text:
      // Text is taken as written: 007 and 2026-11-21 are text, too.
      return {Json::object().raw("type", "[\"string\", \"number\", \"boolean\"]")};
    case Type::Kind::path:
      return {Json::object().text("type", "string")};
    case Type::Kind::secret:
      return {string_pattern("^(\\$\\{(oc\\.)?env:[A-Za-z_][A-Za-z0-9_]*\\}|file:/.*)$")};
    case Type::Kind::enumeration:
      return {enumeration_form(*type.names)};
    case Type::Kind::list: {
      std::vector<Json> out = {
          Json::object().text("type", "array").child("items", item_schema(*type.element, field))};
      if (field.scalar_ok)
        for (auto& form : forms(*type.element, field)) out.push_back(std::move(form));
      return out;
    }
    case Type::Kind::map:
      return {Json::object()
                  .text("type", "object")
                  .child("additionalProperties", item_schema(*type.element, field))};
    case Type::Kind::record:
      return {record_schema(*type.record)};
  }
  return {};
}

Json field_schema(const FieldInfo& field, std::string description) {
  Json schema = Json::object();
  schema.text("description", description);
  Json any = Json::array();
  for (const auto& form : forms(*field.type, field)) any.item(form);
  if (field.type->optional) any.item(Json::object().text("type", "null"));
  if (field.type->kind != Type::Kind::secret) any.item(text_ref("interpolation"));
  schema.child("anyOf", any);
  if (!field.required) schema.raw("default", json(*field.type, field.default_value));
  if (!field.examples.empty()) {
    Json examples = Json::array();
    for (const auto& example : field.examples) examples.item_text(example);
    schema.child("examples", examples);
  }
  if (!field.deprecated.empty()) schema.raw("deprecated", "true");
  if (!field.unit.empty()) schema.text("x-unit", field.unit);
  schema.text("x-effect", effect_name(field.effect));
  schema.text("x-since", field.since);
  if (!field.formula.empty()) schema.text("x-derived", field.formula);
  return schema;
}

Json record_schema(const RecordInfo& record) {
  Json properties = Json::object(), required = Json::array();
  for (const auto& field : record.fields) {
    properties.child(field.name, field_schema(field, field.doc));
    if (field.required) required.item_text(field.name);
  }
  Json schema = Json::object().text("type", "object");
  schema.child("properties", properties);
  if (!required.empty()) schema.child("required", required);
  schema.raw("additionalProperties", "false");
  return schema;
}

bool appends(const FieldInfo& field) {
  return field.type->kind == Type::Kind::list || field.type->kind == Type::Kind::map;
}

// Every spelling under which a section accepts a field: its own names, short forms, names that belong to
// other sections. The second and further spellings refer to the definition of the field.
Json section_properties(const Schema& schema, const std::string& section, const FieldPointer& pointer) {
  Json properties = Json::object();
  std::set<std::string> seen;
  const auto add = [&](const std::string& name, const FieldInfo& field, bool alias) {
    if (!seen.insert(name).second) return;
    const std::string text = alias ? field.doc + " (another name of `" + field.path + "`)" : field.doc;
    const std::string defined = pointer(field);
    if (alias && !defined.empty())
      properties.child(name, Json::object().text("description", text).text("$ref", defined));
    else
      properties.child(name, field_schema(field, text));
    if (!appends(field)) return;
    Json items = Json::array();
    if (defined.empty())
      for (const auto& form : forms(*field.type, field)) items.item(form);
    else
      items.item(Json::object().text("$ref", defined));
    if (field.type->kind == Type::Kind::list && !field.scalar_ok)
      for (const auto& form : forms(*field.type->element, field)) items.item(form);
    properties.child(
        name + "+", Json::object().text("description", "adds to `" + field.path + "`").child("anyOf", items));
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

// In recipe.schema.json.
std::string pointer_in_recipe(const FieldInfo& field) {
  return "#/" + (field.section.empty() ? "" : "$defs/" + field.section + "/") + "properties/" + field.name;
}

Json section_object(const Schema& schema, const SectionInfo& section) {
  Json object = Json::object();
  object.text("description", section.doc).text("type", "object");
  Json properties = section_properties(schema, section.name, pointer_in_recipe);
  if (!section.find("preset"))
    properties.child("preset", Json::object()
                                   .text("description",
                                         "a preset of this section, whose fields yield to those written here")
                                   .text("type", "string"));
  object.child("properties", properties);
  object.raw("additionalProperties", "false");
  return object;
}

constexpr const char* kDialect = "https://json-schema.org/draft/2020-12/schema";

// `extends`, `unset` and `models`.
void add_lists_of_names(Json& properties, const Library& library) {
  const Json one = Json::object().text("type", "string");
  Json names = Json::array();
  for (const auto& entries : {library.methods(), library.recipes()})
    for (const auto& recipe : entries) names.item_text(recipe.name);
  Json extends = Json::array();
  extends.item(Json::object().text("type", "string").child("examples", names));
  extends.item(Json::object().text("type", "array").child("items", one));
  properties.child("extends",
                   Json::object()
                       .text("description", "recipes to start from, by name or path; later ones win")
                       .child("anyOf", extends));
  Json unset = Json::array();
  unset.item(one).item(Json::object().text("type", "array").child("items", one));
  properties.child(
      "unset",
      Json::object().text("description", "paths that go back to preset or default").child("anyOf", unset));
  properties.child(
      "models", Json::object()
                    .text("description", "presets of `model`, and the sections and fields that hold for each")
                    .text("type", "object")
                    .child("additionalProperties", Json::object().text("type", "object")));
}

// A mapping of fields, a preset or its file, or null for a section that may be switched off.
Json section_choice(const SectionInfo& section, const Library& library) {
  Json any = Json::array();
  any.item(Json::object().text("$ref", "#/$defs/" + section.name));
  Json presets = Json::array();
  for (const auto& preset : library.presets(section.name)) presets.item_text(preset.name);
  if (section.optional) presets.item_text("none");
  if (!presets.empty()) any.item(Json::object().text("description", "a preset").child("enum", presets));
  any.item(string_pattern("(/|\\.ya?ml$|^@)"));
  if (section.optional) any.item(Json::object().text("type", "null"));
  return Json::object().text("description", section.doc).child("anyOf", any);
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
  Json root = Json::object();
  root.text("$schema", kDialect);
  root.text("$id", "urn:capstan:recipe:1");
  root.text("title", "Capstan recipe");
  root.text("type", "object");
  Json properties = Json::object();
  properties.child(
      "schema",
      Json::object().text("description", "version of the recipe format").text("const", "capstan/1"));
  add_lists_of_names(properties, library);
  Json definitions = Json::object();
  add_text_definitions(definitions);
  for (const auto& section : schema.sections()) {
    if (section.name.empty()) {
      for (const auto& field : section.fields) properties.child(field.name, field_schema(field, field.doc));
      continue;
    }
    properties.child(section.name, section_choice(section, library));
    definitions.child(section.name, section_object(schema, section));
  }
  const std::set<std::string> prefixes = alias_prefixes(schema);
  for (const auto& prefix : prefixes)
    properties.child(prefix, Json::object()
                                 .text("description", "other names of fields")
                                 .text("type", "object")
                                 .child("properties", section_properties(schema, prefix, pointer_in_recipe))
                                 .raw("additionalProperties", "false"));
  root.child("properties", properties);
  // Dotted keys are allowed at the top only; `capstan check` checks the fields that they name.
  std::string dotted;
  for (const auto& section : schema.sections())
    if (!section.name.empty()) dotted += (dotted.empty() ? "" : "|") + regex(section.name);
  for (const auto& prefix : prefixes) dotted += "|" + regex(prefix);
  root.child("patternProperties", Json::object().raw("^(" + dotted + ")\\.", "{}"));
  root.raw("additionalProperties", "false");
  root.child("$defs", definitions);
  return root.print() + "\n";
}

std::string section_json_schema(const Schema& schema, const SectionInfo& section) {
  Json root = Json::object();
  root.text("$schema", kDialect);
  root.text("$id", "urn:capstan:section:" + section.name + ":1");
  root.text("title", "Capstan section " + section.name);
  root.text("description", section.doc).text("type", "object");
  const auto pointer = [&](const FieldInfo& field) {
    return field.section == section.name ? "#/properties/" + field.name : std::string();
  };
  Json properties = section_properties(schema, section.name, pointer);
  properties.child("extends", Json::object()
                                  .text("description", "in a preset file: the preset to start from")
                                  .text("type", "string"));
  if (!section.find("preset"))
    properties.child("preset",
                     Json::object().text("description", "a preset of this section").text("type", "string"));
  root.child("properties", properties);
  root.child("patternProperties", Json::object().raw("^[a-z_]+\\.", "{}"));
  root.raw("additionalProperties", "false");
  Json definitions = Json::object();
  add_text_definitions(definitions);
  root.child("$defs", definitions);
  return root.print() + "\n";
}

std::map<std::string, std::string> schema_files(const Schema& schema, const Library& library) {
  std::map<std::string, std::string> files;
  files["recipe.schema.json"] = recipe_json_schema(schema, library);
  for (const auto& section : schema.sections())
    if (!section.name.empty()) files[section.name + ".schema.json"] = section_json_schema(schema, section);
  return files;
}

}  // namespace capstan::config
