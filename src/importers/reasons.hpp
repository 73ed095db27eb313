// Reasons for omitted keys that several trainers share.
#pragma once

#include <string_view>

namespace capstan::importers {

inline constexpr std::string_view kCheckpoint =
    "a checkpoint of another trainer; the model as Hugging Face has it is read: "
    "checkpoint.pretrained_checkpoint=hf:DIR";
inline constexpr std::string_view kPreferences = "preference optimization";
inline constexpr std::string_view kSamples = "samples here are JSON lines; see `capstan help data`";
inline constexpr std::string_view kEvaluation = "evaluation here is the loss on held-out text";
inline constexpr std::string_view kHub = "a model hub";
inline constexpr std::string_view kKernels = "a choice of kernels; the numbers are the same";
inline constexpr std::string_view kLayout = "a choice of buffers and messages; the numbers are the same";
inline constexpr std::string_view kLog = "the same values are always logged; see `capstan explain logger`";
inline constexpr std::string_view kPython = "specific to Python";
inline constexpr std::string_view kRanks = "{launch_ranks}";
inline constexpr std::string_view kResume = "{resume_run}";
inline constexpr std::string_view kResumeOrOther = "a checkpoint of another trainer; {resume_run}";
inline constexpr std::string_view kService =
    "a service; metrics.jsonl and TensorBoard events are what a run writes";
inline constexpr std::string_view kVerbosity = "how much is printed is chosen for each command";
inline constexpr std::string_view kStore = "checkpoints have one format here, sharded and saved in parallel";

}  // namespace capstan::importers
