#include "importers/draft.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/actions.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"
#include "config/core/convert.hpp"
#include "config/core/emit.hpp"
#include "importers/rule.hpp"

namespace capstan::importers {

using config::Node;

namespace {

// Comments are aligned up to column kMaxAligned and clipped to kMaxComment characters.
constexpr size_t kMaxAligned = 56, kMaxComment = 160;

std::string clipped(std::string text, size_t most) {
  for (char& c : text)
    if (is_control(c)) c = ' ';
  if (text.size() <= most) return text;
  return text.substr(0, character_start(text, most - 3)) + "...";
}

void write_inline(const Node& node, size_t most, std::string& out) {
  if (out.size() > most) return;
  switch (node.kind) {
    case Node::Kind::null:
      out += "null";
      break;
    case Node::Kind::scalar:
      out += node.text;
      break;
    case Node::Kind::list:
    case Node::Kind::map: {
      const bool map = node.kind == Node::Kind::map;
      out += map ? '{' : '[';
      for (size_t i = 0; i < node.items.size(); ++i) {
        if (i > 0) out += ", ";
        if (map) out += node.keys[i] + ": ";
        write_inline(node.items[i], most, out);
      }
      out += map ? '}' : ']';
    }
  }
}

// Python and YAML 1.1 have more spellings of truth values than a recipe.
Node plain_boolean(const Node& node) {
  Node result = node;
  if (const auto on = truth(node.text)) result.text = *on ? "true" : "false";
  return result;
}

}  // namespace

std::string with_plain_characters(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    const bool plain = is_letter(c) || is_digit(c) || c == '_' || c == '.';
    if (!plain) c = '-';
  }
  return result;
}

std::string shown(const Node& node, size_t most) {
  std::string text;
  write_inline(node, most, text);
  return clipped(std::move(text), most);
}

const config::FieldInfo& Draft::field(std::string_view path) const {
  const config::FieldInfo* found = config::schema().find_field(path);
  CAPSTAN_ASSERT(found, "a table names the field `" + std::string(path) + "`");
  return *found;
}

bool Draft::set(std::string_view path, const Node& value, const SourceKey& from, const std::string& note) {
  const config::FieldInfo& info = field(path);
  const Node node = info.type->kind == config::Type::Kind::boolean && value.kind == Node::Kind::scalar
                        ? plain_boolean(value)
                        : value;
  std::vector<config::Diagnostic> problems;
  config::ConvertContext context;
  context.sources = &sources_;
  context.diagnostics = &problems;
  const auto converted = config::convert(info, node, info.path, context);
  if (!converted) {
    std::string reason = problems.empty() ? "not a value of `" + info.path + "`" : problems.front().message;
    if (!problems.empty() && !problems.front().helps.empty()) reason += "; " + problems.front().helps.front();
    omit(from, value, OmissionReason::value, reason);
    return false;
  }
  Entry entry{from, note, config::yaml_inline(*info.type, *converted)};
  const auto found = entries_.find(info.path);
  if (found != entries_.end() && !found->second.from.key.empty() && found->second.value != entry.value)
    omit(found->second.from, found->second.value, OmissionReason::replaced,
         "`" + from.key + "` sets `" + info.path + "` again");
  entries_[info.path] = std::move(entry);
  return true;
}

bool Draft::set(std::string_view path, const std::string& text, const SourceKey& from,
                const std::string& note) {
  Node value = Node::scalar(text, from.location);
  if (text == "null") value.kind = Node::Kind::null;
  return set(path, value, from, note);
}

bool Draft::set_if_other(std::string_view path, const Node& value, const SourceKey& from) {
  const config::FieldInfo& info = field(path);
  if (!set(path, value, from)) return false;
  const auto entry = entries_.find(info.path);
  if (entry->second.value == config::yaml_inline(*info.type, info.default_value)) {
    entries_.erase(entry);
    omit(from, value, OmissionReason::same, "the default of `" + info.path + "`");
  }
  return true;
}

