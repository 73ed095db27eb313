// Every verb, each defined in its own verb_*.cpp.
#pragma once

#include "cli/context.hpp"

namespace capstan::cli {

extern const Verb kTrain, kCheck, kShow, kExplain, kSchema, kRecipeLs, kRecipeCp, kRecipeNew, kDataPrepare,
    kDataInspect, kTokenizerTrain, kTokenizerEncode, kTokenizerDecode, kGenerate, kEval, kBench, kTrace,
    kDiff, kRunsPlot, kRunsLs, kRunsShow, kHelp, kVersion;

}  // namespace capstan::cli
