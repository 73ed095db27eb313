#include "planner/search.hpp"

#include <algorithm>
#include <cmath>

#include "planner/memory.hpp"
#include "planner/overrides.hpp"

namespace capstan::planner {

namespace {

using config::ShardingStrategy;

// Layouts by formula that are simulated, and of these those that are resolved as recipes.
constexpr size_t kSimulated = 40;

// A layout by formula, before anything is built for it.
struct Scored {
  RunShape shape;
  double seconds = 0, bytes = 0;
};

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
      : base_(base), cluster_(cluster), gpus_(gpus) {}

  void run() {
    for (const int64_t tp : sizes(gpus_, cluster_.fast_domain())) {
      if (!divides_tensors(base_, tp)) continue;
      for (const int64_t pp : sizes(gpus_ / tp, base_.layers + 2))
        for (const int64_t cp : sizes(gpus_ / (tp * pp), 32)) {
          if (cp > 1 && (base_.seq % (2 * cp) != 0 || base_.seq / cp < 1024)) continue;
          for (const int64_t ep : expert_sizes(tp, pp)) try_grid(tp, pp, cp, ep);
        }
    }
  }

  int64_t tried = 0;
  std::vector<Scored> fitting;

 private:
  std::vector<int64_t> expert_sizes(int64_t tp, int64_t pp) const {
    if (!base_.experts) return {1};
    std::vector<int64_t> found;
    for (const int64_t ep : sizes(base_.experts->count, gpus_ / pp))
      if ((gpus_ / pp) % ep == 0 && base_.experts->ffn % tp == 0) found.push_back(ep);
    return found;
  }

  void try_grid(int64_t tp, int64_t pp, int64_t cp, int64_t ep) {
    RunShape s = base_;
    s.tp = tp, s.pp = pp, s.cp = cp, s.ep = ep, s.etp = 1, s.dp = gpus_ / (tp * pp * cp);
    if (!base_.experts) s.etp = tp;
    s.sequence_parallel = tp > 1, s.group = pp;
    for (s.micro_batch = 1; s.micro_batch <= 16; s.micro_batch *= 2) {
      if (s.global_batch % (s.micro_batch * s.dp) != 0 || s.micro_batches() < pp) continue;
      for (const int64_t vpp : sizes(base_.layers + 2, pp > 1 ? 16 : 1)) {
        s.vpp = vpp;
        s.schedule = vpp > 1 ? config::PipelineSchedule::interleaved : config::PipelineSchedule::one_f_one_b;
        if ((vpp > 1 && s.micro_batches() % pp != 0) || !divide_layers(s)) continue;
        for (const ShardingStrategy sharding :
             {ShardingStrategy::optim, ShardingStrategy::optim_grads_params}) {
          // Without replicas nothing is sharded; with a pipeline each micro-batch would gather all again.
          if (sharding == ShardingStrategy::optim_grads_params && (pp > 1 || s.dp * cp == 1)) continue;
          s.sharding = sharding;
          s.overlap_grad_reduce = s.overlap_param_gather = true;
          for (const bool full : {false, true}) {
            s.recompute = {.full = full};
            score(s);
          }
        }
      }
    }
  }

  void score(const RunShape& s) {
    ++tried;
    const double bytes = fullest_by_formula(s).total();
    if (bytes > static_cast<double>(cluster_.usable_memory.value)) return;
    fitting.push_back({s, step_time(s, cluster_, PipelineModel::formula).seconds, bytes});
  }

