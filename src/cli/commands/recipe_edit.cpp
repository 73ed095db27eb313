// capstan recipe fix | trim
#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "cli/text_diff.hpp"
#include "config/core/compose.hpp"
#include "config/core/library.hpp"
#include "config/sections/config.hpp"
#include "config/tools/edit.hpp"

namespace capstan::cli {

namespace {

namespace fs = std::filesystem;

std::string read_recipe_file(const std::string& file) {
  if (!config::is_path(file) && config::Library::standard().recipe(file))
    fail(ErrorCode::usage, "`" + file + "` is a recipe that comes with Capstan, not a file",
         "`capstan recipe cp " + file + " my.yaml` makes a file of it");
  return read_file(file, config::TreeLimits::kFileBytes);
}

// A path that cannot be read as the name of a recipe.
std::string as_path(const std::string& file) {
  return config::is_path(file) ? file : "./" + file;
}

// The file keeps its mode, and a link stays one.
void write_back(const std::string& file, const std::string& text) {
  const fs::path target = fs::canonical(file);
  const fs::perms mode = fs::status(target).permissions();
  write_file_durably(target, text);
  fs::permissions(target, mode);
}

// Prints or writes the edited recipe. done: the participle of the summary ("fixed").
int finish(Context& context, const std::string& file, const std::string& before,
           const config::FixResult& result, const char* done) {
  const Arguments& args = context.args;
  const bool changed = result.text != before;
  const bool only_look = args.has("check") || args.has("diff");
  if (changed && !only_look) write_back(file, result.text);
  if (args.has("json")) {
    OrderedJson object = {{"schema", "capstan.recipe-edit/1"},
                          {"file", file},
                          {"changed", changed},
                          {"written", changed && !only_look}};
    object["changes"] = OrderedJson::array();
    for (const auto& step : result.steps)
      object["changes"].push_back({{"line", step.line}, {"column", step.column}, {"what", step.what}});
    config::RenderOptions options;
    options.format = config::DiagnosticFormat::json;
    object["diagnostics"] =
        ordered_json_of(config::render(result.resolved.diagnostics, result.resolved.sources, options));
    put(dump_json(object, 2) + "\n");
  } else if (args.has("diff")) {
    put(unified_diff(before, result.text, file));
  } else if (!context.quiet()) {
    for (const auto& step : result.steps)
      put(file + ":" + std::to_string(step.line) + ":" + std::to_string(step.column) + ": " + step.what +
          "\n");
    const std::string number = std::to_string(result.steps.size());
    put(file + ": " +
        (!changed ? "nothing to change"
                  : (only_look ? "would be " : "") + std::string(done) + " in " + number +
                        (result.steps.size() == 1 ? " place" : " places")) +
        "\n");
  }
  if (!args.has("json")) show_diagnostics(context, result.resolved);
  if (result.resolved.malformed) return exit_code_of(ErrorCode::format);
  return !result.resolved.ok() || (only_look && changed) ? 1 : 0;
}

int run_recipe_fix(Context& context) {
  const std::string& file = context.args.word(0, "FILE");
  const std::string before = read_recipe_file(file);
  const config::Library library = config::Library::standard();
  config::Request request;
  request.recipe = as_path(file);
  const auto resolve = [&](const std::string& text) {
    config::Config config;
    return config::resolve_text_into(config::schema(), library, &config, request, text);
  };
  return finish(context, file, before, config::fix_recipe(config::schema(), before, resolve), "fixed");
}

int run_recipe_trim(Context& context) {
  const std::string& file = context.args.word(0, "FILE");
  const std::string before = read_recipe_file(file);
  config::Request request;
  request.recipe = as_path(file);
  const config::Resolution resolution = config::resolve(request);
  if (!resolution.ok()) {
    show_diagnostics(context, resolution);
    throw CommandExit{exit_code_of(ErrorCode::config)};
  }
  return finish(context, file, before, config::trim_recipe(as_path(file), before), "trimmed");
}

const std::vector<Option> kEditOptions = {
    {"check", 0, "", "write nothing; code 1 if there are changes to make"},
    {"diff", 0, "", "write nothing; show the changes as `diff -u` does, code 1 if there are any"},
    {"json", 0, "", "print changes and remaining diagnostics as one JSON object"}};

}  // namespace

const Command kRecipeFix = {
    .name = "recipe fix",
    .purpose = "fix errors in a recipe file that have a unique correction",
    .usage = "FILE [--check | --diff]",
    .examples = {{"recipe fix my.yaml", "renamed and misspelled keys, values in the wrong spelling"},
                 {"recipe fix my.yaml --diff", "show the changes only"}},
    .options = kEditOptions,
    .details =
        "Applies a correction that `check` suggests where it is the only one: renamed and misspelled keys, "
        "keys of another\n"
        "section or of another tool, quotes around a number, `yes` for true. Comments and layout stay. "
        "Remaining\n"
        "diagnostics are shown as by `check`. Code 0: no errors remain; 1: some do.\n",
    .max_words = 1,
    .run = run_recipe_fix,
};

const Command kRecipeTrim = {
    .name = "recipe trim",
    .purpose = "remove from a recipe file the values that its base, presets or defaults give",
    .usage = "FILE [--check | --diff]",
    .examples = {{"recipe trim my.yaml", ""}, {"recipe trim my.yaml --diff", "show the changes only"}},
    .options = kEditOptions,
    .details =
        "The recipe resolves to the same value of each field afterward. A value that would then be derived "
        "from\n"
        "others stays. The comment of a removed value, on its line or directly above it, is removed with "
        "it.\n",
    .max_words = 1,
    .run = run_recipe_trim,
};

}  // namespace capstan::cli
