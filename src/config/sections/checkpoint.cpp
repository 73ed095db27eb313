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
  s.doc("saving, resuming and starting from weights");
  s.field("save", &C::save)
      .doc("directory of the checkpoints; null: `checkpoints` of the run directory")
      .effect(Effect::io)
      .known_as("save_dir")
      .known_as("output_dir");
  s.field("load", &C::load)
      .doc("run or checkpoint to continue from, with optimizer, schedule and data position")
      .example("runs/quickstart")
      .known_as("resume")
      .known_as("resume_from_checkpoint");
  s.field("pretrained_checkpoint", &C::pretrained_checkpoint)
      .doc("run or checkpoint whose weights alone are the start");
  s.field("ckpt_step", &C::ckpt_step)
      .doc("the step to load; null: the newest checkpoint that verifies")
      .unit("iterations")
      .min(0)
      .used_when<Config>(load, loads);
  s.field("save_interval", &C::save_interval)
      .doc("steps between two checkpoints; null: only at the end")
      .unit("iterations")
      .count()
      .min(1)
      .effect(Effect::io);
  s.field("save_retain_interval", &C::save_retain_interval)
      .doc("checkpoints of steps that are multiples of this are never deleted; null: no such")
      .unit("iterations")
      .count()
      .min(1)
      .effect(Effect::io);
  s.field("most_recent_k", &C::most_recent_k)
      .doc("newest checkpoints that are kept; -1: all")
      .unit("checkpoints")
      .min(-1)
      .effect(Effect::io)
      .known_as("save_total_limit")
      .known_as("keep_last");
  s.field("save_optim", &C::save_optim)
      .doc("save the optimizer's state; without it a run cannot continue")
      .effect(Effect::io);
  s.field("load_optim", &C::load_optim)
      .doc("continue with the saved optimizer state, on a resume or from checkpoint.load");
  s.field("async_save", &C::async_save)
      .doc("write while training goes on; the step waits for the copy only")
      .effect(Effect::perf)
      .used_when<Config>("`checkpoint.save_interval` is set",
                         [](const Config& c) { return c.checkpoint.save_interval.has_value(); });
  s.field("save_tokenizer_assets", &C::save_tokenizer_assets)
      .doc("keep a copy of the tokenizer in every checkpoint")
      .effect(Effect::io);
}

}  // namespace capstan::config
