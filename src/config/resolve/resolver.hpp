// One resolution: merge, interpolation, conversion, derivation and checks of what compose() listed. Methods
// by file:
//
//   resolve.cpp  run(); sections that are off, variants, merging of writes, fields that replace each other
//   values.cpp   values: interpolation, conversion, derivation
//   checks.cpp   required fields, rules, values without effect, values that hide those of a preset
//   origins.cpp  origin and history of each field, and the delta to the recipes that are extended
//
// Internal to the module; others include resolve.hpp.
#pragma once

#include <cstdlib>
#include <ctime>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "config/core/composer.hpp"
#include "config/resolve/resolve.hpp"

namespace capstan::config {

class Resolver {
 public:
  // root: the struct of the schema, with defaults, which run() fills. text: read in place of the file.
  Resolver(const Schema& schema, const Library& library, void* root, const Request& request,
           const std::string* text = nullptr)
      : schema_(schema), root_(root), request_(request), composed_(compose(schema, library, request, text)) {
    now_ = request.now ? *request.now : static_cast<int64_t>(std::time(nullptr));
    out_.recipe_name = composed_.recipe_name;
    entries_.resize(schema.fields().size());
    for (size_t i = 0; i < entries_.size(); ++i) {
      entries_[i].field = schema.fields()[i];
      index_.emplace(entries_[i].field, i);
    }
    for (const Write& write : composed_.writes) entries_[index_.at(write.field)].writes.push_back(&write);
    for (const FieldInfo* field : composed_.ambiguous) entries_[index_.at(field)].failed = true;
  }
  Resolved run();

 private:
  static constexpr size_t kSettled = static_cast<size_t>(-1);

  // How far the value of a field is computed. deferred: it needs the hash of the configuration, which is
  // computed last.
  enum class State : uint8_t { waiting, active, deferred, done };

  // One field of the schema: what was written to it, and how its value came about.
  struct FieldEntry {
    const FieldInfo* field = nullptr;
    std::vector<const Write*> writes;
    // All effective writes merged; nullopt: there is none.
    std::optional<Node> node;
    // The last effective write.
    const Write* winner = nullptr;
    State state = State::waiting;
    // The value is wrong, and the error is reported.
    bool failed = false;
    // The variant in effect does not have this field.
    bool dropped = false;
    // Another field of a higher layer defines the value (Field::instead_of).
    bool superseded = false;
    // Where the value comes from: the world size of the request, the recipe's name, a derivation; whether it
    // uses an environment variable.
    bool from_world_size = false, from_name = false, derived = false, environment = false;
  };

  Diagnostic& report(Level level, const char* code, std::string message, SourceLocation location = {});
  FieldEntry* entry_of(const std::string& path);
  const Layer& layer(const Write& write) const { return composed_.layers[write.layer]; }
  bool is_explicit(const Write& write) const { return layer(write).precedence != Layer::Precedence::preset; }
  bool section_on(const FieldInfo& field) const;
  // Whether the user gives the field, in a file or on the command line. A default is not given by a file that
  // has most fields of its section, as `show` writes them.
  bool is_given(const FieldEntry& entry);
  // Whether a value is in a file that is built into Capstan. If such a value is dropped because the user
  // chose another variant, the user has nothing to remove, so it is not reported.
  bool is_builtin(const SourceLocation& location) const;

  // Sections, variants and merging (resolve.cpp)
  void switch_sections();
  void choose_variants();
  void merge(FieldEntry& entry);
  static bool gives_value(const FieldEntry& entry);
  std::pair<Layer::Precedence, size_t> precedence_of(const FieldEntry& entry) const;
  // If two fields define one value (Field::instead_of), the one of the higher layer counts and the other is
  // ignored.
  void choose_alternatives();
  void add_world_size_and_name();
  // Marks fields that an unreadable preset or base might have set as failed, so that one cause gives one
  // message. Explicit values are checked all the same. Returns whether there are such fields.
  bool mark_unknown();

  // Values (values.cpp).

  // Evaluates a field after its inputs. A field that is derived from one that is being evaluated (a cycle)
  // stays in State::waiting: returns the lowest index in `active_` that it depends on, else kSettled.
  size_t evaluate(size_t at);
  size_t compute(FieldEntry& entry);
  // A derivation that does not apply leaves the default, which does not count as derived.
  void derive(FieldEntry& entry, const Derivation& derivation);
  void convert_entry(FieldEntry& entry);
  size_t diagnostic_count() const { return out_.diagnostics.size(); }
  std::optional<Node> expand(const Node& node, FieldEntry& entry);
  // `${a.b}`: the value of a field, or of something inside one (`${a.list[0]}`, `${a.map.key}`).
  std::optional<Node> interpolated_value(const std::string& text, SourceLocation location,
                                         FieldEntry& asking);
  void resolve_deferred();
  // Whether one of these inputs was itself derived, directly or indirectly, from `path`.
  bool derived_from(const std::vector<std::string>& inputs, const std::string& path,
                    std::set<std::string>& seen);
  // The value of the field without its explicit value. Where two fields are derived from each other, the
  // given one is the source and has no derived value.
  Value derived_value(const FieldEntry& entry);
  // The value of the field without the recipe's own writes to it; nullopt: not known.
  std::optional<Value> base_value(const FieldEntry& entry);

  // Checks (checks.cpp)
  void check_required();
  // Two fields that define one value in one layer must agree.
  void check_alternatives();
  std::string operand_note(const std::string& path);
  void check_rules();
  // Whether a write is in a recipe or preset that is built into Capstan.
  bool is_builtin_write(const Write& write) const;
  // Whether a write belongs to a built-in recipe that the user extends or overrides. Its values may
  // lose their effect without a report.
  bool is_builtin_base(const Write& write) const;
  // Reports explicit values that are not used in this configuration.
  void check_effects();
  // Whether the preset was chosen after the value was written. A value beside or after the preset is meant to
  // differ from it; an earlier one may have been forgotten.
  bool chosen_after(const Write& preset, const Write& write) const;
  void note_hidden_presets();

  // Origins and history (origins.cpp)
  std::string origin_text(const FieldEntry& entry) const { return make_origin(entry).text; }
  Origin make_origin(const FieldEntry& entry) const;
  Origin write_origin(const Write& write) const;
  void record();
  void record_delta();
  void record_delta_field(const FieldEntry& entry);
  std::string delta_text(const FieldEntry& entry) const;

  const Schema& schema_;
  void* root_;
  const Request& request_;
  Composition composed_;
  Resolved out_;
  std::vector<FieldEntry> entries_;
  std::unordered_map<const FieldInfo*, size_t> index_;
  std::vector<size_t> active_;
  int64_t now_ = 0;
  std::string hash_;
  bool hash_ready_ = false;
};

}  // namespace capstan::config