  const RunShape& base_;
  const Cluster& cluster_;
  const int64_t gpus_;
};

// Whether two layouts differ in nothing but how samples are divided, with the same time: context parallelism
// with a larger micro-batch instead of data parallelism.
bool is_variant(const RunShape& a, const RunShape& b, double seconds, double other_seconds) {
  return a.tp == b.tp && a.pp == b.pp && a.vpp == b.vpp && a.ep == b.ep && a.sharding == b.sharding &&
         a.recompute.full == b.recompute.full && std::abs(seconds / other_seconds - 1) < 2e-3;
}

// The scored layouts without such variants: of each the one with the least context parallelism.
std::vector<Scored> without_variants(const std::vector<Scored>& scored) {
  std::vector<Scored> kept;
  for (const Scored& one : scored) {
    const auto same = std::find_if(kept.begin(), kept.end(), [&](const Scored& other) {
      return is_variant(one.shape, other.shape, one.seconds, other.seconds);
    });
    if (same == kept.end())
      kept.push_back(one);
    else if (one.shape.cp < same->shape.cp)
      *same = one;
  }
  return kept;
}

bool is_faster(const Scored& a, const Scored& b) {
  return a.seconds < b.seconds;
}

// The layouts that no other beats in time and memory by formula, the fastest first.
std::vector<Scored> front_of(std::vector<Scored> scored) {
  std::stable_sort(scored.begin(), scored.end(), is_faster);
  std::vector<Scored> front;
  for (const Scored& one : scored)
    if (front.empty() || one.bytes < front.back().bytes) front.push_back(one);
  return front;
}

// The fastest by the simulated pipeline, without variants.
std::vector<Scored> fastest_of(std::vector<Scored> scored, const Cluster& cluster) {
  const size_t simulated = std::min(kSimulated, scored.size());
  std::partial_sort(scored.begin(), scored.begin() + static_cast<std::ptrdiff_t>(simulated), scored.end(),
                    is_faster);
  scored.resize(simulated);
  for (Scored& one : scored) one.seconds = step_time(one.shape, cluster).seconds;
  std::stable_sort(scored.begin(), scored.end(), is_faster);
  return without_variants(scored);
}

// Turns scored layouts into recipes.
class LayoutList {
 public:
  LayoutList(const RunShape& base, const Cluster& cluster, const Resolver& resolve)
      : base_(base), cluster_(cluster), resolve_(resolve) {}

  // False: it is not a legal recipe, does not fit, or is in the list. passes: as of exact_fullest().
  bool add(const Scored& one, int64_t& passes) {
    Layout layout;
    layout.overrides = overrides_of(base_, one.shape);
    const auto config = legal_recipe(resolve_, layout.overrides, base_.global_batch);
    if (!config || std::any_of(layouts.begin(), layouts.end(),
                               [&](const Layout& other) { return other.overrides == layout.overrides; }))
      return false;
    layout.shape = run_shape(*config);
    layout.bytes = fullest_by_formula(layout.shape).total();
    if (const auto exact = exact_fullest(*config, cluster_, passes))
      layout.bytes = exact->total(), layout.exact = true;
    if (layout.bytes > static_cast<double>(cluster_.usable_memory.value)) return false;
    layout.time = step_time(layout.shape, cluster_);
    layouts.push_back(std::move(layout));
    return true;
  }

  std::vector<Layout> layouts;

 private:
  const RunShape& base_;
  const Cluster& cluster_;
  const Resolver& resolve_;
};

// Adds layouts of the front with less memory than those of the list, at about equal ratios of their memory.
void add_front(LayoutList& list, const std::vector<Scored>& front) {
  if (front.empty()) return;
  double below = front.front().bytes;
  const double ratio = std::pow(front.back().bytes / below, 1.0 / static_cast<double>(kFrontLayouts));
  int64_t passes = kAffordablePasses / 2;
  for (size_t i = 0, added = 0; i < front.size() && added < kFrontLayouts; ++i) {
    // The one with the least memory ends the front.
    if (front[i].bytes > below * ratio * 1.001 && i + 1 < front.size()) continue;
    if (list.add(front[i], passes)) ++added;
    below = front[i].bytes;
  }
}

}  // namespace

SearchResult search_layouts(const config::Config& config, const Cluster& cluster, const Resolver& resolve,
                            size_t most) {
  const RunShape base = run_shape(config);
  Enumeration all(base, cluster, config.dist.world_size);
  all.run();
  SearchResult result;
  result.tried = all.tried, result.fitting = std::ssize(all.fitting);
  LayoutList list(base, cluster, resolve);
  const std::vector<Scored> front = front_of(all.fitting);
  int64_t passes = 2 * kAffordablePasses;
  for (const Scored& one : fastest_of(std::move(all.fitting), cluster)) {
    if (list.layouts.size() == most) break;
    list.add(one, passes);
  }
  add_front(list, front);
  result.layouts = std::move(list.layouts);
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
