#include "planner/search.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include "base/error.hpp"
#include "planner/memory.hpp"
#include "planner/overrides.hpp"

namespace capstan::planner {

namespace {

using config::PipelineSchedule;
using config::ShardingStrategy;

// Pipelines that are simulated, and recipes that are resolved, at most.
constexpr size_t kSimulated = 120, kResolved = 200;

// A layout before anything is built for it. Its shape has no stages until with_stages().
struct Scored {
  RunShape shape;
  double seconds = 0, bytes = 0;
  // The least comes first. Of equal times that with the least context parallelism: a factor of two is 0.1 %.
  double order() const { return seconds * (1 + 1e-3 * std::log2(real(shape.cp))); }
};

RunShape with_stages(RunShape shape) {
  CAPSTAN_ASSERT(divide_layers(shape), "layers were divided before");
  return shape;
}

// Divisors of `number` up to `most`.
std::vector<int64_t> sizes(int64_t number, int64_t most) {
  std::vector<int64_t> found;
  for (int64_t size = 1; size <= std::min(number, most); ++size)
    if (number % size == 0) found.push_back(size);
  return found;
}

class Enumeration {
 public:
  Enumeration(const RunShape& base, const Cluster& cluster, int64_t gpus)
      : base_(base), cluster_(cluster), gpus_(gpus), selective_(selective_recomputations(base)) {}

  void run() {
    visit([this](const RunShape& s) { try_grid(s); });
  }

  // The nearest batches, one less and one more than that of the recipe, that a layout divides.
  std::vector<int64_t> nearest_batches() const {
    int64_t below = 0, above = std::numeric_limits<int64_t>::max();
    visit([&](RunShape s) {
      if (!divide_layers(s)) return;
      // At least a micro-batch for each pipeline rank.
      const int64_t fewest = s.pp * s.dp, down = s.global_batch / s.dp * s.dp;
      if (down >= fewest) below = std::max(below, down);
      above = std::min(above, std::max(down + s.dp, fewest));
    });
    std::vector<int64_t> batches;
    if (below > 0) batches.push_back(below);
    if (above < std::numeric_limits<int64_t>::max()) batches.push_back(above);
    return batches;
  }

  int64_t tried = 0, fitting = 0;
  // Those that fit by formula, and those that may fit.
  std::vector<Scored> scored;

 private:
  // Calls `layout` for all sizes of parallelism that divide the GPUs and the tensors.
  void visit(const std::function<void(const RunShape&)>& layout) const {
    RunShape s = base_;
    s.vpp = 1;
    for (const int64_t tp : sizes(gpus_, cluster_.fast_domain())) {
      if (!divides_tensors(base_, tp)) continue;
      s.tp = tp, s.sequence_parallel = tp > 1;
      for (const int64_t pp : sizes(gpus_ / tp, base_.layers + 2))
        for (const int64_t cp : sizes(gpus_ / (tp * pp), std::max<int64_t>(1, base_.seq / 1024))) {
          if (cp > 1 && base_.seq % (2 * cp) != 0) continue;
          s.pp = s.group = pp, s.cp = cp, s.dp = gpus_ / (tp * pp * cp);
          for (const auto& [ep, etp] : expert_sizes(tp, pp)) {
            s.ep = ep, s.etp = etp;
            layout(s);
          }
        }
    }
  }

  // Of expert parallelism, and of tensor parallelism of the experts, which divides that of other layers.
  std::vector<std::pair<int64_t, int64_t>> expert_sizes(int64_t tp, int64_t pp) const {
    if (!base_.experts) return {{1, tp}};
    std::vector<std::pair<int64_t, int64_t>> found;
    for (const int64_t etp : sizes(tp, tp))
      for (const int64_t ep : sizes(base_.experts->count, gpus_ / pp))
        if (gpus_ / pp % (ep * etp) == 0 && base_.experts->ffn % etp == 0) found.emplace_back(ep, etp);
    return found;
  }

