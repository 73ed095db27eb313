// capstan show
#include <nlohmann/json.hpp>

#include "base/error.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "cli/verbs.hpp"
#include "config/show.hpp"

namespace capstan::cli {

namespace {

int run_show(Context& context) {
  const Arguments& args = context.args;
  const std::string& recipe = args.word(0, "RECIPE");
  static constexpr std::string_view kFormats[] = {"yaml", "json"};
  const std::string format = args.choice("format", kFormats, "yaml");
  if (args.count("origin") + args.count("minimal") + args.count("format") + args.count("json") > 1)
    fail(ErrorCode::usage, "--origin, --minimal, --format and --json exclude each other");

  const config::Resolution resolution = require_recipe(context, recipe, ranks_argument(context));
  config::ShowOptions options;
  if (args.words().size() > 1) options.path = args.words()[1];
  if (args.has("origin")) options.format = config::ShowFormat::origin;
  if (args.has("minimal")) options.format = config::ShowFormat::minimal;
  if (format == "json") options.format = config::ShowFormat::json;
  if (!args.has("json")) {
    put(config::show(resolution, options));
    return 0;
  }

  options.format = config::ShowFormat::json;
  nlohmann::ordered_json object = {{"schema", "capstan.show/1"}, {"recipe", resolution.recipe_name}};
  if (!options.path.empty()) object["path"] = options.path;
  object[options.path.empty() ? "config" : "value"] =
      nlohmann::ordered_json::parse(config::show(resolution, options));
  object["presets"] = resolution.presets;
  if (options.path.empty()) {
    nlohmann::ordered_json origins = nlohmann::ordered_json::object();
    for (const auto& [path, origin] : resolution.origins) origins[path] = origin.text;
    object["origins"] = std::move(origins);
  }
  put(object.dump(2) + "\n");
  return 0;
}

}  // namespace

const Verb kShow = {
    .name = "show",
    .purpose = "the resolved recipe, or one value of it",
    .usage = "RECIPE [PATH] [a.b=c …] [flags]",
    .examples = {{"show llama3-8b", "everything, as YAML that is a recipe again"},
                 {"show llama3-8b model.num_layers", "one value"},
                 {"show my.yaml --origin", "each leaf, and who said so"},
                 {"show my.yaml --minimal", "only what differs from presets and defaults"}},
    .options = {{"origin", 0, "",
                 "each leaf with its origin: file:line:col, preset, <cli>:n, derived: formula"},
                {"minimal", 0, "", "the shortest recipe that resolves to the same"},
                {"format", 0, "FORM", "yaml (default) or json: plain nested values"},
                {"ranks", 0, "N", "the world size, instead of the recipe's"},
                {"json", 0, "", "values, presets and origins as one JSON object"}},
    .details = "PATH is a section, a leaf or something inside one; aliases are known.\n",
    .overrides = true,
    .max_words = 2,
    .run = run_show,
};

}  // namespace capstan::cli
