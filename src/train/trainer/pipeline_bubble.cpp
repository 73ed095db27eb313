#include "train/trainer/pipeline_bubble.hpp"

#include "base/text.hpp"
#include "comm/reduce.hpp"
#include "parallel/schedule.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"

namespace capstan::train {

std::optional<PipelineBubble> pipeline_bubble(const config::Config& config, int64_t micro_batches,
                                              const std::array<double, kPhases>& phases, comm::World& world) {
  const parallel::PipelineShape shape = pipeline_shape(config, micro_batches);
  if (shape.ranks == 1 || backend_of(config.train.device).queues_work) return std::nullopt;
  const auto seconds = [&](Phase phase) { return phases[static_cast<size_t>(phase)]; };
  const double working = seconds(Phase::forward) + seconds(Phase::backward);
  // The ranks begin a step together, and the last one ends its passes after this time.
  const double span =
      comm::all_reduce(world.communicator(), seconds(Phase::pipeline) + working, comm::ReduceOp::max);
  const double all_working = comm::all_reduce(world.communicator(), working);
  return PipelineBubble{.measured = all_working > 0 ? span * world.size() / all_working - 1 : 0,
                        .simulated = parallel::simulate(shape, parallel::make_schedule(shape)).bubble()};
}

std::string bubble_text(const PipelineBubble& bubble) {
  return "pipeline bubble " + fixed(100 * bubble.measured, 1) + "% measured, " +
         fixed(100 * bubble.simulated, 1) + "% simulated";
}

}  // namespace capstan::train
