// capstan check
#include <optional>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "cli/commands/commands.hpp"
#include "cli/named_files.hpp"
#include "cli/recipe_input.hpp"
#include "cli/terminal.hpp"
#include "config/core/field.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/recipe.hpp"

namespace capstan::cli {

namespace {

// Files that are missing or cannot be used are errors with --files, else notes. A missing file that only a
// recipe shipped with Capstan names gets no note: it is a place where data may be put.
std::vector<config::Diagnostic> add_missing_files(config::Resolution& resolution, bool files) {
  if (!resolution.ok()) return {};
  const config::Level level = files ? config::Level::error : config::Level::note;
  const auto missing = missing_files(resolution, level);
  for (const config::Diagnostic& one : unusable_files(resolution, level))
    resolution.diagnostics.push_back(one);
  for (const config::Diagnostic& one : missing) {
    const bool shipped =
        one.location.known() &&
        resolution.sources[static_cast<size_t>(one.location.source)].kind == config::Source::Kind::embedded;
    if (files || !shipped) resolution.diagnostics.push_back(one);
  }
  config::sort_diagnostics(resolution.diagnostics);
  return missing;
}

int run_check(Context& context) {
  const std::string& recipe = context.args.word(0, "RECIPE");
  config::ShrunkFrom shrunk_from;
  config::Resolution resolution = resolve_recipe(context, recipe, ranks_argument(context), &shrunk_from);
  const std::vector<config::Diagnostic> files = add_missing_files(resolution, context.args.has("files"));
  const size_t errors = count(resolution.diagnostics, config::Level::error);
  const size_t warnings = count(resolution.diagnostics, config::Level::warning);
  std::vector<config::MissingFeature> missing;
  if (resolution.ok()) missing = config::missing_features(config::schema(), &resolution.config);

  std::optional<Error> refused;  // by `train`
  bool too_large = false;
  try {
    if (resolution.ok()) {
      train::refuse_missing_features(resolution.config);
      train::check_memory_limit(resolution.config);
    }
  } catch (const Error& error) {
    too_large = error.code() == ErrorCode::no_fit;
    if (!too_large && missing.empty()) throw;
    refused = error;
  }

  if (context.args.has("json")) {
    config::RenderOptions options;
    options.format = config::DiagnosticFormat::json;
    OrderedJson object = {{"schema", "capstan.check/1"},
                          {"recipe", resolution.recipe_name},
                          {"ok", resolution.ok() && !refused},
                          {"errors", errors},
                          {"warnings", warnings}};
    object["diagnostics"] =
        OrderedJson::parse(config::render(resolution.diagnostics, resolution.sources, options));
    object["refused_by_train"] = OrderedJson::array();
    for (const auto& feature : missing)
      object["refused_by_train"].push_back({{"path", feature.path}, {"reason", feature.reason}});
    object["missing_files"] = OrderedJson::array();
    for (const auto& file : files)
      object["missing_files"].push_back({{"path", file.path}, {"message", file.message}});
    if (too_large) object["does_not_fit"] = {{"reason", refused->message()}, {"help", refused->help()}};
    put(object.dump(2) + "\n");
  } else {
    show_diagnostics(context, resolution);
    if (resolution.ok() && !refused && !context.quiet()) {
      std::string line = resolution.recipe_name + ": ";
      line += warnings == 0 ? std::string("ok") : "no errors, " + count_text(warnings, "warning");
      line += " (" + layout_text(resolution.config.dist) + ")";
      if (!context.args.has("files") && resolution.config.dataset.kind != config::DatasetKind::mock)
        line += "; --files opens its data too";
      put(line + "\n");
      if (context.args.has("shrink")) say(shrunk_summary(shrunk_from, resolution) + "\n");
    }
  }
  if (refused) throw *refused;
  if (resolution.ok()) return 0;
  // Code 1 for a recipe that can be read and has errors, 2 for one that cannot be read.
  return resolution.malformed || resolution.bad_words ? 2 : 1;
}

}  // namespace

const Command kCheck = {
    .name = "check",
    .purpose = "find all errors in a recipe, in milliseconds, without a GPU",
    .usage = "RECIPE [a.b=c …] [flags]",
    .examples = {{"check llama3-70b", "at its own world size"},
                 {"check llama3-70b dist.tp=8 --ranks 128", "another layout, another world"},
                 {"check my.yaml --message-format short", "file:line:col, for editors"}},
    .options = {{"ranks", 0, "N", "the world size, instead of the recipe's"},
                {"shrink", 0, "", "the recipe as `train --shrink` runs it"},
                {"files", 0, "",
                 "files that the recipe names and that are missing or cannot be used are errors"},
                {"json", 0, "", "the result and all diagnostics as one JSON object"}},
    .details =
        "Exit code 0: `train` accepts the recipe; 1: it has errors, or needs a feature that this version "
        "lacks;\n"
        "2: it cannot be read, or the command line is wrong; 3: a training step needs more than "
        "`resilience.memory_limit`.\n"
        "Needs no data, tokenizer or weights on disk: a file that the recipe names and that is missing or "
        "cannot be\nused is a note, with --files an error. --files opens all that `train` would: it "
        "tokenizes "
        "fine-tuning data\nand reads the shapes of the weights. The data that a shipped recipe names is "
        "looked "
        "for with --files only.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_check,
};

}  // namespace capstan::cli
