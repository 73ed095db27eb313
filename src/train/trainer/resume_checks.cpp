#include "train/trainer/resume_checks.hpp"

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/collective_errors.hpp"
#include "config/sections/batch_ramp.hpp"
#include "data/dataset_meta.hpp"
#include "train/records/run_dir.hpp"
#include "train/setup/state.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/trainer/recipe.hpp"

namespace capstan::train {

namespace {

// Fields that say where a run begins. They are not read any more once it has a checkpoint of its own.
bool begins(const std::string& path) {
  return path == "checkpoint.load" || path == "checkpoint.ckpt_step" ||
         path == "checkpoint.pretrained_checkpoint" || path == "checkpoint.load_optim" ||
         path == "peft.adapter";
}

// ErrorCode::failed where one of these is given and the run continues from its own checkpoint.
void refuse_unread(const config::Config& config, const std::vector<RecipeChange>& changes) {
  std::string unread;
  for (const RecipeChange& change : changes) {
    // The weights beside which adapters were trained are read again, and may have moved.
    const bool read =
        !begins(change.path) || (config.peft && change.path == "checkpoint.pretrained_checkpoint");
    const bool left_out =
        change.after == "null" || (change.path == "checkpoint.load_optim" && change.after == "true");
    if (!read && !left_out) unread += "\n    " + change.path + ": " + change.before + " -> " + change.after;
  }
  if (!unread.empty())
    fail(ErrorCode::failed,
         "the run continues from its own checkpoint, with its optimizer state, and does not read these "
         "fields:" +
             unread,
         "leave them out, or use them for a new run in {other_run_dir}");
}

// Changes that a continued run may have although they would alter a new one.
bool harmless(const RecipeChange& change, const RunData& data, const checkpoint::Reader& reader) {
  // The state is in the checkpoint; refuse_unread() has seen those that would be ignored.
  if (begins(change.path)) return true;
  // choose_schedule() compares these with the schedule of the checkpoint.
  if (change.path.starts_with("scheduler.") || change.path == "optimizer.lr" ||
      change.path == "optimizer.min_lr" || change.path == "optimizer.min_lr_ratio" ||
      change.path == "optimizer.decoupled_lr" || change.path == "optimizer.decoupled_min_lr" ||
      change.path == "optimizer.weight_decay")
    return true;
  // Data files may have moved; the samples must be the same.
  const bool sources = change.path == "dataset.data_path" ||
                       (change.path.starts_with("dataset.") &&
                        (change.path.find("blend") != std::string::npos || change.path.ends_with("_files")));
  return sources && !data.fingerprint.empty() && stored_data_fingerprint(reader) == data.fingerprint;
}

void report_schedule(const config::Config& config, const ScheduleChoice& choice, int64_t total_steps,
                     RunLog& log) {
  const config::SchedulerConfig& s = config.scheduler;
  const config::BatchRamp ramp(config);
  log.line(std::string("schedule of ") +
           (s.override_opt_param_scheduler ? "this recipe (scheduler.override_opt_param_scheduler)"
            : choice.fields_taken.empty()  ? "the checkpoint"
                                           : "the checkpoint, with changes of this recipe") +
           ": " + summary(choice.schedule, ramp));
  for (const std::string& field : choice.fields_taken) log.line("schedule changed: " + field);
  for (const std::string& field : choice.fields_kept) log.line("schedule kept: " + field);
  const optim::ScheduleOptions& o = choice.schedule.options;
  const int64_t end = ramp.steps_in(o.decay_samples);
  if (!choice.keeps_decay_length || o.style == config::LrDecayStyle::constant || end >= total_steps) return;
  const std::string longer =
      "scheduler.lr_decay_" + (config.train.train_samples
                                   ? "samples=" + std::to_string(*config.train.train_samples)
                                   : "iters=" + std::to_string(total_steps));
  log.warning(
      "the learning rate reaches its floor, " + to_text(o.min_lr) + ", at step " + std::to_string(end) +
      " and stays there to step " + std::to_string(total_steps) + "; " +
      (s.use_checkpoint_opt_param_scheduler
           ? "scheduler.use_checkpoint_opt_param_scheduler=true overrules every field of the schedule; "
             "without it, " +
                 longer + " decays to the end of the run"
           : longer + " decays to the end of the run, scheduler.override_opt_param_scheduler=true takes this "
                      "recipe's full schedule"));
}

// `changes`: of the recipe since the checkpoint. `refused_schedule`: changes of the schedule that
// choose_schedule() refuses.
void check_changes(const RunOptions& options, const RunData& data, const checkpoint::Reader& reader,
                   const std::vector<RecipeChange>& changes, const std::vector<std::string>& refused_schedule,
                   bool megatron_order, RunLog& log) {
  std::string altering;
  bool shorter = false;
  for (const std::string& text : refused_schedule) altering += "\n    " + text;
  for (const RecipeChange& change : changes) {
    const std::string text = change.path + ": " + change.before + " -> " + change.after;
    if (change.alters_numerics && !harmless(change, data, reader)) {
      altering += "\n    " + text;
      shorter = shorter || change.path == "train.train_iters" || change.path == "train.train_samples" ||
                change.path == "train.epochs";
    } else if (!change.path.starts_with("scheduler.")) {
      // report_schedule() reports changes of the scheduler.
      log.line("changed since the checkpoint: " + text);
    }
  }
  const std::string trained_on = stored_data_fingerprint(reader);
  if (options.changes_since && altering.empty() && !trained_on.empty() && trained_on != data.fingerprint)
    fail(ErrorCode::failed,
         std::string(
             "the recipe is the run's, but the data files hold other samples than those that the run was "
             "trained on") +
             (megatron_order
                  ? ", or another length of the run changes their order (dataset.sample_order=megatron)"
                  : ""),
         "restore the files, or start a new run from the weights with checkpoint.pretrained_checkpoint=" +
             reader.directory().string());
  if (!altering.empty())
    fail(ErrorCode::failed, "the recipe differs from the run's in fields that change the results:" + altering,
         "resume with the run's own values" +
             std::string(!refused_schedule.empty()
                             ? " (scheduler.override_opt_param_scheduler=true takes this recipe's "
                               "schedule, scheduler.use_checkpoint_opt_param_scheduler=true the run's)"
                             : "") +
             (shorter ? "; a run can be made longer, not shorter: train.exit_interval=N ends it earlier"
                      : "") +
             "; or start a new run from its weights with checkpoint.pretrained_checkpoint=" +
             reader.directory().string());
}

// Layout and micro-batch have no effect on the numbers, unless experts drop tokens of a rank's part, or their
// losses count the tokens of a micro-batch, or of all that are computed together.
void warn_of_other_routing(const config::ModelConfig& model, const std::vector<RecipeChange>& changes,
                           RunLog& log) {
  if (!model.num_moe_experts) return;
  const auto has = [&](config::RouterBalancing loss) {
    return std::ranges::count(model.moe_router_load_balancing_type.items, loss) > 0;
  };
  const bool drops = model.moe_expert_capacity_factor.has_value(),
             of_ranks = drops || has(config::RouterBalancing::global_aux_loss),
             of_micro_batches = of_ranks || has(config::RouterBalancing::aux_loss);
  for (const RecipeChange& change : changes) {
    const bool moves_tokens =
        change.path.starts_with("dist.") || (drops && change.path == "model.moe_token_dispatcher_type");
    if ((of_micro_batches && change.path == "train.micro_batch_size") || (of_ranks && moves_tokens))
      return log.warning("`" + change.path + "` has changed: " +
                         (drops ? "experts drop other tokens (model.moe_expert_capacity_factor)"
                                : "the balancing losses of experts count other tokens together") +
                         ", so that the losses differ from those of the run without the change");
  }
}

// Whether the recipe is the recipe.yaml that the run has written beside this checkpoint's state, or in its
// own directory.
bool is_own_record(const RecipeRecord& recipe, const checkpoint::Reader& reader) {
  namespace fs = std::filesystem;
  if (!recipe.given.starts_with("# ")) return false;  // "# FILE", then its text
  std::error_code unknown;
  const fs::path file = fs::weakly_canonical(recipe.given.substr(2, recipe.given.find('\n') - 2), unknown);
  const fs::path checkpoint = fs::weakly_canonical(reader.directory(), unknown);
  if (file.filename() != "recipe.yaml") return false;
  const fs::path beside = file.parent_path();
  return beside == checkpoint ||
         (records::is_run(beside) && checkpoint.string().starts_with(beside.string() + "/"));
}

// The schedule that the checkpoint was trained with.
RunSchedule stored_schedule(const checkpoint::Reader& reader, const RunSchedule& otherwise) {
  if (const std::string text = schedule_text_of(reader); !text.empty())
    return parse_schedule(text, (reader.directory() / checkpoint::kStateFile).string());
  // Early versions stored the recipe alone.
  if (reader.has_file(checkpoint::kRecipeFile))
    if (const std::string recipe = reader.read_text(checkpoint::kRecipeFile); !recipe.empty())
      return schedule_of(stored_config(recipe), {});
  return otherwise;
}

}  // namespace

RunSchedule continue_schedule(const config::Config& config, const RunOptions& options, const RunData& data,
                              const RunSchedule& recipe_schedule, const checkpoint::Reader& reader,
                              CheckpointOf whose, int64_t total_steps, RunLog& log) {
  RecipeRecord record = options.recipe;
  std::vector<RecipeChange> changes;
  if (options.changes_since && reader.has_file(checkpoint::kRecipeFile)) {
    changes = options.changes_since(reader.read_text(checkpoint::kRecipeFile));
    // The run's own recipe.yaml holds values that the last launch derived, and that the run does not follow.
    if (is_own_record(options.recipe, reader))
      std::erase_if(record.from_files, [&](const std::string& path) {
        return std::none_of(changes.begin(), changes.end(),
                            [&](const RecipeChange& change) { return change.path == path; });
      });
  }
  if (whose == CheckpointOf::this_run) refuse_unread(config, changes);
  const ScheduleChoice choice =
      choose_schedule(stored_schedule(reader, recipe_schedule), recipe_schedule, record, config);
  check_changes(options, data, reader, changes, choice.refused,
                config.dataset.sample_order == config::SampleOrder::megatron, log);
  warn_of_other_routing(config.model, changes, log);
  report_schedule(config, choice, total_steps, log);
  return choice.schedule;
}

void check_same_tokenizer(const config::Config& config, comm::World& world, const RunData& data,
                          const checkpoint::Reader& reader) {
  comm::run_collectively(world.communicator(), "comparing the tokenizer with the checkpoint's", [&] {
    if (world.rank() == 0 && data.tokenizer) require_own_tokenizer(config, *data.tokenizer, reader);
  });
}

}  // namespace capstan::train