  void try_grid(RunShape s) {
    if (s.global_batch % s.dp != 0) return;
    const int64_t samples = s.global_batch / s.dp;
    for (const int64_t size : sizes(samples, samples / s.pp)) {
      s.micro_batch = size;
      const size_t before = scored.size();
      for (s.vpp = 1; s.vpp <= (s.pp > 1 ? base_.layers + 2 : 1); ++s.vpp)
        for (const PipelineSchedule schedule : schedules(s)) {
          s.schedule = schedule;
          if (divide_layers(s)) try_shardings(s);
        }
      // No larger micro-batch fits where this one does not.
      if (scored.size() == before) return;
    }
  }

  std::vector<PipelineSchedule> schedules(const RunShape& s) const {
    std::vector<PipelineSchedule> found;
    if (s.vpp == 1 || s.micro_batches() % s.pp == 0) found.push_back(default_schedule(s.vpp));
    // Frozen weights have no gradients that could be delayed.
    if (s.pp == 1 || s.frozen_base()) return found;
    if (s.vpp == 1) found.push_back(PipelineSchedule::zb_h1);
    if (s.vpp == 2) found.push_back(PipelineSchedule::zb_v);
    return found;
  }

  void try_shardings(RunShape s) {
    using enum ShardingStrategy;
    for (const ShardingStrategy sharding : {optim, optim_grads, optim_grads_params}) {
      // Without replicas nothing is sharded; with a pipeline each micro-batch would communicate again.
      if (sharding != optim && (s.pp > 1 || s.dp * s.cp == 1)) continue;
      s.sharding = sharding;
      s.overlap_grad_reduce = sharding != base_.sharding || base_.overlap_grad_reduce;
      s.overlap_param_gather = sharding != base_.sharding || base_.overlap_param_gather;
      s.recompute = {};
      score(s);
      for (const auto& forms : {selective_, partial_recomputations(s), {RecomputeShape{.full = true}}})
        for (const RecomputeShape& recompute : forms) {
          s.recompute = recompute;
          score(s);
        }
    }
  }

  void score(const RunShape& s) {
    ++tried;
    const RankMemory memory = fullest_by_formula(s);
    const double bytes = memory.total();
    if (!fits_memory(s, cluster_, bytes - formula_reserve(s, cluster_), memory.host)) return;
    fitting += bytes <= real(cluster_.usable_memory.value) ? 1 : 0;
    scored.push_back({s, step_time(s, cluster_, PipelineModel::formula).seconds, bytes});
    scored.back().shape.stages = {}, scored.back().shape.stage_ranks = {};
  }

  const RunShape& base_;
  const Cluster& cluster_;
  const int64_t gpus_;
  const std::vector<RecomputeShape> selective_;
};

// What layouts have in common that differ in recomputation only. Without a pipeline the schedule is none.
using LayoutKey = std::array<int64_t, 9>;
LayoutKey key_of(const RunShape& s) {
  const int64_t schedule = s.pp > 1 ? static_cast<int64_t>(s.schedule) : -1;
  return {s.tp, s.pp, s.vpp, s.cp, s.ep, s.etp, s.micro_batch, schedule, static_cast<int64_t>(s.sharding)};
}

// Whether a layout differs from a listed one in nothing but sharding, recomputation and how samples are
// divided (context parallelism with a larger micro-batch instead of data parallelism), with the same time.
bool is_variant(const RunShape& a, double seconds, const Layout& b) {
  RunShape same = a;
  same.cp = b.shape.cp, same.micro_batch = b.shape.micro_batch, same.sharding = b.shape.sharding;
  return key_of(same) == key_of(b.shape) && std::abs(seconds / b.time.seconds - 1) < 2e-3;
}

// The layouts that fit and that no other beats in time and memory by formula, the fastest first.
// sorted: the fastest first.
std::vector<Scored> front_of(const std::vector<Scored>& sorted, const Cluster& cluster) {
  std::vector<Scored> front;
  auto least = static_cast<double>(cluster.usable_memory.value);
  for (const Scored& one : sorted)
    if (one.bytes < least) front.push_back(one), least = one.bytes;
  return front;
}

// Turns scored layouts into recipes.
class LayoutList {
 public:
  LayoutList(const RunShape& base, const Cluster& cluster, const Resolver& resolve)
      : base_(base), cluster_(cluster), resolve_(resolve) {}

