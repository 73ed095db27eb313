// capstan recipe ls | cp | new
#include <filesystem>
#include <map>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/table.hpp"
#include "cli/terminal.hpp"
#include "config/core/compose.hpp"
#include "config/core/emit.hpp"
#include "config/core/library.hpp"
#include "config/tools/edit.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::cli {

namespace {

// The sections with presets: the directories below configs/.
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
      fail(ErrorCode::usage, "no presets for `" + section + "`", choices_help(section, sections));
  }
  const auto methods = section.empty() ? library.methods() : std::vector<config::Library::Entry>();
  const auto entries = section.empty() ? library.recipes(methods) : library.presets(section);
  if (context.args.has("json")) {
    OrderedJson object = {{"schema", "capstan.recipes/1"}};
    const auto add = [&](const char* kind, const std::vector<config::Library::Entry>& list) {
      object[kind] = OrderedJson::array();
      for (const auto& entry : list) {
        OrderedJson item = {{"name", entry.name}, {"description", entry.description}};
        if (!entry.file.empty()) item["file"] = entry.file;
        if (!entry.models.empty()) item["models"] = entry.models;
        object[kind].push_back(std::move(item));
      }
    };
    add(section.empty() ? "recipes" : "presets", entries);
    if (section.empty()) add("methods", methods);
    put(dump_json(object, 2) + "\n");
    return 0;
  }
  Table table;
  const auto add = [&](const std::string& name, const config::Library::Entry& entry) {
    table.add({name, entry.description + (entry.file.empty() ? "" : " [" + entry.file + "]")});
  };
  for (const auto& entry : entries)
    if (entry.method.empty()) add(entry.name, entry);
  for (const auto& entry : methods) add(entry.name + " model=MODEL", entry);
  put(table.text());
  // Names of methods by the models that they support.
  std::map<std::vector<std::string>, std::string> methods_of;
  for (const auto& entry : methods) methods_of[entry.models] += " " + entry.name;
  for (const auto& [models, names] : methods_of) put("\nmodels of" + names + ": " + join(models, " ") + "\n");
  if (section.empty() && !context.quiet()) {
    std::string line = "\npresets (capstan recipe ls SECTION):";
    for (const std::string& name : preset_sections()) line += " " + name;
    put(line + "\n");
  }
  return 0;
}

// The recipe of that name, or of SECTION=NAME the preset.
config::Library::Document named_document(const std::string& name) {
  const config::Library library = config::Library::standard();
  if (const size_t at = name.find('='); at != std::string::npos) {
    const std::string section = name.substr(0, at), preset = name.substr(at + 1);
    if (auto found = library.preset(section, preset)) return *std::move(found);
    fail(ErrorCode::not_found, "not found: preset = " + config::shortened(name),
         "`capstan recipe ls " + section + "` lists the presets of a section");
  }
  auto found = library.recipe(name);
  if (!found) config::fail_no_recipe(library, name);
  return *std::move(found);
}

int run_recipe_cp(Context& context) {
  const std::string& to = context.args.word(1, "FILE");
  const config::Library::Document found = named_document(context.args.word(0, "RECIPE"));
  write_new(to, found.file.empty() ? found.text : read_file(found.file, uint64_t{4} << 20));
  put(to + ": a copy of " + found.name + "\n");
  return 0;
}

// The directory as named by a recipe at `to`; relative if it was given as relative.
std::string seen_from(const std::filesystem::path& to, const std::string& directory) {
  namespace fs = std::filesystem;
  const fs::path given(directory);
  std::error_code error;
  const fs::path home = fs::absolute(to, error).parent_path();
  const fs::path text = given.is_absolute() ? given : fs::absolute(given, error).lexically_relative(home);
  return text.lexically_normal().string();
}

bool has_weights(const std::filesystem::path& directory) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error))
    if (entry.path().extension() == ".safetensors") return true;
  return false;
}

bool has_tokenizer(const std::filesystem::path& directory) {
  try {
    return text::Tokenizer::load(directory) != nullptr;
  } catch (const Error&) {
    // `check` reports it when the recipe names one.
    return false;
  }
}

