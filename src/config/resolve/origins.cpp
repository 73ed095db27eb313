// Origin and history of each field, and the delta to the recipes that are extended (see resolver.hpp).
#include "config/resolve/resolver.hpp"

#include <algorithm>

#include "config/core/recipe_delta.hpp"

namespace capstan::config {

Origin Resolver::make_origin(const FieldEntry& entry) const {
  Origin origin;
  if (entry.from_world_size) {
    origin.kind = Origin::Kind::ranks;
    origin.text = request_.ranks_origin;
  } else if (entry.from_name) {
    origin.kind = Origin::Kind::derived;
    origin.text = "derived: recipe name";
  } else if (entry.derived) {
    origin.kind = Origin::Kind::derived;
    origin.text = "derived: " + entry.field->formula;
  } else if (entry.winner) {
    origin = write_origin(*entry.winner);
    if (entry.node && entry.node->kind == Node::Kind::scalar) origin.written = entry.node->text;
  } else {
    origin.text = "default";
  }
  origin.environment = entry.environment;
  return origin;
}

Origin Resolver::write_origin(const Write& write) const {
  Origin origin;
  origin.location = write.location;
  if (write.value.kind == Node::Kind::scalar) origin.written = write.value.text;
  const Layer& from = layer(write);
  if (from.precedence == Layer::Precedence::preset) {
    origin.kind = Origin::Kind::preset;
    origin.text = "preset " + from.preset;
  } else {
    const bool cli = write.location.known() &&
                     composed_.sources[static_cast<size_t>(write.location.source)].kind == Source::Kind::cli;
    origin.kind = cli ? Origin::Kind::cli : Origin::Kind::file;
    origin.text = from.precedence == Layer::Precedence::imposed
                      ? request_.imposed_by
                      : location_text(write.location, composed_.sources, false);
  }
  return origin;
}

void Resolver::record() {
  for (const auto& entry : entries_) {
    if (entry.failed) out_.failed.push_back(entry.field->path);
    if (section_on(*entry.field)) out_.origins[entry.field->path] = make_origin(entry);
    for (const Write* write : entry.writes) {
      HistoryEntry history{entry.field->path, write_origin(*write), HistoryEntry::Status::effective};
      if (entry.dropped) history.status = HistoryEntry::Status::dropped;
      // The number of ranks of the launch replaces every value.
      else if (entry.superseded || entry.from_world_size)
        history.status = HistoryEntry::Status::replaced;
      else if (write->dead)
        history.status = HistoryEntry::Status::reset;
      else if (write != entry.winner && entry.winner && entry.winner->op == Write::Op::set &&
               entry.winner->rest.empty())
        history.status = HistoryEntry::Status::replaced;
      out_.history.push_back(std::move(history));
    }
  }
}

void Resolver::record_delta() {
  RecipeDelta& delta = out_.delta;
  delta.extends = composed_.extends;
  delta.directory = composed_.sources.front().directory;
  delta.sections = own_choices(schema_, root_, composed_);
  for (const auto& entry : entries_) record_delta_field(entry);
}

void Resolver::record_delta_field(const FieldEntry& entry) {
  if (entry.failed || entry.dropped || !section_on(*entry.field)) return;
  const bool given = entry.from_world_size || (entry.winner && is_explicit(*entry.winner));
  // Whether the recipe itself, and whether a recipe that it extends, sets the field.
  bool own = entry.from_world_size, base = false;
  for (const Write* write : entry.writes) {
    if (!is_explicit(*write)) continue;
    if (in_base(composed_, *write)) base = true;
    if (write->dead ? in_base(composed_, *write) : !layer(*write).base) own = true;
  }
  if (!own || !(given || base)) return;
  const Value value = schema_.load(root_, *entry.field);
  const auto before = base_value(entry);
  // Without this entry, the value would be derived from a field of the base that replaces it.
  const bool takes_back =
      given && std::any_of(entries_.begin(), entries_.end(), [&](const FieldEntry& other) {
        return other.superseded && other.field->instead_of == entry.field->path;
      });
  if (before && *before == value && !takes_back) return;
  // A mapping merges with the one below it: keys that went have to be taken back first.
  bool fewer = false;
  if (before && before->kind == Value::Kind::map && entry.field->type->kind == Type::Kind::map)
    for (const auto& key : before->keys)
      fewer |= std::find(value.keys.begin(), value.keys.end(), key) == value.keys.end();
  if (!given || fewer) out_.delta.unset.push_back(entry.field->path);
  if (given) out_.delta.fields[entry.field->path] = delta_text(entry);
}

std::string Resolver::delta_text(const FieldEntry& entry) const {
  if (entry.from_world_size || !entry.winner) return {};
  if (entry.derived) return "null";
  if (entry.winner->op != Write::Op::set || !entry.winner->rest.empty() || !entry.node ||
      entry.node->kind != Node::Kind::scalar || entry.node->raw ||
      entry.node->text.find("${") == std::string::npos || entry.field->type->kind == Type::Kind::secret)
    return {};
  const SourceLocation& location = entry.node->location;
  const bool here = location.known() &&
                    composed_.sources[static_cast<size_t>(location.source)].directory == out_.delta.directory;
  return here || entry.field->type->kind != Type::Kind::path ? entry.node->text : std::string();
}

}  // namespace capstan::config
