// capstan recipe fix | trim
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.hpp"
#include "base/file.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "cli/text_diff.hpp"
#include "config/core/config.hpp"
#include "config/core/library.hpp"
#include "config/tools/edit.hpp"

namespace capstan::cli {

namespace {

namespace fs = std::filesystem;

bool is_name(const std::string& file) {
  return file.find('/') == std::string::npos && !file.ends_with(".yaml") && !file.ends_with(".yml");
}

std::string read_recipe_file(const std::string& file) {
  if (is_name(file) && config::Library::standard().recipe(file))
    fail(ErrorCode::usage, "`" + file + "` is a recipe that comes with Capstan, not a file",
         "`capstan recipe cp " + file + " my.yaml` makes a file of it");
  return read_file(file, config::TreeLimits::kFileBytes);
}

// What is never taken for the name of a recipe.
std::string as_path(const std::string& file) {
  return is_name(file) ? "./" + file : file;
}

// The file keeps its mode, and a link stays one.
void write_back(const std::string& file, const std::string& text) {
  const fs::path target = fs::canonical(file);
  const fs::perms mode = fs::status(target).permissions();
  write_file_durably(target, text);
  fs::permissions(target, mode);
}

// Prints or writes what was mended; `done`: how a step reads in the summary ("mended").
int finish(Context& context, const std::string& file, const std::string& before,
           const config::FixResult& result, const char* done) {
  const Arguments& args = context.args;
  const bool changed = result.text != before;
  const bool only_look = args.has("check") || args.has("diff");
  if (changed && !only_look) write_back(file, result.text);
  if (args.has("json")) {
    nlohmann::ordered_json object = {{"schema", "capstan.recipe-edit/1"},
                                     {"file", file},
                                     {"changed", changed},
                                     {"written", changed && !only_look}};
    object["changes"] = nlohmann::ordered_json::array();
    for (const auto& step : result.steps)
      object["changes"].push_back({{"line", step.line}, {"column", step.column}, {"what", step.what}});
    config::RenderOptions options;
    options.format = config::DiagnosticFormat::json;
    object["left"] = nlohmann::ordered_json::parse(
        config::render(result.resolved.diagnostics, result.resolved.sources, options));
    put(object.dump(2) + "\n");
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
  return finish(context, file, before, config::fix_recipe(config::schema(), before, resolve), "mended");
}

int run_recipe_trim(Context& context) {
  const std::string& file = context.args.word(0, "FILE");
  const std::string before = read_recipe_file(file);
  config::Request request;
  request.recipe = as_path(file);
  const config::Resolution resolution = config::resolve(request);
  if (!resolution.ok()) {
    show_diagnostics(context, resolution);
    throw Exit{exit_code_of(ErrorCode::config)};
  }
  return finish(context, file, before, config::trim_recipe(as_path(file), before), "trimmed");
}

const std::vector<Option> kEditOptions = {
    {"check", 0, "", "write nothing; code 1 when there is something to change"},
    {"diff", 0, "", "write nothing; show the changes as `diff -u` does, code 1 when there are any"},
    {"json", 0, "", "changes and what is left as one JSON object"}};

}  // namespace

const Command kRecipeFix = {
    .name = "recipe fix",
    .purpose = "mend in a recipe file what has one remedy",
    .usage = "FILE [--check | --diff]",
    .examples = {{"recipe fix my.yaml", "renamed and misspelt keys, values in the wrong spelling"},
                 {"recipe fix my.yaml --diff", "only look"}},
    .options = kEditOptions,
    .details =
        "Applies the remedies that `check` names where there is only one: a key's new name, a key that "
        "belongs "
        "to\n"
        "another section or is called otherwise here, a near name, quotes around a number, `yes` for true. "
        "Comments\n"
        "and layout stay. What is left is shown as `check` would. Code 0: no errors are left; 1: some are.\n",
    .max_words = 1,
    .run = run_recipe_fix,
};

const Command kRecipeTrim = {
    .name = "recipe trim",
    .purpose = "drop from a recipe file what its base, presets or defaults say",
    .usage = "FILE [--check | --diff]",
    .examples = {{"recipe trim my.yaml", ""}, {"recipe trim my.yaml --diff", "only look"}},
    .options = kEditOptions,
    .details =
        "The recipe resolves to the same values afterwards, leaf by leaf. A value that would then be derived "
        "from\n"
        "others stays. A comment behind a value that goes, or on the lines directly above it, goes with "
        "it.\n",
    .max_words = 1,
    .run = run_recipe_trim,
};

}  // namespace capstan::cli
