#include "train/trainer/initial_state.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/wording.hpp"
#include "checkpoint/hash.hpp"
#include "checkpoint/store.hpp"
#include "comm/collective_errors.hpp"
#include "formats/hf_directory.hpp"
#include "formats/model_section.hpp"
#include "text/chat/chat_template.hpp"
#include "train/adapters/adapters.hpp"
#include "train/adapters/base_model.hpp"
#include "train/records/run_list.hpp"
#include "train/setup/tokenizer.hpp"
#include "train/trainer/resume_checks.hpp"

namespace capstan::train {

namespace fs = std::filesystem;

namespace {

class InitialStateLoader {
 public:
  InitialStateLoader(const config::Config& config, comm::World& world, const RunOptions& options,
                     const RunData& data, const RunRecorder& recorder, const CheckpointRoot& root,
                     StepRunner& runner, int64_t total_steps, RunLog& log)
      : config_(config),
        world_(world),
        options_(options),
        data_(data),
        recorder_(recorder),
        root_(root),
        runner_(runner),
        total_steps_(total_steps),
        log_(log) {}

  InitialState start() {
    state_.schedule = schedule_of(config_, options_.recipe);
    const auto own = options_.resume == Resume::no ? std::nullopt : find_own_checkpoint();
    if (own) {
      resume_from(checkpoint::Reader::open(own->path, checkpoint::Verification::structure),
                  CheckpointOf::this_run);
    } else if (config_.checkpoint.load) {
      resume_from(open_given_checkpoint(config_.checkpoint), CheckpointOf::other_run);
    } else {
      begin_new();
    }
    return std::move(state_);
  }

 private:
  bool is_rank0() const { return world_.rank() == 0; }

  std::optional<checkpoint::Checkpoint> find_in(const fs::path& directory) {
    std::vector<std::string> refused;
    auto found = find_checkpoint(world_, directory, refused);
    for (std::string& reason : refused) {
      log_.warning("not resumed from " + reason);
      state_.refused.push_back(std::move(reason));
    }
    return found;
  }

  // The newest checkpoint of the run itself. ErrorCode::failed where there are checkpoints and none verifies.
  std::optional<checkpoint::Checkpoint> find_own_checkpoint() {
    auto found = find_in(root_.path());
    if (found) {
      state_.checkpoint = found->path;
      return found;
    }
    // checkpoint.save may have changed since: earlier checkpoints lie where the last start has saved them.
    const fs::path before =
        comm::gather_texts(world_.communicator(), recorder_.earlier_checkpoints().string())[0];
    std::error_code unknown;
    if (!before.empty() && !fs::equivalent(before, root_.path(), unknown)) found = find_in(before);
    const auto damaged = comm::gather_texts(world_.communicator(), join(state_.refused, "\n    "))[0];
    if (!found && !damaged.empty())
      fail(ErrorCode::failed, "no checkpoint of the run is valid:\n    " + damaged,
           "restore one of them; or move them aside and {resume_at_step_0}, or take {other_run_dir}");
    return found;
  }

  void resume_from(checkpoint::Reader reader, CheckpointOf whose) {
    state_.schedule =
        continue_schedule(config_, options_, data_, state_.schedule, reader, whose, total_steps_, log_);
    runner_.set_schedules(state_.schedule.schedule(), state_.schedule.decoupled_schedule());
    check_same_tokenizer(config_, world_, data_, reader);
    runner_.initialize();
    if (config_.peft) load_base_weights(stored_base_hash(reader));
    // checkpoint.load_optim is about checkpoint.load; the moments in the run's own checkpoint are the run's.
    const bool with_optimizer = whose == CheckpointOf::this_run || config_.checkpoint.load_optim;
    runner_.state() = load_state(reader, runner_.store(), with_optimizer ? &runner_.optimizer() : nullptr);
    log_.line("resumed from " + reader.directory().string() + " at step " +
              std::to_string(runner_.state().step));
  }

  void begin_new() {
    const auto resumed =
        comm::gather_texts(world_.communicator(), is_rank0() && recorder_.resumed() ? "x" : "")[0];
    if (!resumed.empty()) {
      const std::string text = "the run has no checkpoint yet: it begins again at step 0";
      // Resume::automatic asks for a new run where there is no checkpoint.
      if (options_.resume == Resume::automatic)
        log_.line(text);
      else
        log_.warning(text);
    }
    runner_.initialize();
    if (config_.peft) {
      begin_adapters(config_, runner_.device(), runner_.store(), load_base_weights({}));
      if (config_.peft->adapter) log_.line("adapters from " + config_.peft->adapter->resolved);
    } else if (config_.checkpoint.pretrained_checkpoint) {
      load_weights(config_.checkpoint.pretrained_checkpoint->resolved);
    }
  }

  // The weights beside which adapters train. expected: their hash at an earlier start; empty: the first
  // start.
  BaseWeights load_base_weights(const std::string& expected) {
    // The weights are those of StepRunner::initialize().
    if (config_.peft->random_base) {
      // Stored checkpoints have the hash of this text: its words do not change.
      state_.base = checkpoint::hash_of("first values of seed " + std::to_string(config_.rng.seed));
      if (!expected.empty() && expected != state_.base)
        fail(ErrorCode::failed, "the base model of the adapters is not the initial values of this seed",
             "resume with the run's own recipe");
      log_.warning(
          "adapters train on a random base model (peft.random_base): good only for testing the recipe");
      return {"random weights", state_.base, 0};
    }
    BaseWeights base = load_base(config_, runner_.store(), expected, world_.communicator());
    state_.base = base.hash;
    log_.line("base model of the adapters: " + base.path);
    log_left_out(base.prediction_layers);
    return base;
  }

