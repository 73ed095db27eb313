#include "config/tools/json_schema.hpp"

#include <algorithm>
#include <set>
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

// The forms in which a value of this type may be written, null and `${…}` apart.
std::vector<Json> forms(const Type& type, const FieldInfo& field) {
  std::vector<Json> out;
  switch (type.kind) {
    case Type::Kind::boolean:
      out.push_back(Json::object().text("type", "boolean"));
      break;
    case Type::Kind::integer: {
      Json number = Json::object().text("type", "integer");
      add_limits(number, field);
      out.push_back(number);
      if (field.form == NumberForm::tokens)
        out.push_back(string_pattern("^[+-]?[0-9]+(_[0-9]+)+$"));
      else if (field.form == NumberForm::hex)
        out.push_back(string_pattern("^0[xX][0-9a-fA-F]+$"));
      else
        out.push_back(string_pattern("^[+-]?[0-9][0-9_]*(\\.[0-9]*)?([eE][+-]?[0-9]+)?([kMBGT]|[KMGT]i)?$"));
      break;
    }
    case Type::Kind::real: {
      Json number = Json::object().text("type", "number");
      add_limits(number, field);
      out.push_back(number);
      // YAML 1.1 reads 1e-4 as text.
      std::string pattern = "^[+-]?([0-9][0-9_]*\\.?[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?";
      if (field.form == NumberForm::fraction) pattern += "%?";
      if (field.form == NumberForm::count) pattern += "([kMBGT]|[KMGT]i)?";
      out.push_back(string_pattern(pattern + "$"));
      if (field.allow_inf || field.allow_nan)
        out.push_back(string_pattern("^[+-]?\\.?([iI]nf|[nN]a[nN]|NAN|INF)$"));
      break;
    }
    case Type::Kind::bytes: {
      Json number = Json::object().text("type", "integer");
      add_limits(number, field);
      out.push_back(number);
      out.push_back(string_pattern("^[0-9][0-9_]*(\\.[0-9]+)?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$"));
      break;
    }
    case Type::Kind::duration:
      if (!field.duration_unit.empty()) out.push_back(Json::object().text("type", "number"));
      out.push_back(string_pattern("^([0-9][0-9_]*(\\.[0-9]+)?(ms|s|m|h|d))+$"));
      break;
    case Type::Kind::text:
      // Text is taken as written: 007 and 2026-11-21 are text, too.
      out.push_back(Json::object().raw("type", "[\"string\", \"number\", \"boolean\"]"));
      break;
    case Type::Kind::path:
      out.push_back(Json::object().text("type", "string"));
      break;
    case Type::Kind::secret:
      out.push_back(string_pattern("^(\\$\\{(oc\\.)?env:[A-Za-z_][A-Za-z0-9_]*\\}|file:/.*)$"));
      break;
    case Type::Kind::enumeration: {
      Json names = Json::array();
      for (const auto& entry : type.names->entries) {
        names.item_text(entry.name);
        for (const auto& alias : entry.aliases) names.item_text(alias);
      }
      Json schema = Json::object().child("enum", names);
      Json docs = Json::object();
      for (const auto& entry : type.names->entries)
        if (!entry.doc.empty()) docs.text(std::string(entry.name), entry.doc);
      if (!docs.empty()) schema.child("x-enum-docs", docs);
      out.push_back(schema);
      break;
    }
    case Type::Kind::list: {
      Json items = Json::array();
      const auto item_forms = forms(*type.element, field);
      for (const auto& form : item_forms) items.item(form);
      items.item(string_pattern("\\$\\{"));
      out.push_back(
          Json::object().text("type", "array").child("items", Json::object().child("anyOf", items)));
      if (field.scalar_ok) out.insert(out.end(), item_forms.begin(), item_forms.end());
      break;
    }
    case Type::Kind::map: {
      Json values = Json::array();
      for (const auto& form : forms(*type.element, field)) values.item(form);
      values.item(string_pattern("\\$\\{"));
      out.push_back(Json::object()
                        .text("type", "object")
                        .child("additionalProperties", Json::object().child("anyOf", values)));
      break;
    }
    case Type::Kind::record:
      out.push_back(record_schema(*type.record));
      break;
  }
  return out;
}

