#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool writes_events(const Config& c) {
  return c.logger.tensorboard;
}
}  // namespace

void describe(Section<LoggerConfig>& s) {
  using L = LoggerConfig;
  const char* events = "`logger.tensorboard` is true";
  s.doc("progress log and metrics");
  s.field("log_interval", &L::log_interval)
      .doc(
          "steps between progress lines and rows of metrics.jsonl; loss, gradient norm and throughput are "
          "means over these steps")
      .unit("iterations")
      .count()
      .min(1)
      .effect(Effect::log)
      .known_as("logging_steps")
      .known_as("log_every_n_steps");
  s.field("tensorboard", &L::tensorboard).doc("write TensorBoard event files").effect(Effect::log);
  s.field("tensorboard_dir", &L::tensorboard_dir)
      .doc("directory of the event files; null: the run directory")
      .effect(Effect::log)
      .used_when<Config>(events, writes_events);
  s.field("tensorboard_log_interval", &L::tensorboard_log_interval)
      .doc(
          "steps between two values of one TensorBoard scalar; loss, gradient norm and throughput are means "
          "over these steps")
      .unit("iterations")
      .count()
      .min(1)
      .effect(Effect::log)
      .used_when<Config>(events, writes_events);
  s.field("log_params_norm", &L::log_params_norm)
      .doc("log the global L2 norm of the trainable parameters (params_norm)")
      .effect(Effect::log);
  s.field("log_num_zeros_in_grad", &L::log_num_zeros_in_grad)
      .doc("log the number of zero elements in the gradients (num_zeros)")
      .effect(Effect::log);
}

}  // namespace capstan::config