void Draft::assume(std::string_view path, const std::string& text, const std::string& reason) {
  Node value = Node::scalar(text, {});
  if (text == "null") value.kind = Node::Kind::null;
  assume(path, value, reason);
}

void Draft::assume(std::string_view path, const Node& value, const std::string& reason) {
  const SourceKey no_key;
  if (!has(path) && set(path, value, no_key)) entries_.find(path)->second.note = reason;
}

void Draft::set_torch_sgd(const SourceKey& from) {
  set("optimizer.optimizer", "sgd", from);
  assume("optimizer.decoupled_weight_decay", "false", "torch.optim.SGD adds the decay to the gradient");
  assume("optimizer.sgd_momentum", "0", "PyTorch's default");
}

void Draft::list_as_assumed(std::string_view path, const std::string& reason) {
  const auto found = entries_.find(field(path).path);
  if (found != entries_.end()) found->second.assumption = reason;
}

void Draft::refer(std::string_view path, std::string_view other, const std::string& reason) {
  if (has(path)) return;
  entries_[field(path).path] = {{}, reason, "${" + std::string(other) + "}"};
}

void Draft::choose(std::string_view section, const std::string& preset, const SourceKey& from,
                   const std::string& note) {
  presets_[std::string(section)] = {from, note, preset};
}

void Draft::assume_preset(std::string_view section, const std::string& preset, const std::string& reason) {
  presets_.try_emplace(std::string(section), Entry{{}, reason, preset});
}

void Draft::extend(const std::string& recipe, const std::string& reason, const std::string& named) {
  extends_ = recipe;
  base_ = named.empty() ? recipe : named;
  base_reason_ = reason;
}

void Draft::omit(const SourceKey& from, const Node& value, OmissionReason why, std::string reason,
                 std::vector<std::string> near) {
  omit(from, shown(value), why, std::move(reason), std::move(near));
}

void Draft::omit(const SourceKey& from, std::string value, OmissionReason why, std::string reason,
                 std::vector<std::string> near) {
  OmittedKey omitted{from.location, clipped(from.key, 80), clipped(std::move(value), 60), std::move(reason),
                     why,           std::move(near)};
  // A key that is processed twice is listed once, except if it gives several fields that are omitted.
  for (const OmittedKey& known : omitted_)
    if (known.key == omitted.key && known.value == omitted.value && known.why == why &&
        known.location.line == from.location.line && known.location.column == from.location.column)
      return;
  omitted_.push_back(std::move(omitted));
}

void Draft::omit_branch(const SourceKey& from, std::string reason) {
  omit(from, std::string(), OmissionReason::to_fill_in, std::move(reason));
  for (OmittedKey& omitted : omitted_)
    if (omitted.why == OmissionReason::to_fill_in && omitted.location.line == from.location.line &&
        omitted.location.column == from.location.column)
      omitted.branch = true;
}

void Draft::withdraw(const std::string& path, OmissionReason why, const std::string& reason) {
  const auto found = entries_.find(path);
  if (found == entries_.end()) return;
  if (!found->second.from.key.empty()) omit(found->second.from, found->second.value, why, reason);
  entries_.erase(found);
}

std::string Draft::preset(std::string_view section) const {
  const auto found = presets_.find(section);
  return found == presets_.end() ? std::string() : found->second.value;
}

bool Draft::mentions(std::string_view key) const {
  const auto has_key = [&](const auto& entry) { return entry.second.from.key == key; };
  return std::any_of(entries_.begin(), entries_.end(), has_key) ||
         std::any_of(presets_.begin(), presets_.end(), has_key) ||
         std::any_of(omitted_.begin(), omitted_.end(),
                     [&](const OmittedKey& omitted) { return omitted.key == key; });
}

std::string Draft::text(std::string_view path) const {
  const auto found = entries_.find(path);
  return found == entries_.end() ? std::string() : found->second.value;
}

