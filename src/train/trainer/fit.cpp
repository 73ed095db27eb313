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
#include "base/wording.hpp"
#include "comm/mesh.hpp"
#include "train/setup/device.hpp"
#include "train/setup/model.hpp"
#include "train/trainer/smaller_steps.hpp"

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

}  // namespace

std::optional<MemoryLimit> memory_limit(const config::Config& config, MemoryKind kind,
                                        MemorySharers sharers) {
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
    limit = {host_memory() / std::max(1, sharers.host), "this rank has"};
  else if (const auto bytes = backend.memory ? backend.memory(sharers) : std::nullopt)
    limit = {*bytes - backend.library_memory, "its GPU has beside " +
                                                  human_bytes(static_cast<double>(backend.library_memory)) +
                                                  " for CUDA and NCCL"};
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
                                            MemorySharers sharers,
                                            const std::optional<MemoryLimit>& cluster) {
  for (const MemoryKind kind : {MemoryKind::device, MemoryKind::host}) {
    auto limit = memory_limit(config, kind, sharers);
    if (kind == MemoryKind::device && cluster && (!limit || cluster->bytes < limit->bytes)) limit = cluster;
    if (limit && use_of(estimate, kind).total() > limit->bytes) return ExceededLimit{kind, *limit};
  }
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
                                   const std::function<StepNeed(const config::Config&)>& need_of) {
  const SmallerSteps steps = find_smaller_steps(config, need_of);
  const auto text = [](const SmallerStep& step) {
    return shell_line(step.overrides) + " (" + human_bytes(static_cast<double>(step.bytes)) + ")";
  };
  std::vector<std::string> proposals;
  for (const SmallerStep& step : steps.fitting) proposals.push_back(text(step));
  if (!proposals.empty()) return join(proposals, ", or ") + "; {force}";
  const std::string more = std::string("choose a smaller model, a shorter sequence or ") +
                           (exceeded.kind == MemoryKind::host ? "more host memory" : "more memory");
  if (steps.smallest.overrides.empty()) return "no override makes the step smaller; " + more + ", or {force}";
  return "no overrides that were tried fit, not even " + text(steps.smallest) + "; " + more + ", or {force}";
}

// The steps of the ranks that a limit concerns, and the limit that they exceed.
class MemoryCheck {
 public:
  MemoryCheck(const config::Config& config, const StepEstimate& estimate, int64_t rank, MemorySharers sharers,
              const std::optional<MemoryLimit>& cluster)
      : config_(config), estimate_(estimate), rank_(rank), sharers_(sharers), cluster_(cluster) {
    steps_ = all_stages_ ? steps_of(config) : RankSteps{{rank, estimate}};
    for (const auto& [r, step] : steps_)
      if (!exceeded_) exceeded_ = exceeded_limit(config, step, sharers, cluster_);
  }

  // Empty: the step fits.
  std::string message() const {
    if (!exceeded_) return {};
    const auto& [rank, step] = largest(steps_, exceeded_->kind);
    const MemoryUse& needed = use_of(step, exceeded_->kind);
    return "a step needs " + human_bytes(static_cast<double>(needed.total())) +
           (exceeded_->kind == MemoryKind::host ? " of host memory" : "") +
           (all_stages_ ? " on rank " + std::to_string(rank) : "") + " (" + memory_text(needed) + ") and " +
           exceeded_->limit.source + " " + human_bytes(static_cast<double>(exceeded_->limit.bytes));
  }

  std::string help() const {
    return smaller_steps_that_fit(config_, *exceeded_,
                                  [this](const config::Config& asked) { return need_of(asked); });
  }

 private:
  StepEstimate step_of(const config::Config& asked, int64_t rank) const {
    return estimate_step(asked, rank, sharers_.host, estimate_.resident_data, estimate_.transport);
  }
  RankSteps steps_of(const config::Config& asked) const {
    RankSteps steps;
    for (const int64_t rank : all_stages_ ? pipeline_ranks(asked) : std::vector{rank_})
      steps.emplace_back(rank, step_of(asked, rank));
    return steps;
  }
  // The other stages matter only where the one that needs the most fits.
  StepNeed need_of(const config::Config& asked) const {
    const auto within = [&](const StepEstimate& one) {
      return !exceeded_limit(asked, one, sharers_, cluster_);
    };
    const int64_t first = largest(steps_, exceeded_->kind).first;
    RankSteps steps{{first, step_of(asked, first)}};
    if (all_stages_ && within(steps.front().second)) steps = steps_of(asked);
    return {use_of(largest(steps, exceeded_->kind).second, exceeded_->kind).total(),
            std::ranges::all_of(steps, [&](const auto& rank_step) { return within(rank_step.second); })};
  }

  const config::Config& config_;
  const StepEstimate& estimate_;
  const int64_t rank_;
  const MemorySharers sharers_;
  const std::optional<MemoryLimit> cluster_;
  // A limit of the recipe or of a cluster holds for every rank. All ranks come to the same answer, that of
  // the stage that needs the most memory.
  const bool all_stages_ = (has_limit(config_) || cluster_) && config_.dist.pipeline_model_parallel_size > 1;
  RankSteps steps_;
  std::optional<ExceededLimit> exceeded_;
};

}  // namespace

void check_fits(const config::Config& config, const StepEstimate& estimate, int64_t rank,
                MemorySharers sharers, const std::optional<MemoryLimit>& cluster) {
  const MemoryCheck check(config, estimate, rank, sharers, cluster);
  if (const std::string message = check.message(); !message.empty())
    fail(ErrorCode::no_fit, message, check.help());
}

std::string memory_excess(const config::Config& config, const StepEstimate& estimate, int64_t rank,
                          MemorySharers sharers, const std::optional<MemoryLimit>& cluster) {
  return MemoryCheck(config, estimate, rank, sharers, cluster).message();
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
