#include "capstan/trainer.hpp"

#include <memory>
#include <mutex>

#include "api/config_impl.hpp"
#include "base/error.hpp"
#include "train/trainer/recipe.hpp"
#include "train/trainer/trainer.hpp"

namespace capstan {

namespace {

// Reports the failure of a rank to the run that is at work. The world outlives its runs, and watches from a
// thread of its own.
class FailureHandler {
 public:
  using Callback = std::function<void(const Error&)>;
  void set(Callback callback) {
    const std::lock_guard lock(mutex_);
    callback_ = std::move(callback);
  }
  comm::FailureWatch failure_watch(double timeout) {
    return {.timeout = timeout,
            .report =
                [this](const Error& error) {
                  const std::lock_guard lock(mutex_);
                  if (callback_) callback_(error);
                },
            .after_report = [] {}};
  }

 private:
  std::mutex mutex_;
  Callback callback_;
};

// The launched world. MPI starts and ends once in a process: the first run joins the world, the exit of the
// process leaves it.
class LaunchedWorld {
 public:
  // In a broken world the destructor of `World` would wait for the other ranks. Without it the process ends,
  // and the launcher ends the others.
  ~LaunchedWorld() {
    if (broken_) static_cast<void>(world_.release());
  }
  comm::World& join(double timeout, FailureHandler& failures) {
    if (broken_)
      fail(ErrorCode::rank_failure, "an earlier run failed in this world, whose ranks may be out of step",
           "start the program again");
    if (!world_) world_ = comm::World::join(failures.failure_watch(timeout));
    return *world_;
  }
  void run_failed() { broken_ = world_ && world_->size() > 1; }

 private:
  std::unique_ptr<comm::World> world_;
  bool broken_ = false;
};

class Sink final : public train::ProgressSink {
 public:
  explicit Sink(const Progress& progress) : progress_(progress) {}
  void line(const std::string& text) override { forward(Message::line, text); }
  void warning(const std::string& text) override { forward(Message::warning, text); }
  void status(const std::string&) override {}
  bool terminal() const override { return false; }

 private:
  void forward(Message kind, const std::string& text) {
    if (progress_) progress_(kind, text);
  }
  const Progress& progress_;
};

// The text that run records hold in place of a command line.
std::string call_text(const config::Request& request) {
  std::string text = "capstan::run_training " + request.recipe;
  for (const config::Override& override : request.overrides) text += " " + override.text;
  return text;
}

}  // namespace

World launched_world() {
  const comm::LaunchedAs launched = comm::launched_as();
  return {launched.rank, launched.size};
}

namespace {

void require_ranks(const config::Config& config, int64_t ranks, const char* help) {
  if (config.dist.world_size == ranks) return;
  fail(ErrorCode::usage,
       "the recipe is resolved for " + std::to_string(config.dist.world_size) +
           " ranks, this process is one of " + std::to_string(ranks),
       help);
}

Outcome train_in(comm::World& world, const Config& config, const TrainOptions& options,
                 const Progress& progress) {
  const config::Resolution& resolution = config.impl().resolution;
  train::RunOptions run;
  run.run_dir = options.run_dir;
  run.resume = options.resume ? train::Resume::automatic : train::Resume::no;
  run.force = options.force;
  run.recipe =
      train::recipe_record(resolution, config.impl().request.overrides, call_text(config.impl().request));
  run.changes_since = [&](const std::string& stored) { return train::changes_since(stored, resolution); };
  run.handle_signals = options.handle_signals;
  run.on_step = options.on_step;
  Sink sink(progress);
  return train::train(resolution.config, world, run, sink);
}

Outcome train_in_launched_world(const Config& config, const TrainOptions& options, const Progress& progress) {
  const config::Config& resolved = config.impl().resolution.config;
  require_ranks(resolved, launched_world().size,
                "resolve it with a world_size of capstan::launched_world().size");
  // The handler is never destroyed: the watchdog of a broken world calls it until the process has ended.
  static FailureHandler& failures = *new FailureHandler;
  static LaunchedWorld launched;
  failures.set(options.on_rank_failure);
  try {
    comm::World& world = launched.join(resolved.resilience.timeout.seconds, failures);
    const Outcome outcome = train_in(world, config, options, progress);
    failures.set({});
    return outcome;
  } catch (...) {
    failures.set({});
    launched.run_failed();
    throw;
  }
}

Outcome train_in_host_world(const Config& config, const TrainOptions& options, const Progress& progress) {
  const config::Config& resolved = config.impl().resolution.config;
  FailureHandler failures;
  failures.set(options.on_rank_failure);
  const std::unique_ptr<comm::World> world = comm::World::from_mpi(
      options.mpi_communicator, failures.failure_watch(resolved.resilience.timeout.seconds));
  require_ranks(resolved, world->size(), "resolve it with the size of the communicator as world_size");
  return train_in(*world, config, options, progress);
}

}  // namespace

Outcome run_training(const Config& config, const TrainOptions& options, const Progress& progress) {
  config.impl().resolution.require_ok();
  train::refuse_missing_features(config.impl().resolution.config);
  return options.mpi_communicator ? train_in_host_world(config, options, progress)
                                  : train_in_launched_world(config, options, progress);
}

}  // namespace capstan
