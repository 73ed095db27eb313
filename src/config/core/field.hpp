// The field table: a section struct registers the names, documentation, limits and effects of its fields
// once, at run time.
//
//   // sections/optimizer.hpp
//   struct OptimizerConfig {
//     double lr = 3e-4;
//     std::optional<double> min_lr;
//   };
//   void describe(Section<OptimizerConfig>& s);
//
//   // sections/optimizer.cpp
//   void describe(Section<OptimizerConfig>& s) {
//     s.doc("optimizer and its hyperparameters");
//     s.field("lr", &OptimizerConfig::lr).doc("peak learning rate").range(0, 1).effect(Effect::math);
//   }
//
//   // sections/register.cpp
//   void register_sections(Schema& s) {
//     s.section("optimizer", &Config::optimizer);  // S or std::optional<S>
//     // derive_ffn: void (Config&)
//     s.derive<Config>("model.ffn_hidden_size", "4 * model.hidden_size", derive_ffn);
//   }
//
// Rules are registered where they are written: see RULE in sections/rule_tools.hpp.
//
// Defaults are the member initializers. Parser, checker, explain, JSON Schema, documentation and completion
// read this table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "config/core/types.hpp"
#include "config/core/value.hpp"

namespace capstan::config {

// The effect of a field. math: the numbers of the training run (loss curve); perf, memory: how fast and how
// large; io: files read and written; log: what is reported.
enum class Effect : uint8_t { math, perf, memory, io, log };
template <>
struct EnumNames<Effect> {
  static constexpr EnumEntry<Effect> list[] = {
      {Effect::math, "math", "numerics (math): the numbers of the training run"},
      {Effect::perf, "perf", "speed (perf): how fast it runs"},
      {Effect::memory, "memory", "memory: what it needs"},
      {Effect::io, "io", "output (io): the files read and written"},
      {Effect::log, "log", "output (log): what is reported"},
  };
};
// For readers, the name among its words: "numerics (math): the numbers of the training run".
std::string_view effect_text(Effect effect);

// How numbers of a field may be written, in addition to its C++ type.
enum class NumberForm : uint8_t {
  // Integers: 42, 1_000, 4k, 1.5M, 1e6 (if it is integral). Reals: 1e-4.
  plain,
  // The forms of `plain`, and the suffixes Ki, Mi, Gi and Ti.
  count,
  // A length in tokens: a suffix is refused, both readings (4000 and 4096) are offered.
  tokens,
  // The forms of `plain`, and 0x1F.
  hex,
  // Reals: 0.03 or 3%.
  fraction,
};

struct EnumTable {
  struct Entry {
    int64_t value;
    std::string_view name, doc;
    std::vector<std::string> aliases;
  };
  std::vector<Entry> entries;
  // Finds an entry by its exact name or alias.
  const Entry* find(std::string_view name) const;
  const Entry* find(int64_t value) const;
  void add(int64_t value, const char* name, const char* doc, const char* aliases);
};

struct RecordInfo;

// A C++ type at run time. load and store move between a member and a Value; store expects a value that
// conversion by this Type has produced.
struct Type {
  enum class Kind : uint8_t {
    boolean,
    integer,
    real,
    text,
    enumeration,
    path,
    bytes,
    duration,
    secret,
    list,
    map,
    record
  };
  Kind kind = Kind::text;
  // Whether the value may be null.
  bool optional = false;
  // A list (OneOrMore) whose only item is the value itself, without brackets.
  bool one_or_more = false;
  // Names of the values of an enumeration.
  const EnumTable* names = nullptr;
  // Type of the elements of a list or map.
  const Type* element = nullptr;
  // Fields of a record.
  const RecordInfo* record = nullptr;
  Value (*load)(const void* member) = nullptr;
  void (*store)(void* member, const Value& value) = nullptr;

