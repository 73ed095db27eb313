#include "train/trainer/fit.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/mesh.hpp"
#include "models/registry.hpp"
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

int64_t memory_limit(const config::Config& config, int local_ranks) {
  if (config.resilience.memory_limit) return config.resilience.memory_limit->value;
  return host_memory() / std::max(1, local_ranks);
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
  for (size_t i = 0; i < kMemoryCategories; ++i)
    if (const int64_t bytes = use.pinned_by_category[i])
      text += (text.empty() ? "pinned " : " | pinned ") +
              std::string(name_of(static_cast<MemoryCategory>(i))) + " " +
              human_bytes(static_cast<double>(bytes));
  for (const auto& [name, bytes] :
       {std::pair("cached", use.cached()), std::pair("kernel scratch", use.kernel_scratch)})
    if (bytes > 0)
      text += (text.empty() ? "" : " | ") + std::string(name) + " " + human_bytes(static_cast<double>(bytes));
  return text;
}

namespace {
struct RankStep {
  int64_t rank = 0;
  StepEstimate estimate;
};
RankStep largest_step(const config::Config& config, int local_ranks) {
  RankStep largest;
  for (const int64_t rank : pipeline_ranks(config)) {
    StepEstimate estimate = estimate_step(config, rank, local_ranks);
    if (rank == 0 || estimate.memory.total() > largest.estimate.memory.total())
      largest = {rank, std::move(estimate)};
  }
  return largest;
}
}  // namespace

void check_fits(const config::Config& config, const StepEstimate& estimate, int64_t rank, int local_ranks) {
  // A limit of the recipe holds for every rank. All ranks come to the same answer, that of the stage that
  // needs the most memory.
  const bool all_stages = config.resilience.memory_limit && config.dist.pipeline_model_parallel_size > 1;
  const auto step_of = [&](const config::Config& asked) {
    return all_stages ? largest_step(asked, local_ranks)
                      : RankStep{rank, estimate_step(asked, rank, local_ranks)};
  };
  const RankStep asked = all_stages ? step_of(config) : RankStep{rank, estimate};
  const MemoryUse& needed = asked.estimate.memory;
  const int64_t limit = memory_limit(config, local_ranks);
  if (needed.total() <= limit) return;
  std::string help;
  int found = 0;
  int64_t least = needed.total();
  for (const SmallerStep& step : smaller_steps(config)) {
    const int64_t peak = step_of(step.config).estimate.memory.total();
    least = std::min(least, peak);
    if (peak > limit) continue;
    help +=
        (help.empty() ? "" : ", or ") + step.overrides + " (" + human_bytes(static_cast<double>(peak)) + ")";
    if (++found == 3) break;
  }
  if (help.empty())
    help =
        "neither a micro-batch of 1 nor full recomputation nor synchronous checkpoints "
        "(checkpoint.async_save=false) fits (" +
        human_bytes(static_cast<double>(least)) + "): a smaller model, a shorter sequence or more memory";
  const std::string whose =
      config.resilience.memory_limit ? "resilience.memory_limit allows " : "this rank has ";
  fail(ErrorCode::no_fit,
       "a step needs " + human_bytes(static_cast<double>(needed.total())) +
           (all_stages ? " on rank " + std::to_string(asked.rank) : "") + " (" + memory_text(needed) +
           ") and " + whose + human_bytes(static_cast<double>(limit)),
       help);
}

int ranks_on_one_host(const config::Config& config) {
  return static_cast<int>(std::min<int64_t>(config.dist.world_size, 1 << 20));
}

void check_memory_limit(const config::Config& config) {
  if (!config.resilience.memory_limit) return;
  const int local_ranks = ranks_on_one_host(config);
  check_fits(config, estimate_step(config, 0, local_ranks), 0, local_ranks);
}

}  // namespace capstan::train
