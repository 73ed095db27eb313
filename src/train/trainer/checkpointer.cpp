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
  Saver::SaveResult result;
  result.step = step;
  timers_.enter(Phase::save);
  try {
    result.directory =
        save_state(world_, plan_, runner_.state(), runner_.store(), runner_.optimizer(), &result.problem);
  } catch (Error& error) {
    if (must_succeed) throw error.in("while saving step " + std::to_string(step));
    result.error = error.message();
  }
  timers_.enter(Phase::other);
  result.seconds = result.stall_seconds = timers_.seconds(Phase::save);
  report(result);
}

void Checkpointer::finish() {
  if (!saver_ || !saver_->busy()) return;
  timers_.enter(Phase::save);
  const auto result = saver_->finish();
  timers_.enter(Phase::other);
  if (result) report(*result);
}

void Checkpointer::commit() {
  if (const auto result = saver_->advance()) report(*result);
}

void Checkpointer::report(const Saver::SaveResult& result) {
  const std::string step = "step " + std::to_string(result.step);
  publish_saved_step(world_, result.error.empty() ? result.step : last_step_);
  if (!result.error.empty()) {
    log_.warning(step + " was not saved: " + result.error);
    recorder_.write(records::MetricsRow(result.step, "save_failed").text("error", result.error));
    return;
  }
  last_ = result.directory;
  saved_step_ = last_step_ = result.step;
  seconds_ = result.seconds;
  const bool beside = result.stall_seconds < result.seconds;
  log_.line(step + " | saved " + last_.string() + " in " + human_duration(result.seconds) +
            (beside ? ", of which training waited " + human_duration(result.stall_seconds) : ""));
  if (!result.problem.empty()) log_.warning("old checkpoints were not deleted: " + result.problem);
  recorder_.write(records::MetricsRow(result.step, "save")
                      .number("seconds", result.seconds)
                      .number("stall_seconds", result.stall_seconds)
                      .integer("resident_bytes", resident_peak()));
}

}  // namespace capstan::train