  // The type of `value`: with one_or_more, the element's unless there are several.
  const Type& type_for(const Value& value) const {
    return one_or_more && value.kind != Value::Kind::list ? *element : *this;
  }
};

struct FieldInfo;

// "without effect unless": the field is read only where the condition holds. On an explicit value that
// differs from the default it is an error for Effect::math fields and a warning for the others.
struct Condition {
  // "`model.num_moe_experts` is set"
  std::string text;
  std::function<bool(const void* root)> holds;
};

// A value that check accepts and train refuses by name, because the feature is not supported.
struct UnsupportedFeature {
  // The missing feature: "virtual pipeline stages"
  std::string reason;
  // Whether the value needs the feature. Empty: any value but the default does.
  std::function<bool(const Value&)> applies;
};

struct FieldInfo {
  std::string name, path, section;
  const Type* type = nullptr;
  // Offset in bytes from the beginning of the section struct.
  size_t offset = 0;
  size_t section_index = 0;
  Value default_value;

  std::string doc, unit, since = "0.1";
  Effect effect = Effect::math;
  NumberForm form = NumberForm::plain;
  std::optional<double> min, max;
  bool min_open = false, max_open = false;
  std::vector<int64_t> one_of;
  int64_t multiple_of = 0;
  // Duration: unit of a plain number ("s", "m", …), empty: a plain number is refused.
  std::string duration_unit;
  bool allow_inf = false, allow_nan = false, scalar_ok = false, required = false, no_preset = false;
  // Why the field is deprecated, and which field replaces it.
  std::string deprecated;
  // Other spellings of this field; with a dot: absolute, else in the same section.
  std::vector<std::string> aliases;
  // Earlier names, which are accepted with a `deprecated_key` warning.
  std::vector<std::string> old_names;
  // Names in other tools: suggested, not accepted.
  std::vector<std::string> known_as;
  // Values of the section's variant field under which this field exists; empty: all.
  std::vector<std::string> variants;
  std::vector<std::string> examples;
  std::vector<UnsupportedFeature> unsupported;
  std::vector<Condition> used_when;
  // Formula of the value of an unset field (Schema::derive).
  std::string formula;
  // Advice for a value outside the range.
  std::string range_help;
  // Path of the field that this one takes the place of, and that is derived from it.
  std::string instead_of;
};

// Chained attributes of one field.
class Field {
 public:
  explicit Field(FieldInfo& info) : info_(&info) {}
  Field& doc(std::string text);
  // "tokens", "samples", "iterations": shown, and x-unit in the JSON Schema.
  Field& unit(std::string text);
  Field& since(std::string version);
  Field& effect(Effect value);
  // The ends are included.
  Field& range(double min, double max);
  Field& min(double value);
  Field& max(double value);
  // The ends are excluded.
  Field& above(double value);
  Field& below(double value);
  Field& one_of(std::initializer_list<int64_t> values);
  Field& multiple_of(int64_t value);
  // "for none: validation.eval_interval=null"
  Field& range_help(std::string text);
  Field& count();
  Field& tokens();
  Field& hex();
  // Accepts 3%; range 0..1 unless one is given.
  Field& fraction();
  // unit: ms, s, m, h or d.
  Field& duration_unit(std::string unit);
  Field& allow_inf();
  Field& allow_nan();
  // A list field also takes one item without brackets.
  Field& scalar_ok();
  // Must be given by a recipe, a preset or a derivation.
  Field& required();
  // Presets may not set it.
  Field& no_preset();
  Field& deprecated(std::string instead);
  // "learning_rate", or "model.tensor_model_parallel_size" (absolute)
  Field& alias(std::string spelling);
  // `old_name` as in alias().
  Field& renamed_from(std::string old_name);
  Field& known_as(std::string other_tools_name);
  Field& only_for(std::initializer_list<const char*> variants);
  // Another way to give `path`, which is derived from this field. Of the two the one of the higher layer
  // counts; both in one layer have to agree.
  Field& instead_of(std::string path);
  Field& example(std::string text);
  // Any value but the default.
  Field& unsupported(std::string reason);
  Field& unsupported(std::string reason, bool (*applies)(const Value&));
  // used_when<Config>("`model.num_moe_experts` is set", [](const Config& c) { return
  // c.model.num_moe_experts.has_value(); })
  template <class Root>
  Field& used_when(std::string text, bool (*holds)(const Root&)) {
    return add_condition(std::move(text),
                         [holds](const void* root) { return holds(*static_cast<const Root*>(root)); });
  }
  FieldInfo& info() { return *info_; }