std::vector<std::string> Draft::paths_of(std::string_view section) const {
  std::vector<std::string> result;
  for (const auto& [path, entry] : entries_)
    if (path.starts_with(std::string(section) + ".")) result.push_back(path);
  return result;
}

std::string Draft::comment(const Entry& entry) const {
  // Puts the comment on one line, because a key of the file may contain line breaks.
  if (entry.from.key.empty()) return clipped(plain_actions(entry.note), kMaxComment);
  std::string text = clipped(entry.from.key, 60);
  if (entry.from.location.known()) text += ", line " + std::to_string(entry.from.location.line);
  if (!entry.note.empty()) text += ": " + plain_actions(entry.note);
  return clipped(std::move(text), kMaxComment);
}

std::string Draft::recipe(const std::string& title, const std::string& name,
                          const std::string& description) const {
  std::string out = "# " + title + "\n";
  if (!base_.empty())
    out += "extends: " + config::yaml_text(extends_) + "  # " + plain_actions(base_reason_) + "\n";
  out += "name: " + config::yaml_text(name) + "\ndescription: " + config::yaml_text(description) + "\n";
  for (const config::SectionInfo& section : config::schema().sections()) {
    if (section.name.empty()) continue;
    // Pairs of a line's text and its comment.
    std::vector<std::pair<std::string, std::string>> lines;
    const auto preset = presets_.find(section.name);
    for (const config::FieldInfo& info : section.fields)
      if (const auto found = entries_.find(info.path); found != entries_.end())
        lines.emplace_back("  " + info.name + ": " + found->second.value, comment(found->second));
    if (preset != presets_.end()) {
      if (lines.empty()) {
        out += "\n" + section.name + ": " + config::yaml_text(preset->second.value) + "  # " +
               comment(preset->second) + "\n";
        continue;
      }
      lines.emplace(lines.begin(), "  preset: " + config::yaml_text(preset->second.value),
                    comment(preset->second));
    }
    if (lines.empty()) continue;
    size_t width = 0;
    for (const auto& [text, remark] : lines)
      if (text.size() <= kMaxAligned) width = std::max(width, text.size());
    out += "\n" + section.name + ":\n";
    for (const auto& [text, remark] : lines) {
      out += text;
      if (!remark.empty())
        out += std::string(width > text.size() ? width - text.size() : 0, ' ') + "  # " + remark;
      out += '\n';
    }
  }
  return out;
}

template <class See>
void Draft::each_entry(See see) const {
  for (const config::SectionInfo& section : config::schema().sections()) {
    if (const auto found = presets_.find(section.name); found != presets_.end())
      see(section.name + " (preset)", found->second);
    for (const config::FieldInfo& info : section.fields)
      if (const auto found = entries_.find(info.path); found != entries_.end()) see(info.path, found->second);
  }
}

std::vector<ImportedKey> Draft::taken() const {
  std::vector<ImportedKey> result;
  each_entry([&](const std::string& path, const Entry& entry) {
    if (!entry.from.key.empty()) result.push_back({entry.from.location, entry.from.key, path, entry.value});
  });
  return result;
}

std::vector<AssumedValue> Draft::assumed() const {
  std::vector<AssumedValue> result;
  if (!base_.empty()) result.push_back({"extends", extends_, base_reason_});
  each_entry([&](const std::string& path, const Entry& entry) {
    const bool by_key = !entry.from.key.empty();
    if (!by_key || !entry.assumption.empty())
      result.push_back({path, entry.value, by_key ? entry.assumption : entry.note});
  });
  return result;
}

std::vector<OmittedKey> Draft::omitted() const {
  std::vector<OmittedKey> result = omitted_;
  std::stable_sort(result.begin(), result.end(), [](const OmittedKey& a, const OmittedKey& b) {
    return std::tuple(!a.location.known(), a.location.line, a.location.column) <
           std::tuple(!b.location.known(), b.location.line, b.location.column);
  });
  return result;
}

}  // namespace capstan::importers
