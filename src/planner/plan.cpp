#include "planner/plan.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "base/text.hpp"
#include "base/wording.hpp"
#include "planner/collectives.hpp"
#include "planner/memory.hpp"
#include "planner/pipeline.hpp"
#include "train/setup/device.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/fit.hpp"
#include "train/trainer/recipe.hpp"

namespace capstan::planner {

double RankMemory::total() const {
  return std::accumulate(bytes.begin(), bytes.end(), cached);
}

namespace {

RankMemory by_formula(const MemoryShape& shape) {
  RankMemory memory;
  const auto set = [&](MemoryCategory category, double bytes) {
    memory.bytes[static_cast<size_t>(category)] = bytes;
  };
  set(MemoryCategory::parameters, shape.parameters);
  set(MemoryCategory::gradients, shape.gradients);
  set(MemoryCategory::main_parameters, shape.main_parameters);
  set(MemoryCategory::moments, shape.moments);
  set(MemoryCategory::activations, shape.activations);
  set(MemoryCategory::workspace, shape.workspace);
  memory.host = shape.host;
  return memory;
}

bool holds_less(const MemoryShape& a, const MemoryShape& b) {
  return a.total() < b.total();
}

// The error of memory by formula, as a fraction (docs/planning.md), and in bytes where a rank needs little.
double formula_error(const RunShape& shape) {
  return shape.experts ? 0.12 : 0.05;
}
constexpr double kLeastFormulaError = 128 << 20;

RankMemory exact_memory(const config::Config& config, const Cluster& cluster, int64_t rank) {
  const train::StepEstimate estimate =
      train::estimate_step(config, rank, static_cast<int>(cluster.gpus_per_node));
  RankMemory memory;
  memory.exact = true;
  for (size_t i = 0; i < kMemoryCategories; ++i)
    memory.bytes[i] = static_cast<double>(estimate.memory.peak_by_category[i]);
  memory.cached = static_cast<double>(estimate.memory.cached());
  memory.host = static_cast<double>(estimate.host_memory.total());
  return memory;
}

// Layers that estimate_step() passes through for one rank of the pipeline: two steps with a few
// micro-batches, whose memory is played again for the others in a tenth of the time. Layers with experts take
// twice as long, for their transfers to many ranks.
int64_t estimated_passes(const RunShape& s, int64_t rank) {
  int64_t layers = 0;
  for (size_t i = 0; i < s.stages.size(); ++i)
    if (s.stage_ranks[i] == rank) layers += s.stages[i].layers() + s.stages[i].mtp_layers;
  const parallel::ShorterStep few = parallel::shorter_step(pipeline_of(s), rank);
  const int64_t left = s.micro_batches() - few.micro_batches;
  return layers * (s.experts ? 2 : 1) * (2 * few.micro_batches + left / 5);
}

bool certainly_fits(const RunShape& s, const Cluster& cluster, const RankMemory& by_formula) {
  return fits_memory(s, cluster, by_formula.total() + formula_reserve(s, cluster), by_formula.host);
}

void set_memory(Plan& plan, const config::Config& config, MemoryChoice choice) {
  const RunShape& s = plan.shape;
  for (const MemoryShape& shape : memory_by_rank(s)) plan.memory.push_back(by_formula(shape));
  std::vector<size_t> order(plan.memory.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return plan.memory[a].total() > plan.memory[b].total(); });
  // Memory differs between the ranks of a pipeline only.
  const std::vector<int64_t> ranks = train::pipeline_ranks(config);
  // What certainly fits is not worth more than a tenth of a second.
  constexpr int64_t kPassesOfTenth = 500;
  plan.passes = certainly_fits(s, plan.cluster, plan.memory[order[0]]) ? kPassesOfTenth : kAffordablePasses;
  for (const size_t rank : order) {
    if (choice == MemoryChoice::formula) break;
    const int64_t needed = estimated_passes(s, static_cast<int64_t>(rank));
    if (choice == MemoryChoice::automatic && needed > plan.passes) break;
    plan.passes -= needed;
    plan.memory[rank] = exact_memory(config, plan.cluster, ranks[rank]);
  }
  for (size_t i = 0; i < plan.memory.size(); ++i)
    if (plan.memory[i].total() > plan.memory[plan.fullest].total()) plan.fullest = i;
  double host = 0;
  for (const RankMemory& memory : plan.memory) host = std::max(host, memory.host);
  plan.host_bytes = host * real(ranks_of_node(s, plan.cluster));
  plan.fits = fits_memory(s, plan.cluster, plan.memory[plan.fullest].total(), host);
}

void set_parts(Plan& plan) {
  const WorkTime& work = plan.time.work;
  const auto hidden = [&](const std::string& name) {
    return name == "tensor_parallel"      ? work.tensor_hidden
           : name == "context_parallel"   ? work.context_hidden
           : name == "expert_parallel"    ? work.expert_hidden
           : name == "activation_offload" ? work.offload_hidden
           : name == "data_parallel"      ? plan.time.data_hidden
                                          : 0;
  };
  for (const auto& [name, exposed] : exposed_parts(plan.time))
    plan.parts.push_back({name, exposed, hidden(name)});
  std::stable_sort(plan.parts.begin(), plan.parts.end(),
                   [](const TimePart& a, const TimePart& b) { return a.exposed > b.exposed; });
}

std::string bytes_text(double bytes) {
  return human_bytes(bytes);
}

// What a part of the step is, as the subject of a sentence.
std::string limit_text(const TimePart& part, const RunShape& s) {
  const auto over = [](int64_t ranks) { return " over " + std::to_string(ranks) + " ranks"; };
  if (part.name == "gemm") return "matrix products";
  if (part.name == "attention") return "attention scores at " + std::to_string(s.seq) + " tokens";
  if (part.name == "memory_bound") return "kernels without matrix products, bound by memory bandwidth";
  if (part.name == "recomputation") return "recomputation of activations";
  if (part.name == "tensor_parallel") return "exposed tensor-parallel communication" + over(s.tp);
  if (part.name == "context_parallel") return "exposed context-parallel communication" + over(s.cp);
  if (part.name == "expert_parallel") return "exposed expert-parallel communication" + over(s.ep);
  if (part.name == "activation_offload") return "exposed copies of activations to and from host memory";
  if (part.name == "pipeline_transfers")
    return "transfers between " + std::to_string(s.pp) + " pipeline stages";
  if (part.name == "pipeline_bubble")
    return "the pipeline bubble of " + std::to_string(s.pp) + " stages with " +
           std::to_string(s.micro_batches()) + " micro-batches";
  if (part.name == "data_parallel") return "exposed data-parallel communication" + over(s.dp * s.cp);
  if (part.name == "optimizer") return "the optimizer";
  return "what the parts do not explain (assumed)";
}

void set_limits(Plan& plan) {
  const RankMemory& memory = plan.memory[plan.fullest];
  if (memory.total() > static_cast<double>(plan.cluster.usable_memory.value))
    plan.limits.push_back("memory: pipeline rank " + std::to_string(plan.fullest) + " needs " +
                          bytes_text(memory.total()) + ", and " +
                          bytes_text(static_cast<double>(plan.cluster.usable_memory.value)) + " are usable");
  if (exceeds_host(plan.cluster, plan.host_bytes))
    plan.limits.push_back("host memory: the " + counted(ranks_of_node(plan.shape, plan.cluster), "rank") +
                          " of a node need " + bytes_text(plan.host_bytes) + ", and a node has " +
                          bytes_text(static_cast<double>(plan.cluster.host_memory->value)));
  for (const TimePart& part : plan.parts) {
    const double fraction = part.exposed / plan.time.seconds;
    if (fraction < 0.05 || part.name == "other" || plan.limits.size() >= 5) continue;
    plan.limits.push_back(limit_text(part, plan.shape) + ": " + fixed(100 * fraction, 0) + "% of the step");
  }
}

void set_warnings(Plan& plan, const config::Config& config) {
  const RunShape& s = plan.shape;
  const Cluster& c = plan.cluster;
  const auto crosses = [&](const char* name, int64_t stride, int64_t size, double WorkTime::*part) {
    if (size > 1 && group_of(c, stride, size, s.gpus()).crosses_domains())
      plan.warnings.push_back(
          std::string(name) + " group of " + std::to_string(size) + " ranks leaves the fast domain of " +
          std::to_string(c.fast_domain()) + " GPUs: its communication takes the network and " +
          significant(plan.time.work.*part, 3) + " s of the step, where within one " +
          "fast domain it would take " + significant(time_within_one_domain(s, c).work.*part, 3) + " s");
  };
  if (c.compute_capability && *c.compute_capability == 0)
    plan.warnings.push_back("the trainer has no backend for " + c.gpu +
                            ": the plan takes the kernels and the allocator of CUDA");
  crosses("tensor-parallel", 1, s.tp, &WorkTime::tensor);
  crosses("expert-parallel", s.etp, s.ep, &WorkTime::expert);
  if (s.tp > 1 && !s.sequence_parallel)
    plan.warnings.push_back(
        "without dist.sequence_parallel each tensor-parallel rank keeps the norms' inputs of "
        "all tokens");
  if (s.experts)
    plan.warnings.push_back(
        "published steps with experts took 1.2 times as long as the formula says (median), and up to 3.4 "
        "times where the host could not launch kernels fast enough; the load of experts is taken as "
        "balanced");
  if (s.format == GemmFormat::fp4)
    plan.warnings.push_back("published steps in FP4 took up to half as long again as the formula says");
  if (config.optimizer.optimizer_cpu_offload && config.optimizer.optimizer_offload_path)
    plan.warnings.push_back(
        "optimizer state in files has the time of host memory here: a disk that is slower bounds the step");
  if (config.dist.distributed_backend == config::DistributedBackend::mpi &&
      c.device == config::DeviceKind::cuda)
    plan.warnings.push_back(
        "dist.distributed_backend=mpi sends through host memory, and the times are those of NCCL");
  if (c.calibration != Calibration::measured)
    plan.warnings.push_back("times are not calibrated on this cluster (calibration: " +
                            std::string(config::enum_name(c.calibration)) +
                            "); the range is an expectation, "
                            "not a bound");
}

}  // namespace

