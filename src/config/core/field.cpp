#include "config/core/field.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"

namespace capstan::config {

std::string_view effect_text(Effect effect) {
  for (const auto& entry : EnumNames<Effect>::list)
    if (entry.value == effect) return entry.doc;
  return "";
}

std::string Secret::read() const {
  const std::string_view text = reference;
  if (text.starts_with("env:")) {
    const std::string name(text.substr(4));
    if (const char* value = std::getenv(name.c_str())) return value;
    fail(ErrorCode::not_found, "the environment variable `" + name + "`, which holds a secret, is not set");
  }
  if (text.starts_with("file:")) {
    std::string content = read_file(std::string(text.substr(5)), 1 << 20);
    return std::string(trim(content));
  }
  fail(ErrorCode::not_found, "no secret is configured");
}

// ---- enums --------------------------------------------------------------------------------------

const EnumTable::Entry* EnumTable::find(std::string_view name) const {
  for (const auto& entry : entries)
    if (entry.name == name ||
        std::find(entry.aliases.begin(), entry.aliases.end(), name) != entry.aliases.end())
      return &entry;
  return nullptr;
}
const EnumTable::Entry* EnumTable::find(int64_t value) const {
  for (const auto& entry : entries)
    if (entry.value == value) return &entry;
  return nullptr;
}
void EnumTable::add(int64_t value, const char* name, const char* doc, const char* aliases) {
  Entry entry{value, name, doc, {}};
  for (const auto alias : split(aliases, ' '))
    if (!alias.empty()) entry.aliases.emplace_back(alias);
  entries.push_back(std::move(entry));
}

// ---- scalar types -------------------------------------------------------------------------------

namespace {
Type scalar(Type::Kind kind, Value (*load)(const void*), void (*store)(void*, const Value&)) {
  Type type;
  type.kind = kind;
  type.load = load;
  type.store = store;
  return type;
}
template <class T>
const T& as(const void* member) {
  return *static_cast<const T*>(member);
}
template <class T>
T& as(void* member) {
  return *static_cast<T*>(member);
}
}  // namespace

namespace detail {
template <>
Type scalar_type<bool>() {
  return scalar(
      Type::Kind::boolean, [](const void* m) { return Value::of(as<bool>(m)); },
      [](void* m, const Value& v) { as<bool>(m) = v.boolean; });
}
template <>
Type scalar_type<int64_t>() {
  return scalar(
      Type::Kind::integer, [](const void* m) { return Value::of(as<int64_t>(m)); },
      [](void* m, const Value& v) { as<int64_t>(m) = v.integer; });
}
template <>
Type scalar_type<double>() {
  return scalar(
      Type::Kind::real, [](const void* m) { return Value::of(as<double>(m)); },
      [](void* m, const Value& v) { as<double>(m) = v.number(); });
}
template <>
Type scalar_type<std::string>() {
  return scalar(
      Type::Kind::text, [](const void* m) { return Value::of(as<std::string>(m)); },
      [](void* m, const Value& v) { as<std::string>(m) = v.text; });
}
template <>
Type scalar_type<Path>() {
  return scalar(
      Type::Kind::path,
      [](const void* m) {
        Value value = Value::of(as<Path>(m).text);
        value.resolved = as<Path>(m).resolved;
        return value;
      },
      [](void* m, const Value& v) {
        as<Path>(m) = {v.text, v.resolved.empty() ? v.text : v.resolved};
      });
}
template <>
Type scalar_type<Bytes>() {
  return scalar(
      Type::Kind::bytes, [](const void* m) { return Value::of(as<Bytes>(m).value); },
      [](void* m, const Value& v) { as<Bytes>(m).value = v.integer; });
}
template <>
Type scalar_type<Duration>() {
  return scalar(
      Type::Kind::duration, [](const void* m) { return Value::of(as<Duration>(m).seconds); },
      [](void* m, const Value& v) { as<Duration>(m).seconds = v.number(); });
}
template <>
Type scalar_type<Secret>() {
  return scalar(
      Type::Kind::secret, [](const void* m) { return Value::of(as<Secret>(m).reference); },
      [](void* m, const Value& v) { as<Secret>(m).reference = v.text; });
}

Value load_record(const RecordInfo& record, const void* object) {
  Value map = Value::map();
  for (const auto& field : record.fields)
    map.add(field.name, field.type->load(static_cast<const char*>(object) + field.offset));
  return map;
}
void store_record(const RecordInfo& record, void* object, const Value& value) {
  for (size_t i = 0; i < value.items.size(); ++i)
    if (const FieldInfo* field = record.find(value.keys[i]))
      field->type->store(static_cast<char*>(object) + field->offset, value.items[i]);
}
}  // namespace detail

template const Type& type_of<bool>();
template const Type& type_of<int64_t>();
template const Type& type_of<double>();
template const Type& type_of<std::string>();
template const Type& type_of<Path>();
template const Type& type_of<Bytes>();
template const Type& type_of<Duration>();
template const Type& type_of<Secret>();
template const Type& type_of<std::optional<bool>>();
template const Type& type_of<std::optional<int64_t>>();
template const Type& type_of<std::optional<double>>();
template const Type& type_of<std::optional<std::string>>();
template const Type& type_of<std::optional<Path>>();
template const Type& type_of<std::optional<Bytes>>();
template const Type& type_of<std::optional<Duration>>();
template const Type& type_of<std::optional<Secret>>();
template const Type& type_of<std::vector<int64_t>>();
template const Type& type_of<std::vector<double>>();
template const Type& type_of<std::vector<std::string>>();
template const Type& type_of<std::vector<Path>>();
template const Type& type_of<std::optional<std::vector<int64_t>>>();
template const Type& type_of<std::optional<std::vector<std::string>>>();
template const Type& type_of<std::vector<std::pair<std::string, double>>>();

// ---- attributes ---------------------------------------------------------------------------------

Field& Field::doc(std::string text) {
  info_->doc = std::move(text);
  return *this;
}
Field& Field::unit(std::string text) {
  info_->unit = std::move(text);
  return *this;
}
Field& Field::since(std::string version) {
  info_->since = std::move(version);
  return *this;
}
Field& Field::effect(Effect value) {
  info_->effect = value;
  return *this;
}
Field& Field::range(double low, double high) {
  return min(low).max(high);
}
Field& Field::min(double value) {
  info_->min = value;
  info_->min_open = false;
  return *this;
}
Field& Field::max(double value) {
  info_->max = value;
  info_->max_open = false;
  return *this;
}
Field& Field::above(double value) {
  info_->min = value;
  info_->min_open = true;
  return *this;
}
Field& Field::below(double value) {
  info_->max = value;
  info_->max_open = true;
  return *this;
}
Field& Field::one_of(std::initializer_list<int64_t> values) {
  info_->one_of = values;
  return *this;
}
Field& Field::multiple_of(int64_t value) {
  info_->multiple_of = value;
  return *this;
}
Field& Field::range_help(std::string text) {
  info_->range_help = std::move(text);
  return *this;
}
Field& Field::count() {
  info_->form = NumberForm::count;
  return *this;
}
Field& Field::tokens() {
  info_->form = NumberForm::tokens;
  if (info_->unit.empty()) info_->unit = "tokens";
  return *this;
}
Field& Field::hex() {
  info_->form = NumberForm::hex;
  return *this;
}
Field& Field::fraction() {
  info_->form = NumberForm::fraction;
  if (!info_->min) info_->min = 0;
  if (!info_->max) info_->max = 1;
  return *this;
}
Field& Field::duration_unit(std::string unit) {
  info_->duration_unit = std::move(unit);
  return *this;
}
Field& Field::allow_inf() {
  info_->allow_inf = true;
  return *this;
}
Field& Field::allow_nan() {
  info_->allow_nan = true;
  return *this;
}
Field& Field::scalar_ok() {
  info_->scalar_ok = true;
  return *this;
}
Field& Field::required() {
  info_->required = true;
  return *this;
}
Field& Field::no_preset() {
  info_->no_preset = true;
  return *this;
}
Field& Field::deprecated(std::string instead) {
  info_->deprecated = std::move(instead);
  return *this;
}
Field& Field::alias(std::string spelling) {
  info_->aliases.push_back(std::move(spelling));
  return *this;
}
Field& Field::renamed_from(std::string old_name) {
  info_->old_names.push_back(std::move(old_name));
  return *this;
}
Field& Field::known_as(std::string name) {
  info_->known_as.push_back(std::move(name));
  return *this;
}
Field& Field::only_for(std::initializer_list<const char*> variants) {
  info_->variants.assign(variants.begin(), variants.end());
  return *this;
}
Field& Field::instead_of(std::string path) {
  info_->instead_of = std::move(path);
  return *this;
}
Field& Field::example(std::string text) {
  info_->examples.push_back(std::move(text));
  return *this;
}
Field& Field::unsupported(std::string reason) {
  info_->unsupported.push_back({std::move(reason), {}});
  return *this;
}
Field& Field::unsupported(std::string reason, bool (*applies)(const Value&)) {
  info_->unsupported.push_back({std::move(reason), applies});
  return *this;
}
Field& Field::add_condition(std::string text, std::function<bool(const void*)> holds) {
  info_->used_when.push_back({std::move(text), std::move(holds)});
  return *this;
}

const FieldInfo* RecordInfo::find(std::string_view field_name) const {
  for (const auto& field : fields)
    if (field.name == field_name) return &field;
  return nullptr;
}

// ---- rules --------------------------------------------------------------------------------------

Violation& Violation::at(std::string path) {
  pointed = std::move(path);
  return *this;
}
Violation& Violation::operand(std::string path) {
  operands.push_back({std::move(path), {}, true});
  return *this;
}
Violation& Violation::operand(std::string expression, std::string value) {
  operands.push_back({std::move(expression), std::move(value), false});
  return *this;
}
Violation& Violation::help(std::string text) {
  help_text = std::move(text);
  return *this;
}
Violation& Violation::if_given() {
  only_if_given = true;
  return *this;
}
Violation& RuleReport::error(std::string message) {
  violations.emplace_back().message = std::move(message);
  return violations.back();
}
Violation& RuleReport::warning(std::string message) {
  error(std::move(message)).warning = true;
  return violations.back();
}

// ---- schema -------------------------------------------------------------------------------------

SectionInfo& Schema::add_section(std::string name) {
  SectionInfo& info = sections_.emplace_back();
  info.name = std::move(name);
  info.index = sections_.size() - 1;
  return info;
}

void Schema::finish_section(SectionInfo& info) {
  for (auto& field : info.fields) {
    field.section = info.name;
    field.section_index = info.index;
    field.path = info.name.empty() ? field.name : info.name + "." + field.name;
    order_.push_back(&field);
  }
}

void Schema::add_derivation(std::string path, std::string formula, std::function<void(void*)> run) {
  derivations_.push_back({std::move(path), std::move(formula), {}, std::move(run)});
}

void Schema::add_rule(RuleInfo info, std::function<void(const void*, RuleReport&)> check) {
  rules_.push_back({std::move(info), std::move(check)});
}

// The dotted names in a formula that are fields ("4 * model.hidden_size").
static std::vector<std::string> paths_in(const std::string& formula, const Schema& schema) {
  std::vector<std::string> paths;
  const auto word = [](char c) { return is_letter(c) || is_digit(c) || c == '_' || c == '.'; };
  for (size_t i = 0; i < formula.size();) {
    if (!word(formula[i])) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < formula.size() && word(formula[end])) ++end;
    std::string name = formula.substr(i, end - i);
    while (!name.empty() && name.back() == '.') name.pop_back();
    if (schema.find_field(name) && std::find(paths.begin(), paths.end(), name) == paths.end())
      paths.push_back(name);
    i = end;
  }
  return paths;
}

