#include "capstan/trainer.hpp"

#include <cstdio>

#include "api/config_impl.hpp"
#include "base/error.hpp"
#include "train/trainer/recipe.hpp"
#include "train/trainer/trainer.hpp"

namespace capstan {

namespace {

// MPI starts and ends once in a process: the world is joined by the first run and left at exit.
class Membership {
 public:
  // A rank that left a broken world in good order would wait for ranks that still hope for it; one that just ends makes the
  // launcher end the others.
  ~Membership() {
    if (broken_) static_cast<void>(world_.release());
  }
  // tell: the failure of a rank, just before this process ends with exit code 4.
  comm::World& join(double timeout, std::function<void(const Error&)> tell) {
    if (broken_)
      fail(ErrorCode::rank_failure, "an earlier run failed in this world, whose ranks may be out of step",
           "start the program again");
    if (!world_) world_ = comm::World::join({.timeout = timeout, .report = std::move(tell)});
    return *world_;
  }
  void run_failed() { broken_ = world_->size() > 1; }

 private:
  std::unique_ptr<comm::World> world_;
  bool broken_ = false;
};

class Sink final : public train::ProgressSink {
 public:
  explicit Sink(const Progress& progress) : progress_(progress) {}
  void line(const std::string& text) override { say(Message::line, text); }
  void warning(const std::string& text) override { say(Message::warning, text); }
  void status(const std::string&) override {}
  bool terminal() const override { return false; }

 private:
  void say(Message kind, const std::string& text) {
    if (progress_) progress_(kind, text);
  }
  const Progress& progress_;
};

// For the records of the run, where the command line stands otherwise.
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

Outcome run_training(const Config& config, const TrainOptions& options, const Progress& progress) {
  const config::Resolution& resolution = config.impl().resolution;
  resolution.require_ok();
  if (const int64_t size = launched_world().size; resolution.config.dist.world_size != size)
    fail(ErrorCode::usage,
         "the recipe is resolved for " + std::to_string(resolution.config.dist.world_size) +
             " ranks, this process is one of " + std::to_string(size),
         "resolve it with a world_size of capstan::launched_world().size");
  train::refuse_missing_features(resolution.config);

  train::RunOptions run;
  run.run_dir = options.run_dir;
  run.resume = options.resume ? train::Resume::automatic : train::Resume::no;
  run.recipe =
      train::recipe_record(resolution, config.impl().request.overrides, call_text(config.impl().request));
  run.changes_since = [&](const std::string& stored) { return train::changes_since(stored, resolution); };
  Sink sink(progress);
  static Membership membership;
  comm::World& world = membership.join(resolution.config.resilience.timeout.seconds, [](const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  });
  try {
    const train::Outcome outcome = train::train(resolution.config, world, run, sink);
    return {outcome.ended == train::Ended::finished ? Ended::finished : Ended::stopped, outcome.reason,
            outcome.step, outcome.run_dir, outcome.checkpoint};
  } catch (...) {
    membership.run_failed();
    throw;
  }
}

}  // namespace capstan
