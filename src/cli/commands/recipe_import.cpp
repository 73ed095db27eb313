// capstan recipe import
#include <algorithm>
#include <filesystem>
#include <iostream>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/wording.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/report.hpp"
#include "cli/table.hpp"
#include "cli/terminal.hpp"
#include "config/core/field.hpp"
#include "importers/import.hpp"
#include "importers/key_reference.hpp"

namespace capstan::cli {

namespace {

using importers::Imported;
using importers::OmissionReason;

constexpr uint64_t kMaxBytes = uint64_t{4} << 20;

std::string read_input(const std::string& file) {
  if (file != "-") return read_file(file, kMaxBytes);
  std::string text(kMaxBytes + 1, '\0');
  std::cin.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(std::cin.gcount()));
  return text;
}

importers::Options options_of(const Context& context, const std::string& to) {
  importers::Options options;
  if (!to.empty()) options.recipe_name = to;
  if (const auto name = context.args.value("from"))
    for (const importers::FormatInfo& info : importers::known_formats())
      if (info.name == *name) options.format = info.format;
  if (const auto base = context.args.value("base")) {
    const config::Library library = config::Library::standard();
    std::error_code unknown;
    if (!library.recipe(*base) && !std::filesystem::exists(*base, unknown))
      config::fail_no_recipe(library, *base);
    options.base = *base;
    options.extends = extends_text(*base, to);
  }
  for (const std::string& word : context.args.values("var")) {
    const size_t equals = word.find('=');
    if (equals == 0 || equals == std::string::npos)
      fail(ErrorCode::usage, "`--var " + word + "` gives no variable a value",
           "write --var NAME=VALUE, or --var 1=VALUE for the script's first argument");
    options.variables[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return options;
}

std::string location_of(const Imported& imported, const importers::OmittedKey& omitted) {
  return omitted.location.known() ? config::location_text(omitted.location, imported.sources) : std::string();
}

// Lists that hold names only are summarized by their length.
bool only_counted(OmissionReason why) {
  return why == OmissionReason::off || why == OmissionReason::same;
}

std::string summary(const Imported& imported) {
  const auto counted = [](size_t number, const char* what) { return std::to_string(number) + " " + what; };
  std::string text =
      imported.sources[0].name + ": " + std::string(importers::info_of(imported.format).title) + "; " +
      counted(imported.taken.size(), "taken") + ", " + counted(imported.assumed.size(), "assumed") + ", " +
      counted(imported.omitted.size(), "omitted") + "\n";
  if (!imported.assumed.empty()) {
    text += "assumed:\n";
    Table table;
    for (const importers::AssumedValue& one : imported.assumed)
      table.add({"  " + one.path + ": " + one.value, with_flags(one.reason)});
    text += table.text();
  }
  for (const OmissionReason why :
       {OmissionReason::to_fill_in, OmissionReason::unknown, OmissionReason::value,
        OmissionReason::unsupported, OmissionReason::external, OmissionReason::replaced,
        OmissionReason::no_effect, OmissionReason::same, OmissionReason::off}) {
    const auto number =
        static_cast<size_t>(std::count_if(imported.omitted.begin(), imported.omitted.end(),
                                          [&](const auto& omitted) { return omitted.why == why; }));
    if (number == 0) continue;
    text += std::string(importers::omission_title(why)) + ":";
    if (only_counted(why)) {
      text += " " + std::to_string(number) + " (--json names them)\n";
      continue;
    }
    text += "\n";
    Table table;
    for (const importers::OmittedKey& omitted : imported.omitted) {
      if (omitted.why != why) continue;
      std::string reason = with_flags(omitted.reason);
      for (size_t i = 0; i < omitted.near.size(); ++i)
        reason += (i == 0 ? "; similar: `" : ", `") + omitted.near[i] + "`";
      const std::string location = location_of(imported, omitted);
      table.add({"  " + (location.empty() ? "" : location + " ") + omitted.key +
                     (omitted.value.empty() ? "" : " " + omitted.value),
                 reason});
    }
    text += table.text();
  }
  return text;
}

OrderedJson as_json(const Imported& imported, const std::string& to) {
  const auto& resolution = imported.resolution;
  OrderedJson object = {{"schema", "capstan.import/1"},
                        {"file", imported.sources[0].name},
                        {"format", importers::info_of(imported.format).name},
                        {"ok", resolution.ok() && !imported.undecided}};
  if (!to.empty()) object["written"] = to;
  object["recipe"] = imported.recipe;
  const auto put_location = [](OrderedJson& item, const config::SourceLocation& location) {
    if (location.known()) item["line"] = location.line, item["column"] = location.column;
  };
  auto& taken = object["taken"] = OrderedJson::array();
  for (const importers::ImportedKey& one : imported.taken) {
    OrderedJson item = {{"key", one.key}, {"path", one.path}, {"value", one.value}};
    put_location(item, one.location);
    taken.push_back(std::move(item));
  }
  auto& assumed = object["assumed"] = OrderedJson::array();
  for (const importers::AssumedValue& one : imported.assumed)
    assumed.push_back({{"path", one.path}, {"value", one.value}, {"reason", with_flags(one.reason)}});
  auto& omitted = object["omitted"] = OrderedJson::array();
  for (const importers::OmittedKey& one : imported.omitted) {
    OrderedJson item = {{"key", one.key},
                        {"value", one.value},
                        {"why", importers::omission_name(one.why)},
                        {"reason", with_flags(one.reason)}};
    if (!one.near.empty()) item["near"] = one.near;
    put_location(item, one.location);
    omitted.push_back(std::move(item));
  }
  config::RenderOptions options;
  options.format = config::DiagnosticFormat::json;
  object["diagnostics"] =
      ordered_json_of(config::render(resolution.diagnostics, resolution.sources, options));
  object["refused_by_train"] = OrderedJson::array();
  if (resolution.ok())
    for (const auto& feature : config::missing_features(config::schema(), &resolution.config))
      object["refused_by_train"].push_back({{"path", feature.path}, {"reason", feature.reason}});
  return object;
}

// Shows the features that `train` lacks.
void show_refusals(const Imported& imported) {
  if (!imported.resolution.ok()) return;
  const auto missing = config::missing_features(config::schema(), &imported.resolution.config);
  if (missing.empty()) return;
  std::string text = "note: the recipe is valid, but this version cannot train it:\n";
  for (const auto& feature : missing) text += "  " + feature.path + ": " + feature.reason + "\n";
  print_stderr(text);
}

int run_recipe_import(Context& context) {
  if (context.args.has("keys")) {
    put(with_flags(importers::coming_from_page()));
    return 0;
  }
  const std::string& file = context.args.word(0, "FILE");
  const std::string to = context.args.value("output").value_or("");
  const Imported imported = importers::import_recipe(read_input(file), file == "-" ? "standard-input" : file,
                                                     options_of(context, to));
  if (!to.empty()) write_new(to, imported.recipe);
  if (context.args.has("json")) {
    put(dump_json(as_json(imported, to), 2) + "\n");
  } else {
    if (to.empty()) put(imported.recipe);
    if (!context.quiet()) print_stderr(summary(imported));
    show_diagnostics(context, imported.resolution);
    if (!context.quiet()) show_refusals(imported);
  }
  return imported.resolution.ok() && !imported.undecided ? 0 : 1;
}

}  // namespace

const Command kRecipeImport = {
    .name = "recipe import",
    .purpose = "turn another trainer's configuration into a recipe",
    .usage = "FILE [--from FORMAT] [--base RECIPE] [-o FILE] [--json] | --keys",
    .examples = {{"recipe import pretrain_gpt.sh -o gpt.yaml", "a Megatron command line"},
                 {"recipe import ds_config.json --base llama3-8b",
                  "DeepSpeed's settings on a recipe's model"},
                 {"recipe import run_config.yaml --json", "the recipe and all lists as one object"}},
    .options = {{"from", 0, "FORMAT", "format of the file; default: detected from its content", "",
                 "megatron deepspeed bridge torchtune axolotl training-arguments"},
                {"base", 0, "RECIPE", "the recipe to extend, for files without a model"},
                {"var", 0, "NAME=VALUE",
                 "value of a variable of the script (of its first argument: 1=VALUE); may be repeated", "",
                 "", true},
                {"output", 'o', "FILE", "file to write the recipe to; default standard output"},
                {"json", 0, "",
                 "print the recipe and what was taken, assumed and omitted as one JSON object"},
                {"keys", 0, "", "print the options of other trainers and their fields as Markdown tables"}},
    .details =
        "The text is parsed, never executed: variables of a script are expanded, $(commands) are not. A "
        "branch whose\n"
        "condition depends on an unknown variable is listed with the variable to give by --var. Options "
        "without a\n"
        "counterpart are listed with their location and the reason. Exit code 1: the recipe has errors, or a "
        "branch\n"
        "is undecided. `capstan help importing` describes the formats.\n",
    .max_words = 1,
    .run = run_recipe_import,
};

}  // namespace capstan::cli