void refuse_missing_formats(const config::Config& config, const Cluster& c) {
  if (c.compute_capability.value_or(0) > 0)
    train::check_precision(config.mixed_precision,
                           {c.gpu, static_cast<int>(std::lround(10 * *c.compute_capability))});
}

Cluster with_memory_limits(const config::Config& config, Cluster cluster) {
  const auto& [device, host] = std::tie(config.resilience.memory_limit, config.resilience.memory_limit_host);
  if (device) cluster.usable_memory.value = std::min(cluster.usable_memory.value, device->value);
  if (!host) return cluster;
  const int64_t of_node = std::min<int64_t>(config.dist.world_size, cluster.gpus_per_node) * host->value;
  cluster.host_memory =
      config::Bytes{cluster.host_memory ? std::min(cluster.host_memory->value, of_node) : of_node};
  return cluster;
}

Plan make_plan(const config::Config& given, const Cluster& whole, MemoryChoice memory) {
  const Cluster cluster = with_memory_limits(given, whole);
  config::Config config = given;
  config.train.device = cluster.device;
  train::refuse_missing_estimates(config);
  refuse_missing_formats(config, cluster);
  Plan plan;
  plan.shape = run_shape(config);
  plan.cluster = cluster;
  plan.time = step_time(plan.shape, cluster);
  set_memory(plan, config, memory);
  set_parts(plan);
  plan.tokens_per_second = tokens_per_second(plan.shape, plan.time.seconds);
  plan.tflops_per_gpu = tflops_per_gpu(plan.shape, plan.time.seconds);
  plan.mfu = model_flops_utilization(plan.shape, cluster, plan.time.seconds);
  set_limits(plan);
  set_warnings(plan, config);
  return plan;
}

