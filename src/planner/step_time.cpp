#include "planner/step_time.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "parallel/bucket.hpp"
#include "planner/collectives.hpp"
#include "planner/counts.hpp"
#include "planner/kernels.hpp"
#include "planner/linear_layers.hpp"
#include "planner/memory.hpp"
#include "planner/optimizer_time.hpp"
#include "planner/pipeline.hpp"

namespace capstan::planner {

namespace {

double simulated_seconds(const parallel::PipelineShape& pipeline,
                         const std::vector<parallel::ActionTicks>& ticks,
                         const std::vector<int64_t>& transfers) {
  const auto run = parallel::simulate(pipeline, parallel::make_schedule(pipeline), ticks, transfers);
  CAPSTAN_ASSERT(run.problem.empty(), run.problem);
  return 1e-9 * static_cast<double>(run.ticks);
}

// Seconds of all micro-batches. In its steady state a pipeline takes the same time for each further group of
// micro-batches, so that not more of them than a few groups are simulated.
double pipeline_seconds(const RunShape& s, const std::vector<StageTime>& stages,
                        const std::vector<int64_t>& transfers) {
  parallel::PipelineShape pipeline = pipeline_of(s);
  const std::vector<parallel::ActionTicks> ticks = action_ticks(pipeline, stages);
  const int64_t all = pipeline.micro_batches, group = pipeline.group;
  const int64_t rest = all % group;
  const int64_t few = 4 * group + rest, more = 6 * group + rest;
  if (all <= more || s.schedule == config::PipelineSchedule::gpipe)
    return simulated_seconds(pipeline, ticks, transfers);
  pipeline.micro_batches = few;
  const double first = simulated_seconds(pipeline, ticks, transfers);
  pipeline.micro_batches = more;
  const double second = simulated_seconds(pipeline, ticks, transfers);
  return second + (second - first) * real(all - more) / real(more - few);
}

// A time that all micro-batches take at least: a rank begins when the first micro-batch has passed the stages
// before it, and after its last backward pass the same stages have theirs to do. Zero-bubble schedules keep
// weight gradients for that time.
double least_pipeline_seconds(const RunShape& s, const std::vector<StageTime>& stages, double transfer) {
  using enum config::PipelineSchedule;
  const bool separate = s.schedule == zb_h1 || s.schedule == zb_v;
  const int64_t all = s.micro_batches();
  const auto forward = [&](size_t i) { return stages[i].forward.total(); };
  const auto weights = [&](size_t i) { return stages[i].weight_gradients.total(); };
  const auto backward = [&](size_t i) {
    return stages[i].input_gradients.total() + stages[i].recompute.total() + (separate ? 0 : weights(i));
  };
  std::vector<double> work(static_cast<size_t>(s.pp));
  for (size_t i = 0; i < stages.size(); ++i)
    work[static_cast<size_t>(s.stage_ranks[i])] += stages[i].total().total();
  double before = 0, after = 0, least = 0;
  for (size_t rank = 0; rank < work.size(); ++rank) {
    const double alone = before + real(all) * work[rank];
    double left = 0;
    if (separate) left = real(std::min(all, static_cast<int64_t>(rank) + 1)) * weights(rank) - weights(0);
    if (s.schedule == zb_v)
      left += real(std::min(all, static_cast<int64_t>(rank))) * weights(stages.size() - 1 - rank);
    least = std::max({least, alone, alone - left + after});
    before += forward(rank) + transfer, after += backward(rank) + transfer;
  }
  if (s.vpp > 1 || s.schedule == gpipe) return least;
  // The first rank waits for its first backward pass after min(P, M) forward passes.
  const double passed = before + after - backward(0) - 2 * transfer;
  return std::max(least, passed + real(all) * work[0] - real(std::min(all, s.pp)) * forward(0));
}

// Work of one micro-batch on a pipeline rank.
StageTime rank_time(const RunShape& s, const std::vector<StageTime>& stages, int64_t rank) {
  StageTime sum;
  for (size_t i = 0; i < stages.size(); ++i) {
    if (s.stage_ranks[i] != rank) continue;
    sum.forward += stages[i].forward;
    sum.input_gradients += stages[i].input_gradients;
    sum.weight_gradients += stages[i].weight_gradients;
    sum.recompute += stages[i].recompute;
  }
  return sum;
}

// Communication of data parallelism in a step of one rank, without anything that hides it.
struct DataTraffic {
  double gradients = 0, parameters = 0;
};

// Passes of a step before which sharded parameters are gathered.
double passes_of(const RunShape& s) {
  return 2 * real(s.micro_batches());
}

// Parameters of a rank that a pass gathers where they are sharded, in the mean: all but the two blocks
// (layers, or tables) that one pass leaves to the next.
RankParameters gathered_parameters(const RunShape& s, RankParameters all) {
  if (s.pp > 1) return all;
  const LayerParameters layer = layer_parameters(s, s.is_expert_layer(s.layers - 1));
  const double table = s.tied ? 0 : real(s.vocab * s.hidden), left = 1 - 1 / passes_of(s);
  all.dense -= left * ((layer.sharded + table) / real(s.tp) + layer.replicated);
  all.experts -= left * layer.experts / real(s.ep * s.etp);
  return all;
}

// Parameters of a rank on one of the two grids.
struct GridParameters {
  // Replicas are on `shards` ranks of each optimizer instance, at a distance of `stride`.
  int64_t stride = 1, shards = 1;
  // Those that train, and those that are gathered before a pass (gathered_parameters()).
  double trained = 0, gathered = 0;
  // Buckets of the trained ones, and of all. Each has a collective of its own.
  double trained_buckets = 0, buckets = 0;
};

// The weights of a layer on a rank, from the last one on; of the small ones the first norm alone, before
// which a bucket may be full.
std::vector<double> rank_weights(const RunShape& s, bool expert_layer, ParameterGrid grid) {
  const double h = real(s.hidden), fc1 = s.gated ? 2 : 1;
  if (grid == ParameterGrid::expert) {
    if (!expert_layer) return {};
    const double experts = h * real(s.experts->ffn * s.experts->count) / real(s.ep * s.etp);
    return {experts, fc1 * experts};
  }
  std::vector<double> weights;
  const LinearLayers layers = dense_layers(s, expert_layer);
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer)
    weights.push_back(layer->inputs(s.tp) * layer->outputs(s.tp));
  weights.push_back(h);
  return weights;
}

// The buckets of a rank's weights, which are filled as parallel::plan_buckets() does it: one is full when it
// has `elements`, and ends with its layer where parameters are sharded.
double bucket_count(const RunShape& s, int64_t rank, ParameterGrid grid, double elements) {
  const bool by_layer = s.sharding == config::ShardingStrategy::optim_grads_params;
  double count = 0, open = 0;
  const auto close = [&] { count += open > 0, open = 0; };
  const auto add = [&](double weight) {
    open += weight;
    if (open >= elements) close();
  };
  const auto add_table = [&](bool exists) {
    if (!exists || grid == ParameterGrid::expert) return;
    add(real(s.hidden * s.vocab) / real(s.tp));
    if (by_layer) close();
  };
  for (size_t i = 0; i < s.stages.size(); ++i) {
    if (s.stage_ranks[i] != rank) continue;
    const StageShape& stage = s.stages[i];
    add_table(stage.head && !s.tied);
    for (int64_t layer = 0; layer < stage.layers(); ++layer) {
      for (const double weight : rank_weights(s, layer < stage.expert_layers, grid)) add(weight);
      if (by_layer) close();
    }
    add_table(stage.embedding);
  }
  close();
  return count;
}

GridParameters grid_parameters(const RunShape& s, int64_t rank, ParameterGrid grid, double trained,
                               double gathered) {
  const bool experts = grid == ParameterGrid::expert;
  const int64_t shards = experts ? s.expert_shards() : s.dense_shards();
  const double elements = real(s.bucket_elements.value_or(
      s.sharding >= config::ShardingStrategy::optim_grads
          ? parallel::default_bucket_elements(static_cast<int64_t>(trained), s.dense_shards())
          : parallel::BucketOptions().bucket_elements));
  const double all = bucket_count(s, rank, grid, elements);
  return {.stride = experts ? s.etp * s.ep : s.tp,
          .shards = shards,
          .trained = trained,
          .gathered = gathered,
          // Adapters are small.
          .trained_buckets = s.frozen_base() ? std::ceil(trained / elements) : all,
          .buckets = all};
}

DataTraffic data_traffic(const RunShape& s, const Cluster& c, const GridParameters& grid) {
  using enum config::ShardingStrategy;
  const Group shard = group_of(c, grid.stride, grid.shards, s.gpus()),
              replica = group_of(c, grid.stride * grid.shards, s.instances, s.gpus());
  const auto seconds = [&](Collective collective, double bytes) {
    return collectives_seconds(c, shard, collective, bytes * grid.trained, grid.trained_buckets);
  };
  if (s.sharding == no_shard) return {seconds(Collective::all_reduce, s.reduced_bytes), 0};
  const double slice = grid.trained / real(grid.shards);
  DataTraffic traffic{seconds(Collective::reduce_scatter, s.reduced_bytes),
                      seconds(Collective::all_gather, s.parameter_bytes)};
  // Gradients that are sharded are reduced after each micro-batch.
  if (s.sharding >= optim_grads) traffic.gradients *= real(s.micro_batches());
  if (s.sharding == optim_grads_params)
    traffic.parameters = passes_of(s) * collectives_seconds(c, shard, Collective::all_gather,
                                                            s.parameter_bytes * grid.gathered, grid.buckets);
  // The slice of a rank is reduced between instances once in a step.
  const Collective between = s.shards_over_instances ? Collective::reduce_scatter : Collective::all_reduce;
  traffic.gradients += collective_seconds(c, replica, between, s.reduced_bytes * slice);
  if (s.shards_over_instances)
    traffic.parameters += collective_seconds(c, replica, Collective::all_gather, s.parameter_bytes * slice);
  return traffic;
}

DataTraffic data_traffic(const RunShape& s, const Cluster& c, int64_t rank) {
  const RankParameters trained = trained_parameters(s, rank),
                       frozen = s.frozen_base() ? rank_parameters(s, rank) : RankParameters(),
                       gathered = gathered_parameters(
                           s, {trained.dense + frozen.dense, trained.experts + frozen.experts});
  const DataTraffic dense = data_traffic(
                        s, c, grid_parameters(s, rank, ParameterGrid::dense, trained.dense, gathered.dense)),
                    experts = data_traffic(
                        s, c,
                        grid_parameters(s, rank, ParameterGrid::expert, trained.experts, gathered.experts));
  return {dense.gradients + experts.gradients, dense.parameters + experts.parameters};
}

void add_data_time(const RunShape& s, const DataTraffic& traffic, const StageTime& one, StepTime& step) {
  using enum config::ShardingStrategy;
  const double backward = one.input_gradients.total() + one.weight_gradients.total() + one.recompute.total();
  const double micro_batches = real(s.micro_batches());
  // The passes that hide it: the backward pass of the last micro-batch, the forward pass of the first one,
  // or of each where they communicate each time.
  const double gradients_hide =
      !s.overlap_grad_reduce ? 0 : backward * (s.sharding >= optim_grads ? micro_batches : 1);
  const double parameters_hide = !s.overlap_param_gather ? 0
                                 : s.sharding == optim_grads_params
                                     ? (one.forward.total() + backward) * micro_batches
                                     : one.forward.total();
  // Sharded parameters and gradients hide behind the same passes.
  const double gradients_hidden = std::min(traffic.gradients, gradients_hide);
  const double left = s.sharding == optim_grads_params ? parameters_hide - gradients_hidden : parameters_hide;
  const double hidden = gradients_hidden + std::min(traffic.parameters, std::max(0.0, left));
  step.data_hidden = hidden;
  step.data = traffic.gradients + traffic.parameters - hidden;
}

// How much longer than with kOtherRanks ranks a step waits for the slowest rank. The largest of N deviations
// with a normal distribution grows with the root of ln N; with few ranks other causes outweigh it.
double slowest_rank(int64_t ranks) {
  constexpr double kOtherRanks = 16;
  return std::sqrt(std::log(std::max(kOtherRanks, real(ranks))) / std::log(kOtherRanks));
}

}  // namespace

