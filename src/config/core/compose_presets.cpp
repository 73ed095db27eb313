#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/error.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"
#include "config/core/composer.hpp"
#include "config/core/external.hpp"

namespace capstan::config {

namespace {

template <class F>
bool set_by_own_preset(const std::vector<Write>& preset_writes, const FieldInfo& field,
                       const F& from_own_preset) {
  return std::any_of(preset_writes.begin(), preset_writes.end(),
                     [&](const Write& write) { return write.field == &field && from_own_preset(write); });
}

}  // namespace

void Composer::choose_presets() {
  std::vector<Write> explicit_writes = std::move(out_.writes);
  out_.writes.clear();
  std::vector<Write> own;
  for (const auto& section : schema_.sections()) {
    const auto& choices = out_.choices[section.index];
    if (choices.empty() || choices.back().off || choices.back().preset.empty()) continue;
    const Choice choice = choices.back();
    out_.preset_of[section.index] = choice.preset;
    out_.layers.push_back({Layer::Precedence::preset, section.name + "/" + choice.preset});
    layer_ = out_.layers.size() - 1;
    std::vector<std::string> chain;
    read_preset(section, choice.preset, choice.location, chain);
  }
  // A section's own preset is stronger than what another section's preset says about it.
  std::vector<Write> preset_writes = std::move(out_.writes);
  out_.writes.clear();
  const auto from_own_preset = [&](const Write& write) {
    return out_.layers[write.layer].preset.starts_with(write.field->section + "/");
  };
  for (auto& write : preset_writes)
    if (!from_own_preset(write)) {
      for (const auto& other : out_.writes)
        if (other.field == write.field && other.layer != write.layer && same(other.rest, write.rest) &&
            !equal(*write.field, other.value, write.value) &&
            !set_by_own_preset(preset_writes, *write.field, from_own_preset)) {
          error("C0506", "two presets set `" + write.field->path + "` differently", write.location,
                "preset " + out_.layers[write.layer].preset)
              .related(other.location, "preset " + out_.layers[other.layer].preset)
              .help("set it explicitly in the recipe");
        }
      out_.writes.push_back(write);
    }
  for (auto& write : preset_writes)
    if (from_own_preset(write)) out_.writes.push_back(std::move(write));
  for (auto& write : explicit_writes) out_.writes.push_back(std::move(write));
}

// A preset that cannot be read. Its fields are unknown; all others are checked.
Diagnostic& Composer::preset_error(const SectionInfo& section, std::string message, SourceLocation location) {
  out_.unknown_presets[section.index] = true;
  return error("C0505", std::move(message), location);
}

bool Composer::preset_exists(const SectionInfo& section, const Node& value) {
  if (is_external_model(section.name, value.text) || is_path(value.text)) return true;
  if (library_.preset(section.name, value.text)) return true;
  std::vector<std::string> names;
  for (const auto& entry : library_.presets(section.name)) names.push_back(entry.name);
  const size_t colon = value.text.find(':');
  const bool model = section.name == "model";
  if (const std::string known = lower_case(value.text.substr(0, colon + 1));
      model && colon != std::string::npos && (known == "hf:" || known == "gguf:")) {
    const std::string right = known + value.text.substr(colon + 1);
    preset_error(section, "`" + shortened(value.text) + "` names no model", value.location)
        .help("a model of another program is named `" + shortened(right) + "`, in lower case")
        .replace(value.location, right);
    return false;
  }
  // Names of presets contain no colon.
  if (colon != std::string::npos && colon > 0) {
    const std::string right = value.text.substr(0, colon) + ": " + value.text.substr(colon + 1);
    out_.unknown_presets[section.index] = true;
    auto& problem = error("C0002", "missing space after `:`", value.location);
    problem.help("write `" + shortened(right) + "`");
    if (!value.quoted && value.location.length == static_cast<int>(count_code_points(value.text)))
      problem.replace(value.location, right);
    return false;
  }
  auto& problem = preset_error(
      section, "`" + section.name + "` has no preset named `" + shortened(value.text) + "`", value.location);
  const std::filesystem::path path = std::filesystem::path(request_.directory) / value.text;
  if (const std::string scheme = model ? model_scheme(path) : ""; !scheme.empty()) {
    problem.help((scheme == "hf:" ? "a Hugging Face model is in the directory of that name: model="
                                  : "the file of that name is a model: model=") +
                 scheme + value.text);
    return false;
  }
  const std::string_view text = value.text;
  if (section.optional &&
      (text == "None" || text == "none" || text == "off" || text == "no" || text == "false")) {
    problem.help("`" + section.name + ": null` leaves the section out");
    return false;
  }
  const auto near = near_matches(value.text, names);
  for (const auto& name : near) problem.help("a preset with a similar name exists: `" + name + "`");
  if (near.size() == 1) problem.replace(value.location, near[0]);
  if (near.empty() && !names.empty()) {
    std::string all;
    for (size_t i = 0; i < names.size() && i < 6; ++i) all += (i ? ", " : "") + names[i];
    problem.help("its presets are " + all + (names.size() > 6 ? " and others" : ""));
  } else if (names.empty()) {
    problem.help("`" + section.name + "` has no presets: write its fields as a mapping");
  }
  return false;
}

// A model that is given by a path without its scheme, or by a name of the Hugging Face Hub.
bool Composer::report_unnamed_model(const SectionInfo& section, const std::string& name,
                                    SourceLocation location) {
  if (section.name != "model") return false;
  const std::filesystem::path file = std::filesystem::path(request_.directory) / name;
  std::error_code unknown;
  if (const std::string scheme = model_scheme(file); !scheme.empty()) {
    error(
        "C0001",
        "`" + shortened(name) + "` is a " + (scheme == "hf:" ? "directory" : "GGUF file") + ", not a preset",
        location)
        .help((scheme == "hf:" ? "a Hugging Face model is in it: model=" : "as a model: model=") + scheme +
              name);
  } else if (std::filesystem::exists(file, unknown)) {
    return false;
  } else {
    const bool yaml = file.extension() == ".yaml" || file.extension() == ".yml";
    const std::string download =
        yaml || !near_paths(name, file).empty() ? std::string() : download_help(file);
    if (download.empty()) return false;
    error("C0001", not_found_text(section.name, shortened(name)), location).help(download);
  }
  out_.malformed = true;
  return true;
}

// A complete recipe in place of the fields of one section.
bool Composer::report_recipe(const SectionInfo& section, const Node& tree, const std::string& name,
                             SourceLocation location) {
  if (tree.kind != Node::Kind::map) return false;
  for (const std::string& key : tree.keys) {
    const bool of_recipe = key == "models" || key == "unset" || schema_.find_section(key);
    if (!of_recipe || key == "preset" || section.find(key)) continue;
    preset_error(section,
                 "`" + shortened(name) + "` is a recipe, with the section `" + key + "`, not a preset of `" +
                     section.name + "`",
                 location)
        .help("a recipe is extended, `extends: " + shortened(name) + "`, or given as the first argument");
    return true;
  }
  return false;
}

void Composer::read_preset(const SectionInfo& section, const std::string& name, SourceLocation location,
                           std::vector<std::string>& chain) {
  const bool external = is_external_model(section.name, name), is_file = !external && is_path(name);
  if (!budget(location) || (is_file && report_unnamed_model(section, name, location))) return;
  const Source* const from = location.known() ? &out_.sources[static_cast<size_t>(location.source)] : nullptr;
  std::optional<int> source;
  if (external) {
    // Relative to the file that names it.
    const std::string directory = from ? from->directory : "";
    try {
      source = add_source(Source::Kind::file, name, external_model(absolute_name(name, directory)), {});
    } catch (const Error& problem) {
      // A directory that exists may lack a file of the model.
      std::error_code unknown;
      const bool missing =
          problem.code() == ErrorCode::not_found &&
          !std::filesystem::exists(split_scheme(absolute_name(name, directory)).path, unknown);
      error("C0001", missing ? not_found_text(section.name, name) : problem.message(), location)
          .help(problem.help());
      out_.malformed = true;
    }
  } else if (is_file) {
    std::string file = (std::filesystem::path(request_.directory) / name).string();
    const bool cli = from && from->kind == Source::Kind::cli;
    if (from && !cli) {
      const Origin origin{from->kind == Source::Kind::embedded ? "" : from->directory,
                          Layer::Precedence::preset};
      const auto allowed = inside(name, location.source, origin, location);
      if (!allowed) return;
      file = *allowed;
    }
    std::error_code unknown;
    if (!std::filesystem::exists(file, unknown) && !unknown) {
      error("C0001", not_found_text(section.name, shortened(name)), location)
          .help(near_paths_help(near_paths(name, file)));
      out_.malformed = true;
      return;
    }
    source = read_named(file, cli ? name : file, location);
  } else {
    const auto found = library_.preset(section.name, name);
    if (!found) {
      preset_error(section, "`" + section.name + "` has no preset named `" + shortened(name) + "`", location);
      return;
    }
    if (found->file.empty())
      source = add_document(*found);
    else
      source = read_named(found->file, found->name, location);
  }
  if (!source) return;
  const auto first = std::find(chain.begin(), chain.end(), name);
  const bool cycle = first != chain.end(), direct = cycle && first + 1 == chain.end();
  if (cycle) {
    std::string way;
    for (auto one = first; one != chain.end(); ++one) way += *one + " → ";
    error("C0501",
          "the preset `" + section.name + "/" + name + "` extends itself" + (direct ? "" : ": " + way + name),
          location)
        .help(direct ? "remove this line" : "remove `extends` from one of these presets");
    return;
  }
  chain.push_back(name);
  const auto tree = parse(*source);
  if (!tree || (is_file && report_recipe(section, *tree, name, location))) return;
  if (const Node* extends = tree->find("extends")) {
    if (extends->kind == Node::Kind::scalar)
      read_preset(section, extends->text, extends->location, chain);
    else
      error("C0501", "`extends` of a preset expects the name of one preset", extends->location);
  }
  for (size_t i = 0; i < tree->items.size(); ++i) {
    std::string key = tree->keys[i];
    if (key == "extends" || key == "schema") continue;
    const auto op = take_plus(key) ? Write::Op::append : Write::Op::set;
    ParsedPath path;
    path.location = tree->key_locations[i];
    if (key.find('.') == std::string::npos)
      path.segments.push_back({Segment::Kind::name, section.name, {}, 0});
    for (const auto part : split(key, '.'))
      path.segments.push_back({Segment::Kind::name, std::string(part), {}, 0});
    const auto target = find(path);
    if (!target) continue;
    if (!target->field) {
      error("C0505", "a preset sets fields, not sections", tree->key_locations[i]);
      continue;
    }
    if (target->field->no_preset) {
      error("C0505", "a preset may not set `" + target->field->path + "`", tree->key_locations[i]);
      continue;
    }
    add_write(*target, tree->items[i], op, tree->key_locations[i]);
  }
}

}  // namespace capstan::config
