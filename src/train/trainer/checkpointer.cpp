#include "train/trainer/checkpointer.hpp"

#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/writer.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/stop.hpp"

namespace capstan::train {

Checkpointer::Checkpointer(const config::Config& config, comm::World& world, SavePlan plan,
                           StepRunner& runner, StepTimers& timers, RunRecorder& recorder, RunLog& log,
                           const std::filesystem::path& saved)
    : config_(config),
      world_(world),
      plan_(std::move(plan)),
      runner_(runner),
      timers_(timers),
      recorder_(recorder),
      log_(log),
      saved_step_(saved.empty() ? -1 : runner.state().step),
      last_step_(saved_step_),
      last_(saved) {
  publish_saved_step(world_, last_step_);
}

void Checkpointer::allocate_snapshot() {
  if (config_.checkpoint.async_save && config_.checkpoint.save_interval)
    saver_ = std::make_unique<Saver>(world_, runner_.store(), runner_.optimizer(), plan_.optimizer,
                                     runner_.device());
}

// Waits for the save before, because one save is under way at a time. False where the current step is saved
// already.
bool Checkpointer::prepare() {
  timers_.start_step();
  publish_expected_stop(world_, {.seconds = seconds_});
  finish();
  plan_.parent = last_.string();
  const int64_t step = runner_.state().step;
  if (saved_step_ == step) return false;
  StopSignals::publish_save(step, plan_.root / checkpoint::step_directory_name(step));
  return true;
}

void Checkpointer::save() {
  if (!prepare()) return;
  if (!saver_) return save_synchronously(false);
  timers_.enter(Phase::save);
  saver_->begin(plan_, runner_.state());
  timers_.enter(Phase::other);
}

void Checkpointer::save_and_wait() {
  if (prepare()) save_synchronously(true);
}

void Checkpointer::save_synchronously(bool must_succeed) {
  const int64_t step = runner_.state().step;
  Saver::Ended ended;
  ended.step = step;
  timers_.enter(Phase::save);
  try {
    ended.directory =
        save_state(world_, plan_, runner_.state(), runner_.store(), runner_.optimizer(), &ended.problem);
  } catch (Error& error) {
    if (must_succeed) throw error.in("while saving step " + std::to_string(step));
    ended.error = error.message();
  }
  timers_.enter(Phase::other);
  ended.seconds = ended.stall_seconds = timers_.seconds(Phase::save);
  report(ended);
}

void Checkpointer::finish() {
  if (!saver_ || !saver_->busy()) return;
  timers_.enter(Phase::save);
  const auto ended = saver_->finish();
  timers_.enter(Phase::other);
  if (ended) report(*ended);
}

void Checkpointer::commit() {
  if (const auto ended = saver_->advance()) report(*ended);
}

void Checkpointer::report(const Saver::Ended& ended) {
  const std::string step = "step " + std::to_string(ended.step);
  publish_saved_step(world_, ended.error.empty() ? ended.step : last_step_);
  if (!ended.error.empty()) {
    log_.warning(step + " was not saved: " + ended.error);
    recorder_.write(records::MetricsRow(ended.step, "save_failed").text("error", ended.error));
    return;
  }
  last_ = ended.directory;
  saved_step_ = last_step_ = ended.step;
  seconds_ = ended.seconds;
  const bool beside = ended.stall_seconds < ended.seconds;
  log_.line(step + " | saved " + last_.string() + " in " + human_duration(ended.seconds) +
            (beside ? ", of which training waited " + human_duration(ended.stall_seconds) : ""));
  if (!ended.problem.empty()) log_.warning("old checkpoints were not deleted: " + ended.problem);
  recorder_.write(records::MetricsRow(ended.step, "save")
                      .number("seconds", ended.seconds)
                      .number("stall_seconds", ended.stall_seconds)
                      .integer("resident_bytes", resident_peak()));
}

}  // namespace capstan::train
