#include "planner/pipeline.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "planner/collectives.hpp"

namespace capstan::planner {

namespace {

double exposed_communication(const WorkTime& work) {
  return work.total() - work.compute();
}

}  // namespace

parallel::PipelineShape pipeline_of(const RunShape& s) {
  parallel::PipelineShape pipeline;
  pipeline.ranks = s.pp, pipeline.chunks = s.vpp, pipeline.micro_batches = s.micro_batches();
  pipeline.group = std::max(s.group, s.pp), pipeline.order = s.schedule, pipeline.stage_ranks = s.stage_ranks;
  return pipeline;
}

std::vector<parallel::ActionTicks> action_ticks(const parallel::PipelineShape& pipeline,
                                                const std::vector<StageTime>& stages) {
  std::vector<parallel::ActionTicks> ticks;
  for (const StageTime& stage : stages) {
    parallel::ActionTicks& one = ticks.emplace_back();
    one.forward = nanoseconds(stage.forward.total());
    one.backward = nanoseconds(stage.input_gradients.total() + stage.recompute.total());
    const int64_t weights = nanoseconds(stage.weight_gradients.total());
    one.weight_gradients = pipeline.separates_weight_gradients() ? weights : 0;
    if (!pipeline.separates_weight_gradients()) one.backward += weights;
  }
  return ticks;
}

double transfer_bytes(const RunShape& s) {
  return s.activation_bytes * s.tokens() * real(s.hidden) / (s.sequence_parallel ? real(s.tp) : 1);
}

namespace {
// Transfers that leave the fast domain of a rank.
bool crosses_domains(const RunShape& s, const Cluster& c) {
  return group_of(c, s.tp * s.cp * s.dp, s.pp, s.gpus()).crosses_domains();
}
}  // namespace

double stage_transfer_seconds(const RunShape& s, const Cluster& c) {
  return transfer_seconds(c, crosses_domains(s, c), transfer_bytes(s));
}

std::vector<int64_t> transfer_ticks(const RunShape& s, const Cluster& c) {
  std::vector<int64_t> ticks;
  if (s.pp == 1) return ticks;
  const bool crosses = crosses_domains(s, c);
  for (const StageShape& stage : s.stages)
    ticks.push_back(nanoseconds(transfer_seconds(c, crosses, real(stage.states_out) * transfer_bytes(s))));
  return ticks;
}

std::string_view name_of(Span::Kind kind) {
  switch (kind) {
    case Span::Kind::forward:
      return "forward";
    case Span::Kind::backward:
      return "backward";
    case Span::Kind::weight_gradients:
      return "weight gradients";
    case Span::Kind::data_parallel:
      return "data parallel";
    case Span::Kind::optimizer:
      return "optimizer";
    case Span::Kind::other:
      break;
  }
  return "other";
}

namespace {

Span span_of(const parallel::PipelineAction& action, const StageTime& stage, bool separate) {
  Span span;
  span.micro_batch = action.micro_batch, span.chunk = action.chunk;
  WorkTime work = stage.forward;
  if (action.kind == parallel::ActionKind::backward) {
    span.kind = Span::Kind::backward;
    work = stage.input_gradients;
    work += stage.recompute;
    if (!separate) work += stage.weight_gradients;
  } else if (action.kind == parallel::ActionKind::weight_gradients) {
    span.kind = Span::Kind::weight_gradients;
    work = stage.weight_gradients;
  }
  span.communication = exposed_communication(work);
  return span;
}

}  // namespace

Timeline simulate_timeline(const RunShape& s, const Cluster& c, const StepTime& time) {
  const std::vector<StageTime> stages = stage_times(s, c);
  const parallel::PipelineShape pipeline = pipeline_of(s);
  const parallel::Schedule schedule = parallel::make_schedule(pipeline);
  const auto run =
      parallel::simulate(pipeline, schedule, action_ticks(pipeline, stages), transfer_ticks(s, c));
  CAPSTAN_ASSERT(run.problem.empty(), run.problem);
  const comm::StageMap map = pipeline.stages();
  const double pipeline_end = 1e-9 * static_cast<double>(run.ticks);
  Timeline timeline;
  for (size_t rank = 0; rank < schedule.size(); ++rank) {
    std::vector<Span>& spans = timeline.ranks.emplace_back();
    for (size_t i = 0; i < schedule[rank].size(); ++i) {
      const parallel::PipelineAction& action = schedule[rank][i];
      const auto stage = static_cast<size_t>(map.stage_of(static_cast<int64_t>(rank), action.chunk));
      Span& span = spans.emplace_back(span_of(action, stages[stage], pipeline.separates_weight_gradients()));
      span.begin = 1e-9 * static_cast<double>(run.start[rank][i]);
      span.end = span.begin + 1e-9 * static_cast<double>(run.lengths[stage].of(action.kind));
    }
    double at = pipeline_end;
    for (const auto& [kind, seconds] :
         {std::pair(Span::Kind::data_parallel, time.data), std::pair(Span::Kind::optimizer, time.optimizer),
          std::pair(Span::Kind::other, time.other)}) {
      if (seconds <= 0) continue;
      spans.push_back({kind, 0, 0, at, at + seconds});
      at += seconds;
    }
    timeline.seconds = std::max(timeline.seconds, at);
    timeline.idle.push_back(1e-9 * static_cast<double>(run.idle[rank]));
  }
  return timeline;
}

namespace {

// A cluster whose links take a second for each byte, or no time: seconds of communication are then bytes.
Cluster counting(Cluster c, bool fast) {
  constexpr double kBytePerSecond = 1e-9, kInstant = 1e30;  // GB/s
  c.bus_bandwidth_by_nodes.clear(), c.gather_bandwidth_by_nodes.clear(), c.intra_peer_bandwidth.reset();
  c.intra_latency = c.inter_latency = 0, c.intra_efficiency = c.inter_efficiency = 1;
  c.intra_bandwidth = fast ? kBytePerSecond : kInstant;
  c.inter_bandwidth = fast ? kInstant : kBytePerSecond;
  return c;
}

std::vector<LinkTraffic> traffic_of(const StepTime& t) {
  WorkTime w = t.work;
  w += t.recompute;
  return {{"tensor_parallel", 0, 0, w.tensor, w.tensor_hidden},
          {"context_parallel", 0, 0, w.context, w.context_hidden},
          {"expert_parallel", 0, 0, w.expert, w.expert_hidden},
          {"data_parallel", 0, 0, t.data, t.data_hidden}};
}

// Tensors that the pipeline rank that sends the most sends for a micro-batch: activations to the stage after
// each of its own, gradients to the one before, where another rank has these.
int64_t most_transfers(const RunShape& s) {
  std::vector<int64_t> transfers(static_cast<size_t>(s.pp));
  for (size_t i = 1; i < s.stage_ranks.size(); ++i) {
    if (s.stage_ranks[i] == s.stage_ranks[i - 1]) continue;
    for (const int64_t rank : {s.stage_ranks[i - 1], s.stage_ranks[i]})
      transfers[static_cast<size_t>(rank)] += s.stages[i - 1].states_out;
  }
  return std::ranges::max(transfers);
}

}  // namespace

std::vector<LinkTraffic> link_traffic(const RunShape& s, const Cluster& c, const StepTime& time) {
  std::vector<LinkTraffic> all = traffic_of(time);
  const auto fast = traffic_of(step_time(s, counting(c, true), PipelineModel::formula)),
             network = traffic_of(step_time(s, counting(c, false), PipelineModel::formula));
  for (size_t i = 0; i < all.size(); ++i) {
    // Less than a byte is what instant links leave.
    all[i].fast_bytes = std::round(fast[i].exposed + fast[i].hidden);
    all[i].network_bytes = std::round(network[i].exposed + network[i].hidden);
  }
  if (s.pp > 1) {
    const double count = real(s.micro_batches() * most_transfers(s)), bytes = count * transfer_bytes(s);
    const bool crosses = crosses_domains(s, c);
    const double seconds = count * stage_transfer_seconds(s, c);
    all.push_back({"pipeline_transfers", crosses ? 0 : bytes, crosses ? bytes : 0, time.transfers,
                   std::max(0.0, seconds - time.transfers)});
  }
  std::erase_if(all, [](const LinkTraffic& one) { return one.fast_bytes + one.network_bytes < 1; });
  return all;
}

StepTime time_within_one_domain(const RunShape& s, Cluster c) {
  c.fast_domain_size = s.gpus();
  return step_time(s, c);
}

}  // namespace capstan::planner
