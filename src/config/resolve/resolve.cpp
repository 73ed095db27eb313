// The resolution of a recipe (see resolver.hpp).
#include "config/resolve/resolver.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "config/core/merge.hpp"

namespace capstan::config {

namespace {
constexpr size_t kMaxDiagnostics = 300;
}  // namespace

Resolved Resolver::run() {
  // The values of a file that cannot be parsed are unknown: no further checks.
  if (!composed_.malformed) {
    switch_sections();
    for (auto& entry : entries_) merge(entry);
    choose_alternatives();
    add_world_size_and_name();
    const bool unknown = mark_unknown();
    choose_variants();
    for (size_t i = 0; i < entries_.size(); ++i) evaluate(i);
    resolve_deferred();
    check_required();
    if (!unknown) check_alternatives();
    check_rules();
    // Imposed overrides may leave parts of the recipe without effect on purpose.
    if (request_.imposed.empty() && !unknown) {
      check_effects();
      note_hidden_presets();
    }
    record();
    if (out_.ok()) record_delta();
  }
  out_.malformed = composed_.malformed;
  out_.bad_words = composed_.bad_words;
  for (size_t i = 0; i < composed_.preset_of.size(); ++i)
    if (!composed_.preset_of[i].empty()) out_.presets[schema_.sections()[i].name] = composed_.preset_of[i];
  out_.sources = std::move(composed_.sources);
  out_.diagnostics.insert(out_.diagnostics.begin(), composed_.diagnostics.begin(),
                          composed_.diagnostics.end());
  sort_diagnostics(out_.diagnostics);
  if (out_.diagnostics.size() > kMaxDiagnostics) {
    const size_t more = out_.diagnostics.size() - kMaxDiagnostics;
    const Level level = out_.diagnostics.front().level;
    out_.diagnostics.resize(kMaxDiagnostics);
    Diagnostic rest;
    rest.level = level;
    rest.message = "and " + std::to_string(more) + " more";
    out_.diagnostics.push_back(std::move(rest));
  }
  return std::move(out_);
}

Diagnostic& Resolver::report(Level level, const char* code, std::string message, SourceLocation location) {
  Diagnostic diagnostic;
  diagnostic.level = level;
  diagnostic.code = code;
  diagnostic.message = std::move(message);
  diagnostic.location = location;
  out_.diagnostics.push_back(std::move(diagnostic));
  return out_.diagnostics.back();
}

Resolver::FieldEntry* Resolver::entry_of(const std::string& path) {
  const FieldInfo* field = schema_.find_spelling(path);
  return field ? &entries_[index_.at(field)] : nullptr;
}

bool Resolver::section_on(const FieldInfo& field) const {
  return schema_.sections()[field.section_index].at(root_) != nullptr;
}

bool Resolver::is_builtin(const SourceLocation& location) const {
  return location.known() &&
         composed_.sources[static_cast<size_t>(location.source)].kind == Source::Kind::embedded;
}

void Resolver::switch_sections() {
  for (const auto& section : schema_.sections()) {
    if (!section.optional) continue;
    const auto& choices = composed_.choices[section.index];
    bool on = !choices.empty() && !choices.back().off;
    for (auto& write : composed_.writes) {
      if (write.dead || write.field->section_index != section.index || !is_explicit(write)) continue;
      if (on || choices.empty() || write.layer > choices.back().layer) {
        on = true;
        continue;
      }
      write.take_back(choices.back().layer);
      const std::string location = location_text(write.location, composed_.sources, false);
      if (write.layer == choices.back().layer) {
        report(Level::error, "C0109",
               "`" + section.name + "` is switched off, and `" + write.field->path + "` is set",
               write.location)
            .related(choices.back().location, "switched off here");
      } else if (!is_builtin(write.location)) {
        report(Level::note, "C0701",
               "`" + write.field->path + "` from " + location + " is dropped: `" + section.name +
                   "` is switched off at " +
                   location_text(choices.back().location, composed_.sources, false));
      }
    }
    if (on) section.ensure(root_);
  }
}

void Resolver::choose_variants() {
  for (const auto& section : schema_.sections()) {
    if (section.variant_field.empty() || !section.at(root_)) continue;
    FieldEntry& chooser = entries_[index_.at(section.find(section.variant_field))];
    evaluate(index_.at(chooser.field));
    if (chooser.failed) continue;
    const std::string variant = schema_.load(root_, *chooser.field).text;
    // The layer that decided: the explicit write, or the choice of the preset that holds it.
    const auto& choices = composed_.choices[section.index];
    size_t decided = 0;
    if (chooser.winner && is_explicit(*chooser.winner))
      decided = chooser.winner->layer + 1;
    else if (!choices.empty())
      decided = choices.back().layer + 1;
    for (const auto& field : section.fields) {
      if (field.variants.empty() ||
          std::find(field.variants.begin(), field.variants.end(), variant) != field.variants.end())
        continue;
      FieldEntry& entry = entries_[index_.at(&field)];
      entry.dropped = true;
      entry.node.reset();
      entry.winner = nullptr;
      for (const Write* write : entry.writes) {
        // An explicit null agrees with a kind that lacks the field.
        if (write->dead || !is_explicit(*write) || write->value.kind == Node::Kind::null) continue;
        if (write->layer + 1 < decided) {
          if (!request_.imposed.empty() || is_builtin(write->location)) continue;
          report(Level::note, "C0701",
                 "`" + field.path + "` from " + location_text(write->location, composed_.sources, false) +
                     " is dropped: `" + section.name + "` of kind `" + variant + "` has no such field");
        } else {
          std::string only;
          for (const auto& name : field.variants) only += (only.empty() ? "`" : ", `") + name + "`";
          auto& problem = report(
              Level::error, "C0110",
              "`" + field.path + "` is not a field of `" + section.name + "` of kind `" + variant + "`",
              write->location);
          problem.path = field.path;
          problem.help("it belongs to " + section.variant_field + " " + only);
        }
      }
    }
  }
}

void Resolver::merge(FieldEntry& entry) {
  for (const Write* write : entry.writes) {
    if (write->dead) continue;
    if (write->field->section_index < schema_.sections().size() && !section_on(*write->field)) continue;
    if (!apply_write(entry.node, *write, out_.diagnostics)) {
      entry.failed = true;
      continue;
    }
    entry.winner = write;
  }
}

bool Resolver::gives_value(const FieldEntry& entry) {
  return entry.winner && entry.node && entry.node->kind != Node::Kind::null;
}

std::pair<Layer::Precedence, size_t> Resolver::precedence_of(const FieldEntry& entry) const {
  return {layer(*entry.winner).precedence, entry.winner->layer};
}

void Resolver::choose_alternatives() {
  for (auto& one : entries_) {
    if (one.field->instead_of.empty()) continue;
    FieldEntry& other = *entry_of(one.field->instead_of);
    if (!gives_value(one) || !gives_value(other) || precedence_of(one) == precedence_of(other)) continue;
    FieldEntry& weaker = precedence_of(one) < precedence_of(other) ? one : other;
    weaker.node.reset();
    weaker.winner = nullptr;
    weaker.superseded = true;
  }
}

void Resolver::add_world_size_and_name() {
  if (request_.ranks && !schema_.ranks_path().empty()) {
    FieldEntry& ranks = *entry_of(schema_.ranks_path());
    ranks.node = Node::scalar(std::to_string(*request_.ranks), {});
    ranks.from_world_size = true;
    ranks.winner = nullptr;
  }
  FieldEntry* name = entry_of("name");
  if (name && name->field->section.empty() && !name->node && name->field->type->kind == Type::Kind::text) {
    name->node = Node::scalar(out_.recipe_name, {}, true);
    name->node->raw = true;
    name->from_name = true;
  }
}

bool Resolver::mark_unknown() {
  bool any = false;
  for (FieldEntry& entry : entries_) {
    const SectionInfo& section = schema_.sections()[entry.field->section_index];
    if (!composed_.incomplete && !composed_.unknown_presets[section.index]) continue;
    any = true;
    const bool given = entry.from_world_size || entry.from_name ||
                       (entry.winner && is_explicit(*entry.winner) && entry.winner->op == Write::Op::set &&
                        entry.winner->rest.empty());
    if (!given) entry.failed = true;
  }
  return any;
}

const Origin& Resolved::origin(const std::string& path) const {
  static const Origin kDefault{Origin::Kind::default_value, "default", {}, {}, false};
  const auto found = origins.find(path);
  return found == origins.end() ? kDefault : found->second;
}

void Resolved::require_ok() const {
  if (ok()) return;
  std::vector<Diagnostic> errors;
  for (const auto& diagnostic : diagnostics)
    if (diagnostic.level == Level::error) errors.push_back(diagnostic);
  fail(malformed ? ErrorCode::format : ErrorCode::config, render(errors, sources));
}

Resolved resolve_into(const Schema& schema, const Library& library, void* root, const Request& request) {
  return Resolver(schema, library, root, request).run();
}

Resolved resolve_text_into(const Schema& schema, const Library& library, void* root, const Request& request,
                           const std::string& text) {
  return Resolver(schema, library, root, request, &text).run();
}

const Schema& schema() {
  static const Schema* built = [] {
    // Lives as long as the program.
    auto* result = new Schema;
    register_sections(*result);
    result->finish();
    return result;
  }();
  return *built;
}

Resolution resolve(const Request& request) {
  Resolution resolution;
  static_cast<Resolved&>(resolution) =
      resolve_into(schema(), Library::standard(), &resolution.config, request);
  return resolution;
}

Resolution resolve_text(const std::string& text, const Request& request) {
  Resolution resolution;
  static_cast<Resolved&>(resolution) =
      resolve_text_into(schema(), Library::standard(), &resolution.config, request, text);
  return resolution;
}

}  // namespace capstan::config
