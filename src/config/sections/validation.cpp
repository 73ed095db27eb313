#include "config/sections/conditions.hpp"
#include "config/sections/sections.hpp"

namespace capstan::config {

void describe(Section<ValidationConfig>& s) {
  using V = ValidationConfig;
  const char* set = "`validation.eval_interval` is set";
  s.doc("evaluation on held-out data during training");
  s.field("eval_interval", &V::eval_interval)
      .doc("steps between evaluations; null: no validation")
      .unit("iterations")
      .count()
      .min(1)
      .range_help("for no validation: validation.eval_interval=null")
      .effect(Effect::log)
      .alias("train.eval_interval")
      .known_as("eval_steps")
      .known_as("val_check_interval");
  s.field("eval_iters", &V::eval_iters)
      .doc("global batches per evaluation")
      .unit("iterations")
      .count()
      .range(1, int64_t{1} << 32)
      .range_help("for no validation: validation.eval_interval=null")
      .effect(Effect::log)
      .alias("train.eval_iters")
      .used_when<Config>(set, evaluates);
  s.field("eval_global_batch_size", &V::eval_global_batch_size)
      .doc("samples per evaluation batch over all ranks")
      .unit("samples")
      .count()
      .range(1, 1 << 30)
      .effect(Effect::log)
      .used_when<Config>(set, evaluates);
  s.field("eval_micro_batch_size", &V::eval_micro_batch_size)
      .doc("samples per forward pass of evaluation")
      .unit("samples")
      .range(1, 1 << 30)
      .effect(Effect::memory)
      .used_when<Config>(set, evaluates);
}

}  // namespace capstan::config
