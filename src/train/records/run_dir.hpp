// The directory of a run:
//
//   run.json                          who, when, which recipe, how it ended
//   command.txt                       the command line, one line per start
//   version.json                      of the binary that ran last
//   recipe.given.yaml                 as given, with the overrides
//   recipe.yaml                       resolved, with the origin of each value
//   log.txt                           what the run said
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

// The texts that a start leaves in the directory; the trainer hands them in.
struct RunRecords {
  std::string recipe_name;                  // for listings: "quickstart"
  std::string recipe_given;                 // YAML as read, with the overrides as comments or keys
  std::string recipe;                       // YAML, resolved, origins as comments
  std::string command;                      // one line
  std::string version;                      // JSON object
  std::string checkpoints = "checkpoints";  // where they go, relative to the run directory or absolute
  std::string layout, data;                 // "tp2 dp4"; the samples trained on, in a line
  int64_t ranks = 1, seed = 0;
  std::optional<int64_t> steps;  // of the whole run
};

enum class RunEnd : uint8_t { finished, stopped, failed };

// DIRECTORY/lock, held by this process until it ends, however it ends. Throws ErrorCode::failed naming the
// holder when another has it: `what` (a "run", say) says of what.
class FileLock {
 public:
  FileLock(const std::filesystem::path& directory, std::string_view what);
  ~FileLock();
  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&&) = delete;

 private:
  int fd_ = -1;
};

class RunDirectory {
 public:
  // Creates the directory, or opens an existing run when `resume` is set, and takes its lock. Throws
  // ErrorCode::failed when the run exists and `resume` is not set, when another process holds it, or when the
  // directory is something else. Resuming what does not exist starts it. Only one process of a run (rank 0)
  // does this.
  RunDirectory(const std::filesystem::path& path, bool resume);
  RunDirectory(RunDirectory&& other) noexcept = default;
  RunDirectory& operator=(RunDirectory&&) = delete;

  bool resumed() const { return resumed_; }  // there was a run; its texts can be read with previous_recipe
  const std::string& id() const { return file_.id; }  // 16 hexadecimal digits, the same over all starts
  bool killed() const { return killed_; }             // the last start's process ended without saying how
  std::string previous_recipe() const;                // recipe.yaml of the last start; empty in a new run

  // Writes the texts of this start. In a resumed run, a recipe that differs from the last one's is kept as
  // recipe.N.yaml.
  void begin(const RunRecords& records);
  // How it ended; a run whose process has gone without calling it was killed.
  void end(RunEnd how, std::string_view reason);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path checkpoints() const;
  std::filesystem::path metrics() const { return path_ / "metrics.jsonl"; }
  std::filesystem::path log() const { return path_ / "log.txt"; }

 private:
  void save() const;  // run.json
  std::filesystem::path path_;
  std::optional<FileLock> lock_;
  bool resumed_ = false, killed_ = false;
  RunFile file_;
};

std::string utc_now();  // "2026-01-31T12:34:56Z"

}  // namespace capstan::records
