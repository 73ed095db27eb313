#include "planner/changes.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>

#include "base/text.hpp"
#include "base/wording.hpp"

namespace capstan::planner {

namespace {

// Prices changes of a plan: by formula, and exactly as far as the passes go.
class Pricing {
 public:
  Pricing(const Plan& plan, const Resolver& resolve)
      : plan_(plan),
        resolve_(resolve),
        passes_(plan.fits ? plan.passes : kAffordablePasses),
        scale_(plan.memory[plan.fullest].total() / fullest_by_formula(plan.shape).total()) {}

  // Bytes of the fullest rank by formula, scaled by what the exact figure of the plan is of the formula's.
  double scaled(const RankMemory& memory) const { return scale_ * memory.total(); }
  bool fits_by_formula(const RunShape& shape) const {
    const RankMemory memory = fullest_by_formula(shape);
    return fits_memory(shape, plan_.cluster, scaled(memory), memory.host);
  }

  // The recipe with the overrides, with its time and its memory by formula. nullopt: it is not legal, or a
  // bound of its time says that it takes more than `most` seconds.
  struct Priced {
    Change change;
    config::Config config;
    RunShape shape;
  };
  bool fits_by_formula(const Priced& priced) const {
    return fits_memory(priced.shape, plan_.cluster, priced.change.bytes, priced.change.host_bytes);
  }
  // Memory by formula has to leave what it may lack, where that of the plan is exact: a plan by formula
  // fits without it, too.
  bool fits(const Priced& priced) const {
    const Change& change = priced.change;
    const bool by_formula = exact_plan() && !change.exact;
    const double lacking = by_formula ? formula_reserve(priced.shape, plan_.cluster) : 0;
    return fits_memory(priced.shape, plan_.cluster, change.bytes + lacking, change.host_bytes);
  }
  std::optional<Priced> price(std::vector<std::string> overrides,
                              double most = std::numeric_limits<double>::infinity()) const {
    const auto config = legal_recipe(resolve_, overrides, plan_.shape.global_batch);
    if (!config) return std::nullopt;
    Priced priced{{}, *config, run_shape(*config)};
    if (step_time(priced.shape, plan_.cluster, PipelineModel::formula).seconds > most) return std::nullopt;
    priced.change.overrides = std::move(overrides);
    priced.change.seconds = step_time(priced.shape, plan_.cluster).seconds;
    const RankMemory memory = fullest_by_formula(priced.shape);
    priced.change.bytes = scaled(memory), priced.change.host_bytes = memory.host;
    return priced;
  }

  // Replaces the memory by that of the trainer's step, where that of the plan is, and where passes are left.
  void make_exact(Priced& priced) {
    if (!exact_plan()) return;
    const auto exact = exact_fullest(priced.config, plan_.cluster, passes_);
    if (!exact) return;
    priced.change.bytes = exact->total(), priced.change.exact = true;
    // Of a rank that need not be the one with the most.
    priced.change.host_bytes = std::max(exact->host, priced.change.host_bytes);
  }

 private:
  bool exact_plan() const { return plan_.memory[plan_.fullest].exact; }