 private:
  Field& add_condition(std::string text, std::function<bool(const void*)> holds);
  FieldInfo* info_;
};

// The schema of one struct: a section of the recipe, or an item of a list of structs.
struct RecordInfo {
  std::string name, doc;
  // Name of the field that identifies an item of a list, as in `datasets[name=code]`.
  std::string id_field;
  // Name of the enum field that chooses the variant of a section.
  std::string variant_field;
  // Conditions that apply to every field.
  std::vector<Condition> used_when;
  // The fields in the order of their declarations.
  std::deque<FieldInfo> fields;
  const FieldInfo* find(std::string_view name) const;
};

struct SectionInfo : RecordInfo {
  bool optional = false;
  size_t index = 0;
  // null: the section is switched off.
  std::function<const void*(const void* root)> at;
  // Switches the section on.
  std::function<void*(void* root)> ensure;
  // Sets the section back to its defaults; an optional section is switched off.
  std::function<void(void* root)> clear;
};

namespace detail {
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {
  using Inner = T;
};
template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {
  using Inner = T;
};
template <class T>
struct IsOneOrMore : std::false_type {};
template <class T>
struct IsOneOrMore<OneOrMore<T>> : std::true_type {
  using Inner = T;
};
// A map that keeps the order in which it was written.
template <class T>
struct IsMap : std::false_type {};
template <class T>
struct IsMap<std::vector<std::pair<std::string, T>>> : std::true_type {
  using Inner = T;
};

// Returns the type of a scalar. The set is closed; field.cpp defines it.
template <class T>
Type scalar_type();
template <>
Type scalar_type<bool>();
template <>
Type scalar_type<int64_t>();
template <>
Type scalar_type<double>();
template <>
Type scalar_type<std::string>();
template <>
Type scalar_type<Path>();
template <>
Type scalar_type<Bytes>();
template <>
Type scalar_type<Duration>();
template <>
Type scalar_type<Secret>();
template <class T>
inline constexpr bool kIsScalar =
    std::is_same_v<T, bool> || std::is_same_v<T, int64_t> || std::is_same_v<T, double> ||
    std::is_same_v<T, std::string> || std::is_same_v<T, Path> || std::is_same_v<T, Bytes> ||
    std::is_same_v<T, Duration> || std::is_same_v<T, Secret>;

Value load_record(const RecordInfo& record, const void* object);
void store_record(const RecordInfo& record, void* object, const Value& value);
template <class T>
const RecordInfo& record_of();
}  // namespace detail

template <class E>
const EnumTable& enum_table() {
  static const EnumTable table = [] {
    EnumTable result;
    for (const auto& entry : EnumNames<E>::list)
      result.add(static_cast<int64_t>(entry.value), entry.name, entry.doc, entry.aliases);
    return result;
  }();
  return table;
}

template <class T>
const Type& type_of();

namespace detail {
template <class T>
Type make_type() {
  Type type;
  if constexpr (kIsScalar<T>) {
    type = scalar_type<T>();
  } else if constexpr (std::is_enum_v<T>) {
    type.kind = Type::Kind::enumeration;
    type.names = &enum_table<T>();
    type.load = [](const void* member) {
      const auto* entry = enum_table<T>().find(static_cast<int64_t>(*static_cast<const T*>(member)));
      return Value::of(std::string(entry ? entry->name : "?"));
    };
    type.store = [](void* member, const Value& value) {
      if (const auto* entry = enum_table<T>().find(value.text))
        *static_cast<T*>(member) = static_cast<T>(entry->value);
    };
  } else if constexpr (IsOptional<T>::value) {
    using Inner = typename IsOptional<T>::Inner;
    type = type_of<Inner>();
    type.optional = true;
    type.load = [](const void* member) {
      const auto& value = *static_cast<const T*>(member);
      return value ? type_of<Inner>().load(&*value) : Value();
    };
    type.store = [](void* member, const Value& value) {
      auto& target = *static_cast<T*>(member);
      if (value.is_null()) {
        target.reset();
      } else {
        target.emplace();
        type_of<Inner>().store(&*target, value);
      }
    };
  } else if constexpr (IsMap<T>::value) {
    using Inner = typename IsMap<T>::Inner;
    type.kind = Type::Kind::map;
    type.element = &type_of<Inner>();
    type.load = [](const void* member) {
      Value map = Value::map();
      for (const auto& [key, item] : *static_cast<const T*>(member))
        map.add(key, type_of<Inner>().load(&item));
      return map;
    };
    type.store = [](void* member, const Value& value) {
      auto& target = *static_cast<T*>(member);
      target.clear();
      for (size_t i = 0; i < value.items.size(); ++i)
        type_of<Inner>().store(&target.emplace_back(value.keys[i], Inner{}).second, value.items[i]);
    };
  } else if constexpr (IsVector<T>::value) {
    using Inner = typename IsVector<T>::Inner;
    static_assert(!std::is_same_v<Inner, bool>, "std::vector<bool> has no addressable items");
    type.kind = Type::Kind::list;
    type.element = &type_of<Inner>();
    type.load = [](const void* member) {
      Value list = Value::list();
      for (const auto& item : *static_cast<const T*>(member))
        list.items.push_back(type_of<Inner>().load(&item));
      return list;
    };
    type.store = [](void* member, const Value& value) {
      auto& target = *static_cast<T*>(member);
      target.assign(value.items.size(), Inner{});
      for (size_t i = 0; i < target.size(); ++i) type_of<Inner>().store(&target[i], value.items[i]);
    };
  } else if constexpr (IsOneOrMore<T>::value) {
    using Inner = typename IsOneOrMore<T>::Inner;
    type = type_of<std::vector<Inner>>();
    type.one_or_more = true;
    type.load = [](const void* member) {
      Value list = type_of<std::vector<Inner>>().load(&static_cast<const T*>(member)->items);
      return list.items.size() == 1 ? std::move(list.items[0]) : list;
    };
    type.store = [](void* member, const Value& value) {
      auto& items = static_cast<T*>(member)->items;
      if (value.kind == Value::Kind::list)
        type_of<std::vector<Inner>>().store(&items, value);
      else
        items.resize(1), type_of<Inner>().store(&items[0], value);
    };
  } else {
    static_assert(std::is_class_v<T>,
                  "a field is bool, int64_t, double, std::string, Path, Bytes, Duration, Secret, an enum "
                  "with EnumNames, a struct with describe(), or optional/vector/map/OneOrMore of these");
    type.kind = Type::Kind::record;
    type.record = &record_of<T>();
    type.load = [](const void* member) { return load_record(record_of<T>(), member); };
    type.store = [](void* member, const Value& value) { store_record(record_of<T>(), member, value); };
  }
  return type;
}
}  // namespace detail

template <class T>
const Type& type_of() {
  static const Type type = detail::make_type<T>();
  return type;
}
extern template const Type& type_of<bool>();
extern template const Type& type_of<int64_t>();
extern template const Type& type_of<double>();
extern template const Type& type_of<std::string>();
extern template const Type& type_of<Path>();
extern template const Type& type_of<Bytes>();
extern template const Type& type_of<Duration>();
extern template const Type& type_of<Secret>();
extern template const Type& type_of<std::optional<bool>>();
extern template const Type& type_of<std::optional<int64_t>>();
extern template const Type& type_of<std::optional<double>>();
extern template const Type& type_of<std::optional<std::string>>();
extern template const Type& type_of<std::optional<Path>>();
extern template const Type& type_of<std::optional<Bytes>>();
extern template const Type& type_of<std::optional<Duration>>();
extern template const Type& type_of<std::optional<Secret>>();
extern template const Type& type_of<std::vector<int64_t>>();
extern template const Type& type_of<std::vector<double>>();
extern template const Type& type_of<std::vector<std::string>>();
extern template const Type& type_of<std::vector<Path>>();
extern template const Type& type_of<std::optional<std::vector<int64_t>>>();
extern template const Type& type_of<std::optional<std::vector<std::string>>>();
extern template const Type& type_of<std::vector<std::pair<std::string, double>>>();

// The table of one struct while describe() fills it.
template <class S>
class Section {
 public:
  explicit Section(RecordInfo& info) : info_(info) {}
  Section& doc(std::string text) {
    info_.doc = std::move(text);
    return *this;
  }
  // Sets the field that identifies an item of a list.
  Section& id(std::string field) {
    info_.id_field = std::move(field);
    return *this;
  }
  // Sets the enum field whose value decides which fields exist (Field::only_for).
  Section& variants(std::string field) {
    info_.variant_field = std::move(field);
    return *this;
  }
  template <class Root>
  // Adds the condition to every field of the section.
  Section& used_when(std::string text, bool (*holds)(const Root&)) {
    info_.used_when.push_back(
        {std::move(text), [holds](const void* root) { return holds(*static_cast<const Root*>(root)); }});
    return *this;
  }
  template <class T>
  Field field(std::string name, T S::*member) {
    const T* location = &(prototype_.*member);
    FieldInfo& info = info_.fields.emplace_back();
    info.name = std::move(name);
    info.type = &type_of<T>();
    info.offset = static_cast<size_t>(reinterpret_cast<const char*>(location) -
                                      reinterpret_cast<const char*>(&prototype_));
    info.default_value = info.type->load(location);
    info.scalar_ok = info.type->one_or_more;
    return Field(info);
  }

