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

// run.json as it is on the disk. Times are UTC, "2026-01-31T12:34:56Z"; empty: not yet.
struct RunFile {
  std::string id, recipe, checkpoints, created, started, ended;
  // Running (as far as the last writer knew), finished, stopped, failed.
  std::string state;
  std::string reason;
  int64_t starts = 0;
  // Of the last start; not in the files of earlier versions.
  std::string layout, data;
  int64_t ranks = 0;
  std::optional<int64_t> seed, steps;  // steps: of the whole run
};
RunFile read_run_file(const std::filesystem::path& run);  // throws ErrorCode::not_found or ::format
std::string run_file_text(const RunFile& file);

// killed: the process that was at work has gone without saying how the run ended.
enum class RunState : uint8_t { running, finished, stopped, killed, failed };
std::string_view name_of(RunState state);

struct RunSummary {
  std::string name;  // of the directory
  std::filesystem::path path;
  RunState state = RunState::stopped;  // running: a process holds its lock
  std::string reason;                  // of the end, where one was given
  std::string recipe, started, ended;
  std::optional<int64_t> step;         // last recorded: logged, saved or validated
  std::optional<int64_t> logged_step;  // last logged: a run may end between two
  std::optional<double> last_loss;     // of the logged step; null: none, or not finite
  std::vector<int64_t> checkpoints;    // steps, newest first; not verified
  RunFile file;                        // run.json
};

// What `runs show` says beyond the summary, from the rows of metrics.jsonl; null: not there.
struct RunDetails {
  std::optional<int64_t> tokens;  // trained on so far
  std::optional<double> tokens_per_second, mfu,
      memory;  // of the last logged step; memory in bytes, with that of kernels
  std::optional<int64_t> validation_step;
  std::optional<double> validation_loss, perplexity;
  std::optional<double> test_loss;  // of the end of the run
};

bool is_run(const std::filesystem::path& path);
// ErrorCode::not_found with the names of runs near it where `path` holds no run.
void require_run(const std::filesystem::path& path);
// Where a run's checkpoints are, by its run.json (checkpoint.save may lie elsewhere); of what is no run or
// has none yet, the path itself.
std::filesystem::path saved_in(const std::filesystem::path& path);
RunSummary summarize(const std::filesystem::path& run);  // throws like read_run_file
RunDetails details_of(const std::filesystem::path& run);

// The runs of a directory ("runs"), latest start first. Entries that are no runs are left out; a run whose
// run.json is damaged is listed as failed with the reason.
std::vector<RunSummary> list_runs(const std::filesystem::path& root);

std::string to_json(const RunSummary& run);  // one object
std::string to_json(const RunSummary& run,
                    const RunDetails& details);         // one object, with all that `runs show` says
std::string to_json(std::span<const RunSummary> runs);  // an array, one run per line

}  // namespace capstan::records
