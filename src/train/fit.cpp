#include "train/fit.hpp"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "models/registry.hpp"

namespace capstan::train {

namespace {

int64_t host_memory() {
  int64_t bytes = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  try {
    const std::string text = read_file("/sys/fs/cgroup/memory.max", 64);
    if (const auto limit = parse_int(text.substr(0, text.find('\n')))) bytes = std::min(bytes, *limit);
  } catch (const Error&) {  // no control group of the second version: nothing else limits
  }
  return bytes;
}

struct Way {
  std::string overrides;
  config::Config config;
};

// Ways to a smaller step, the cheapest in time first. What they change keeps the mathematics: a smaller micro-batch leaves the global
// one as it is, also where it follows from the other.
std::vector<Way> smaller_steps(const config::Config& config) {
  std::vector<Way> ways;
  const auto add = [&](std::string overrides, const config::Config& smaller) {
    if (!overrides.empty()) ways.push_back({overrides.substr(1), smaller});
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
    ways.push_back({overrides.substr(1), again});
  };
  std::vector<Way> bases{{"", config}};
  if (config.validation.eval_interval &&
      config.validation.eval_micro_batch_size.value_or(0) > config.train.micro_batch_size) {
    bases.push_back(
        {" validation.eval_micro_batch_size=" + std::to_string(config.train.micro_batch_size), config});
    bases.back().config.validation.eval_micro_batch_size = config.train.micro_batch_size;
  }
  if (config.checkpoint.async_save && config.checkpoint.save_interval)
    for (size_t i = 0, count = bases.size(); i < count; ++i) {
      Way synchronous = bases[i];
      synchronous.overrides += " checkpoint.async_save=false";
      synchronous.config.checkpoint.async_save = false;
      bases.push_back(std::move(synchronous));
    }
  for (const Way& base : bases)
    for (int64_t micro = config.train.micro_batch_size; micro >= 1; micro /= 2) {
      if (config.train.micro_batch_size % micro != 0) break;
      config::Config smaller = base.config;
      smaller.train.micro_batch_size = micro;
      const bool changed = micro != config.train.micro_batch_size;
      add(base.overrides +
              (changed ? " train.micro_batch_size=" + std::to_string(micro) +
                             " train.global_batch_size=" + std::to_string(*config.train.global_batch_size)
                       : ""),
          smaller);
    }
  return ways;
}

}  // namespace

int64_t memory_limit(const config::Config& config, int local_ranks) {
  if (config.resilience.memory_limit) return config.resilience.memory_limit->value;
  return host_memory() / std::max(1, local_ranks);
}

std::string memory_text(const MemoryUse& use) {
  std::string text;
  for (size_t owner = 0; owner < kMemoryOwners; ++owner)
    if (const int64_t bytes = use.at_peak_by_owner[owner])
      text += (text.empty() ? "" : " | ") + std::string(name_of(static_cast<MemoryOwner>(owner))) + " " +
              human_bytes(static_cast<double>(bytes));
  if (use.kernel_scratch > 0)
    text += (text.empty() ? "kernel scratch " : " | kernel scratch ") +
            human_bytes(static_cast<double>(use.kernel_scratch));
  return text;
}

void check_fits(const config::Config& config, const StepEstimate& estimate, int64_t rank, int local_ranks) {
  const int64_t limit = memory_limit(config, local_ranks);
  if (estimate.memory.total() <= limit) return;
  std::string help;
  int found = 0;
  int64_t least = estimate.memory.total();
  for (const Way& way : smaller_steps(config)) {
    const int64_t peak = estimate_step(way.config, rank, local_ranks).memory.total();
    least = std::min(least, peak);
    if (peak > limit) continue;
    help +=
        (help.empty() ? "" : ", or ") + way.overrides + " (" + human_bytes(static_cast<double>(peak)) + ")";
    if (++found == 3) break;
  }
  if (help.empty())
    help = "neither a micro-batch of 1 nor full recomputation nor saving in the step's own time fits (" +
           human_bytes(static_cast<double>(least)) + "): a smaller model, a shorter sequence or more memory";
  const std::string whose =
      config.resilience.memory_limit ? "resilience.memory_limit allows " : "this rank has ";
  fail(ErrorCode::no_fit,
       "a step needs " + human_bytes(static_cast<double>(estimate.memory.total())) + " (" +
           memory_text(estimate.memory) + ") and " + whose + human_bytes(static_cast<double>(limit)),
       help);
}

}  // namespace capstan::train