void Schema::finish() {
  by_path_.clear();
  by_spelling_.clear();
  derivation_by_path_.clear();
  const auto claim = [&](std::string spelling, const FieldInfo& field, Spelling spelled) {
    const auto [location, fresh] = by_spelling_.emplace(std::move(spelling), std::pair(&field, spelled));
    CAPSTAN_ASSERT(fresh || location->second.first == &field, "two fields are spelled `" + location->first +
                                                                  "`: " + location->second.first->path +
                                                                  " and " + field.path);
  };
  for (const FieldInfo* field : order_) {
    CAPSTAN_ASSERT(by_path_.emplace(field->path, field).second,
                   "field `" + field->path + "` is registered twice");
    CAPSTAN_ASSERT(!field->doc.empty(), "field `" + field->path + "` has no documentation");
    CAPSTAN_ASSERT(find_section(field->path) == nullptr, "`" + field->path + "` names a field and a section");
    claim(field->path, *field, Spelling::canonical);
  }
  const auto absolute = [](const FieldInfo& field, const std::string& alias) {
    return alias.find('.') != std::string::npos || field.section.empty() ? alias
                                                                         : field.section + "." + alias;
  };
  for (const FieldInfo* field : order_) {
    for (const auto& alias : field->aliases) claim(absolute(*field, alias), *field, Spelling::alias);
    for (const auto& name : field->old_names) claim(absolute(*field, name), *field, Spelling::old_name);
  }
  for (auto& section : sections_) {
    if (section.variant_field.empty()) continue;
    const FieldInfo* chooser = section.find(section.variant_field);
    CAPSTAN_ASSERT(chooser && chooser->type->kind == Type::Kind::enumeration,
                   "section `" + section.name + "` has no enum field `" + section.variant_field +
                       "` to choose variants");
    for (const auto& field : section.fields)
      for (const auto& variant : field.variants)
        CAPSTAN_ASSERT(chooser->type->names->find(variant),
                       "field `" + field.path + "` is for an unknown variant " + variant);
  }
  for (size_t i = 0; i < derivations_.size(); ++i) {
    auto& derivation = derivations_[i];
    CAPSTAN_ASSERT(find_field(derivation.path),
                   "a derivation for the unknown field `" + derivation.path + "`");
    CAPSTAN_ASSERT(derivation_by_path_.emplace(derivation.path, i).second,
                   "field `" + derivation.path + "` has two derivations");
    derivation.inputs = paths_in(derivation.formula, *this);
    for (auto& field : sections_[find_field(derivation.path)->section_index].fields)
      if (field.path == derivation.path) field.formula = derivation.formula;
  }
  for (const FieldInfo* field : order_)
    CAPSTAN_ASSERT(
        field->instead_of.empty() || find_derivation(field->instead_of),
        "field `" + field->path + "` takes the place of `" + field->instead_of + "`, which is not derived");
  for (const auto& rule : rules_) {
    CAPSTAN_ASSERT(!rule.name.empty() && !rule.doc.empty(),
                   "rule " + rule.code + " has no name or documentation");
    for (const auto& path : rule.reads)
      CAPSTAN_ASSERT(find_field(path), "rule `" + rule.name + "` reads the unknown field `" + path + "`");
  }
  CAPSTAN_ASSERT(ranks_path_.empty() || find_field(ranks_path_),
                 "unknown field `" + ranks_path_ + "` for the ranks");
}

