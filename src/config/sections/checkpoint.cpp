#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool loads(const Config& c) {
  return c.checkpoint.load.has_value();
}
}  // namespace

void describe(Section<CheckpointConfig>& s) {
  using C = CheckpointConfig;
  const char* load = "`checkpoint.load` is set";
  s.doc("saving, resuming and initial weights");
  s.field("save", &C::save)
      .doc("directory of the checkpoints; null: `checkpoints` in the run directory")
      .effect(Effect::io)
      .known_as("save_dir")
      .known_as("output_dir");
  s.field("load", &C::load)
      .doc("run or checkpoint to resume from, including optimizer state, schedule and data position")
      .example("runs/quickstart")
      .known_as("resume")
      .known_as("resume_from_checkpoint");
  s.field("pretrained_checkpoint", &C::pretrained_checkpoint)
      .doc(
          "run or checkpoint from which only the weights are loaded, for fine-tuning or continued "
          "pretraining");
  s.field("ckpt_step", &C::ckpt_step)
      .doc("step of the checkpoint to load; null: the newest valid checkpoint")
      .unit("iterations")
      .min(0)
      .used_when<Config>(load, loads);
  s.field("save_interval", &C::save_interval)
      .doc("steps between checkpoints; null: only at the end of the run")
      .unit("iterations")
      .count()
      .min(1)
      .effect(Effect::io)
      .known_as("save_steps")
      .known_as("save_every");
  s.field("save_retain_interval", &C::save_retain_interval)
      .doc("checkpoints whose step is a multiple of this are never deleted; null: none")
      .unit("iterations")
      .count()
      .min(1)
      .effect(Effect::io)
      .used_when<Config>("`checkpoint.most_recent_k` deletes checkpoints",
                         [](const Config& c) { return c.checkpoint.most_recent_k >= 0; });
  s.field("most_recent_k", &C::most_recent_k)
      .doc("number of most recent checkpoints to keep; -1: all")
      .unit("checkpoints")
      .min(-1)
      .effect(Effect::io)
      .known_as("save_total_limit")
      .known_as("keep_last");
  s.field("save_optim", &C::save_optim)
      .doc("save the optimizer state; a run cannot be resumed without it")
      .effect(Effect::io);
  s.field("load_optim", &C::load_optim)
      .doc("restore the optimizer state of checkpoint.load; false: begin with a fresh optimizer")
      .used_when<Config>(load, loads);
  s.field("async_save", &C::async_save)
      .doc("write checkpoints in the background; training waits only for the copy in memory")
      .effect(Effect::perf)
      .used_when<Config>("`checkpoint.save_interval` is set",
                         [](const Config& c) { return c.checkpoint.save_interval.has_value(); });
  s.field("save_tokenizer_assets", &C::save_tokenizer_assets)
      .doc("store a copy of the tokenizer in every checkpoint")
      .effect(Effect::io);
}

}  // namespace capstan::config