StepTime step_time(const RunShape& s, const Cluster& c, PipelineModel model) {
  const std::vector<StageTime> stages = stage_times(s, c);
  const double micro_batches = real(s.micro_batches());
  StepTime step;
  // The pipeline rank that works longest.
  StageTime one;
  int64_t busiest = 0;
  for (int64_t rank = 0; rank < s.pp; ++rank) {
    const StageTime time = rank_time(s, stages, rank);
    if (rank == 0 || time.total().total() > one.total().total()) one = time, busiest = rank;
  }
  step.recompute = one.recompute.scaled(micro_batches);
  step.work = one.total().scaled(micro_batches);
  step.work += step.recompute.scaled(-1);
  const double work = step.work.total() + step.recompute.total();
  double pipeline = work;
  if (s.pp > 1 && model == PipelineModel::formula) {
    pipeline = std::max(work, least_pipeline_seconds(s, stages, stage_transfer_seconds(s, c)));
    step.bubble = pipeline - work;
  } else if (s.pp > 1) {
    const double without = pipeline_seconds(s, stages, {});
    pipeline = pipeline_seconds(s, stages, transfer_ticks(s, c));
    step.bubble = without - work;
    step.transfers = std::max(0.0, pipeline - without);
  }
  add_data_time(s, data_traffic(s, c, busiest), one, step);
  step.optimizer =
      update_seconds(s, c, trained_parameters(s, busiest)) + orthogonalization_seconds(s, c, busiest);
  const double sum = pipeline + step.data + step.optimizer;
  step.other = c.other_fraction * slowest_rank(s.gpus()) * sum;
  step.seconds = sum + step.other;
  step.fastest = step.seconds * (1 - c.uncertainty());
  step.slowest = step.seconds * (1 + c.uncertainty());
  return step;
}

std::vector<std::pair<std::string, double>> exposed_parts(const StepTime& t) {
  return {{"gemm", t.work.gemm},
          {"attention", t.work.attention},
          {"memory_bound", t.work.memory},
          {"recomputation", t.recompute.total()},
          {"tensor_parallel", t.work.tensor},
          {"context_parallel", t.work.context},
          {"expert_parallel", t.work.expert},
          {"activation_offload", t.work.offload},
          {"pipeline_transfers", t.transfers},
          {"pipeline_bubble", t.bubble},
          {"data_parallel", t.data},
          {"optimizer", t.optimizer},
          {"other", t.other}};
}

double tokens_per_second(const RunShape& s, double seconds) {
  return real(s.tokens_per_step()) / seconds;
}

double tflops_per_gpu(const RunShape& s, double seconds) {
  return flops_per_token(s) * tokens_per_second(s, seconds) / real(s.gpus()) / 1e12;
}

double model_flops_utilization(const RunShape& s, const Cluster& c, double seconds) {
  return 1e12 * tflops_per_gpu(s, seconds) / peak_flops(c, s.format);
}

}  // namespace capstan::planner
