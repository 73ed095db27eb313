// capstan recipe ls | cp | new
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.hpp"
#include "base/file.hpp"
#include "cli/recipe_input.hpp"
#include "cli/table.hpp"
#include "cli/terminal.hpp"
#include "cli/verbs.hpp"
#include "config/library.hpp"

namespace capstan::cli {

namespace {

// Presets are grouped by section below configs/.
std::vector<std::string> preset_sections() {
  std::vector<std::string> sections;
  for (const config::LibraryFile& file : config::library_files()) {
    if (!file.path.starts_with("configs/")) continue;
    const std::string_view rest = file.path.substr(8);
    const std::string section(rest.substr(0, rest.find('/')));
    if (sections.empty() || sections.back() != section) sections.push_back(section);
  }
  return sections;
}

int run_recipe_ls(Context& context) {
  const config::Library library = config::Library::standard();
  const std::string section = context.args.words().empty() ? "" : context.args.words()[0];
  if (!section.empty()) {
    const auto sections = preset_sections();
    if (std::find(sections.begin(), sections.end(), section) == sections.end())
      fail(ErrorCode::usage, "no presets for `" + section + "`", did_you_mean(section, sections));
  }
  const auto entries = section.empty() ? library.recipes() : library.presets(section);
  if (context.args.has("json")) {
    nlohmann::ordered_json object = {{"schema", "capstan.recipes/1"}};
    const char* kind = section.empty() ? "recipes" : "presets";
    object[kind] = nlohmann::ordered_json::array();
    for (const auto& entry : entries) {
      nlohmann::ordered_json item = {{"name", entry.name}, {"description", entry.description}};
      if (!entry.file.empty()) item["file"] = entry.file;
      object[kind].push_back(std::move(item));
    }
    put(object.dump(2) + "\n");
    return 0;
  }
  Table table;
  for (const auto& entry : entries)
    table.add({entry.name, entry.description + (entry.file.empty() ? "" : " [" + entry.file + "]")});
  put(table.text());
  if (section.empty() && !context.quiet()) {
    std::string line = "\npresets (capstan recipe ls SECTION):";
    for (const std::string& name : preset_sections()) line += " " + name;
    put(line + "\n");
  }
  return 0;
}

int run_recipe_cp(Context& context) {
  const std::string& name = context.args.word(0, "RECIPE");
  const std::string& to = context.args.word(1, "FILE");
  const config::Library library = config::Library::standard();
  const auto found = library.recipe(name);
  if (!found) {
    std::vector<std::string> names;
    for (const auto& entry : library.recipes()) names.push_back(entry.name);
    std::string help = did_you_mean(name, names);
    if (help.empty()) help = "`capstan recipe ls` lists the names";
    fail(ErrorCode::not_found, "there is no recipe `" + name + "`", help);
  }
  write_new(to, found->file.empty() ? std::string(found->text) : read_file(found->file, uint64_t{4} << 20));
  put(to + ": a copy of " + found->name + "\n");
  return 0;
}

int run_recipe_new(Context& context) {
  const std::string& to = context.args.word(0, "FILE");
  const std::string base = context.args.value("from").value_or("quickstart");
  // The base is resolved first: a recipe that extends nothing would be no beginning.
  config::Request request;
  request.recipe = base;
  const config::Resolution resolution = config::resolve(request);
  if (!resolution.ok()) show_diagnostics(context, resolution), throw Exit{2};
  const std::string name = std::filesystem::path(to).stem().string();
  write_new(to, "# What differs from the recipe `" + base +
                    "`. See: capstan help recipes, capstan explain SECTION\n"
                    "extends: " +
                    base +
                    "\n"
                    "name: " +
                    name +
                    "\n"
                    "description: one line for listings\n\n"
                    "# model: {num_layers: 6}              # fields: capstan explain model\n"
                    "# mixed_precision: bf16_mixed         # presets: capstan recipe ls mixed_precision\n"
                    "# optimizer: {lr: 1e-3}\n"
                    "# train: {train_iters: 1000}\n"
                    "# dataset: {data_path: data/corpus_text_document}\n"
                    "# tokenizer: {tokenizer_model: data/tokenizer.json}\n");
  put(to + ": extends " + base + "; next: capstan check " + shell_quoted(to) + "\n");
  return 0;
}

}  // namespace

const Verb kRecipeLs = {
    .name = "recipe ls",
    .purpose = "the recipes, or the presets of a section",
    .usage = "[SECTION] [--json]",
    .examples = {{"recipe ls", "recipes by name"},
                 {"recipe ls mixed_precision", "what `mixed_precision=NAME` can choose"}},
    .options = {{"json", 0, "", "as one JSON object"}},
    .max_words = 1,
    .run = run_recipe_ls,
};

const Verb kRecipeCp = {
    .name = "recipe cp",
    .purpose = "copy a named recipe into a file",
    .usage = "RECIPE FILE",
    .examples = {{"recipe cp llama3-8b my.yaml", ""}},
    .max_words = 2,
    .run = run_recipe_cp,
};

const Verb kRecipeNew = {
    .name = "recipe new",
    .purpose = "begin a recipe that extends another one",
    .usage = "FILE [--from RECIPE]",
    .examples = {{"recipe new my.yaml", "extends quickstart"}, {"recipe new big.yaml --from llama3-8b", ""}},
    .options = {{"from", 0, "RECIPE", "the recipe to extend; default quickstart"}},
    .max_words = 1,
    .run = run_recipe_new,
};

}  // namespace capstan::cli