  enum class Outcome : uint8_t { listed, known, illegal, too_large };
  // known: it is in the list already. passes: as of exact_fullest().
  Outcome add(const Scored& one, int64_t& passes) {
    Layout layout;
    layout.overrides = overrides_of(base_, with_stages(one.shape));
    const auto config = legal_recipe(resolve_, layout.overrides, base_.global_batch);
    if (!config) return Outcome::illegal;
    if (std::any_of(layouts.begin(), layouts.end(),
                    [&](const Layout& other) { return other.overrides == layout.overrides; }))
      return Outcome::known;
    layout.shape = run_shape(*config);
    const RankMemory memory = fullest_by_formula(layout.shape);
    layout.bytes = memory.total();
    double error = formula_reserve(layout.shape, cluster_);
    if (const auto exact = exact_fullest(*config, cluster_, passes))
      layout.bytes = exact->total(), layout.exact = true, error = 0;
    if (!fits_memory(layout.shape, cluster_, layout.bytes + error, memory.host)) return Outcome::too_large;
    layout.time = step_time(layout.shape, cluster_);
    layouts.push_back(std::move(layout));
    return Outcome::listed;
  }

  std::vector<Layout> layouts;

 private:
  const RunShape& base_;
  const Cluster& cluster_;
  const Resolver& resolve_;
};

// Adds the fastest layouts to a list. Times by formula are never more than the simulated ones: a layout is
// next when its simulated time is not above those by formula that are left. Of layouts that differ in
// recomputation only the fastest one that fits is added.
class BestFirst {
 public:
  // sorted: the first by formula first. passes: as of exact_fullest().
  BestFirst(const std::vector<Scored>& sorted, const Cluster& cluster, int64_t passes)
      : sorted_(sorted), cluster_(cluster), passes_(passes), doubtful_passes_(passes / 3) {}

  void add_to(LayoutList& list, size_t most) {
    while (list.layouts.size() < most) {
      const bool simulates = next_ < sorted_.size() && simulations_ < kSimulated &&
                             (simulated_.empty() || sorted_[next_].order() < simulated_.begin()->first);
      if (simulates) {
        simulate(sorted_[next_++]);
      } else if (!simulated_.empty() && resolved_ < kResolved) {
        const Scored one = std::move(simulated_.extract(simulated_.begin()).mapped());
        try_next(one, list);
      } else {
        return;
      }
    }
  }

 private:
  void simulate(const Scored& one) {
    if (done_.contains(key_of(one.shape))) return;
    Scored simulated = one;
    if (one.shape.pp > 1) {
      ++simulations_;
      simulated.seconds = step_time(with_stages(one.shape), cluster_).seconds;
    }
    simulated_.emplace(simulated.order(), std::move(simulated));
  }

  void try_next(const Scored& one, LayoutList& list) {
    using enum LayoutList::Outcome;
    const RunShape& s = one.shape;
    if (done_.contains(key_of(s)) || std::any_of(list.layouts.begin(), list.layouts.end(), [&](auto& other) {
          return is_variant(s, one.seconds, other);
        }))
      return;
    ++resolved_;
    const bool fits = one.bytes <= static_cast<double>(cluster_.usable_memory.value);
    const auto outcome = list.add(one, fits ? passes_ : doubtful_passes_);
    // Selective recomputation may be what is illegal.
    const bool selective = s.recompute.any() && !s.recompute.full;
    if (outcome == listed || (outcome == illegal && !selective)) done_.insert(key_of(s));
  }