  void load_weights(const std::string& name) {
    BaseModel weights = BaseModel::open(name);
    // Shapes are checked with the weights. Other differences may be meant.
    report_differences(config_, weights, log_);
    load_parameters(weights.parameters(config_.model), runner_.store());
    const auto* const external = weights.external();
    log_.line("weights from " + weights.path() + (external ? " (" + external->kind() + ")" : ""));
    log_left_out(weights.prediction_layers());
  }

  void log_left_out(int64_t prediction_layers) {
    if (prediction_layers == 0 || config_.model.mtp_num_layers) return;
    log_.line("the weights' " + counted(prediction_layers, "layer") + " for multi-token prediction " +
              (prediction_layers == 1 ? "is" : "are") + " not read: model.mtp_num_layers is null");
  }

  const config::Config& config_;
  comm::World& world_;
  const RunOptions& options_;
  const RunData& data_;
  const RunRecorder& recorder_;
  const CheckpointRoot& root_;
  StepRunner& runner_;
  int64_t total_steps_;
  RunLog& log_;
  InitialState state_;
};

struct PretrainedFiles {
  formats::Assets files;
  // Tokenizer that a checkpoint records, even if the checkpoint has no tokenizer files.
  std::optional<data::TokenizerRecord> tokenizer;
};

// Warns where token ids of the pretrained weights' tokenizer stand for other text than those of the recipe's.
void compare_tokenizer(const config::Config& config, const RunData& data, const PretrainedFiles& pretrained,
                       const std::string& from, RunLog& log) {
  const auto& named = config.tokenizer.tokenizer_model;
  if (named && named->resolved == from) return;
  const auto& here = data.tokenizer_record;
  std::shared_ptr<const text::Tokenizer> own;
  try {
    own = text::Tokenizer::from_texts(pretrained.files, from);
  } catch (const Error&) {
    // The weights come without a tokenizer, or with one of another kind.
  }
  if (!own || !data.tokenizer) {
    const auto there = own ? data::record_of(*own, from) : pretrained.tokenizer;
    if (there && here && there->identity != here->identity)
      log.warning("the weights of " + from + " were trained with another tokenizer, " +
                  data::to_text(*there) + "; the run's is " + data::to_text(*here));
    return;
  }
  const int64_t shared = std::min(own->vocab_size(), data.tokenizer->vocab_size());
  int64_t different = 0;
  int32_t first = 0;
  for (int32_t id = 0; id < shared; ++id)
    if (own->token_of(id) != data.tokenizer->token_of(id) && different++ == 0) first = id;
  // The tokenizers agree, or one has further tokens.
  if (different == 0) return;
  log.warning("the weights of " + from + " come with another tokenizer: " + with_separators(different) +
              " of " + with_separators(shared) + " ids stand for another token there, the first is " +
              std::to_string(first) + " (" + in_quotes(own->token_of(first)) + " there, " +
              in_quotes(data.tokenizer->token_of(first)) + " here)");
}

}  // namespace

// resolve_checkpoint() reads and hashes the contents; those of a step that is named are verified here.
checkpoint::Reader open_given_checkpoint(const config::CheckpointConfig& config) {
  const fs::path load = config.load->resolved;
  if (!config.ckpt_step)
    return checkpoint::Reader::open(checkpoint::resolve_checkpoint(records::saved_in(load)).path,
                                    checkpoint::Verification::structure);
  fs::path root = records::saved_in(load);
  if (fs::is_directory(root / "checkpoints")) root /= "checkpoints";
  const fs::path step = root / checkpoint::step_directory_name(*config.ckpt_step);
  std::error_code unknown;
  if (!fs::is_directory(step, unknown))
    fail(ErrorCode::not_found,
         "not found: checkpoint.ckpt_step = " + std::to_string(*config.ckpt_step) + " in `" + root.string() +
             "`",
         "leave checkpoint.ckpt_step out: the newest valid checkpoint is taken");
  return checkpoint::Reader::open(step, checkpoint::Verification::content);
}

InitialState start_or_resume(const config::Config& config, comm::World& world, const RunOptions& options,
                             const RunData& data, const RunRecorder& recorder, const CheckpointRoot& root,
                             StepRunner& runner, int64_t total_steps, RunLog& log) {
  return InitialStateLoader(config, world, options, data, recorder, root, runner, total_steps, log).start();
}

void report_differences(const config::Config& config, const BaseModel& weights, RunLog& log) {
  if (!weights.external()) return;
  for (const auto& one : formats::differences(config.model, weights.external()->model()))
    log.warning(one.path + " is " + one.first + " in the recipe and " + one.second + " in " + weights.path());
}

CheckpointAssets find_assets(const config::Config& config, const RunData& data, const BaseModel* weights,
                             RunLog& log) {
  CheckpointAssets assets;
  if (config.tokenizer.chat_template && data.tokenizer && config.checkpoint.save_tokenizer_assets)
    assets.chat_template = chat_template_of(config, *data.tokenizer)->text();
  if (!config.checkpoint.pretrained_checkpoint) return assets;
  const std::string& from = config.checkpoint.pretrained_checkpoint->resolved;
  PretrainedFiles found;
  try {
    std::optional<BaseModel> opened;
    if (!weights) weights = &opened.emplace(BaseModel::open(from));
    found.files = weights->assets();
    if (weights->checkpoint()) found.tokenizer = tokenizer_of(*weights->checkpoint());
  } catch (const Error&) {
    return assets;
  }
  compare_tokenizer(config, data, found, from, log);
  // Checkpoints keep the tokenizer of the run instead.
  for (auto& file : found.files)
    if (!formats::is_tokenizer_file(file.first)) assets.files.push_back(std::move(file));
  return assets;
}

}  // namespace capstan::train
