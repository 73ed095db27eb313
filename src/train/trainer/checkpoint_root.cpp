#include "train/trainer/checkpoint_root.hpp"

#include "base/error.hpp"
#include "checkpoint/reader.hpp"
#include "checkpoint/store.hpp"
#include "checkpoint/writer.hpp"
#include "comm/collective_errors.hpp"
#include "train/records/run_list.hpp"

namespace capstan::train {

namespace fs = std::filesystem;

CheckpointRoot::CheckpointRoot(const config::Config& config, const fs::path& run_directory)
    : config_(config),
      run_directory_(run_directory),
      path_(config.checkpoint.save ? fs::path(config.checkpoint.save->resolved)
                                   : run_directory / "checkpoints") {}

void CheckpointRoot::open(comm::World& world, const RunOptions& options, const std::string& run_id,
                          RunLog& log) {
  comm::run_collectively(world.communicator(), "opening the run directory", [&] {
    if (world.rank() != 0) return;
    std::error_code unknown;
    if (config_.checkpoint.save && !fs::equivalent(path_, run_directory_, unknown)) {
      try {
        checkpoint::real_file_system().make_directories(path_);
      } catch (Error& error) {
        throw error.in("checkpoint.save = " + config_.checkpoint.save->text);
      }
      lock_ = std::make_unique<records::FileLock>(path_, "checkpoint directory");
      lock_owner();
      require_own_checkpoints(config_, run_id);
    }
    try {
      checkpoint::remove_leftovers(options.files ? *options.files : checkpoint::real_file_system(), path_);
    } catch (const Error& error) {
      log.warning("the remains of an earlier save were not removed: " + error.message());
    }
  });
}

void CheckpointRoot::lock_owner() {
  std::error_code unknown;
  const fs::path owner = fs::weakly_canonical(path_, unknown).parent_path();
  if (records::is_run(owner) && !fs::equivalent(owner, run_directory_, unknown))
    owner_lock_ = std::make_unique<records::FileLock>(owner, "run");
}

void require_own_checkpoints(const config::Config& config, const std::string& run_id) {
  if (!config.checkpoint.save) return;
  const fs::path path = config.checkpoint.save->resolved;
  std::error_code unknown;
  // checkpoint.load of the same directory continues in it.
  if (config.checkpoint.load && fs::equivalent(config.checkpoint.load->resolved, path, unknown)) return;
  for (const auto& one : checkpoint::list_checkpoints(path)) {
    std::string id;
    try {
      id = checkpoint::Reader::open(one.path, checkpoint::Verification::structure).info().run_id;
    } catch (const Error&) {
      // The run of a damaged checkpoint is unknown.
    }
    if (!id.empty() && id != run_id)
      fail(ErrorCode::failed,
           "checkpoint.save `" + path.string() + "` holds checkpoints of another run (" + id + "; " +
               one.path.filename().string() + ")",
           "choose another directory; checkpoint.load=" + path.string() +
               " continues from its newest checkpoint");
  }
}

}  // namespace capstan::train