  const Plan& plan_;
  const Resolver& resolve_;
  // As of exact_fullest(). A plan that fits should take no more time for them.
  int64_t passes_;
  const double scale_;
};

// ---- changes after which a run fits ----

// In the order in which they change a shape: recomputed and offloaded layers are counted in divided stages.
enum class Kind : uint8_t {
  tensor,
  pipeline,
  context,
  experts,
  sharding,
  micro_batch,
  recomputation,
  activation_offload,
  state_offload
};

struct Technique {
  Kind kind;
  // Changes the shape; false where it does not apply.
  std::function<bool(RunShape&)> apply;
};

// Divides the layers over `pp` ranks, with the most chunks up to those of now that divide them.
bool divide_pipeline(RunShape& s, int64_t pp) {
  s.pp = s.group = pp;
  for (; s.vpp >= 1; --s.vpp) {
    if (s.vpp == 1 && s.schedule == config::PipelineSchedule::interleaved)
      s.schedule = config::PipelineSchedule::one_f_one_b;
    if (s.pp * s.vpp <= s.layers + 2 && divide_layers(s)) return true;
  }
  return false;
}

void add_parallelism(std::vector<Technique>& techniques, const RunShape& base, const Cluster& cluster) {
  for (const int64_t factor : {2, 4, 8}) {
    techniques.push_back({Kind::tensor, [&, factor](RunShape& s) {
                            s.tp *= factor, s.sequence_parallel = true;
                            if (s.experts) s.etp = base.etp == base.tp ? 1 : base.etp;
                            if (!s.experts) s.etp = s.tp;
                            return s.tp <= cluster.fast_domain() && divides_tensors(s, s.tp);
                          }});
    techniques.push_back(
        {Kind::pipeline, [factor](RunShape& s) { return divide_pipeline(s, factor * s.pp); }});
    techniques.push_back({Kind::context, [factor](RunShape& s) {
                            s.cp *= factor;
                            return s.seq % (2 * s.cp) == 0 && s.seq / s.cp >= 1024;
                          }});
    if (base.experts)
      techniques.push_back({Kind::experts, [factor](RunShape& s) {
                              s.ep *= factor;
                              return s.experts->count % s.ep == 0;
                            }});
  }
}

void add_recomputation(std::vector<Technique>& techniques, const RunShape& base) {
  const auto add = [&](RecomputeShape recompute) {
    if (recompute != base.recompute)
      techniques.push_back({Kind::recomputation, [recompute](RunShape& s) {
                              s.recompute = recompute;
                              return true;
                            }});
  };
  if (base.recompute.full && base.recompute.layers < 0) return;
  if (!base.recompute.full)
    for (const RecomputeShape& r : selective_recomputations(base, base.recompute)) add(r);
  for (const size_t quarters : {1, 2, 3})
    techniques.push_back({Kind::recomputation, [quarters](RunShape& s) {
                            const auto partial = partial_recomputations(s);
                            if (partial.size() < quarters) return false;
                            const RecomputeShape& r = partial[quarters - 1];
                            if (s.recompute.full && s.recompute.layers >= r.layers) return false;
                            s.recompute = r;
                            return true;
                          }});
  add({.full = true});
}

void add_offload(std::vector<Technique>& techniques, const RunShape& base) {
  for (const int64_t halves : {1, 2})
    techniques.push_back({Kind::activation_offload, [halves](RunShape& s) {
                            const int64_t layers = std::min(largest_stage(s) * halves / 2, s.layers - 1);
                            if (layers <= s.offloaded_layers) return false;
                            s.offloaded_layers = layers;
                            return true;
                          }});
  if (base.offloaded_state < 1 && !base.frozen_base())
    techniques.push_back({Kind::state_offload, [](RunShape& s) {
                            s.offloaded_state = 1;
                            return true;
                          }});
  // Where the host's memory is what is missing.
  if (base.offloaded_layers > 0)
    techniques.push_back({Kind::activation_offload, [](RunShape& s) {
                            s.offloaded_layers = 0;
                            return true;
                          }});
  if (base.offloaded_state > 0)
    techniques.push_back({Kind::state_offload, [](RunShape& s) {
                            s.offloaded_state = 0;
                            return true;
                          }});
}

std::vector<Technique> techniques_of(const RunShape& base, const Cluster& cluster) {
  using enum config::ShardingStrategy;
  std::vector<Technique> techniques;
  add_parallelism(techniques, base, cluster);
  for (const auto sharding : {optim, optim_grads, optim_grads_params})
    techniques.push_back({Kind::sharding, [sharding](RunShape& s) {
                            // With a pipeline ZeRO 2 and 3 would communicate for each micro-batch.
                            if (sharding <= s.sharding || (sharding > optim && s.pp > 1)) return false;
                            s.sharding = sharding, s.overlap_grad_reduce = s.overlap_param_gather = true;
                            return true;
                          }});
  for (int64_t size = base.micro_batch / 2; size >= 1; size /= 2)
    techniques.push_back({Kind::micro_batch, [size](RunShape& s) {
                            s.micro_batch = size;
                            return true;
                          }});
  add_recomputation(techniques, base);
  add_offload(techniques, base);
  std::stable_sort(techniques.begin(), techniques.end(),
                   [](const Technique& a, const Technique& b) { return a.kind < b.kind; });
  return techniques;
}

// Sets the data-parallel size. False: the GPUs or the batch cannot be divided so.
bool complete(RunShape& s, const RunShape& base) {
  const int64_t gpus = base.gpus(), model = s.tp * s.pp * s.cp;
  if (gpus % model != 0) return false;
  s.dp = gpus / model;
  if (s.global_batch % (s.micro_batch * s.dp) != 0 || s.micro_batches() < s.pp) return false;
  if (s.vpp > 1 && s.micro_batches() % s.pp != 0) return false;
  return !s.experts || (gpus / s.pp) % (s.ep * s.etp) == 0;
}

std::string name_of(const RunShape& base, const RunShape& s) {
  std::string text;
  const auto add = [&](bool changed, const std::string& part) {
    if (changed) text += (text.empty() ? "" : ", ") + part;
  };
  const auto number = [](int64_t value) { return " " + std::to_string(value); };
  add(s.tp != base.tp, "tensor parallelism" + number(s.tp));
  add(s.pp != base.pp, "pipeline parallelism" + number(s.pp));
  add(s.cp != base.cp, "context parallelism" + number(s.cp));
  add(s.ep != base.ep, "expert parallelism" + number(s.ep));
  add(s.sharding != base.sharding, "ZeRO" + number(static_cast<int64_t>(s.sharding)));
  add(s.micro_batch != base.micro_batch, "micro-batch" + number(s.micro_batch));
  const RecomputeShape& r = s.recompute;
  if (r != base.recompute)
    add(true, !r.full        ? "selective recomputation"
              : r.layers < 0 ? "recompute all layers"
                             : "recompute " + counted(r.layers, "layer") + " of each stage");
  add(s.offloaded_layers != base.offloaded_layers,
      s.offloaded_layers == 0
          ? "activations on the GPU"
          : "activations of " + counted(s.offloaded_layers, "layer") + " of each stage in host memory");
  add(s.offloaded_state != base.offloaded_state,
      s.offloaded_state == 0 ? "optimizer state on the GPU" : "optimizer state in host memory");
  return text;
}

// Combinations of techniques of different kinds that fit by formula.
class Combinations {
 public:
  struct Fitting {
    RunShape shape;
    uint64_t techniques = 0;  // bits
    uint32_t kinds = 0;       // bits
    double seconds = 0;
  };