 private:
  RecordInfo& info_;
  S prototype_{};
};

namespace detail {
template <class T>
const RecordInfo& record_of() {
  static const RecordInfo* info = [] {
    // Lives as long as the program.
    auto* result = new RecordInfo;
    Section<T> section(*result);
    describe(section);
    return result;
  }();
  return *info;
}
}  // namespace detail

// One thing a rule found. Every operand (the rule's `reads`, unless operands are named) is printed with its
// value and the location that set it; the first one is where the diagnostic points.
class Violation {
 public:
  // Point here, and print it first.
  Violation& at(std::string path);
  // Print these paths instead of the rule's `reads`
  Violation& operand(std::string path);
  // "micro_batch_size * data_parallel_size", "64"
  Violation& operand(std::string expression, std::string value);
  // "nearest legal values: 1024 and 960"
  Violation& help(std::string text);
  // Report it only if the user gives the field of at(), be it its default.
  Violation& if_given();
  struct Operand {
    // value: empty for a path.
    std::string name, value;
    bool is_path;
  };
  std::string message, help_text, pointed;
  std::vector<Operand> operands;
  bool warning = false, only_if_given = false;
};

class RuleReport {
 public:
  // "`train.global_batch_size` is not a multiple of …", lower case, no full stop.
  Violation& error(std::string message);
  Violation& warning(std::string message);
  std::deque<Violation> violations;
};

struct RuleInfo {
  // Stable code, such as "R0301".
  std::string code;
  // "batch_divides": reads well after "allow"
  std::string name;
  // The rule in one sentence, for explain and documentation.
  std::string doc;
  // Paths; the rule is skipped while one of them has an error.
  std::vector<std::string> reads;
  // The part of `reads` that only adds to what the rule reports: an error there does not skip the rule.
  std::vector<std::string> optional_reads;
};
struct Rule : RuleInfo {
  std::function<void(const void* root, RuleReport& report)> check;
};

struct Derivation {
  std::string path, formula;
  // The paths named in the formula.
  std::vector<std::string> inputs;
  std::function<void(void* root)> run;
};

class Schema {
 public:
  Schema() = default;
  Schema(const Schema&) = delete;
  Schema& operator=(const Schema&) = delete;