  const std::vector<Scored>& sorted_;
  const Cluster& cluster_;
  size_t next_ = 0, simulations_ = 0, resolved_ = 0;
  // For exact memory of layouts that fit by formula, and of those that may fit.
  int64_t passes_, doubtful_passes_;
  std::multimap<double, Scored> simulated_;
  std::set<LayoutKey> done_;
};

// As of exact_fullest(): about half a second.
constexpr int64_t kSearchPasses = 10000;

// Adds layouts of the front with less memory than those of the list, at about equal ratios of their memory.
void add_front(LayoutList& list, const std::vector<Scored>& front) {
  if (front.empty()) return;
  double below = front.front().bytes;
  const double ratio = std::pow(front.back().bytes / below, 1.0 / static_cast<double>(kFrontLayouts));
  int64_t passes = kSearchPasses / 3;
  for (size_t i = 0, added = 0; i < front.size() && added < kFrontLayouts; ++i) {
    // The one with the least memory ends the front.
    if (front[i].bytes > below * ratio * 1.001 && i + 1 < front.size()) continue;
    if (list.add(front[i], passes) == LayoutList::Outcome::listed) ++added;
    below = front[i].bytes;
  }
}

// The recipe as it is, with the figures of its plan. nullopt: it is not legal, or does not fit.
std::optional<Layout> own_layout(const Cluster& cluster, const Resolver& resolve) {
  const auto config = resolve({});
  if (!config) return std::nullopt;
  Plan plan = make_plan(*config, cluster);
  if (!plan.fits) return std::nullopt;
  const RankMemory& memory = plan.memory[plan.fullest];
  return Layout{{}, std::move(plan.shape), plan.time, memory.total(), memory.exact};
}

}  // namespace

SearchResult search_layouts(const config::Config& config, const Cluster& whole, const Resolver& resolve,
                            size_t most) {
  const Cluster cluster = with_memory_limits(config, whole);
  refuse_missing_formats(config, cluster);
  const RunShape base = run_shape(config);
  Enumeration all(base, cluster, config.dist.world_size);
  all.run();
  SearchResult result;
  result.tried = all.tried, result.fitting = all.fitting;
  if (all.tried == 0) result.batches = all.nearest_batches();
  std::stable_sort(all.scored.begin(), all.scored.end(), [](const Scored& a, const Scored& b) {
    return std::pair(a.order(), a.bytes) < std::pair(b.order(), b.bytes);
  });
  LayoutList list(base, cluster, resolve);
  BestFirst(all.scored, cluster, kSearchPasses).add_to(list, most);
  add_front(list, front_of(all.scored, cluster));
  result.layouts = std::move(list.layouts);
  std::erase_if(result.layouts, [](const Layout& one) { return one.is_recipe(); });
  if (auto own = own_layout(cluster, resolve)) result.layouts.push_back(std::move(*own));
  std::stable_sort(result.layouts.begin(), result.layouts.end(),
                   [](const Layout& a, const Layout& b) { return a.time.seconds < b.time.seconds; });
  mark_front(result.layouts);
  return result;
}

void mark_front(std::vector<Layout>& layouts) {
  constexpr double kEqual = 1.005;
  const auto beats = [&](const Layout& a, const Layout& b) {
    const double slower = a.time.seconds / b.time.seconds, larger = a.bytes / b.bytes;
    return std::max(slower, larger) <= kEqual && std::min(slower, larger) * kEqual < 1;
  };
  for (Layout& one : layouts)
    one.on_front =
        std::none_of(layouts.begin(), layouts.end(), [&](const Layout& other) { return beats(other, one); });
}

std::vector<std::pair<std::string, double>> differences(const Layout& best, const Layout& other) {
  const auto before = exposed_parts(best.time);
  auto parts = exposed_parts(other.time);
  for (size_t i = 0; i < parts.size(); ++i) parts[i].second -= before[i].second;
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& a, const auto& b) { return std::abs(a.second) > std::abs(b.second); });
  return parts;
}

}  // namespace capstan::planner
