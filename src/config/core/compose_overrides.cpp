#include <filesystem>
#include <utility>

#include "config/core/composer.hpp"
#include "config/core/convert.hpp"

namespace capstan::config {

void Composer::read_overrides(const std::vector<Override>& overrides, const std::string& name,
                              Layer::Precedence precedence) {
  if (overrides.empty()) return;
  std::string text;
  for (const auto& given : overrides) {
    for (const char c : given.text) text += c == '\n' || c == '\r' ? ' ' : c;
    text += '\n';
  }
  Source cli{Source::Kind::cli, name, std::move(text),
             request_.directory.empty() ? current_directory_ : request_.directory};
  out_.sources.push_back(std::move(cli));
  const int source = static_cast<int>(out_.sources.size()) - 1;
  std::vector<ParsedOverride> parsed;
  for (size_t i = 0; i < overrides.size(); ++i) {
    const std::string* next = i + 1 < overrides.size() ? &overrides[i + 1].text : nullptr;
    // `lr = 1` arrives as three words; one message is enough.
    const bool skip =
        i > 0 && overrides[i].text == "=" && overrides[i - 1].text.find('=') == std::string::npos;
    if (skip) {
      if (next && next->find('=') == std::string::npos) ++i;
      continue;
    }
    if (auto one = parse_override(overrides[i], next, source, static_cast<int>(i) + 1, out_.diagnostics))
      parsed.push_back(std::move(*one));
    else
      out_.bad_words = true;
  }
  for (const auto& one : parsed)
    if (one.op == ParsedOverride::Op::include) include_override(one);
  out_.layers.push_back({precedence, {}});
  layer_ = out_.layers.size() - 1;
  for (const auto& one : parsed)
    if (one.op != ParsedOverride::Op::include) apply(one);
}

void Composer::include_override(const ParsedOverride& one) {
  if (!budget(one.location)) return;
  const std::string file = (std::filesystem::path(request_.directory) / one.file).string();
  if (one.path.segments.empty()) {
    const auto source = read_named(file, one.file, one.location);
    if (!source) return;
    const Origin origin{directory_of(file), Layer::Precedence::file};
    std::vector<std::pair<std::string, SourceLocation>> ring{{canonical(file), one.location}};
    if (auto tree = parse(*source)) read_tree(*tree, *source, origin, ring);
    return;
  }
  const auto target = find(one.path);
  if (!target) return;
  const auto source = read_named(file, one.file, one.value_location);
  if (!source) return;
  auto tree = parse(*source);
  if (!tree || (target->section && report_recipe(*target->section, *tree, one.file, one.location))) return;
  const Origin origin{directory_of(file), Layer::Precedence::file};
  out_.layers.push_back({Layer::Precedence::file, {}});
  layer_ = out_.layers.size() - 1;
  origin_ = &origin;
  if (target->section)
    write_section(*target->section, *tree, Write::Op::set, one.location);
  else if (target->field)
    add_write(*target, *tree, Write::Op::set, one.location);
  find_duplicates();
  origin_ = nullptr;
}

void Composer::apply(const ParsedOverride& one) {
  using Op = ParsedOverride::Op;
  if (one.op == Op::unset) return reset(one.path, one.value ? &*one.value : nullptr);
  const auto target = find(one.path);
  if (!target) return;
  Node value = *one.value;
  if (target->section) {
    if (value.empty) {
      error("C0203", "the section `" + target->section->name + "` has no value", one.location)
          .help("write the name of a preset, a mapping {…}, or `~" + target->section->name + "` to reset it");
      return;
    }
    return write_section(*target->section, value, one.op == Op::append ? Write::Op::append : Write::Op::set,
                         one.location);
  }
  if (target->prefix) {
    unknown("", target->spelling, one.path.location);
    return;
  }
  const Type& type = *target->field->type;
  if (value.empty && target->rest.empty() && one.op != Op::append &&
      (type.kind == Type::Kind::text || type.kind == Type::Kind::path)) {
    // `key=` is the empty text.
    value = Node::scalar("", one.value_location, true);
  }
  if (one.op == Op::add) {
    for (const auto& write : out_.writes) {
      if (write.dead || write.field != target->field || !same(write.rest, target->rest)) continue;
      error("C0106", "`" + target->field->path + "` already has an explicit value", one.location,
            "`+` only adds")
          .related(write.location, "set here")
          .help("to replace it write `" + one.path.text() + "=…`");
      return;
    }
  }
  if (one.op == Op::append && type.kind != Type::Kind::list && type.kind != Type::Kind::map &&
      target->rest.empty()) {
    error("C0103",
          "`+=` adds to lists and open mappings, and `" + target->field->path + "` takes " +
              type_text(type, *target->field),
          one.location)
        .help("write `" + one.path.text() + "=…`");
    return;
  }
  add_write(*target, value, one.op == Op::append ? Write::Op::append : Write::Op::set, one.location);
  replace_earlier();
}

void Composer::replace_earlier() {
  const Write& last = out_.writes.back();
  if (last.op != Write::Op::set || last.value.kind == Node::Kind::map) return;
  for (size_t i = 0; i + 1 < out_.writes.size(); ++i) {
    const Write& earlier = out_.writes[i];
    if (earlier.dead || earlier.layer != last.layer || earlier.op != Write::Op::set ||
        earlier.field != last.field || !same(earlier.rest, last.rest))
      continue;
    if (earlier.spelling != last.spelling) {
      if (equal(*last.field, earlier.value, last.value)) continue;
      out_.ambiguous.push_back(last.field);
      error("C0105",
            "`" + earlier.spelling + "` and `" + last.spelling +
                "` are the same field and have different values",
            last.location)
          .related(earlier.location, "given here, with the same rank")
          .help("keep one of them; the canonical name is `" + last.field->path + "`");
      continue;
    }
    auto& warning = error("C0603", "this override is replaced by a later one", earlier.location);
    warning.level = Level::warning;
    warning.name = "unused_override";
    warning.path = last.field->path;
    warning.related(last.location, "this one counts");
    out_.writes[i].take_back(layer_);
  }
}

void Composer::reset(const ParsedPath& path, const Node* expected) {
  const auto target = find(path);
  if (!target) return;
  if (target->field && !target->rest.empty()) {
    Write write;
    write.op = Write::Op::remove;
    write.field = target->field;
    write.rest = target->rest;
    write.location = path.location;
    write.spelling = target->spelling;
    write.layer = layer_;
    if (expected) {
      error("C0107", "`~path=value` compares fields, not items", path.location)
          .help("write `~" + path.text() + "`");
      return;
    }
    out_.writes.push_back(std::move(write));
    return;
  }
  bool any = false;
  const Write* current = nullptr;
  for (auto& write : out_.writes) {
    const bool hit = target->field ? write.field == target->field
                                   : target->section && write.field->section == target->section->name;
    if (write.dead || !hit) continue;
    any = true;
    current = &write;
  }
  if (expected) {
    if (!target->field) {
      error("C0107", "`~section=value` is not an override", path.location)
          .help("write `~" + path.text() + "`");
      return;
    }
    if (!current || !equal(*target->field, current->value, *expected)) {
      auto& problem = error(
          "C0107",
          "`" + target->field->path + "` is not `" + shortened(expected->text) + "`, so it is not reset",
          path.location);
      if (current)
        problem.related(current->location, "set here");
      else
        problem.note("nothing sets it explicitly");
      return;
    }
  }
  if (!any) {
    auto& warning =
        error("C0603", "nothing sets `" + path.text() + "` explicitly, so there is nothing to reset",
              path.location);
    warning.level = Level::warning;
    warning.name = "unused_override";
    return;
  }
  for (auto& write : out_.writes)
    if (target->field ? write.field == target->field : write.field->section == target->section->name)
      write.take_back(layer_);
}

}  // namespace capstan::config
