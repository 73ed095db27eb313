#include "cli/commands/commands.hpp"

namespace capstan::cli {

std::span<const Command* const> all_commands() {
  static const Command* const commands[] = {
      &kTrain,           &kCheck,           &kShow,        &kPlan,        &kExplain,
      &kSchema,          &kRecipeLs,        &kRecipeCp,    &kRecipeNew,   &kRecipeFix,
      &kRecipeTrim,      &kRecipeImport,    &kDataPrepare, &kDataInspect, &kTokenizerTrain,
      &kTokenizerEncode, &kTokenizerDecode, &kGenerate,    &kEval,        &kMerge,
      &kConvert,         &kBench,           &kTrace,       &kDiff,        &kRunsPlot,
      &kRunsLs,          &kRunsShow,        &kSweepPlan,   &kSweepAdd,    &kSweepRun,
      &kSweepStatus,     &kSweepRetry,      &kSweepTable,  &kSweepPlot,   &kSweepSlurm,
      &kSweepAsk,        &kSweepTell,       &kCompletion,  &kHelp,        &kVersion};
  return commands;
}

}  // namespace capstan::cli
