// Values of fields: interpolation, conversion and derivation (see resolver.hpp).
#include "config/resolve/resolver.hpp"

#include <algorithm>

#include "config/core/convert.hpp"
#include "config/core/hash.hpp"
#include "config/core/interpolate.hpp"
#include "config/core/merge.hpp"
#include "config/core/recipe_delta.hpp"

namespace capstan::config {

size_t Resolver::evaluate(size_t at) {
  FieldEntry& entry = entries_[at];
  if (entry.state != State::waiting) return kSettled;
  if (entry.node && !hash_ready_ && mentions_hash(*entry.node)) {
    if (entry.field->effect == Effect::io || entry.field->effect == Effect::log) {
      entry.state = State::deferred;
    } else {
      entry.state = State::done;
      entry.failed = true;
      report(Level::error, "C0405",
             "`${hash}` cannot be part of `" + entry.field->path + "`, which the hash is made of",
             entry.node->location);
    }
    return kSettled;
  }
  entry.state = State::active;
  active_.push_back(at);
  const size_t waits = compute(entry);
  active_.pop_back();
  entry.state = waits == kSettled ? State::done : State::waiting;
  return waits;
}

size_t Resolver::compute(FieldEntry& entry) {
  if (entry.failed || entry.dropped || !section_on(*entry.field)) return kSettled;
  const bool given = entry.node && (entry.node->kind != Node::Kind::null || entry.node->empty);
  const Derivation* derivation =
      entry.field->formula.empty() ? nullptr : schema_.find_derivation(entry.field->path);
  if (given || (entry.node && !derivation) || (entry.node && !entry.field->type->optional)) {
    convert_entry(entry);
    return kSettled;
  }
  if (!derivation) return kSettled;
  const size_t own = active_.size() - 1;
  size_t waits = kSettled;
  // Inputs that are derived from this field.
  std::vector<size_t> later;
  for (const auto& input : derivation->inputs) {
    const size_t at = index_.at(schema_.find_field(input));
    if (&entries_[at] == &entry) continue;
    if (entries_[at].state == State::active) {
      const auto location = std::find(active_.begin(), active_.end(), at) - active_.begin();
      waits = std::min(waits, static_cast<size_t>(location));
      continue;
    }
    const size_t found = evaluate(at);
    if (entries_[at].failed) {
      entry.failed = true;
      return kSettled;
    }
    if (found == kSettled) continue;
    waits = std::min(waits, found);
    later.push_back(at);
  }
  if (waits < own) return waits;
  derive(entry, *derivation);
  if (entry.derived || later.empty()) return kSettled;
  // These fields are derived from each other, and the given one was not reached yet. With this field marked
  // as done, the others are derived from the given one, and this field then from them.
  entry.state = State::done;
  for (const size_t at : later) {
    evaluate(at);
    entry.failed = entry.failed || entries_[at].failed;
  }
  if (!entry.failed) derive(entry, *derivation);
  return kSettled;
}

void Resolver::derive(FieldEntry& entry, const Derivation& derivation) {
  derivation.run(root_);
  const Value value = schema_.load(root_, *entry.field);
  const bool collection = value.kind == Value::Kind::list || value.kind == Value::Kind::map;
  entry.derived = !value.is_null() && !(collection && value.items.empty());
}

void Resolver::convert_entry(FieldEntry& entry) {
  ConvertContext context;
  context.sources = &composed_.sources;
  context.diagnostics = &out_.diagnostics;
  context.expand = [&](const Node& node) { return expand(node, entry); };
  const size_t errors = diagnostic_count();
  auto value = convert(*entry.field, *entry.node, entry.field->path, context);
  if (!value) {
    entry.failed = true;
    if (entry.from_world_size && diagnostic_count() > errors)
      out_.diagnostics.back().help("from " + request_.ranks_origin + " " + std::to_string(*request_.ranks));
    return;
  }
  schema_.store(root_, *entry.field, *value);
}

std::optional<Node> Resolver::expand(const Node& node, FieldEntry& entry) {
  Interpolation context;
  context.diagnostics = &out_.diagnostics;
  context.section = entry.field->section;
  context.path = entry.field->path;
  context.recipe_name = out_.recipe_name;
  context.now = now_;
  context.used_environment = &entry.environment;
  context.environment = [](const std::string& name) -> const char* { return std::getenv(name.c_str()); };
  context.field_value = [&](const std::string& path, SourceLocation location) {
    return interpolated_value(path, location, entry);
  };
  context.hash = [&](SourceLocation location) -> std::optional<std::string> {
    if (hash_ready_) return hash_;
    report(Level::error, "C0405", "`${hash}` cannot be used here", location);
    return std::nullopt;
  };
  return interpolate(node, context);
}

std::optional<Node> Resolver::interpolated_value(const std::string& text, SourceLocation location,
                                                 FieldEntry& asking) {
  const auto parsed = parse_path(text, location, out_.diagnostics);
  if (!parsed) return std::nullopt;
  std::string path;
  size_t used = 0;
  const FieldInfo* field = nullptr;
  for (size_t i = 0; i < parsed->segments.size() && i < 2 && !field; ++i) {
    path += (i ? "." : "") + parsed->segments[i].name;
    field = schema_.find_spelling(path);
    used = i + 1;
  }
  if (!field) {
    const size_t dot = text.find('.');
    Diagnostic problem = unknown_key(schema_, dot == std::string::npos ? "" : text.substr(0, dot),
                                     dot == std::string::npos ? text : text.substr(dot + 1), location);
    problem.code = "C0402";
    problem.message = schema_.find_section(text) ? "`${" + text + "}` names a section, not a field"
                                                 : "`${" + text + "}` names no field";
    problem.label.clear();
    problem.suggestions.clear();
    if (schema_.find_section(text)) problem.helps = {"name one of its fields"};
    out_.diagnostics.push_back(std::move(problem));
    return std::nullopt;
  }
  const size_t at = index_.at(field);
  FieldEntry& source = entries_[at];
  if (source.state == State::active) {
    auto& problem = report(Level::error, "C0403", "`" + field->path + "` is defined by itself", location);
    auto first = std::find(active_.begin(), active_.end(), at);
    for (; first != active_.end(); ++first) {
      const FieldEntry& link = entries_[*first];
      const auto next = first + 1 == active_.end() ? at : *(first + 1);
      if (link.node && link.node->location.known() &&
          !(link.node->location.line == location.line && link.node->location.source == location.source))
        problem.related(link.node->location,
                        "`" + link.field->path + "` needs `" + entries_[next].field->path + "`");
    }
    return std::nullopt;
  }
  if (evaluate(at) != kSettled) {
    report(Level::error, "C0403",
           "`" + field->path + "` is derived from `" + asking.field->path + "`, which is given by it",
           location);
    return std::nullopt;
  }
  if (source.state == State::deferred) {
    report(Level::error, "C0405", "`" + field->path + "` holds `${hash}` and cannot be used here", location);
    return std::nullopt;
  }
  if (source.failed) return std::nullopt;
  asking.environment = asking.environment || source.environment;
  Node node = node_from_value(*field->type, schema_.load(root_, *field));
  node.location = location;
  for (; used < parsed->segments.size(); ++used) {
    const Segment& segment = parsed->segments[used];
    const Node* inner = nullptr;
    if (node.kind == Node::Kind::list && segment.kind == Segment::Kind::index) {
      const auto size = static_cast<long long>(node.items.size());
      const long long item = segment.index < 0 ? size + segment.index : segment.index;
      if (item >= 0 && item < size) inner = &node.items[static_cast<size_t>(item)];
    } else if (node.kind == Node::Kind::map && segment.kind != Segment::Kind::id) {
      inner = node.find(segment.name);
    }
    if (!inner) {
      report(Level::error, "C0402",
             "`${" + text + "}` does not name a value: `" + field->path + "` has no such item", location);
      return std::nullopt;
    }
    Node copy = *inner;
    node = std::move(copy);
  }
  return node;
}

void Resolver::resolve_deferred() {
  bool any = false;
  for (const auto& entry : entries_) any = any || entry.state == State::deferred;
  if (!any) return;
  hash_ = config_hash(schema_, root_, HashScope::math);
  hash_ready_ = true;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].state != State::deferred) continue;
    entries_[i].state = State::waiting;
    evaluate(i);
  }
}

