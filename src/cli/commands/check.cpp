// capstan check
#include <algorithm>
#include <optional>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "cli/commands/commands.hpp"
#include "cli/named_files.hpp"
#include "cli/recipe_input.hpp"
#include "cli/report.hpp"
#include "cli/terminal.hpp"
#include "config/core/field.hpp"
#include "train/setup/device.hpp"
#include "train/setup/transport.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/recipe.hpp"
#include "train/trainer/start_checks.hpp"

namespace capstan::cli {

namespace {

// Files that are missing or cannot be used are errors with --files, else notes; --files also looks at the
// directories that the run writes. A missing file that only a recipe shipped with Capstan names gets no note:
// the user may put data there. resident_data: as for unusable_files().
std::vector<config::Diagnostic> add_missing_files(const Context& context, config::Resolution& resolution,
                                                  int64_t& resident_data) {
  const bool files = context.args.has("files");
  const auto run_dir = context.args.value("run-dir");
  if (run_dir && !files)
    fail(ErrorCode::usage, "`--run-dir` applies only with `--files`", "add --files, or leave it out");
  if (!resolution.ok()) return {};
  const config::Level level = files ? config::Level::error : config::Level::note;
  auto missing = missing_files(resolution, level);
  for (const config::Diagnostic& one : unusable_files(resolution, level, resident_data))
    resolution.diagnostics.push_back(one);
  const auto add = [&](const std::vector<config::Diagnostic>& found) {
    resolution.diagnostics.insert(resolution.diagnostics.end(), found.begin(), found.end());
  };
  if (files) {
    add(unwritable_directories(resolution, run_dir.value_or("")));
    add(occupied_directories(resolution, run_dir.value_or("")));
  } else {
    add(unusable_name(resolution));
  }
  for (const config::Diagnostic& one : missing) {
    const bool shipped =
        one.location.known() &&
        resolution.sources[static_cast<size_t>(one.location.source)].kind == config::Source::Kind::embedded;
    if (files || !shipped) resolution.diagnostics.push_back(one);
  }
  config::sort_diagnostics(resolution.diagnostics);
  return missing;
}

// Throws the error with which a run on this machine refuses the device of the recipe, or NCCL without GPUs.
// Opening the CUDA backend would take longer than the check: `auto` opens it for NCCL alone. Errors of `auto`
// on a GPU are not found; a router in fp64, which every GPU refuses, is a warning of the recipe.
void check_device_here(const config::Config& config) {
  const bool nccl = config.dist.distributed_backend == config::DistributedBackend::nccl;
  if (config.train.device != config::DeviceKind::automatic) train::check_device(config, 0);
  if (nccl && train::device_kind(config.train.device) != config::DeviceKind::cuda)
    train::choose_transport(config.dist.distributed_backend, {}, {});
}

// Adds a note if this machine cannot train on the device of the recipe; the recipe is valid all the same.
void add_device_note(config::Resolution& resolution) {
  try {
    check_device_here(resolution.config);
  } catch (const Error& error) {
    config::Diagnostic note;
    // The message begins with the field, except for a failure of the device itself.
    note.path = error.message().substr(0, error.message().find(':'));
    if (!config::schema().find_field(note.path)) note.path = "train.device";
    note.level = config::Level::note;
    note.code = "C0805";
    note.name = "device_not_here";
    note.message = "the recipe cannot be trained on this machine: " + error.message();
    note.location = resolution.origin(note.path).location;
    note.help(with_flags(error.marked_help()));
    resolution.diagnostics.push_back(std::move(note));
    config::sort_diagnostics(resolution.diagnostics);
  }
}

// "my: ok (1 rank). Data files were not checked; `--files` checks them.".
std::string accepted_text(const config::Resolution& resolution, size_t warnings, bool files) {
  const config::CheckpointConfig& checkpoint = resolution.config.checkpoint;
  const bool data = resolution.config.dataset.kind != config::DatasetKind::mock,
             weights = checkpoint.load || checkpoint.pretrained_checkpoint;
  std::string line = resolution.recipe_name + ": ";
  line +=
      warnings == 0 ? std::string("ok") : "no errors, " + counted(static_cast<int64_t>(warnings), "warning");
  line += " (" + layout_text(resolution.config.dist) + ")";
  const bool noted = std::ranges::any_of(resolution.diagnostics, [](const config::Diagnostic& one) {
    return one.level == config::Level::note && (one.code == "C0801" || one.code == "C0802");
  });
  if (noted)
    line += ". Files that cannot be read here are notes; with `--files` they are errors.";
  else if (!files && (data || weights))
    line += std::string(!weights ? ". Data files"
                        : data   ? ". Data files and weights"
                                 : ". Weights") +
            " were not checked; `--files` checks them.";
  return line + "\n";
}

int run_check(Context& context) {
  const std::string& recipe = context.args.word(0, "RECIPE");
  config::ShrunkFrom shrunk_from;
  config::Resolution resolution = resolve_recipe(context, recipe, ranks_argument(context), &shrunk_from);
  int64_t resident_data = 0;
  const std::vector<config::Diagnostic> files = add_missing_files(context, resolution, resident_data);
  const size_t errors = count(resolution.diagnostics, config::Level::error);
  const size_t warnings = count(resolution.diagnostics, config::Level::warning);
  std::vector<config::MissingFeature> missing;
  if (resolution.ok()) {
    missing = config::missing_features(config::schema(), &resolution.config);
    if (missing.empty()) add_device_note(resolution);
  }

  // Why `train` refuses the recipe.
  std::optional<Error> refused;
  bool too_large = false;
  try {
    if (resolution.ok()) {
      train::refuse_missing_features(resolution.config);
      if (!context.args.has("files")) resident_data = train::data_bytes_under_limit(resolution.config);
      train::check_memory_limit(resolution.config, resident_data);
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
        ordered_json_of(config::render(resolution.diagnostics, resolution.sources, options));
    object["refused_by_train"] = OrderedJson::array();
    for (const auto& feature : missing)
      object["refused_by_train"].push_back({{"path", feature.path}, {"reason", feature.reason}});
    object["missing_files"] = OrderedJson::array();
    for (const auto& file : files)
      object["missing_files"].push_back({{"path", file.path}, {"message", file.message}});
    if (too_large)
      object["does_not_fit"] = {{"reason", refused->message()}, {"help", with_flags(refused->marked_help())}};
    put(dump_json(object, 2) + "\n");
  } else {
    show_diagnostics(context, resolution);
    if (resolution.ok() && !refused && !context.quiet()) {
      put(escape_controls(accepted_text(resolution, warnings, context.args.has("files"))));
      if (context.args.has("shrink")) print_stderr(shrunk_summary(shrunk_from, resolution) + "\n");
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
                 {"check my.yaml --files", "before a long run: data, weights and directories too"},
                 {"check my.yaml --message-format short", "file:line:col, for editors"}},
    .options = {{"ranks", 0, "N", "the world size, instead of the recipe's"},
                {"shrink", 0, "", "scale the recipe down as `train --shrink` does"},
                {"files", 0, "", "report files of the recipe that are missing or cannot be used as errors"},
                {"run-dir", 0, "DIR", "with --files: the run directory of `train`; default runs/NAME"},
                {"json", 0, "", "print the result and all diagnostics as one JSON object"}},
    .details =
        "Exit code 0: `train` accepts the recipe; 1: it has errors, or needs a feature that this version\n"
        "lacks; 2: it cannot be read, or the command line is wrong; 3: a training step needs more than\n"
        "`resilience.memory_limit`.\n"
        "Needs no data, tokenizer or weights on disk: a file that the recipe names and that is missing or\n"
        "cannot be used is a note, with --files an error. --files opens all that `train` would: it\n"
        "tokenizes fine-tuning data and compares the recipe with the checkpoints with which the run begins,\n"
        "as `train` does, and shows the warnings with which `train` would begin. It also checks that the\n"
        "directories of the run can be created and written. The data that a shipped recipe names is\n"
        "checked only with --files.\n",
    .overrides = true,
    .max_words = 1,
    .run = run_check,
};

}  // namespace capstan::cli
