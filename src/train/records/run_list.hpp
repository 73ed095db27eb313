// Reading runs: what `capstan runs ls` and `capstan runs show` print.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace capstan::records {

inline constexpr std::string_view kRunFile = "run.json";
inline constexpr std::string_view kRunSchema = "capstan.run/1";
// The reason of a run whose processes ended without recording one.
inline constexpr const char* kUnknownEnd =
    "no reason recorded; for example SIGKILL, no memory left, a second ctrl-C, or the machine stopped";

// run.json as it is on the disk. Times are UTC, "2026-01-31T12:34:56Z"; empty: not yet.
struct RunFile {
  std::string id, recipe, checkpoints, created, started, ended;
  // Running (as far as the last writer knew), finished, stopped, failed.
  std::string state;
  std::string reason;
  int64_t starts = 0;
  // Layout and data of the last start. Files of earlier versions do not have them.
  std::string layout, data;
  int64_t ranks = 0;
  // Random seed, and number of steps of the complete run.
  std::optional<int64_t> seed, steps;
};
// Throws ErrorCode::not_found or ::format.
RunFile read_run_file(const std::filesystem::path& run);
std::string run_file_text(const RunFile& file);

// killed: the process has ended without recording how the run ended.
enum class RunState : uint8_t { running, finished, stopped, killed, failed };
std::string_view name_of(RunState state);

struct RunSummary {
  // Name of the run directory.
  std::string name;
  std::filesystem::path path;
  // `running` means that a process holds the lock of the run.
  RunState state = RunState::stopped;
  // Reason why the run ended, if it is known.
  std::string reason;
  std::string recipe, started, ended;
  // Last recorded step, whether logged, saved or validated.
  std::optional<int64_t> step;
  // Last logged step. A run may end between two logged steps.
  std::optional<int64_t> logged_step;
  // Loss of the last logged step. Null: there is none, or it is not finite.
  std::optional<double> last_loss;
  // Steps of the checkpoints, newest first. The checkpoints are not verified.
  std::vector<int64_t> checkpoints;
  // Content of run.json.
  RunFile file;
  // False: run.json cannot be read, for `reason`.
  bool readable = true;
};

// Additional output of `runs show`, from the rows of metrics.jsonl; null: unknown.
struct RunDetails {
  // Number of tokens trained on so far.
  std::optional<int64_t> tokens;
  // Values of the last logged step. memory: bytes, including the workspaces of kernels.
  std::optional<double> tokens_per_second, mfu, memory;
  // Estimated bytes; measured and estimated seconds of one of the first steps, and for which cluster.
  std::optional<double> memory_estimated, step_seconds, step_estimated_seconds;
  std::string cluster;
  // Idle time in the first steps over the time of the passes, as measured and by the schedule.
  std::optional<double> pipeline_bubble, pipeline_bubble_simulated;
  std::optional<int64_t> validation_step;
  std::optional<double> validation_loss, perplexity;
  // Test loss at the end of the run.
  std::optional<double> test_loss;
};

bool is_run(const std::filesystem::path& path);
// Throws ErrorCode::not_found with the names of similar runs if `path` holds no run.
void require_run(const std::filesystem::path& path);
// Directory of a run's checkpoints according to its run.json (checkpoint.save may be elsewhere). Returns the
// path itself if it is not a run, or if the run has no checkpoints yet.
std::filesystem::path saved_in(const std::filesystem::path& path);
// Throws like read_run_file.
RunSummary summarize(const std::filesystem::path& run);
RunDetails details_of(const std::filesystem::path& run);

// The runs of a directory ("runs"), latest start first. Entries that are not runs are omitted; a run whose
// run.json is damaged is listed as failed with the reason.
std::vector<RunSummary> list_runs(const std::filesystem::path& root);

// One JSON object with everything that `runs show` prints.
std::string to_json(const RunSummary& run, const RunDetails& details);
// An array, one run per line.
std::string to_json(std::span<const RunSummary> runs);

}  // namespace capstan::records