  template <class Root, class S>
  SectionInfo& section(std::string name, S Root::*member) {
    SectionInfo& info = add_section(std::move(name));
    info.at = [member](const void* root) -> const void* {
      return &(static_cast<const Root*>(root)->*member);
    };
    info.ensure = [member](void* root) -> void* { return &(static_cast<Root*>(root)->*member); };
    info.clear = [member](void* root) { static_cast<Root*>(root)->*member = S{}; };
    Section<S> table(info);
    describe(table);
    finish_section(info);
    return info;
  }
  template <class Root, class S>
  SectionInfo& section(std::string name, std::optional<S> Root::*member) {
    SectionInfo& info = add_section(std::move(name));
    info.optional = true;
    info.at = [member](const void* root) -> const void* {
      const auto& value = static_cast<const Root*>(root)->*member;
      return value ? &*value : nullptr;
    };
    info.ensure = [member](void* root) -> void* {
      auto& value = static_cast<Root*>(root)->*member;
      if (!value) value.emplace();
      return &*value;
    };
    info.clear = [member](void* root) { (static_cast<Root*>(root)->*member).reset(); };
    Section<S> table(info);
    describe(table);
    finish_section(info);
    return info;
  }

  // Fields at the top of the recipe:
  //   s.root<Config>([](Section<Config>& r) { r.field("name", &Config::name).doc("…"); });
  template <class Root>
  void root(void (*describe_root)(Section<Root>&)) {
    SectionInfo& info = add_section("");
    info.at = [](const void* object) { return object; };
    info.ensure = [](void* object) { return object; };
    info.clear = [](void*) {};
    Section<Root> table(info);
    describe_root(table);
    finish_section(info);
  }

