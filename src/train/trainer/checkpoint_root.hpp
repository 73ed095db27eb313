// The directory in which a run saves its checkpoints.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "comm/world.hpp"
#include "config/sections/config.hpp"
#include "train/records/run_dir.hpp"
#include "train/trainer/run_log.hpp"
#include "train/trainer/run_options.hpp"

namespace capstan::train {

// ErrorCode::failed where checkpoint.save holds checkpoints of another run than that with this id (empty: of
// a run that does not exist yet), because the two would delete each other's checkpoints.
void require_own_checkpoints(const config::Config& config, const std::string& run_id);

class CheckpointRoot {
 public:
  // checkpoint.save, else `checkpoints` in the run directory.
  CheckpointRoot(const config::Config& config, const std::filesystem::path& run_directory);

  // Collective; the run directory must be locked. Locks a directory outside the run directory, and removes
  // the leftovers of saves that were killed. Errors: those of require_own_checkpoints().
  void open(comm::World& world, const RunOptions& options, const std::string& run_id, RunLog& log);

  const std::filesystem::path& path() const { return path_; }

 private:
  void lock_owner();

  const config::Config& config_;
  std::filesystem::path run_directory_, path_;
  std::unique_ptr<records::FileLock> lock_;
  // Lock of the run in whose directory checkpoint.save lies.
  std::unique_ptr<records::FileLock> owner_lock_;
};

}  // namespace capstan::train
