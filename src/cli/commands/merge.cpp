// capstan merge
#include "train/adapters/merge.hpp"
#include "base/wording.hpp"
#include "checkpoint/file_system.hpp"
#include "checkpoint/reader.hpp"
#include "cli/commands/commands.hpp"
#include "cli/stored_model.hpp"
#include "cli/terminal.hpp"
#include "config/core/external.hpp"
#include "train/adapters/stored_adapters.hpp"

namespace capstan::cli {

namespace {

// Only `capstan convert` writes formats of other programs.
void refuse_other_formats(const Arguments& args, const std::string& from, const std::string& to) {
  const auto scheme = config::split_scheme(to).scheme;
  if (scheme.empty()) return;
  const std::string base = args.has("base") ? " --base " + *args.value("base") : "";
  fail(ErrorCode::usage, "`" + to + "`: merged weights are written as a checkpoint",
       scheme == "peft:" ? "`capstan convert " + from + " " + to + "` writes the adapters alone"
                         : "write " + to + " in two steps: `capstan merge " + from + " MERGED" + base +
                               "`, then `capstan convert MERGED " + to + "`");
}

int run_merge(Context& context) {
  const std::string& from = context.args.word(0, "ADAPTER");
  const std::string& to = context.args.word(1, "CHECKPOINT");
  refuse_other_formats(context.args, from, to);
  // Overrides change the recipe of a run, which names the base.
  const auto& overrides = context.args.overrides();
  if (!overrides.empty() && (context.args.has("base") || train::peft_directory(from)))
    fail(ErrorCode::usage,
         "the override `" + overrides.front().text + "` changes the recipe of a run, and " +
             (context.args.has("base") ? "--base is taken instead" : "`" + from + "` has none"),
         "leave it out");
  auto base = train::base_of_adapters(from, context.args.value("base"), overrides);
  const auto adapters = train::open_adapters(from, base.weights, base.recipe.resolution.config.model);
  if (adapters.run)
    for (const std::string& reason : adapters.run->refused)
      print_stderr("warning: not used: " + reason + "\nwarning: used instead: `" +
                   adapters.run->checkpoint.string() + "`\n");
  const train::Merged merged = train::merge_adapters(adapters, base, to, checkpoint::real_file_system());
  print_stderr("adapters of " + std::to_string(merged.layers) + " layers merged into " +
               merged.checkpoint.string() + "\n");
  if (const int64_t count = merged.prediction_layers; count > 0 && !context.quiet())
    print_stderr("note: the base's " + counted(count, "layer") + " for multi-token prediction " +
                 (count == 1 ? "is" : "are") + " left out: adapters are trained without them\n");
  if (adapters.run) {
    const auto run = checkpoint::Reader::open(adapters.run->checkpoint, checkpoint::Verification::structure);
    warn_of_turn_end(run, adapters.run->resolution.config);
  }
  return 0;
}

}  // namespace

const Command kMerge = {
    .name = "merge",
    .purpose = "merge adapters into their base weights",
    .usage = "ADAPTER CHECKPOINT [--base BASE]",
    .examples = {{"merge runs/quickstart-lora runs/merged", "then: capstan generate runs/merged --prompt …"},
                 {"merge peft:adapter merged --base hf:SmolLM2-135M", "then: capstan convert merged hf:DIR"}},
    .options = {{"base", 0, "BASE", "base weights of the adapters: CHECKPOINT, RUN or hf:DIR"}},
    .details =
        "ADAPTER is a run with `peft`, a checkpoint of one, or a PEFT directory. The merged weights are "
        "written to\n"
        "CHECKPOINT/step-N, with the recipe and the data types of the base. The default base is that of the "
        "run,\n"
        "or base_model_name_or_path of adapter_config.json.\n",
    .overrides = true,
    .max_words = 2,
    .run = run_merge,
};

}  // namespace capstan::cli
