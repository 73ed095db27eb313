#include "config/core/compose.hpp"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/utf8.hpp"
#include "config/core/composer.hpp"
#include "config/core/convert.hpp"

namespace capstan::config {

bool is_path(std::string_view text) {
  return text.find('/') != std::string_view::npos || text.ends_with(".yaml") || text.ends_with(".yml");
}

Composer::Composer(const Schema& schema, const Library& library, const Request& request,
                   const std::string* text, std::string model)
    : schema_(schema), library_(library), request_(request), text_(text), model_(std::move(model)) {
  out_.choices.resize(schema.sections().size());
  out_.preset_of.resize(schema.sections().size());
  out_.unknown_presets.resize(schema.sections().size());
  for (const FieldInfo* field : schema.fields())
    for (const auto& alias : field->aliases)
      if (const size_t dot = alias.find('.'); dot != std::string::npos)
        alias_prefixes_.insert(alias.substr(0, dot));
}

Composition Composer::run() {
  std::error_code ignored;
  current_directory_ =
      request_.directory.empty() ? std::filesystem::current_path(ignored).string() : request_.directory;
  read_recipe();
  unset_requested();
  read_overrides(request_.overrides, "<cli>", Layer::Precedence::cli);
  read_overrides(request_.imposed, request_.imposed_by, Layer::Precedence::imposed);
  if (models_location_.known()) choose_entry();
  choose_presets();
  return std::move(out_);
}

Diagnostic& Composer::error(const char* code, std::string message, SourceLocation location,
                            std::string label) {
  Diagnostic diagnostic;
  diagnostic.code = code;
  // The codes of files; preset_error() is for presets.
  if (diagnostic.code.starts_with("C05") && diagnostic.code != "C0505") out_.incomplete = true;
  diagnostic.message = std::move(message);
  diagnostic.location = location;
  diagnostic.label = std::move(label);
  out_.diagnostics.push_back(std::move(diagnostic));
  return out_.diagnostics.back();
}

void Composer::unknown(const std::string& section, const std::string& key, SourceLocation location) {
  // Suggests similar names for the first 50 unknown keys only, because each search takes time.
  out_.diagnostics.push_back(unknown_key(schema_, section, key, location, ++unknown_ <= 50));
}

std::optional<Composer::Target> Composer::find(const ParsedPath& path) {
  Target target;
  const auto& segments = path.segments;
  if (segments[0].kind != Segment::Kind::name) {
    error("C0101", "a path starts with the name of a section", path.location);
    return std::nullopt;
  }
  const std::string& first = segments[0].name;
  size_t used = 1;
  const SectionInfo* section = schema_.find_section(first);
  if (segments.size() == 1 && section) {
    target.section = section;
    target.spelling = first;
    return target;
  }
  std::string spelling = first;
  Schema::Spelling spelled{};
  const FieldInfo* field = nullptr;
  if (segments.size() > 1 && segments[1].kind == Segment::Kind::name) {
    spelling = first + "." + segments[1].name;
    used = 2;
    field = schema_.find_spelling(spelling, &spelled);
  }
  if (!field && !section) {
    field = schema_.find_spelling(first, &spelled);
    if (field) spelling = first, used = 1;
  }
  if (!field && !section && segments.size() == 1 && alias_prefix(first)) {
    target.prefix = true;
    target.spelling = first;
    return target;
  }
  if (!field) {
    SourceLocation location = path.location;
    std::string key = first;
    if (section || alias_prefix(first)) {
      key = segments.size() > 1 ? segments[1].name : first;
      // The location is that of the key alone where the section is not written beside it, as in a preset.
      if (segments.size() > 1 &&
          path.location.length >= static_cast<int>(count_code_points(first + "." + key))) {
        location.column += static_cast<int>(first.size()) + 1;
        location.length = std::max(1, location.length - static_cast<int>(first.size()) - 1);
      }
      unknown(first, key, location);
    } else {
      if (segments.size() > 1 && segments[1].kind == Segment::Kind::name)
        unknown(first, segments[1].name, location);
      else
        unknown("", first, location);
    }
    return std::nullopt;
  }
  target.field = field;
  target.spelling = spelling;
  target.rest.assign(segments.begin() + static_cast<std::ptrdiff_t>(used), segments.end());
  if (spelled == Schema::Spelling::old_name) {
    auto& warning = error("C0602", "`" + spelling + "` is now called `" + field->path + "`", path.location);
    warning.level = Level::warning;
    warning.name = "deprecated_key";
    warning.path = field->path;
    // A correction replaces the key alone or the full path, depending on the location of the diagnostic.
    const bool full_path = path.location.length == static_cast<int>(count_code_points(spelling));
    if (full_path || (section && section->name == field->section &&
                      path.location.length == static_cast<int>(count_code_points(segments[1].name))))
      warning.replace(path.location, full_path ? field->path : field->name);
  } else if (!field->deprecated.empty()) {
    auto& warning =
        error("C0602", "`" + field->path + "` is deprecated: " + field->deprecated, path.location);
    warning.level = Level::warning;
    warning.name = "deprecated_key";
  }
  return target;
}

void Composer::write(const ParsedPath& path, const Node& value, Write::Op op, SourceLocation location) {
  const auto target = find(path);
  if (!target) return;
  if (target->section) return write_section(*target->section, value, op, location);
  if (target->prefix) {
    if (value.kind != Node::Kind::map) {
      unknown("", target->spelling, location);
      return;
    }
    return write_members(target->spelling, value);
  }
  add_write(*target, value, op, location);
}

void Composer::add_write(const Target& target, const Node& value, Write::Op op, SourceLocation location) {
  Write write;
  write.op = op;
  write.field = target.field;
  write.rest = target.rest;
  write.value = value;
  write.location = location;
  write.spelling = target.spelling;
  write.layer = layer_;
  out_.writes.push_back(std::move(write));
}

void Composer::write_members(const std::string& section, const Node& map) {
  for (size_t i = 0; i < map.items.size(); ++i) {
    std::string key = map.keys[i];
    const auto op = take_plus(key) ? Write::Op::append : Write::Op::set;
    ParsedPath path;
    path.location = map.key_locations[i];
    path.segments.push_back({Segment::Kind::name, section, {}, 0});
    path.segments.push_back({Segment::Kind::name, key, {}, 0});
    if (key.find('.') != std::string::npos && !schema_.find_spelling(section + "." + key)) {
      error("C0102", "unknown key `" + section + "." + shortened(key) + "`", map.key_locations[i])
          .help("dotted keys are allowed only at the top level of a recipe: `" + section + "." +
                shortened(key) + ": …`");
      continue;
    }
    // The location is the key's, without the section in front.
    const auto known = schema_.find_spelling(section + "." + key);
    if (!known) {
      unknown(section, key, map.key_locations[i]);
      continue;
    }
    write(path, map.items[i], op, map.key_locations[i]);
  }
}

void Composer::write_section(const SectionInfo& section, const Node& value, Write::Op op,
                             SourceLocation location) {
  if (op == Write::Op::append && value.kind != Node::Kind::map) {
    error("C0103", "`+=` adds to lists and open mappings, and `" + section.name + "` is a section", location)
        .help("write `" + section.name + "=…`");
    return;
  }
  Choice choice;
  choice.layer = layer_;
  choice.location = value.location;
  const std::string name = section.name;
  switch (value.kind) {
    case Node::Kind::null:
      if (value.empty) {
        error("C0203", "the section `" + name + "` has no value", location)
            .help("leave the line out, or write its fields below it, indented");
        return;
      }
      if (!section.optional) {
        error("C0205", "the section `" + name + "` cannot be switched off", value.location);
        return;
      }
      choice.off = true;
      break;
    case Node::Kind::list:
      error("C0206", "`" + name + "` is a section: it takes a mapping or the name of a preset, not a list",
            value.location);
      return;
    case Node::Kind::map: {
      Node members = value;
      for (size_t i = 0; i < members.keys.size(); ++i) {
        if (members.keys[i] != "preset" || section.find("preset")) continue;
        const Node preset = members.items[i];
        members.keys.erase(members.keys.begin() + static_cast<std::ptrdiff_t>(i));
        members.key_locations.erase(members.key_locations.begin() + static_cast<std::ptrdiff_t>(i));
        members.items.erase(members.items.begin() + static_cast<std::ptrdiff_t>(i));
        if (preset.kind == Node::Kind::scalar && !preset.text.empty() && preset.text[0] != '@')
          write_section(section, preset, Write::Op::set, location);
        else
          preset_error(section, "`preset` expects the name of a preset of `" + name + "`", preset.location);
        break;
      }
      // A mapping in an optional section switches it on, even an empty one.
      if (section.optional && members.items.empty() && value.items.empty())
        out_.choices[section.index].push_back(choice);
      write_members(name, members);
      return;
    }
    case Node::Kind::scalar:
      if (value.text.starts_with("@")) return include(section, value.text.substr(1), value.location);
      if (section.optional && value.text == "none" && !library_.preset(name, "none")) {
        choice.off = true;
        break;
      }
      if (!preset_exists(section, value)) return;
      choice.preset = value.text;
      break;
  }
  out_.choices[section.index].push_back(std::move(choice));
}

bool Composer::take_plus(std::string& key) {
  if (key.size() < 2 || key.back() != '+') return false;
  key.pop_back();
  return true;
}

bool Composer::same(const std::vector<Segment>& a, const std::vector<Segment>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Segment& x, const Segment& y) {
    return x.kind == y.kind && x.name == y.name && x.text == y.text && x.index == y.index;
  });
}

bool Composer::equal(const FieldInfo& field, const Node& a, const Node& b) const {
  std::vector<Diagnostic> ignored;
  ConvertContext context{&out_.sources, &ignored, {}};
  const auto x = convert(field, a, field.path, context), y = convert(field, b, field.path, context);
  return x && y ? *x == *y : a.text == b.text && a.kind == b.kind;
}

Composition compose(const Schema& schema, const Library& library, const Request& request,
                    const std::string* text) {
  Composer composer(schema, library, request, text);
  Composition out = composer.run();
  if (composer.model_with_entry().empty()) return out;
  // Standard input is read once.
  const std::string given = out.sources.front().text;
  return Composer(schema, library, request, &given, composer.model_with_entry()).run();
}

}  // namespace capstan::config
