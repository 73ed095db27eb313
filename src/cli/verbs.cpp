#include "cli/verbs.hpp"

namespace capstan::cli {

std::span<const Verb* const> all_verbs() {
  static const Verb* const verbs[] = {
      &kTrain,           &kCheck,     &kShow,        &kExplain,     &kSchema,         &kRecipeLs,
      &kRecipeCp,        &kRecipeNew, &kDataPrepare, &kDataInspect, &kTokenizerTrain, &kTokenizerEncode,
      &kTokenizerDecode, &kGenerate,  &kEval,        &kBench,       &kTrace,          &kDiff,
      &kRunsPlot,        &kRunsLs,    &kRunsShow,    &kHelp,        &kVersion};
  return verbs;
}

}  // namespace capstan::cli