Json field_schema(const FieldInfo& field, std::string description) {
  Json schema = Json::object();
  schema.text("description", description);
  Json any = Json::array();
  for (const auto& form : forms(*field.type, field)) any.item(form);
  if (field.type->optional) any.item(Json::object().text("type", "null"));
  if (field.type->kind != Type::Kind::secret) any.item(string_pattern("\\$\\{"));
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

// Every spelling under which a section takes a field: own names, short forms, places that belong to other sections.
Json section_properties(const Schema& schema, const std::string& section) {
  Json properties = Json::object();
  std::set<std::string> seen;
  const auto add = [&](const std::string& name, const FieldInfo& field, bool alias) {
    if (!seen.insert(name).second) return;
    Json entry =
        field_schema(field, alias ? field.doc + " (another name of `" + field.path + "`)" : field.doc);
    properties.child(name, entry);
    if (appends(field)) {
      Json items = Json::array();
      for (const auto& form : forms(*field.type, field)) items.item(form);
      if (field.type->kind == Type::Kind::list)
        for (const auto& form : forms(*field.type->element, field)) items.item(form);
      properties.child(
          name + "+",
          Json::object().text("description", "adds to `" + field.path + "`").child("anyOf", items));
    }
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

Json section_object(const Schema& schema, const SectionInfo& section) {
  Json object = Json::object();
  object.text("description", section.doc).text("type", "object");
  Json properties = section_properties(schema, section.name);
  if (!section.find("preset"))
    properties.child("preset", Json::object()
                                   .text("description",
                                         "a preset of this section, whose fields yield to those written here")
                                   .text("type", "string"));
  object.child("properties", properties);
  object.raw("additionalProperties", "false");
  return object;
}

}  // namespace

std::string recipe_json_schema(const Schema& schema, const Library& library) {
  Json root = Json::object();
  root.text("$schema", "https://json-schema.org/draft/2020-12/schema");
  root.text("$id", "urn:capstan:recipe:1");
  root.text("title", "Capstan recipe");
  root.text("type", "object");
  Json properties = Json::object();
  properties.child(
      "schema",
      Json::object().text("description", "version of the recipe format").text("const", "capstan/1"));
  const Json one = Json::object().text("type", "string");
  Json names = Json::array();
  for (const auto& recipe : library.recipes()) names.item_text(recipe.name);
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
  Json definitions = Json::object();
  std::set<std::string> sections;
  for (const auto& section : schema.sections()) {
    if (section.name.empty()) {
      for (const auto& field : section.fields) properties.child(field.name, field_schema(field, field.doc));
      continue;
    }
    sections.insert(section.name);
    Json any = Json::array();
    any.item(Json::object().text("$ref", "#/$defs/" + section.name));
    Json presets = Json::array();
    for (const auto& preset : library.presets(section.name)) presets.item_text(preset.name);
    if (section.optional) presets.item_text("none");
    if (!presets.empty()) any.item(Json::object().text("description", "a preset").child("enum", presets));
    any.item(string_pattern("(/|\\.ya?ml$|^@)"));
    if (section.optional) any.item(Json::object().text("type", "null"));
    properties.child(section.name, Json::object().text("description", section.doc).child("anyOf", any));
    definitions.child(section.name, section_object(schema, section));
  }
  // Aliases whose first part is no section: `parallel: {tp: 4}`.
  std::set<std::string> prefixes;
  for (const FieldInfo* field : schema.fields())
    for (const auto& alias : field->aliases)
      if (const size_t dot = alias.find('.');
          dot != std::string::npos && !sections.count(alias.substr(0, dot)))
        prefixes.insert(alias.substr(0, dot));
  for (const auto& prefix : prefixes)
    properties.child(prefix, Json::object()
                                 .text("description", "other names of fields")
                                 .text("type", "object")
                                 .child("properties", section_properties(schema, prefix))
                                 .raw("additionalProperties", "false"));
  root.child("properties", properties);
  // Dotted keys stand at the top only; what they name is checked by `capstan check`.
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
  root.text("$schema", "https://json-schema.org/draft/2020-12/schema");
  root.text("$id", "urn:capstan:section:" + section.name + ":1");
  root.text("title", "Capstan section " + section.name);
  root.text("description", section.doc).text("type", "object");
  Json properties = section_properties(schema, section.name);
  properties.child("extends", Json::object()
                                  .text("description", "in a preset file: the preset to start from")
                                  .text("type", "string"));
  if (!section.find("preset"))
    properties.child("preset",
                     Json::object().text("description", "a preset of this section").text("type", "string"));
  root.child("properties", properties);
  root.child("patternProperties", Json::object().raw("^[a-z_]+\\.", "{}"));
  root.raw("additionalProperties", "false");
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