  Combinations(const Plan& plan, const Pricing& pricing)
      : plan_(plan), pricing_(pricing), techniques_(techniques_of(plan.shape, plan.cluster)) {}

  // Those of `count` techniques of which no part fits, the fastest first.
  std::vector<Fitting> of(int count) {
    found_.clear();
    extend({plan_.shape}, 0, count);
    for (const Fitting& one : found_) smaller_.push_back(one.techniques);
    std::stable_sort(found_.begin(), found_.end(),
                     [](const Fitting& a, const Fitting& b) { return a.seconds < b.seconds; });
    return found_;
  }

 private:
  void extend(const Fitting& from, size_t next, int count) {
    if (count == 0) return finish(from);
    for (size_t i = next; i < techniques_.size(); ++i) {
      const uint32_t kind = uint32_t{1} << static_cast<uint32_t>(techniques_[i].kind);
      if (from.kinds & kind) continue;
      Fitting longer = from;
      longer.techniques |= uint64_t{1} << i, longer.kinds |= kind;
      if (techniques_[i].apply(longer.shape)) extend(longer, i + 1, count - 1);
    }
  }

  void finish(Fitting one) {
    if (!complete(one.shape, plan_.shape)) return;
    for (const uint64_t smaller : smaller_)
      if ((one.techniques & smaller) == smaller) return;
    if (!pricing_.fits_by_formula(one.shape)) return;
    one.seconds = step_time(one.shape, plan_.cluster, PipelineModel::formula).seconds;
    found_.push_back(std::move(one));
  }