const SectionInfo* Schema::find_section(std::string_view name) const {
  for (const auto& section : sections_)
    if (!section.name.empty() && section.name == name) return &section;
  return nullptr;
}
const FieldInfo* Schema::find_field(std::string_view path) const {
  const auto found = by_path_.find(std::string(path));
  return found == by_path_.end() ? nullptr : found->second;
}
const Derivation* Schema::find_derivation(std::string_view path) const {
  const auto found = derivation_by_path_.find(std::string(path));
  return found == derivation_by_path_.end() ? nullptr : &derivations_[found->second];
}
const FieldInfo* Schema::find_spelling(std::string_view path, Spelling* spelled) const {
  const auto found = by_spelling_.find(std::string(path));
  if (found == by_spelling_.end()) return nullptr;
  if (spelled) *spelled = found->second.second;
  return found->second.first;
}

Value Schema::load(const void* root, const FieldInfo& field) const {
  const void* section = sections_[field.section_index].at(root);
  return section ? field.type->load(static_cast<const char*>(section) + field.offset) : Value();
}
void Schema::store(void* root, const FieldInfo& field, const Value& value) const {
  void* section = sections_[field.section_index].ensure(root);
  field.type->store(static_cast<char*>(section) + field.offset, value);
}

std::vector<MissingFeature> missing_features(const Schema& schema, const void* root) {
  std::vector<MissingFeature> result;
  for (const FieldInfo* field : schema.fields()) {
    if (field->unsupported.empty() || !schema.sections()[field->section_index].at(root)) continue;
    const Value value = schema.load(root, *field);
    for (const auto& feature : field->unsupported)
      if (feature.applies ? feature.applies(value) : value != field->default_value)
        result.push_back({field->path, value, feature.reason});
  }
  return result;
}

}  // namespace capstan::config
