#include "config/tools/reference.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "base/text.hpp"
#include "base/wording.hpp"
#include "config/core/convert.hpp"
#include "config/core/emit.hpp"
#include "config/resolve/resolve.hpp"
#include "config/sections/config.hpp"
#include "config/tools/markdown.hpp"
#include "config/tools/show.hpp"

namespace capstan::config {

namespace {

// Rules carry their code as the anchor.
std::string rule_link(const Rule& rule) {
  return "[" + rule.code + "](rules.md#" + lower_case(rule.code) + "-" + rule.name + ")";
}

// of_recipe: a field of recipes, which has an effect on a run and a version.
std::string field_entry(const Schema& schema, const FieldInfo& field, bool of_recipe = true) {
  std::string out = "## " + field.name + "\n\n" + field.doc + "\n\n";
  const auto row = [&](const char* name, const std::string& text) {
    if (!text.empty()) out += std::string("- ") + name + ": " + text + "\n";
  };
  row("type", type_text(*field.type, field) + (field.type->optional ? ", or null" : "") +
                  (field.scalar_ok ? "; a single item needs no brackets" : ""));
  row("unit", field.unit);
  row("default",
      field.required ? "none: must be given" : code(yaml_inline(*field.type, field.default_value)));
  row("derived where unset", field.formula.empty() ? "" : code(field.formula));
  row("instead of", field.instead_of.empty() ? "" : code(field.instead_of));
  row("effect", of_recipe ? std::string(enum_name(field.effect)) : std::string());
  for (const auto& condition : field.used_when) row("read when", condition.text);
  row("only for", codes(field.variants));
  row("aliases", codes(field.aliases));
  row("was", codes(field.old_names));
  row("called elsewhere", codes(field.known_as));
  row("deprecated", field.deprecated);
  row("example", codes(field.examples));
  for (const auto& missing : field.unsupported) row("`train` refuses some values", missing.reason);
  std::string rules;
  for (const auto& rule : schema.rules())
    if (std::find(rule.reads.begin(), rule.reads.end(), field.path) != rule.reads.end())
      rules += (rules.empty() ? "" : ", ") + rule_link(rule);
  row("rules", rules);
  row("since", of_recipe ? field.since : std::string());
  const Type* type = field.type->kind == Type::Kind::list ? field.type->element : field.type;
  if (type->kind == Type::Kind::enumeration) {
    out += "\n| value | |\n|---|---|\n";
    for (const auto& entry : type->names->entries)
      out += "| " + code(std::string(entry.name)) + " | " + markdown_cell(entry.doc) +
             (entry.aliases.empty() ? "" : (entry.doc.empty() ? "also " : "; also ") + codes(entry.aliases)) +
             " |\n";
  }
  if (type->kind == Type::Kind::record) {
    out += "\n| field of an item | | type |\n|---|---|---|\n";
    for (const auto& inner : type->record->fields)
      out += "| " + code(inner.name) + " | " + markdown_cell(inner.doc) + " | " +
             markdown_cell(type_text(*inner.type, inner)) + " |\n";
  }
  return out + "\n";
}

std::string preset_table(const std::vector<Library::Entry>& presets) {
  std::string out = "| preset | |\n|---|---|\n";
  for (const auto& preset : presets)
    out += "| " + code(preset.name) + " | " + markdown_cell(preset.description) + " |\n";
  return out + "\n";
}

std::string section_page(const Schema& schema, const Library& library, const SectionInfo& section) {
  std::string out =
      "# " + section.name + "\n\nReference, for users who write recipes: " + section.doc + ".\n\n";
  if (section.optional) out += "The section may be switched off: " + code(section.name + ": null") + ".\n\n";
  for (const auto& condition : section.used_when) out += "Read when " + condition.text + ".\n\n";
  const auto presets = library.presets(section.name);
  if (!presets.empty())
    out += "Presets, chosen by " + code(section.name + ": NAME") + ":\n\n" + preset_table(presets);
  for (const auto& field : section.fields) out += field_entry(schema, field);
  return out;
}

std::string file_page(const Schema& schema, const Library& library, const FilePage& file) {
  std::string out = "# " + file.name + "\n\nReference, for users who write such files: " + file.fields->doc +
                    ". The keys are at the top of the file.\n\n";
  const auto presets = library.presets(file.name);
  if (!presets.empty()) out += preset_table(presets);
  for (const auto& field : file.fields->fields) out += field_entry(schema, field, false);
  return out;
}

std::string rules_page(const Schema& schema) {
  std::string out =
      "# Rules and codes\n\n"
      "Reference, for users whose recipe is refused: the rules that `capstan check` applies in addition "
      "to the type and range of each field. `capstan explain R0206` shows one of them.\n\n";
  for (const auto& rule : schema.rules())
    out += "## " + rule.code + " " + rule.name + "\n\n" + rule.doc + "\n\n- reads: " + codes(rule.reads) +
           "\n\n";
  out += "## Codes of other diagnostics\n\n| code | |\n|---|---|\n";
  for (const auto& one : diagnostic_codes())
    out += "| " + std::string(one.code) + " | " + markdown_cell(one.title) + " |\n";
  return out;
}

// "8 ranks: TP 2, PP 2"
std::string layout_text(const DistConfig& dist) {
  std::string out = counted(dist.world_size, "rank"), axes;
  const auto axis = [&](const char* name, int64_t size) {
    if (size > 1) axes += (axes.empty() ? ": " : ", ") + std::string(name) + " " + std::to_string(size);
  };
  axis("TP", dist.tensor_model_parallel_size);
  axis("PP", dist.pipeline_model_parallel_size);
  axis("CP", dist.context_parallel_size);
  axis("EP", dist.expert_model_parallel_size);
  return out + axes;
}

Resolved resolve_named(const Schema& schema, const Library& library, Config& config,
                       const std::string& recipe) {
  Request request;
  request.recipe = recipe;
  return resolve_into(schema, library, &config, request);
}

// The methods, and the layout that each chooses for each model.
std::string methods_part(const Schema& schema, const Library& library) {
  std::string out =
      "\n"
      "## Methods\n\n"
      "A method takes a model: `capstan train sft model=llama3.1-8b`, with the short name "
      "`llama3.1-8b-sft`. A preset of `model` that is not in the table takes the settings that all models "
      "share, on one rank.\n\n";
  const std::vector<Library::Entry> methods = library.methods();
  std::set<std::string> models;
  for (const auto& entry : methods) {
    models.insert(entry.models.begin(), entry.models.end());
    out += "- " + code(entry.name) + ": " + entry.description + "\n";
  }
  std::string rule = "|---|";
  out += "\n| model |";
  for (const auto& method : methods) out += " " + code(method.name) + " |", rule += "---|";
  out += "\n" + rule + "\n";
  for (const std::string& model : models) {
    out += "| " + code(model) + " |";
    for (const auto& method : methods) {
      Config config;
      const bool listed = std::ranges::count(method.models, model) > 0;
      const bool ok = listed && resolve_named(schema, library, config, model + "-" + method.name).ok();
      out += " " + (ok ? layout_text(config.dist) : std::string()) + " |";
    }
    out += "\n";
  }
  return out;
}

std::string recipes_page(const Schema& schema, const Library& library) {
  std::string out =
      "# Recipes and presets\n\n"
      "Reference, for users who choose a recipe to start from: the recipes and presets included with "
      "Capstan. Your own recipe extends one of them: `extends: NAME`; `capstan recipe new` begins one.\n\n"
      "| recipe | | layers × hidden size | sequence length | global batch size | world size |\n"
      "|---|---|---|---|---|---|\n";
  for (const auto& entry : library.recipes()) {
    if (!entry.method.empty()) continue;
    Config config;
    const Resolved resolved = resolve_named(schema, library, config, entry.name);
    out += "| " + code(entry.name) + " | " + markdown_cell(entry.description) + " | ";
    if (!resolved.ok()) {
      // A test keeps all of them sound.
      out += "| | | |\n";
      continue;
    }
    out += std::to_string(config.model.num_layers) + " × " + std::to_string(config.model.hidden_size) +
           " | " + std::to_string(config.model.seq_length) + " | " +
           std::to_string(config.train.global_batch_size.value_or(config.train.micro_batch_size)) + " | " +
           layout_text(config.dist) + " |\n";
  }
  out += methods_part(schema, library);
  for (const auto& section : schema.sections()) {
    if (section.name.empty()) continue;
    const auto presets = library.presets(section.name);
    if (presets.empty()) continue;
    out += "\n## " + section.name + "\n\n" + preset_table(presets);
    out.pop_back();
  }
  return out;
}

std::string index_page(const Schema& schema, const std::vector<FilePage>& files) {
  std::string out =
      "# Reference\n\n"
      "Reference, for users who write recipes. Generated from the field tables by `scripts/docs.sh`; a test "
      "keeps the pages fresh. On the command line, `capstan explain optimizer.lr` shows a field, and "
      "`capstan help reference/optimizer` a page. A field's effect is what changes with it: the numbers of "
      "the training run (math), its speed (perf), its memory, its files (io) or its reports (log).\n\n";
  for (const PageTitle& page : reference_titles(schema, files))
    out += "- [" + page.name + "](" + page.name + ".md): " + page.title + "\n";
  out +=
      "\n"
      "The top level of a recipe holds `schema: capstan/1` (the format), `extends` (the recipes to start "
      "from), `unset` (paths that go back to preset or default), `models` (presets of `model`, and the keys "
      "that hold for each), the sections above, and:\n\n";
  for (const auto& section : schema.sections())
    if (section.name.empty())
      for (const auto& field : section.fields) out += field_entry(schema, field);
  return out;
}

}  // namespace

std::vector<PageTitle> reference_titles(const Schema& schema, const std::vector<FilePage>& files) {
  std::vector<PageTitle> titles;
  for (const auto& section : schema.sections())
    if (!section.name.empty()) titles.push_back({section.name, section.doc});
  titles.push_back({"rules", "constraints between fields, and the codes of diagnostics"});
  titles.push_back({"recipes", "the recipes and presets included with Capstan"});
  for (const FilePage& file : files) titles.push_back({file.name, file.fields->doc});
  return titles;
}

std::string reference_page(const Schema& schema, const Library& library, const std::string& name,
                           const std::vector<FilePage>& files) {
  const SectionInfo* section = name.empty() ? nullptr : schema.find_section(name);
  std::string page = name == "README"    ? index_page(schema, files)
                     : name == "rules"   ? rules_page(schema)
                     : name == "recipes" ? recipes_page(schema, library)
                     : section           ? section_page(schema, library, *section)
                                         : std::string();
  for (const FilePage& file : files)
    if (file.name == name) page = file_page(schema, library, file);
  // One line break at the end.
  while (page.ends_with("\n\n")) page.pop_back();
  return wrapped_markdown(page);
}

std::map<std::string, std::string> reference_pages(const Schema& schema, const Library& library,
                                                   const std::vector<FilePage>& files) {
  std::map<std::string, std::string> pages{{"README.md", reference_page(schema, library, "README", files)}};
  for (const PageTitle& page : reference_titles(schema, files))
    pages[page.name + ".md"] = reference_page(schema, library, page.name, files);
  return pages;
}

}  // namespace capstan::config
