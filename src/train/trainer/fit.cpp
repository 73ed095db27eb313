#include "train/trainer/fit.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/mesh.hpp"
#include "models/registry.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"

namespace capstan::train {

namespace {

int64_t host_memory() {
  int64_t bytes = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  // Such files have size 0, so they are read as streams. Only a control group of version 2 is a further
  // limit.
  std::string text;
  std::getline(std::ifstream("/sys/fs/cgroup/memory.max"), text);
  if (const auto limit = parse_int(text)) bytes = std::min(bytes, *limit);
  return bytes;
}

struct SmallerStep {
  std::string overrides;
  config::Config config;
};

// Changes to a smaller step, the cheapest in time first. They keep the mathematics: a smaller micro-batch
// leaves the global one as it is, also where it follows from the other.
std::vector<SmallerStep> smaller_steps(const config::Config& config) {
  std::vector<SmallerStep> steps;
  const auto add = [&](std::string overrides, const config::Config& smaller) {
    if (!overrides.empty()) steps.push_back({overrides.substr(1), smaller});
    const config::ModelConfig& m = smaller.model;
    const bool selective = m.recompute_granularity == config::RecomputeGranularity::selective;
    if (m.recompute_granularity == config::RecomputeGranularity::full &&
        m.recompute_method == config::RecomputeMethod::uniform && m.recompute_num_layers == 1)
      return;
    config::Config again = smaller;
    again.model.recompute_granularity = config::RecomputeGranularity::full;
    again.model.recompute_method = config::RecomputeMethod::uniform;
    again.model.recompute_num_layers = 1;
    again.model.recompute_modules.clear();
    overrides +=
        " model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1";
    if (selective && m.recompute_modules != std::vector{config::RecomputeModule::core_attn})
      overrides += " ~model.recompute_modules";
    steps.push_back({overrides.substr(1), again});
  };
  std::vector<SmallerStep> bases{{"", config}};
  if (config.validation.eval_interval &&
      config.validation.eval_micro_batch_size.value_or(0) > config.train.micro_batch_size) {
    bases.push_back(
        {" validation.eval_micro_batch_size=" + std::to_string(config.train.micro_batch_size), config});
    bases.back().config.validation.eval_micro_batch_size = config.train.micro_batch_size;
  }
  if (config.checkpoint.async_save && config.checkpoint.save_interval)
    for (size_t i = 0, count = bases.size(); i < count; ++i) {
      SmallerStep synchronous = bases[i];
      synchronous.overrides += " checkpoint.async_save=false";
      synchronous.config.checkpoint.async_save = false;
      bases.push_back(std::move(synchronous));
    }
  if (config.optimizer.optimizer_cpu_offload && !backend_of(config.train.device).shares_host_memory)
    for (size_t i = 0, count = bases.size(); i < count; ++i) {
      SmallerStep on_device = bases[i];
      on_device.overrides += " optimizer.optimizer_cpu_offload=false";
      on_device.config.optimizer.optimizer_cpu_offload = false;
      bases.push_back(std::move(on_device));
    }
  for (const SmallerStep& base : bases)
    for (int64_t micro = config.train.micro_batch_size; micro >= 1; micro /= 2) {
      if (config.train.micro_batch_size % micro != 0) break;
      config::Config smaller = base.config;
      smaller.train.micro_batch_size = micro;
      // Evaluation has the micro-batches of training unless the recipe says otherwise.
      if (smaller.validation.eval_micro_batch_size == config.train.micro_batch_size)
        smaller.validation.eval_micro_batch_size = micro;
      const bool changed = micro != config.train.micro_batch_size;
      add(base.overrides +
              (changed ? " train.micro_batch_size=" + std::to_string(micro) +
                             " train.global_batch_size=" + std::to_string(*config.train.global_batch_size)
                       : ""),
          smaller);
    }
  return steps;
}

}  // namespace

std::optional<MemoryLimit> memory_limit(const config::Config& config, MemoryKind kind, int local_ranks) {
  const auto& [device, host] = std::tie(config.resilience.memory_limit, config.resilience.memory_limit_host);
  const bool shared = backend_of(config.train.device).shares_host_memory;
  std::optional<MemoryLimit> limit;
  const auto consider = [&](const std::optional<config::Bytes>& bytes, const char* field) {
    if (bytes && (!limit || bytes->value < limit->bytes))
      limit = {bytes->value, "resilience." + std::string(field) + " allows"};
  };
  if (kind == MemoryKind::device || shared) consider(device, "memory_limit");
  if (kind == MemoryKind::host || shared) consider(host, "memory_limit_host");
  if (limit) return limit;
  const DeviceBackend& backend = backend_of(config.train.device);
  if (kind == MemoryKind::host || backend.lies_in_host_memory)
    limit = {host_memory() / std::max(1, local_ranks), "this rank has"};
  else if (const auto bytes = backend.memory ? backend.memory(local_ranks) : std::nullopt)
    limit = {*bytes, "its GPU has"};
  return limit;
}

int64_t resident_peak() {
  std::ifstream status("/proc/self/status");
  int64_t kib = 0;
  for (std::string key; status >> key;) {
    if (key == "VmHWM:" && status >> kib) break;
    status.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 1024 * kib;
}

std::vector<int64_t> pipeline_ranks(const config::Config& config) {
  const comm::Mesh mesh(mesh_sizes(config, config.dist.world_size), 0);
  return mesh.dense().group_of(0, {comm::Axis::pp});
}

std::string memory_text(const MemoryUse& use) {
  std::string text;
  for (size_t i = 0; i < kMemoryCategories; ++i)
    if (const int64_t bytes = use.peak_by_category[i])
      text += (text.empty() ? "" : " | ") + std::string(name_of(static_cast<MemoryCategory>(i))) + " " +
              human_bytes(static_cast<double>(bytes));
  if (const int64_t bytes = use.cached())
    text += (text.empty() ? "" : " | ") + std::string("cached ") + human_bytes(static_cast<double>(bytes));
  return text;
}

namespace {

bool has_limit(const config::Config& config) {
  return config.resilience.memory_limit || config.resilience.memory_limit_host;
}

// The first limit that a step exceeds.
struct ExceededLimit {
  MemoryKind kind;
  MemoryLimit limit;
};
const MemoryUse& use_of(const StepEstimate& estimate, MemoryKind kind) {
  return kind == MemoryKind::device ? estimate.memory : estimate.host_memory;
}
std::optional<ExceededLimit> exceeded_limit(const config::Config& config, const StepEstimate& estimate,
                                            int local_ranks) {
  for (const MemoryKind kind : {MemoryKind::device, MemoryKind::host})
    if (const auto limit = memory_limit(config, kind, local_ranks);
        limit && use_of(estimate, kind).total() > limit->bytes)
      return ExceededLimit{kind, *limit};
  return std::nullopt;
}

// The steps of ranks that are held against the limits: of one rank of each stage, or of one rank.
using RankSteps = std::vector<std::pair<int64_t, StepEstimate>>;

// The rank whose step needs the most of a kind of memory.
const std::pair<int64_t, StepEstimate>& largest(const RankSteps& steps, MemoryKind kind) {
  return *std::max_element(steps.begin(), steps.end(), [&](const auto& a, const auto& b) {
    return use_of(a.second, kind).total() < use_of(b.second, kind).total();
  });
}

// Help: overrides whose step fits, each with its need of the memory that the step of the recipe exceeds.
std::string smaller_steps_that_fit(const config::Config& config, const ExceededLimit& exceeded,
                                   int64_t needed, int local_ranks,
                                   const std::function<RankSteps(const config::Config&)>& steps_of) {
  std::string help;
  int found = 0;
  int64_t least = needed;
  for (const SmallerStep& step : smaller_steps(config)) {
    const RankSteps steps = steps_of(step.config);
    const int64_t peak = use_of(largest(steps, exceeded.kind).second, exceeded.kind).total();
    least = std::min(least, peak);
    if (std::any_of(steps.begin(), steps.end(), [&](const auto& rank_step) {
          return exceeded_limit(step.config, rank_step.second, local_ranks).has_value();
        }))
      continue;
    help +=
        (help.empty() ? "" : ", or ") + step.overrides + " (" + human_bytes(static_cast<double>(peak)) + ")";
    if (++found == 3) break;
  }
  if (!help.empty()) return help;
  const bool saves_asynchronously = config.checkpoint.async_save && config.checkpoint.save_interval;
  return std::string("neither a micro-batch of 1 nor full recomputation ") +
         (saves_asynchronously ? "nor synchronous checkpoints (checkpoint.async_save=false) " : "") +
         "fits (" + human_bytes(static_cast<double>(least)) +
         "); choose a smaller model, a shorter sequence or more memory";
}

}  // namespace

void check_fits(const config::Config& config, const StepEstimate& estimate, int64_t rank, int local_ranks) {
  // A limit of the recipe holds for every rank. All ranks come to the same answer, that of the stage that
  // needs the most memory.
  const bool all_stages = has_limit(config) && config.dist.pipeline_model_parallel_size > 1;
  const auto steps_of = [&](const config::Config& asked) {
    RankSteps steps;
    for (const int64_t r : all_stages ? pipeline_ranks(asked) : std::vector{rank})
      steps.emplace_back(r, estimate_step(asked, r, local_ranks, estimate.resident_data, estimate.transport));
    return steps;
  };
  const RankSteps steps = all_stages ? steps_of(config) : RankSteps{{rank, estimate}};
  std::optional<ExceededLimit> exceeded;
  for (const auto& [r, step] : steps)
    if (!exceeded) exceeded = exceeded_limit(config, step, local_ranks);
  if (!exceeded) return;
  const auto& [largest_rank, step] = largest(steps, exceeded->kind);
  const MemoryUse& needed = use_of(step, exceeded->kind);
  fail(ErrorCode::no_fit,
       "a step needs " + human_bytes(static_cast<double>(needed.total())) +
           (exceeded->kind == MemoryKind::host ? " of host memory" : "") +
           (all_stages ? " on rank " + std::to_string(largest_rank) : "") + " (" + memory_text(needed) +
           ") and " + exceeded->limit.source + " " + human_bytes(static_cast<double>(exceeded->limit.bytes)),
       smaller_steps_that_fit(config, *exceeded, needed.total(), local_ranks, steps_of));
}

int ranks_on_one_host(const config::Config& config) {
  return static_cast<int>(std::min<int64_t>(config.dist.world_size, 1 << 20));
}

void check_memory_limit(const config::Config& config, int64_t resident_data) {
  if (!has_limit(config)) return;
  const int local_ranks = ranks_on_one_host(config);
  check_fits(config, estimate_step(config, 0, local_ranks, resident_data), 0, local_ranks);
}

}  // namespace capstan::train
