// Checkpoints of tests: a directory of all ranks, and what is saved there and loaded from it.
#pragma once

#include <doctest/doctest.h>

#include <exception>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/reader.hpp"
#include "comm/collective_errors.hpp"
#include "support/temporary_directory.hpp"
#include "support/worlds.hpp"
#include "train/setup/state.hpp"
#include "train/trainer/step_runner.hpp"

namespace capstan::test {

// One directory for all ranks of the world, which goes away when all of them are done with it. Collective.
class SharedDirectory {
 public:
  SharedDirectory() {
    if (world().rank() == 0) own_.emplace();
    path_ = comm::gather_texts(world().communicator(), own_ ? own_->path().string() : std::string())[0];
  }
  // After an error the other ranks do not come here.
  ~SharedDirectory() {
    if (std::uncaught_exceptions() == 0) world().communicator().barrier();
  }
  SharedDirectory(const SharedDirectory&) = delete;
  SharedDirectory& operator=(const SharedDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::optional<TemporaryDirectory> own_;
  std::filesystem::path path_;
};

inline train::SavePlan plan_in(const std::filesystem::path& root) {
  train::SavePlan plan;
  plan.root = root;
  plan.run_id = "test", plan.recipe = "name: tiny\n", plan.recipe_hash = "0", plan.version = "test";
  return plan;
}

// Returns the directory of the checkpoint. Collective.
inline std::filesystem::path save_in(const std::filesystem::path& root, train::StepRunner& runner) {
  return train::save_state(world(), plan_in(root), runner.state(), runner.store(), runner.optimizer());
}

// Continues from a checkpoint; its losses need a new loader. Collective.
inline void load_into(train::StepRunner& runner, checkpoint::Reader reader) {
  runner.state() = train::load_state(reader, runner.store(), &runner.optimizer());
}
inline void load_into(train::StepRunner& runner, const std::filesystem::path& checkpoint) {
  load_into(runner, checkpoint::Reader::open(checkpoint, checkpoint::Verification::content));
}

// Collective.
inline checkpoint::Reader newest_in(const std::filesystem::path& root) {
  std::vector<std::string> refused;
  const auto found = train::find_checkpoint(world(), root, refused);
  REQUIRE(found);
  return checkpoint::Reader::open(found->path, checkpoint::Verification::content);
}

}  // namespace capstan::test
