// capstan explain
#include <optional>

#include "base/error.hpp"
#include "cli/commands/commands.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "config/tools/show.hpp"

namespace capstan::cli {

namespace {

int run_explain(Context& context) {
  const Arguments& args = context.args;
  // Without a path: the sections.
  const std::string what = args.words().empty() ? std::string() : args.words()[0];
  std::optional<config::Resolution> resolution;
  auto recipe = args.value("recipe");
  if (args.words().size() > 1) {
    if (recipe)
      fail(ErrorCode::usage, "two recipes are given: `" + *recipe + "` and `" + args.words()[1] + "`");
    recipe = args.words()[1];
  }
  if (recipe) {
    resolution = require_recipe(context, *recipe, ranks_argument(context));
  } else if (!args.overrides().empty()) {
    fail(ErrorCode::usage,
         "the override `" + args.overrides().front().text + "` changes a recipe, and none is given",
         "name one after the path, or with -r RECIPE");
  }
  if (args.has("json")) {
    const config::Config* config = resolution ? &resolution->config : nullptr;
    put(config::explain_json(config::schema(), what, config, resolution ? &*resolution : nullptr));
    put("\n");
  } else {
    put(config::explain(what, resolution ? &*resolution : nullptr));
    if (what.empty() && !context.quiet())
      put("\n`capstan explain SECTION` lists the fields of a section; `capstan help` lists commands and "
          "topics.\n");
  }
  return 0;
}

}  // namespace

const Command kExplain = {
    .name = "explain",
    .purpose = "explain a field, a section, a rule or an error code",
    .usage = "[PATH [RECIPE]] [a.b=c …] [flags]",
    .examples = {{"explain optimizer.lr", "what it is, its unit, range and default"},
                 {"explain model.ffn_hidden_size llama3-8b", "its value there, and every write to it"},
                 {"explain dist", "the fields of a section"},
                 {"explain", "the sections"}},
    .options = {{"recipe", 'r', "RECIPE",
                 "the same as the second word: show the value, every write in order, and what depends on it"},
                {"ranks", 0, "N", "the world size, instead of the recipe's"},
                {"json", 0, "", "print one JSON object"}},
    .overrides = true,
    .max_words = 2,
    .run = run_explain,
};

}  // namespace capstan::cli
