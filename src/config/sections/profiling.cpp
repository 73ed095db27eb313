#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool traces(const Config& c) {
  return c.profiling.trace;
}
}  // namespace

void describe(Section<ProfilingConfig>& s) {
  using P = ProfilingConfig;
  const char* on = "`profiling.trace` is true";
  s.doc("trace of operations over some steps");
  s.field("trace", &P::trace)
      .doc("write a Chrome trace of operations with shapes, FLOPs and bytes")
      .effect(Effect::log);
  s.field("profile_step_start", &P::profile_step_start)
      .doc("first traced step")
      .unit("iterations")
      .count()
      .min(0)
      .effect(Effect::log)
      .used_when<Config>(on, traces);
  s.field("profile_step_end", &P::profile_step_end)
      .doc("step after the last traced one")
      .unit("iterations")
      .count()
      .min(0)
      .effect(Effect::log)
      .used_when<Config>(on, traces);
  s.field("profile_ranks", &P::profile_ranks)
      .doc("ranks that write a trace")
      .unit("ranks")
      .scalar_ok()
      .effect(Effect::log)
      .used_when<Config>(on, traces);
  s.field("record_shapes", &P::record_shapes)
      .doc("record the shapes of operands")
      .effect(Effect::log)
      .used_when<Config>(on, traces);
  s.field("trace_dir", &P::trace_dir)
      .doc("directory of the traces; null: `trace` in the run directory")
      .effect(Effect::log)
      .used_when<Config>(on, traces);
}

}  // namespace capstan::config
