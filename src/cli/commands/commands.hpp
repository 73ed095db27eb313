// All commands; commands/NAME.cpp defines a command or a group.
#pragma once

#include "cli/context.hpp"

namespace capstan::cli {

extern const Command kTrain, kCheck, kShow, kPlan, kExplain, kSchema, kRecipeLs, kRecipeCp, kRecipeNew,
    kRecipeFix, kRecipeTrim, kRecipeImport, kDataPrepare, kDataInspect, kTokenizerTrain, kTokenizerEncode,
    kTokenizerDecode, kGenerate, kEval, kMerge, kConvert, kBench, kTrace, kDiff, kRunsPlot, kRunsLs,
    kRunsShow, kSweepPlan, kSweepAdd, kSweepRun, kSweepStatus, kSweepRetry, kSweepTable, kSweepPlot,
    kSweepSlurm, kSweepAsk, kSweepTell, kCompletion, kHelp, kVersion;

}  // namespace capstan::cli
