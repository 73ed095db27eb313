// Checks of resolved values (see resolver.hpp).
#include "config/resolve/resolver.hpp"

#include <algorithm>

#include "config/core/convert.hpp"
#include "config/core/emit.hpp"

namespace capstan::config {

void Resolver::check_alternatives() {
  for (const auto& one : entries_) {
    if (one.field->instead_of.empty()) continue;
    const FieldEntry& other = *entry_of(one.field->instead_of);
    if (!gives_value(one) || !gives_value(other) || one.failed || other.failed) continue;
    const Value value = schema_.load(root_, *other.field), derived = derived_value(other);
    if (value == derived) continue;
    auto& problem =
        report(Level::error, "C0111",
               "`" + one.field->path + "` and `" + other.field->path + "` are both given and disagree",
               one.winner->location);
    problem.path = one.field->path;
    problem.related(other.winner->location, "`" + other.field->path + "` is " +
                                                yaml_inline(*other.field->type, value) + " here, and " +
                                                yaml_inline(*other.field->type, derived) + " by `" +
                                                one.field->name + "`");
    problem.help("give one of the two");
  }
}

void Resolver::check_required() {
  for (auto& entry : entries_) {
    if (!entry.field->required || entry.failed || entry.dropped || !section_on(*entry.field)) continue;
    const Value value = schema_.load(root_, *entry.field);
    const bool missing = entry.field->type->optional ? value.is_null() : !entry.node && !entry.derived;
    if (!missing) continue;
    entry.failed = true;
    auto& problem = report(Level::error, "C0210", "`" + entry.field->path + "` is missing",
                           entry.winner ? entry.winner->location : SourceLocation{});
    problem.path = entry.field->path;
    // The first part of the documentation is what the field is; typical values follow.
    const std::string what = entry.field->doc.substr(0, entry.field->doc.find(';'));
    problem.help(what + ": " + type_text(*entry.field->type, *entry.field));
  }
}

std::string Resolver::operand_note(const std::string& path) {
  const FieldEntry& operand = *entry_of(path);
  const std::string value = yaml_inline(*operand.field->type, schema_.load(root_, *operand.field));
  return "`" + path + "` = " + value + " (" + origin_text(operand) + ")";
}

void Resolver::check_rules() {
  const bool any_failed =
      std::any_of(entries_.begin(), entries_.end(), [](const FieldEntry& one) { return one.failed; });
  for (const Rule& rule : schema_.rules()) {
    const bool skip = any_failed && std::ranges::any_of(rule.reads, [&](const std::string& path) {
                        return entry_of(path)->failed && std::ranges::count(rule.optional_reads, path) == 0;
                      });
    if (skip) continue;
    RuleReport found;
    rule.check(root_, found);
    for (const auto& violation : found.violations) {
      // A value without effect that a preset or recipe of the program brought is not the user's to remove.
      const FieldEntry* pointed = violation.pointed.empty() ? nullptr : entry_of(violation.pointed);
      if (violation.only_if_given && !(pointed && is_given(*pointed))) continue;
      if (violation.warning && pointed && pointed->winner && is_builtin_write(*pointed->winner) &&
          (!is_explicit(*pointed->winner) || is_builtin_base(*pointed->winner)))
        continue;
      std::vector<Violation::Operand> operands;
      if (!violation.pointed.empty()) operands.push_back({violation.pointed, {}, true});
      for (const auto& operand : violation.operands)
        if (!operand.is_path || operand.name != violation.pointed) operands.push_back(operand);
      const bool named_paths = std::any_of(violation.operands.begin(), violation.operands.end(),
                                           [](const Violation::Operand& operand) { return operand.is_path; });
      if (!named_paths)
        for (const auto& path : rule.reads)
          if (path != violation.pointed) operands.push_back({path, {}, true});
      auto& problem =
          report(violation.warning ? Level::warning : Level::error, rule.code.c_str(), violation.message);
      problem.name = rule.name;
      problem.path = violation.pointed;
      // Point at what the user can change: the operand named by the rule, else the one set with the highest
      // rank.
      const FieldEntry* best = nullptr;
      for (const auto& operand : operands) {
        const FieldEntry* candidate = operand.is_path ? entry_of(operand.name) : nullptr;
        if (!candidate) continue;
        if (candidate->winner && is_explicit(*candidate->winner)) {
          const bool named = operand.name == violation.pointed;
          if (!best || (!named && best->winner->layer < candidate->winner->layer &&
                        best->field->path != violation.pointed))
            best = candidate;
        }
      }
      if (!violation.pointed.empty() && entry_of(violation.pointed)->from_world_size) best = nullptr;
      // A number of ranks that the user gave is to be changed before what a recipe of the program says.
      const bool by_ranks = std::any_of(operands.begin(), operands.end(), [&](const auto& operand) {
        return operand.is_path && entry_of(operand.name) && entry_of(operand.name)->from_world_size;
      });
      if (best && by_ranks && is_builtin_write(*best->winner)) best = nullptr;
      if (best) {
        problem.location =
            best->node && best->node->location.known() ? best->node->location : best->winner->location;
        if (problem.path.empty()) problem.path = best->field->path;
      }
      for (const auto& operand : operands)
        problem.note(operand.is_path && entry_of(operand.name) ? operand_note(operand.name)
                                                               : operand.name + " = " + operand.value);
      problem.help(violation.help_text);
    }
  }
}

bool Resolver::is_builtin_write(const Write& write) const {
  return write.location.known() &&
         composed_.sources[static_cast<size_t>(write.location.source)].kind == Source::Kind::embedded;
}

bool Resolver::is_builtin_base(const Write& write) const {
  const auto embedded = [](const Source& source) { return source.kind == Source::Kind::embedded; };
  return is_builtin_write(write) &&
         ((layer(write).base && !layer(write).given) ||
          !std::all_of(composed_.sources.begin(), composed_.sources.end(), embedded));
}

bool Resolver::is_given(const FieldEntry& entry) {
  if (!entry.winner || !is_explicit(*entry.winner) || is_builtin_write(*entry.winner)) return false;
  if (schema_.load(root_, *entry.field) != entry.field->default_value) return true;
  const int source = entry.winner->location.source;
  if (source >= 0 && composed_.sources[static_cast<size_t>(source)].kind == Source::Kind::cli) return true;
  int64_t fields = 0, written = 0;
  for (const FieldEntry& other : entries_) {
    if (other.field->section_index != entry.field->section_index) continue;
    ++fields;
    if (other.winner && other.winner->location.source == source) ++written;
  }
  return 2 * written <= fields;
}

void Resolver::check_effects() {
  for (auto& entry : entries_) {
    if (entry.failed || entry.dropped || !entry.winner || !is_explicit(*entry.winner) ||
        !section_on(*entry.field) || is_builtin_base(*entry.winner))
      continue;
    const SectionInfo& section = schema_.sections()[entry.field->section_index];
    const Condition* unmet = nullptr;
    for (const auto* conditions : {&section.used_when, &entry.field->used_when})
      for (const auto& condition : *conditions)
        if (!unmet && !condition.holds(root_)) unmet = &condition;
    if (!unmet) continue;
    const Value value = schema_.load(root_, *entry.field);
    // A default that the user gives has no effect either, unless it says that something is off.
    const bool is_default = value == entry.field->default_value;
    const bool is_off = value.is_null() || (value.kind == Value::Kind::boolean && !value.boolean);
    if (is_default ? is_off || !is_given(entry) : value == derived_value(entry)) continue;
    const bool error = entry.field->effect == Effect::math && !is_default;
    auto& problem = report(error ? Level::error : Level::warning, error ? "C0604" : "C0606",
                           "`" + entry.field->path + "` has no effect here", entry.winner->location);
    problem.name = error ? "no_effect" : "unused_value";
    problem.path = entry.field->path;
    problem.label = "read only when " + unmet->text;
    problem.help("remove it, or make sure that " + unmet->text);
  }
}

bool Resolver::chosen_after(const Write& preset, const Write& write) const {
  const std::string name = layer(preset).preset.substr(0, layer(preset).preset.find('/'));
  const Choice& choice = composed_.choices[schema_.find_section(name)->index].back();
  const bool one_line = choice.layer == write.layer && layer(write).precedence == Layer::Precedence::cli;
  return choice.layer > write.layer || (one_line && choice.location.line > write.location.line);
}

void Resolver::note_hidden_presets() {
  for (const auto& entry : entries_) {
    if (entry.failed || entry.dropped || !entry.winner || !is_explicit(*entry.winner)) continue;
    const Write* preset = nullptr;
    for (const Write* write : entry.writes)
      if (!is_explicit(*write) && !write->dead && write->rest.empty()) preset = write;
    if (!preset || entry.field->type->kind == Type::Kind::map || entry.winner->op == Write::Op::append ||
        !entry.winner->rest.empty() || !chosen_after(*preset, *entry.winner))
      continue;
    // What `models` says about a model is meant for it, though its preset is chosen later.
    if (layer(*entry.winner).of_model && entry.field->section == "model") continue;
    std::vector<Diagnostic> ignored;
    ConvertContext context{&composed_.sources, &ignored, {}};
    const auto soft = convert(*entry.field, preset->value, entry.field->path, context);
    const Value kept = schema_.load(root_, *entry.field);
    if (!soft || *soft == kept) continue;
    auto& note = report(Level::note, "C0702",
                        "preset " + layer(*preset).preset + " would set `" + entry.field->path + ": " +
                            yaml_inline(*entry.field->type, *soft) + "`; kept `" +
                            yaml_inline(*entry.field->type, kept) + "` from " + origin_text(entry));
    note.path = entry.field->path;
  }
}

int64_t hidden_fields(const Resolved& resolved, std::string_view section, std::string_view preset) {
  const std::string begin =
      "preset " + std::string(section) + "/" + (preset.empty() ? std::string() : std::string(preset) + " ");
  return std::ranges::count_if(resolved.diagnostics, [&](const Diagnostic& note) {
    return note.code == "C0702" && note.message.starts_with(begin);
  });
}

}  // namespace capstan::config