  const Plan& plan_;
  const Pricing& pricing_;
  const std::vector<Technique> techniques_;
  std::vector<uint64_t> smaller_;
  std::vector<Fitting> found_;
};

bool is_faster(const Change& a, const Change& b) {
  return a.seconds < b.seconds;
}

// Kinds in one change, and recipes that are resolved for each number of kinds.
constexpr int kMostKinds = 4, kMostTrials = 40;

}  // namespace

std::vector<Change> ways_to_fit(const Plan& plan, const Resolver& resolve, size_t most) {
  if (plan.fits) return {};
  Pricing pricing(plan, resolve);
  Combinations combinations(plan, pricing);
  std::vector<Change> changes;
  for (int count = 1; count <= kMostKinds && (count <= 2 || changes.empty()); ++count) {
    const double fastest =
        changes.empty() ? 0 : std::min_element(changes.begin(), changes.end(), is_faster)->seconds;
    std::vector<uint32_t> kinds;
    int trials = 0;
    for (const auto& fitting : combinations.of(count)) {
      if (changes.size() >= most || ++trials > kMostTrials) break;
      if (std::find(kinds.begin(), kinds.end(), fitting.kinds) != kinds.end()) continue;
      auto priced = pricing.price(overrides_of(plan.shape, fitting.shape));
      if (!priced || !pricing.fits_by_formula(*priced)) continue;
      if (fastest > 0 && priced->change.seconds >= fastest) continue;
      pricing.make_exact(*priced);
      if (!pricing.fits(*priced)) continue;
      priced->change.name = name_of(plan.shape, priced->shape);
      kinds.push_back(fitting.kinds);
      changes.push_back(std::move(priced->change));
    }
  }
  std::stable_sort(changes.begin(), changes.end(), is_faster);
  return changes;
}

// ---- changes that make a step faster ----

namespace {

// Overrides that may make a step faster, each a single idea.
std::vector<std::vector<std::string>> faster_candidates(const RunShape& s) {
  using enum config::ShardingStrategy;
  std::vector<std::vector<std::string>> list;
  const auto number = [](const char* field, int64_t value) { return field + std::to_string(value); };
  const auto add = [&](std::vector<std::string> overrides) { list.push_back(std::move(overrides)); };
  if (s.sharding == no_shard && s.dp * s.cp > 1) add({"ddp=zero1"});
  if (s.sharding == optim && s.pp == 1) add({"ddp=zero3"});
  if (s.sharding == optim_grads_params) add({"ddp=zero1"});
  if (s.tp > 1 && !s.sequence_parallel) add({"dist.sp=true"});
  if (s.tp > 1 && !s.overlap_tp) add({"comm_overlap=tp"});
  if (!s.overlap_grad_reduce && s.dp * s.cp > 1 && s.sharding != no_shard)
    add({"ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"});
  if (s.recompute.any())
    add({"model.recompute_granularity=null", "model.recompute_method=null", "model.recompute_num_layers=null",
         "~model.recompute_modules"});
  else
    add({"model.recompute_granularity=full", "model.recompute_method=uniform",
         "model.recompute_num_layers=1"});
  add({number("train.micro_batch_size=", 2 * s.micro_batch)});
  if (s.micro_batch > 1) add({number("train.micro_batch_size=", s.micro_batch / 2)});
  if (s.pp > 1) add({number("dist.vpp=", 2 * s.vpp)});
  if (s.tp > 1) add({number("dist.tp=", s.tp / 2)});
  if (s.pp > 1) add({number("dist.pp=", s.pp / 2)});
  if (s.cp > 1) add({number("dist.cp=", s.cp / 2)});
  if (s.experts) add({number("dist.ep=", 2 * s.ep)});
  if (s.experts && s.sharding == optim_grads_params)
    add({number("dist.ep=", std::min<int64_t>(8, s.experts->count)), "ddp=zero1"});
  add({number("dist.tp=", 2 * s.tp), "dist.sp=true"});
  add({number("dist.pp=", 2 * s.pp)});
  add({number("dist.tp=", 2 * s.tp), "dist.sp=true", "ddp=zero1"});
  return list;
}

}  // namespace

std::vector<Change> faster_changes(const Plan& plan, const Resolver& resolve, size_t most) {
  Pricing pricing(plan, resolve);
  std::vector<Pricing::Priced> found;
  const double most_seconds = 0.98 * plan.time.seconds;
  for (auto& overrides : faster_candidates(plan.shape)) {
    auto priced = pricing.price(std::move(overrides), most_seconds);
    if (!priced) continue;
    const Change& change = priced->change;
    if (!pricing.fits_by_formula(*priced) || change.seconds > most_seconds) continue;
    // An override that changes nothing more than an earlier one is no proposal of its own.
    if (std::none_of(found.begin(), found.end(), [&](const Pricing::Priced& other) {
          return other.change.seconds == change.seconds && other.change.bytes == change.bytes;
        }))
      found.push_back(std::move(*priced));
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return is_faster(a.change, b.change); });
  std::vector<Change> changes;
  for (Pricing::Priced& priced : found) {
    if (changes.size() == most) break;
    pricing.make_exact(priced);
    if (pricing.fits(priced)) changes.push_back(std::move(priced.change));
  }
  return changes;
}

}  // namespace capstan::planner
