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
  s.doc("what a run prints and records");
  s.field("log_interval", &L::log_interval)
      .doc(
          "steps between two progress lines and metrics rows; loss, gradient norm and throughput are means "
          "over these steps")
      .unit("iterations")
      .count()
      .min(1)
      .effect(Effect::log)
      .known_as("logging_steps")
      .known_as("log_every_n_steps");
  s.field("tensorboard", &L::tensorboard).doc("write TensorBoard events").effect(Effect::log);
  s.field("tensorboard_dir", &L::tensorboard_dir)
      .doc("directory of the events; null: the run directory")
      .effect(Effect::log)
      .used_when<Config>(events, writes_events);
  s.field("tensorboard_log_interval", &L::tensorboard_log_interval)
      .doc(
          "steps between two events of one scalar; loss, gradient norm and throughput are means over these "
          "steps")
      .unit("iterations")
      .count()
      .min(1)
      .effect(Effect::log)
      .used_when<Config>(events, writes_events);
  s.field("log_params_norm", &L::log_params_norm)
      .doc("log the global L2 norm of the parameters that train (params_norm)")
      .effect(Effect::log);
  s.field("log_num_zeros_in_grad", &L::log_num_zeros_in_grad)
      .doc("log how many elements of the gradients are zero (num_zeros)")
      .effect(Effect::log);
}

}  // namespace capstan::config
