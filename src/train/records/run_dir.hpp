// The directory of a run:
//
//   run.json                          id, times, recipe, state and reason of the end
//   command.txt                       the command line, one line per start
//   version.json                      version of the program at the last start
//   recipe.given.yaml                 as given, with the overrides
//   recipe.yaml                       resolved, with the origin of each value
//   log.txt                           the lines that the run reported
//   metrics.jsonl, events.out.tfevents.*
//   checkpoints/
//   lock                              held while a process works on the run
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "train/records/run_list.hpp"

namespace capstan::records {

// The texts that each start of a run writes to the directory.
struct RunRecords {
  // Name of the recipe in listings, such as "quickstart".
  std::string recipe_name;
  // YAML as read, with the overrides as comments or keys.
  std::string recipe_given;
  // YAML, resolved, origins as comments.
  std::string recipe;
  // Command line of the start, without line breaks.
  std::string command;
  // Version of the binary as a JSON object.
  std::string version;
  // Directory of the checkpoints, relative to the run directory or absolute.
  std::string checkpoints = "checkpoints";
  // Parallel layout, such as "tp2 dp4", and a one-line description of the training data.
  std::string layout, data;
  int64_t ranks = 1, seed = 0;
  // Number of steps of the complete run.
  std::optional<int64_t> steps;
};

enum class RunEnd : uint8_t { finished, stopped, failed };

// The lock DIRECTORY/lock, which this process holds until it ends. If another process holds it, throws
// ErrorCode::failed that names the holder. `what` names the locked object in that message, such as "run".
class FileLock {
 public:
  FileLock(const std::filesystem::path& directory, std::string_view what);
  ~FileLock();
  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&&) = delete;

 private:
  int fd_ = -1;
};

// Throws ErrorCode::failed if the path exists, and no run can begin or continue there: it is a file, or a
// directory that holds other files than those of a run.
void require_run_or_empty(const std::filesystem::path& path);

// Records why the last start of a run was killed, for a launcher that outlives its ranks. Does nothing if
// that start was before `since` (utc_now() of the launch) or has recorded its end, or if the path is no
// run. Throws if a process works on the run.
void record_killed(const std::filesystem::path& run, std::string_view since, std::string_view reason);

class RunDirectory {
 public:
  // Creates the directory, or opens an existing run when `resume` is set, and takes its lock. Throws
  // ErrorCode::failed when the run exists and `resume` is not set, when another process holds it, or when the
  // directory is something else. Resuming a run that does not exist starts it. Called only by one process of
  // a run (rank 0).
  RunDirectory(const std::filesystem::path& path, bool resume);
  RunDirectory(RunDirectory&& other) noexcept = default;
  RunDirectory& operator=(RunDirectory&&) = delete;

  // Whether the directory held a run.
  bool resumed() const { return resumed_; }
  // 16 hexadecimal digits that stay the same over all starts.
  const std::string& id() const { return file_.id; }
  // Whether the process of the last start ended without recording how the run ended.
  bool killed() const { return killed_; }

  // Writes the texts of this start. In a resumed run, a recipe that differs from the last one's is kept as
  // recipe.N.yaml.
  void begin(const RunRecords& records);
  // Records how the run ended. A run whose process exits without this call was killed.
  void end(RunEnd how, std::string_view reason);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path checkpoints() const;
  std::filesystem::path metrics() const { return path_ / "metrics.jsonl"; }
  std::filesystem::path log() const { return path_ / "log.txt"; }

 private:
  // Writes run.json.
  void save() const;
  std::filesystem::path path_;
  std::optional<FileLock> lock_;
  bool resumed_ = false, killed_ = false;
  RunFile file_;
};

// The current time, as in "2026-01-31T12:34:56Z".
std::string utc_now();

}  // namespace capstan::records