double formula_reserve(const RunShape& s, const Cluster& cluster) {
  const bool sharded = s.sharding > config::ShardingStrategy::optim && !s.adapters;
  return formula_error(s) * real(cluster.usable_memory.value) +
         (sharded ? s.gradient_bytes * largest_block(s) : 0);
}

std::optional<RankMemory> exact_fullest(config::Config config, const Cluster& cluster, int64_t& passes) {
  config.train.device = cluster.device;
  const RunShape shape = run_shape(config);
  const std::vector<MemoryShape> by_formula = memory_by_rank(shape);
  const double most = std::max_element(by_formula.begin(), by_formula.end(), holds_less)->total();
  // One rank may take more than by formula, and the one with the most less.
  const double error = std::max(formula_error(shape) * most, kLeastFormulaError);
  std::vector<int64_t> candidates;
  int64_t needed = 0;
  for (int64_t rank = 0; rank < shape.pp; ++rank) {
    if (by_formula[static_cast<size_t>(rank)].total() < most - 2 * error) continue;
    candidates.push_back(rank);
    needed += estimated_passes(shape, rank);
  }
  if (needed > passes) return std::nullopt;
  const std::vector<int64_t> ranks = train::pipeline_ranks(config);
  RankMemory fullest;
  for (const int64_t rank : candidates) {
    passes -= estimated_passes(shape, rank);
    const RankMemory memory = exact_memory(config, cluster, ranks[static_cast<size_t>(rank)]);
    if (memory.total() > fullest.total()) fullest = memory;
    if (fullest.total() > real(cluster.usable_memory.value)) break;
  }
  return fullest;
}

RankMemory fullest_by_formula(const RunShape& shape) {
  const std::vector<MemoryShape> ranks = memory_by_rank(shape);
  RankMemory fullest = by_formula(*std::max_element(ranks.begin(), ranks.end(), holds_less));
  for (const MemoryShape& rank : ranks) fullest.host = std::max(fullest.host, rank.host);
  return fullest;
}

int64_t ranks_of_node(const RunShape& shape, const Cluster& cluster) {
  return std::min(shape.gpus(), cluster.gpus_per_node);
}

bool exceeds_host(const Cluster& cluster, double node_bytes) {
  return cluster.host_memory && node_bytes > static_cast<double>(cluster.host_memory->value);
}

bool fits_memory(const RunShape& shape, const Cluster& cluster, double bytes, double host_bytes) {
  return bytes <= static_cast<double>(cluster.usable_memory.value) &&
         !exceeds_host(cluster, host_bytes * real(ranks_of_node(shape, cluster)));
}

}  // namespace capstan::planner