// A recipe that fine-tunes the model of a Hugging Face directory, on mock data until the user names a
// dataset.
std::string recipe_of_directory(const std::string& to, const std::string& directory) {
  const std::string model = config::yaml_text("hf:" + seen_from(to, directory));
  const bool weights = has_weights(directory), tokenizer = has_tokenizer(directory);
  std::string text = "# The model, the tokenizer and the weights of " + directory +
                     ". See: capstan help recipes, capstan help data\n"
                     "name: " +
                     std::filesystem::path(to).stem().string() +
                     "\n"
                     "description: one line for listings\n\n"
                     "model: " +
                     model +
                     "\n"
                     "mixed_precision: bf16_mixed\n"
                     "ddp: zero1\n"
                     "train:\n"
                     "  micro_batch_size: 1\n"
                     "  global_batch_size: 8\n"
                     "  train_iters: 100\n"
                     "optimizer:\n"
                     "  preset: adamw_finetune\n"
                     "  lr: 1e-5\n"
                     "  min_lr_ratio: 0.1\n"
                     "scheduler:\n"
                     "  preset: cosine\n"
                     "  lr_warmup_fraction: 0.05\n";
  if (weights)
    text += "checkpoint:\n  pretrained_checkpoint: " + model + "\n  save_interval: 50\n";
  else
    text +=
        "# The directory has no *.safetensors: training begins with random weights.\n"
        "checkpoint: {save_interval: 50}\n";
  if (tokenizer)
    text += "tokenizer:\n  preset: huggingface\n  tokenizer_model: " + model + "\n";
  else
    text += "# The directory has no tokenizer that can be read.\ntokenizer: none\n";
  return text +
         "\n# Generated tokens: the recipe runs, and learns nothing. In place of them, for example\n"
         "#   dataset: {preset: sft, train_files: data/chats.jsonl, split: '98,2,0'}\n"
         "#   dataset: {preset: gpt, data_path: data/corpus_text_document}\n"
         "dataset: mock\n"
         "logger: {log_interval: 1}\n";
}

// The written file as the argument of a command: a word without a slash and .yaml would be a recipe's name.
std::string recipe_argument(const std::string& file) {
  return shell_quoted(config::is_path(file) ? file : "./" + file);
}

int new_of_directory(Context& context, const std::string& to, const std::string& directory) {
  const std::string text = recipe_of_directory(to, directory);
  config::Request request;
  request.recipe = to.find('/') == std::string::npos ? "./" + to : to;
  const config::Resolution resolution = config::resolve_text(text, request);
  if (!resolution.ok()) show_diagnostics(context, resolution), throw CommandExit{2};
  write_new(to, text);
  put(to + ": the model of " + directory + "; next: capstan train " + recipe_argument(to) + "\n");
  return 0;
}

int run_recipe_new(Context& context) {
  const std::string& to = context.args.word(0, "FILE");
  const std::string base = context.args.value("from").value_or("quickstart");
  if (base.starts_with("hf:")) return new_of_directory(context, to, base.substr(3));
  // Resolves the base first, so that the new recipe extends a valid one.
  config::Request request;
  request.recipe = base;
  const config::Resolution resolution = config::resolve(request);
  if (!resolution.ok()) show_diagnostics(context, resolution), throw CommandExit{2};
  const std::string name = std::filesystem::path(to).stem().string();
  const std::string extends = config::yaml_text(extends_text(base, to));
  request.recipe = to.find('/') == std::string::npos ? "./" + to : to;
  const config::Resolution derived = config::resolve_text("extends: " + extends + "\n", request);
  if (!derived.ok()) show_diagnostics(context, derived), throw CommandExit{2};
  write_new(to, "# What differs from the recipe `" + base +
                    "`. See: capstan help recipes, capstan explain SECTION\n"
                    "extends: " +
                    extends +
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
  put(to + ": extends " + base + "; next: capstan check " + recipe_argument(to) + "\n");
  return 0;
}

}  // namespace

const Command kRecipeLs = {
    .name = "recipe ls",
    .purpose = "list the recipes, or the presets of a section",
    .usage = "[SECTION] [--json]",
    .examples = {{"recipe ls", "recipes by name"},
                 {"recipe ls mixed_precision", "what `mixed_precision=NAME` can choose"}},
    .options = {{"json", 0, "", "print one JSON object"}},
    .max_words = 1,
    .run = run_recipe_ls,
};

const Command kRecipeCp = {
    .name = "recipe cp",
    .purpose = "copy a named recipe, or a preset, into a file",
    .usage = "RECIPE|SECTION=PRESET FILE",
    .examples = {{"recipe cp llama3-8b my.yaml", ""},
                 {"recipe cp cluster=h100 mine.yaml", "GPUs and a network for `plan --cluster ./mine.yaml`"}},
    .max_words = 2,
    .run = run_recipe_cp,
};

const Command kRecipeNew = {
    .name = "recipe new",
    .purpose = "create a recipe from another one, or from a model on disk",
    .usage = "FILE [--from RECIPE|hf:DIR]",
    .examples = {{"recipe new my.yaml", "extends quickstart"},
                 {"recipe new big.yaml --from llama3-8b", ""},
                 {"recipe new mine.yaml --from hf:SmolLM2-135M", "a Hugging Face model on disk"}},
    .options = {{"from", 0, "RECIPE",
                 "the recipe to extend, default quickstart; or hf:DIR: model, tokenizer and weights there"}},
    .max_words = 1,
    .run = run_recipe_new,
};

}  // namespace capstan::cli