  // Runs after all overrides where `path` is unset (or null), its inputs first: the dotted names in the
  // formula that are fields. It leaves the target alone when the inputs do not determine it.
  template <class Root>
  void derive(std::string path, std::string formula, void (*function)(Root&)) {
    add_derivation(std::move(path), std::move(formula),
                   [function](void* root) { function(*static_cast<Root*>(root)); });
  }
  template <class Root>
  void rule(RuleInfo info, void (*check)(const Root&, RuleReport&)) {
    add_rule(std::move(info), [check](const void* root, RuleReport& report) {
      check(*static_cast<const Root*>(root), report);
    });
  }

  // Path of the field that Request::ranks sets ("dist.world_size").
  void ranks_path(std::string path) { ranks_path_ = std::move(path); }
  const std::string& ranks_path() const { return ranks_path_; }

  // Checks the table after everything is registered (unknown paths in rules, colliding aliases, missing
  // documentation) and fills the indices. Throws ErrorCode::internal.
  void finish();

  const std::deque<SectionInfo>& sections() const { return sections_; }
  const std::vector<Rule>& rules() const { return rules_; }
  const std::vector<Derivation>& derivations() const { return derivations_; }
  const SectionInfo* find_section(std::string_view name) const;
  // Canonical path only.
  const FieldInfo* find_field(std::string_view path) const;
  const Derivation* find_derivation(std::string_view path) const;
  // Canonical path, alias or old name; `spelled` receives which of them it is.
  enum class Spelling : uint8_t { canonical, alias, old_name };
  const FieldInfo* find_spelling(std::string_view path, Spelling* spelled = nullptr) const;
  // The fields in the order of their declarations.
  const std::vector<const FieldInfo*>& fields() const { return order_; }

  // Null where the section is switched off.
  Value load(const void* root, const FieldInfo& field) const;
  void store(void* root, const FieldInfo& field, const Value& value) const;

 private:
  SectionInfo& add_section(std::string name);
  void finish_section(SectionInfo& info);
  void add_derivation(std::string path, std::string formula, std::function<void(void*)> run);
  void add_rule(RuleInfo info, std::function<void(const void*, RuleReport&)> check);

  std::deque<SectionInfo> sections_;
  std::vector<Rule> rules_;
  std::vector<Derivation> derivations_;
  std::vector<const FieldInfo*> order_;
  std::unordered_map<std::string, const FieldInfo*> by_path_;
  std::unordered_map<std::string, std::pair<const FieldInfo*, Spelling>> by_spelling_;
  std::unordered_map<std::string, size_t> derivation_by_path_;
  std::string ranks_path_;
};

// Fields whose value `train` has to refuse by name.
struct MissingFeature {
  std::string path;
  Value value;
  std::string reason;
};
std::vector<MissingFeature> missing_features(const Schema& schema, const void* root);

// sections/register.cpp: sections, derivations and rules of Config.
void register_sections(Schema& schema);
// The registry of Config, built on first use.
const Schema& schema();

}  // namespace capstan::config
