// `capstan recipe fix` and `capstan recipe trim`: see edit.hpp.
#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "config/sections/config.hpp"
#include "config/tools/edit.hpp"

namespace capstan::config {

namespace {

constexpr int kMaxSteps = 1'000;

// The recipe is the first source of its resolution.
bool in_recipe(const SourceLocation& location) {
  return location.known() && location.source == 0;
}

std::optional<Node> tree_of(const std::string& text) {
  const std::vector<Source> sources{{Source::Kind::file, "", normalized(text), ""}};
  std::vector<Diagnostic> ignored;
  return parse_yaml(0, sources, ignored);
}

struct Proposal {
  std::vector<TextEdit> edits;
  std::string what;
};

std::optional<Proposal> replacement(const std::string& text, const Diagnostic& diagnostic) {
  for (const auto& suggestion : diagnostic.suggestions) {
    if (!suggestion.machine_applicable || !in_recipe(suggestion.location)) continue;
    const SourceLocation& location = suggestion.location;
    const size_t begin = offset_of(text, location.line, location.column);
    const size_t end = offset_of(text, location.line, location.column + location.length);
    const std::string was = text.substr(begin, end - begin);
    return Proposal{{{begin, end, suggestion.replacement}},
                    "`" + was + "` is now `" + suggestion.replacement + "`"};
  }
  return std::nullopt;
}

// Corrects a known field in the wrong section: removes its key, and writes it with its full path after the
// section.
std::optional<Proposal> move(const Schema& schema, const std::string& text, const Diagnostic& diagnostic) {
  if (diagnostic.code != "C0102" || !in_recipe(diagnostic.location) || !schema.find_field(diagnostic.path))
    return std::nullopt;
  const auto tree = tree_of(text);
  if (!tree) return std::nullopt;
  const auto entries = entries_of(*tree);
  for (const Entry& entry : entries) {
    if (entry.location.line != diagnostic.location.line) continue;
    const size_t key = offset_of(text, entry.location.line, entry.location.column);
    const size_t key_end =
        offset_of(text, entry.location.line, entry.location.column + entry.location.length);
    const std::string what = "`" + (entry.section.empty() ? "" : entry.section + ".") + entry.key +
                             "` is now `" + diagnostic.path + "`";
    if (entry.section.empty()) {
      if (entry.value->kind == Node::Kind::map && entry.key.find('.') == std::string::npos) continue;
      return Proposal{{{key, key_end, diagnostic.path}}, what};
    }
    if (entry.location.column != diagnostic.location.column) continue;
    const std::string value(value_text(text, entry));
    std::vector<TextEdit> edits = removal(text, entry, CommentsOfEntry::stay);
    if (value.empty() || edits.empty()) return std::nullopt;
    // The entry goes before the next section and its comments, or to the end.
    size_t at = text.size();
    for (const Entry& other : entries)
      if (other.section.empty() && other.location.line > entry.location.line) {
        at = std::min(at, offset_of(text, other.location.line, 1));
        break;
      }
    while (at > 0) {
      const size_t before = at > 1 ? text.rfind('\n', at - 2) : std::string::npos;
      const size_t begin = before == std::string::npos ? 0 : before + 1;
      const size_t word = text.find_first_not_of(" \r", begin);
      if (at == text.size() ? text[word] != '\n' : text[word] != '\n' && text[begin] != '#') break;
      if (begin <= key) break;
      at = begin;
    }
    const std::string lead = at > 0 && text[at - 1] != '\n' ? "\n" : "";
    edits.push_back({at, at, lead + diagnostic.path + ": " + value + "\n"});
    return Proposal{std::move(edits), what};
  }
  return std::nullopt;
}

size_t with_code(const Resolved& resolved, std::initializer_list<const char*> codes) {
  return static_cast<size_t>(std::count_if(
      resolved.diagnostics.begin(), resolved.diagnostics.end(),
      [&](const Diagnostic& one) { return std::find(codes.begin(), codes.end(), one.code) != codes.end(); }));
}

// Whether a corrected key sets a field that another key of the file sets already.
bool given_twice(const Resolved& after, const Resolved& before) {
  const auto more = [&](std::initializer_list<const char*> codes) {
    return with_code(after, codes) > with_code(before, codes);
  };
  return more({"C0005"}) || more({"C0005", "C0104", "C0105"});
}

size_t alike(const Resolved& resolved, const Diagnostic& diagnostic) {
  return static_cast<size_t>(
      std::count_if(resolved.diagnostics.begin(), resolved.diagnostics.end(), [&](const Diagnostic& one) {
        return one.code == diagnostic.code && one.message == diagnostic.message;
      }));
}

}  // namespace

FixResult fix_recipe(const Schema& schema, std::string text, const ResolveText& resolve) {
  FixResult result;
  result.text = std::move(text);
  result.resolved = resolve(result.text);
  // Tried, and of no use.
  std::set<std::string> refused;
  for (int step = 0; step < kMaxSteps; ++step) {
    bool changed = false;
    for (const Diagnostic& diagnostic : result.resolved.diagnostics) {
      auto proposal = replacement(result.text, diagnostic);
      if (!proposal) proposal = move(schema, result.text, diagnostic);
      if (!proposal || refused.count(diagnostic.message)) continue;
      std::string next = apply_edits(result.text, std::move(proposal->edits));
      Resolved after = resolve(next);
      const bool gone = alike(after, diagnostic) < alike(result.resolved, diagnostic);
      const bool sound =
          result.resolved.malformed || (!after.malformed && !given_twice(after, result.resolved));
      if (!gone || !sound) {
        refused.insert(diagnostic.message);
        continue;
      }
      result.steps.push_back(
          {diagnostic.location.line, diagnostic.location.column, std::move(proposal->what)});
      result.text = std::move(next);
      result.resolved = std::move(after);
      changed = true;
      break;
    }
    if (!changed) break;
  }
  return result;
}

FixResult trim_recipe(const std::string& file, std::string text) {
  const Schema& fields = schema();
  Request request;
  request.recipe = file;
  const Library library = Library::standard();
  const auto resolved = [&](const std::string& content) {
    Resolution resolution;
    static_cast<Resolved&>(resolution) =
        resolve_text_into(fields, library, &resolution.config, request, content);
    return resolution;
  };
  const Resolution before = resolved(text);
  before.require_ok();
  const size_t warnings = count(before.diagnostics, Level::warning);

  // Whether every field keeps its value, and no field that was written becomes a derived one.
  const auto same = [&](const Resolution& after) {
    if (!after.ok() || count(after.diagnostics, Level::warning) > warnings || after.presets != before.presets)
      return false;
    for (const auto& section : fields.sections())
      if ((section.at(&before.config) == nullptr) != (section.at(&after.config) == nullptr)) return false;
    for (const FieldInfo* field : fields.fields()) {
      if (fields.load(&before.config, *field) != fields.load(&after.config, *field)) return false;
      const Origin::Kind was = before.origin(field->path).kind, is = after.origin(field->path).kind;
      if (is == Origin::Kind::derived && was != is) return false;
    }
    return true;
  };

  // Steps are reported at their locations in the original text.
  std::map<std::pair<std::string, std::string>, SourceLocation> original;
  if (const auto tree = tree_of(text))
    for (const Entry& entry : entries_of(*tree)) original[{entry.section, entry.key}] = entry.location;

  FixResult result;
  std::set<std::pair<std::string, std::string>> kept;
  bool changed = true;
  while (changed) {
    changed = false;
    const auto tree = tree_of(text);
    CAPSTAN_ASSERT(tree.has_value(), "a recipe that resolved is a tree");
    for (const Entry& entry : entries_of(*tree)) {
      const auto is_special = [](const std::string& key) {
        return key == "extends" || key == "schema" || key == "unset" || key == "name" || key == "models";
      };
      const bool special = is_special(entry.section.empty() ? entry.key : entry.section);
      // A section that is a mapping goes with its last entry.
      const bool is_section = entry.section.empty() && entry.value->kind == Node::Kind::map &&
                              !entry.value->items.empty() && fields.find_section(entry.key);
      if (special || is_section || kept.count({entry.section, entry.key})) continue;
      // Each entry is examined once.
      kept.insert({entry.section, entry.key});
      auto edits = removal(text, entry, CommentsOfEntry::go);
      if (edits.empty()) continue;
      std::string next = apply_edits(text, std::move(edits));
      if (!same(resolved(next))) continue;
      const SourceLocation location = original.at({entry.section, entry.key});
      result.steps.push_back(
          {location.line, location.column,
           "`" + (entry.section.empty() ? "" : entry.section + ".") + entry.key + "` is already given"});
      text = std::move(next);
      changed = true;
      break;
    }
  }
  result.resolved = resolved(text);
  result.text = std::move(text);
  return result;
}

}  // namespace capstan::config