bool Resolver::derived_from(const std::vector<std::string>& inputs, const std::string& path,
                            std::set<std::string>& seen) {
  for (const auto& input : inputs) {
    if (input == path) return true;
    const Derivation* derivation = entry_of(input)->derived ? schema_.find_derivation(input) : nullptr;
    if (derivation && seen.insert(input).second && derived_from(derivation->inputs, path, seen)) return true;
  }
  return false;
}

Value Resolver::derived_value(const FieldEntry& entry) {
  const Derivation* derivation =
      entry.field->formula.empty() ? nullptr : schema_.find_derivation(entry.field->path);
  std::set<std::string> seen;
  if (!derivation || derived_from(derivation->inputs, entry.field->path, seen))
    return entry.field->default_value;
  const Value kept = schema_.load(root_, *entry.field);
  schema_.store(root_, *entry.field, entry.field->default_value);
  derivation->run(root_);
  Value derived = schema_.load(root_, *entry.field);
  schema_.store(root_, *entry.field, kept);
  return derived;
}

std::optional<Value> Resolver::base_value(const FieldEntry& entry) {
  std::optional<Node> node;
  std::vector<Diagnostic> ignored;
  for (const Write* write : entry.writes)
    if (in_base(composed_, *write)) apply_write(node, *write, ignored);
  const bool null = node && node->kind == Node::Kind::null && !node->empty;
  if (!node || (null && !entry.field->formula.empty())) return derived_value(entry);
  const size_t reported = out_.diagnostics.size();
  FieldEntry asking = entry;
  ConvertContext context{&composed_.sources, &ignored, {}};
  context.expand = [&](const Node& text) { return expand(text, asking); };
  auto value = convert(*entry.field, *node, entry.field->path, context);
  out_.diagnostics.resize(reported);
  return value;
}

}  // namespace capstan::config
