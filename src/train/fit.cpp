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

// Ways to a smaller step, the cheapest in time first. What they change keeps the mathematics.
std::vector<Way> smaller_steps(const config::Config& config) {
  std::vector<Way> ways;
  const auto recomputing = [](config::Config c) {
    c.model.recompute_granularity = config::RecomputeGranularity::full;
    c.model.recompute_method = config::RecomputeMethod::uniform;
    c.model.recompute_num_layers = 1;
    return c;
  };
  const std::string recompute =
      "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1";
  const bool recomputes = config.model.recompute_granularity == config::RecomputeGranularity::full;
  for (int64_t micro = config.train.micro_batch_size; micro >= 1; micro /= 2) {
    config::Config smaller = config;
    smaller.train.micro_batch_size = micro;
    const bool changed = micro != config.train.micro_batch_size;
    if (changed && config.train.micro_batch_size % micro != 0) break;
    const std::string text = "train.micro_batch_size=" + std::to_string(micro);
    if (changed) ways.push_back({text, smaller});
    if (!recomputes) ways.push_back({changed ? text + " " + recompute : recompute, recomputing(smaller)});
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

void check_fits(const config::Config& config, const StepEstimate& estimate, int local_ranks) {
  const int64_t limit = memory_limit(config, local_ranks);
  if (estimate.memory.total() <= limit) return;
  std::string help;
  int found = 0;
  int64_t least = estimate.memory.total();
  for (const Way& way : smaller_steps(config)) {
    const int64_t peak =
        estimate_step(way.config, *models::build(way.config.model), local_ranks).memory.total();
    least = std::min(least, peak);
    if (peak > limit) continue;
    help +=
        (help.empty() ? "" : ", or ") + way.overrides + " (" + human_bytes(static_cast<double>(peak)) + ")";
    if (++found == 3) break;
  }
  if (help.empty())
    help = "neither a micro-batch of 1 nor full recomputation fits (" +
           human_bytes(static_cast<double>(least)) + "): a smaller model, a shorter sequence or more memory";
  const std::string whose =
      config.resilience.memory_limit ? "resilience.memory_limit allows " : "this rank has ";
  fail(ErrorCode::no_fit,
       "a step needs " + human_bytes(static_cast<double>(estimate.memory.total())) + " (" +
           memory_text(estimate.memory) + ") and " + whose + human_bytes(static_cast<double>(limit)),
       help);
}

}  // namespace capstan::train
