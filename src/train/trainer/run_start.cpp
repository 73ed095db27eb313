// What a run begins with: its directory, its data, fresh parameters or a checkpoint.
#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/hash.hpp"
#include "checkpoint/writer.hpp"
#include "comm/together.hpp"
#include "config/core/external.hpp"
#include "data/dataset_meta.hpp"
#include "formats/external_model.hpp"
#include "formats/hf_directory.hpp"
#include "formats/model_section.hpp"
#include "text/chat/chat_template.hpp"
#include "train/adapters/base_model.hpp"
#include "train/records/run_list.hpp"
#include "train/trainer/inputs.hpp"
#include "train/trainer/recipe.hpp"
#include "train/trainer/run.hpp"
#include "train/trainer/setup.hpp"

namespace capstan::train {

void Run::name_run_directory() {
  const std::string& name = options_.recipe.name;
  if (options_.run_dir.empty() && (name.find('/') != std::string::npos || name == "." || name == ".."))
    fail(ErrorCode::config, "the recipe's name `" + name + "` cannot name a directory in runs/",
         "a name without `/`, or another run directory");
  run_dir_ = options_.run_dir.empty() ? fs::path("runs") / name : options_.run_dir;
  if (options_.resume != Resume::existing) return;
  comm::together(world_.communicator(), "looking for the run to resume", [&] {
    if (is_rank0()) records::require_run(run_dir_);
  });
}

void Run::open_records() {
  // Rank 0 owns the directory; a refusal there ends the run on every rank.
  comm::together(world_.communicator(), "opening the run directory", [&] {
    if (!is_rank0()) return;
    records_ = std::make_unique<records::RunDirectory>(run_dir_, options_.resume != Resume::no);
    run_id_ = records_->id();
    clear_leftovers();
  });
  run_id_ = comm::gather_texts(world_.communicator(), run_id_)[0];
}

// "mock data", "gpt data/a, data/b: 120 samples a pass".
static std::string data_text(const config::DatasetConfig& config, const data::Dataset& dataset) {
  if (config.kind == config::DatasetKind::mock) return "mock data";
  std::vector<std::string> names;
  for (const config::Path& path : config.data_path) names.push_back(path.text);
  for (const auto& blend : {config.blend, config.train_blend})
    for (const auto& [prefix, weight] : blend) names.push_back(prefix);
  for (const config::Path& path : config.train_files) names.push_back(path.text);
  const std::string summary = dataset.summary();
  return std::string(config::enum_name(config.kind)) + " " + join(names, ", ") + ": " +
         (summary.empty() ? std::to_string(dataset.epoch_samples()) + " samples a pass" : summary);
}

// What the directory says about the run changes only now: a start that was refused has left it as it was.
void Run::begin_records() {
  comm::together(world_.communicator(), "beginning the run's records", [&] {
    if (!is_rank0()) return;
    records_->begin(
        {.recipe_name = options_.recipe.name,
         .recipe_given = options_.recipe.given,
         .recipe = options_.recipe.resolved,
         .command = options_.recipe.command,
         .version =
             "{\"version\": \"" CAPSTAN_VERSION "\", \"world\": " + std::to_string(world_.size()) + "}\n",
         .checkpoints = config_.checkpoint.save ? config_.checkpoint.save->resolved : "checkpoints",
         .layout = loop_->mesh().text(),
         .data = data_text(config_.dataset, *datasets_[0]),
         .ranks = world_.size(),
         .seed = config_.rng.seed,
         .steps = total_steps_});
    begun_ = true;
    log_.open_log(records_->log());
    if (records_->killed())
      log_.log_only("the start before this one was killed: its process ended without a word");
  });
}

// What killed processes left behind of saves; the run's lock, which is held here, says that nobody is at it.
void Run::clear_leftovers() {
  std::error_code unknown;
  if (config_.checkpoint.save && !fs::equivalent(checkpoint_root(), run_dir_, unknown)) {
    checkpoint::real_file_system().make_directories(checkpoint_root());
    root_lock_ = std::make_unique<records::FileLock>(checkpoint_root(), "checkpoint directory");
    refuse_other_runs_checkpoints();
  }
  try {
    checkpoint::remove_leftovers(options_.files ? *options_.files : checkpoint::real_file_system(),
                                 checkpoint_root());
  } catch (const Error& error) {
    log_.warning("what an earlier save left behind was not removed: " + error.message());
  }
}

// Two runs that save into one directory would take turns in deleting each other's checkpoints.
void Run::refuse_other_runs_checkpoints() {
  const fs::path root = checkpoint_root();
  std::error_code unknown;
  const fs::path owner = fs::weakly_canonical(root, unknown).parent_path();
  if (records::is_run(owner) && !fs::equivalent(owner, run_dir_, unknown))
    owner_lock_ = std::make_unique<records::FileLock>(owner, "run");  // it saves there itself
  if (config_.checkpoint.load && fs::equivalent(config_.checkpoint.load->resolved, root, unknown))
    return;  // to go on in it
  for (const auto& one : checkpoint::list_checkpoints(root)) {
    std::string id;
    try {
      id = checkpoint::Reader::open(one.path, checkpoint::Depth::structure).info().run_id;
    } catch (const Error&) {  // damaged: whose it was is not known, and nobody is kept from saving
    }
    if (!id.empty() && id != run_id_)
      fail(ErrorCode::failed,
           "checkpoint.save `" + root.string() + "` holds checkpoints of another run (" + id + "; " +
               one.path.filename().string() + ")",
           "choose a directory of its own; checkpoint.load=" + root.string() + " goes on from what is there");
  }
}

void Run::open_data() {
  require_files(missing_files(config_, options_.resume != Resume::no));
  // Random tokens need none, and what a checkpoint holds does not depend on whether its files happen to be there.
  if (config_.dataset.kind != config::DatasetKind::mock) tokenizer_ = load_tokenizer(config_);
  datasets_ = open_datasets(config_, tokenizer_.get());
  if (!datasets_[0])
    fail(ErrorCode::config, "dataset.split gives the training data no share", "dataset.split=969,30,1");
  data_ = datasets_[0]->fingerprint();
  if (config_.train.epochs && !config_.train.train_iters)
    config_.train.train_iters = steps_of_epochs(config_, *datasets_[0]);
  const char* const splits[] = {"training", "validation", "test"};
  for (size_t split = 0; split < 3; ++split) {
    if (!datasets_[split]) continue;
    if (const std::string summary = datasets_[split]->summary(); !summary.empty())
      log_.line(std::string(splits[split]) + " data: " + summary);
    for (const std::string& warning : datasets_[split]->warnings())
      log_.warning(std::string(splits[split]) + " data: " + warning);
  }
}

void Run::report_passes() {
  constexpr double kMany = 20;
  const int64_t batch = *config_.train.global_batch_size;
  const auto most = data::most_passes(*datasets_[0], total_steps_ * batch);
  if (!most) return;
  const std::string passes = fixed(most->count, most->count < 10 ? 2 : 1) + " passes over ";
  const bool blend = datasets_[0]->parts().size() > 1;
  const std::string what = blend ? "`" + most->part.name + "`, the part of the blend that is repeated most"
                                 : std::string("the training data");
  log_.line(with_separators(total_steps_) + " steps of " + with_separators(batch) + " samples make " +
            passes + what + " (" + with_separators(most->part.epoch_samples) + " samples of " +
            std::to_string(datasets_[0]->sequence_length()) + " tokens)");
  if (most->count > kMany)
    log_.warning("the run makes " + passes + what +
                 ": beyond some 20 passes a model learns its text by heart; shorten the run or add data");
}

// Changes that a continued run may have although they would alter a new one.
bool Run::harmless(const RecipeChange& change, const checkpoint::Reader& reader) const {
  // Where a run began is past; the state says it all.
  if (change.path.starts_with("checkpoint.") || change.path == "peft.adapter") return true;
  // Judged against the checkpoint's schedule, by follow_schedule_of().
  if (change.path.starts_with("scheduler.") || change.path == "optimizer.lr" ||
      change.path == "optimizer.min_lr" || change.path == "optimizer.min_lr_ratio" ||
      change.path == "optimizer.decoupled_lr" || change.path == "optimizer.decoupled_min_lr" ||
      change.path == "optimizer.weight_decay")
    return true;
  // Files that have moved: the samples are the same.
  const bool sources = change.path == "dataset.data_path" ||
                       (change.path.starts_with("dataset.") &&
                        (change.path.find("blend") != std::string::npos || change.path.ends_with("_files")));
  return sources && !data_.empty() && data_of(reader) == data_;
}

void Run::follow_schedule_of(const checkpoint::Reader& reader) {
  const std::string text = schedule_text_of(reader);
  const std::string recipe =
      reader.has_file(checkpoint::kRecipeFile) ? reader.read_text(checkpoint::kRecipeFile) : "";
  RunSchedule stored = schedule_;
  if (!text.empty())
    stored = parse_schedule(text, (reader.directory() / checkpoint::kStateFile).string());
  else if (!recipe.empty())  // of a version that stored the recipe alone
    stored = schedule_of(stored_config(recipe), {});
  const ScheduleChoice choice = choose_schedule(stored, schedule_, options_.recipe, config_);
  check_changes(reader, choice.refused);
  schedule_ = choice.schedule;
  loop_->set_schedules(schedule_.schedule(), schedule_.decoupled_schedule());
  report_schedule(choice);
}

void Run::report_schedule(const ScheduleChoice& choice) {
  const config::SchedulerConfig& s = config_.scheduler;
  const int64_t batch = *config_.train.global_batch_size;
  log_.line(std::string("schedule of ") +
            (s.override_opt_param_scheduler ? "this recipe (scheduler.override_opt_param_scheduler)"
             : choice.fields_taken.empty()  ? "the checkpoint"
                                            : "the checkpoint, with changes of this recipe") +
            ": " + summary(schedule_, batch));
  for (const std::string& field : choice.fields_taken) log_.line("schedule changed: " + field);
  for (const std::string& field : choice.fields_kept) log_.line("schedule kept: " + field);
  const optim::ScheduleOptions& o = schedule_.options;
  const int64_t end = o.decay_samples / batch;
  if (!choice.keeps_decay_length || o.style == config::LrDecayStyle::constant || end >= total_steps_) return;
  log_.warning("the learning rate reaches its floor, " + to_text(o.min_lr) + ", at step " +
               std::to_string(end) + " and stays there to step " + std::to_string(total_steps_) +
               "; scheduler.lr_decay_" +
               (config_.train.train_samples ? "samples=" + std::to_string(*config_.train.train_samples)
                                            : "iters=" + std::to_string(total_steps_)) +
               " decays to the end of the run, scheduler.override_opt_param_scheduler=true takes this "
               "recipe's whole schedule");
}

void Run::check_changes(const checkpoint::Reader& reader, const std::vector<std::string>& refused_schedule) {
  std::string altering;
  for (const std::string& text : refused_schedule) altering += "\n    " + text;
  std::vector<RecipeChange> changes;
  if (options_.changes_since && reader.has_file(checkpoint::kRecipeFile))
    changes = options_.changes_since(reader.read_text(checkpoint::kRecipeFile));
  for (const RecipeChange& change : changes) {
    const std::string text = change.path + ": " + change.before + " -> " + change.after;
    if (change.alters_numerics && !harmless(change, reader))
      altering += "\n    " + text;
    else if (!change.path.starts_with("scheduler."))  // report_schedule() says what becomes of those
      log_.line("changed since the checkpoint: " + text);
  }
  const std::string trained_on = data_of(reader);
  if (options_.changes_since && altering.empty() && !trained_on.empty() && trained_on != data_)
    fail(ErrorCode::failed,
         "the recipe is the run's, but the data files hold other samples than those that it was trained on",
         "restore the files, or start a new run from the weights with checkpoint.pretrained_checkpoint=" +
             reader.directory().string());
  if (!altering.empty())
    fail(
        ErrorCode::failed, "the recipe differs from the run's in what alters the numbers:" + altering,
        "resume with the run's own values (scheduler.override_opt_param_scheduler=true takes this recipe's "
        "schedule, scheduler.use_checkpoint_opt_param_scheduler=true the run's), or start a new run from its "
        "weights with checkpoint.pretrained_checkpoint=" +
            reader.directory().string());
}

// The checkpoints of a run keep its tokenizer: a run that goes on with another one would save weights beside the wrong one.
void Run::check_tokenizer(const checkpoint::Reader& reader) {
  comm::together(world_.communicator(), "comparing the tokenizer with the checkpoint's", [&] {
    if (!is_rank0() || !tokenizer_ ||
        !(reader.has_file("tokenizer.json") || reader.has_file("tokenizer.model")))
      return;
    const auto own = data::record_of(*data::Tokenizer::load(reader.directory()), reader.directory().string());
    const auto now = data::record_of(*tokenizer_, tokenizer_name(config_.tokenizer));
    if (own.identity != now.identity)
      fail(
          ErrorCode::failed,
          "the run was trained with the tokenizer " + data::to_text(own) + ", not with " + data::to_text(now),
          "tokenizer.tokenizer_model=" + reader.directory().string() + " is the run's own");
  });
}

void Run::compare_tokenizer(const std::vector<std::pair<std::string, std::string>>& files,
                            const std::string& from) {
  const auto& named = config_.tokenizer.tokenizer_model;
  if (!tokenizer_ || (named && named->resolved == from)) return;
  std::shared_ptr<const data::Tokenizer> own;
  try {
    own = data::Tokenizer::from_texts(files, from);
  } catch (const Error&) {
    return;  // the weights come without a tokenizer, or with one of another kind
  }
  const int64_t shared = std::min(own->vocab_size(), tokenizer_->vocab_size());
  int64_t different = 0;
  int32_t first = 0;
  for (int32_t id = 0; id < shared; ++id)
    if (own->token_of(id) != tokenizer_->token_of(id) && different++ == 0) first = id;
  if (different == 0) return;  // the same one, or one with further tokens
  log_.warning("the weights of " + from + " come with another tokenizer: " + with_separators(different) +
               " of " + with_separators(shared) + " ids stand for another token there, the first is " +
               std::to_string(first) + " (" + quoted(own->token_of(first)) + " there, " +
               quoted(tokenizer_->token_of(first)) + " here)");
}

BaseWeights Run::begin_with_base(const std::string& expected) {
  if (config_.peft->random_base) {  // initialize() has made it
    base_ = checkpoint::hash_of("first values of seed " + std::to_string(config_.rng.seed));
    if (!expected.empty() && expected != base_)
      fail(ErrorCode::failed,
           "the adapters were trained beside other weights than the first values of this seed",
           "resume with the run's own recipe");
    log_.warning("adapters beside random weights (peft.random_base): they show that the recipe works");
    return {"random weights", base_};
  }
  BaseWeights base = load_base(config_, loop_->store(), expected, world_.communicator());
  base_ = base.hash;
  log_.line("adapters beside the weights of " + base.path);
  return base;
}

void Run::start_from_external(const std::string& name) {
  const auto external = interchange::ExternalModel::open(name);
  // Shapes are checked with the weights; what else the file says of its model may be meant otherwise here.
  for (const auto& one : interchange::differences(config_.model, external->model()))
    log_.warning(one.path + " is " + one.first + " in the recipe and " + one.second + " in " + name);
  load_parameters(*external->parameters(config_.model), loop_->store());
  log_.line("weights from " + name + " (" + external->kind() + ")");
}

// A fine-tuned model goes on with the config.json, generation settings and chat template that its weights came with. They may be
// gone when a run is resumed: then its checkpoints do without.
void Run::find_assets() {
  if (!is_rank0()) return;
  if (config_.tokenizer.chat_template && tokenizer_ && config_.checkpoint.save_tokenizer_assets)
    chat_template_ = chat_template_of(config_, *tokenizer_)->text();
  if (!config_.checkpoint.pretrained_checkpoint) return;
  const std::string& from = config_.checkpoint.pretrained_checkpoint->resolved;
  std::vector<std::pair<std::string, std::string>> found;
  try {
    if (interchange::is_external(from)) {
      found = interchange::ExternalModel::open(from)->assets();
    } else {
      found = assets_in(checkpoint::Reader::open(checkpoint::resolve_checkpoint(records::saved_in(from)).path,
                                                 checkpoint::Depth::structure));
    }
  } catch (const Error&) {
    return;
  }
  // The tokenizer is the run's own.
  compare_tokenizer(found, from);
  for (auto& file : found)
    if (!interchange::is_tokenizer_file(file.first)) assets_.push_back(std::move(file));
}

void Run::start_or_resume() {
  find_assets();
  schedule_ = schedule_of(config_, options_.recipe);
  std::optional<checkpoint::Checkpoint> from;
  std::vector<std::string> refused;
  const bool resume = options_.resume != Resume::no;
  if (resume) from = find_checkpoint(world_, checkpoint_root(), refused);
  for (const std::string& reason : refused) log_.warning("not resumed from " + reason);
  refused_ = std::move(refused);
  const bool own = from.has_value();
  if (resume && !from) {
    // checkpoint.save may have changed since: what the run has lies where it was written.
    const fs::path before = comm::gather_texts(
        world_.communicator(), is_rank0() && records_->resumed() ? records_->checkpoints().string() : "")[0];
    std::error_code unknown;
    if (!before.empty() && !fs::equivalent(before, checkpoint_root(), unknown)) {
      std::vector<std::string> reasons;
      from = find_checkpoint(world_, before, reasons);
      for (const std::string& reason : reasons) log_.warning("not resumed from " + reason);
      refused_.insert(refused_.end(), reasons.begin(), reasons.end());
    }
  }
  const auto damaged = comm::gather_texts(world_.communicator(), join(refused_, "\n    "))[0];
  if (resume && !from && !damaged.empty())
    fail(ErrorCode::failed, "no checkpoint of the run verifies:\n    " + damaged,
         "restore one of them; or, to give them up, move them away and resume from step 0, or take "
         "another run directory");
  if (!from && config_.checkpoint.load) {
    const fs::path load = config_.checkpoint.load->resolved;
    if (config_.checkpoint.ckpt_step) {
      fs::path root = load;
      if (fs::is_directory(root / "checkpoints")) root /= "checkpoints";
      from = checkpoint::Checkpoint{root / checkpoint::step_directory_name(*config_.checkpoint.ckpt_step),
                                    *config_.checkpoint.ckpt_step};
    } else {
      from = checkpoint::resolve_checkpoint(records::saved_in(load));
    }
  }
  if (from) {
    // What find_checkpoint() and resolve_checkpoint() return has been read and hashed; a step that was named has not.
    const bool named = !own && config_.checkpoint.ckpt_step;
    auto reader = checkpoint::Reader::open(from->path,
                                           named ? checkpoint::Depth::content : checkpoint::Depth::structure);
    follow_schedule_of(reader);
    check_tokenizer(reader);
    loop_->initialize();
    if (config_.peft) begin_with_base(base_of(reader));
    loop_->state() =
        load_state(reader, loop_->store(), config_.checkpoint.load_optim ? &loop_->optimizer() : nullptr);
    log_.line("resumed from " + from->path.string() + " at step " + std::to_string(loop_->state().step));
    if (own) saved_step_ = loop_->state().step, last_checkpoint_ = from->path;
    return;
  }
  const auto resumed =
      comm::gather_texts(world_.communicator(), is_rank0() && records_->resumed() ? "x" : "")[0];
  if (!resumed.empty()) {
    const std::string text = "the run has no checkpoint yet: it begins again at step 0";
    if (options_.resume == Resume::automatic)  // which asks for either
      log_.line(text);
    else
      log_.warning(text);
  }
  loop_->initialize();
  if (config_.peft) {
    begin_adapters(config_, loop_->device(), loop_->store(), begin_with_base({}));
    if (config_.peft->adapter) log_.line("adapters from " + config_.peft->adapter->resolved);
  } else if (config_.checkpoint.pretrained_checkpoint) {
    const std::string& weights = config_.checkpoint.pretrained_checkpoint->resolved;
    if (interchange::is_external(weights)) return start_from_external(weights);
    const auto found = checkpoint::resolve_checkpoint(records::saved_in(weights));
    auto reader = checkpoint::Reader::open(found.path, checkpoint::Depth::structure);
    load_parameters(reader, loop_->store());
    log_.line("weights from " + found.path.string());
  }
}

}  // namespace capstan::train
