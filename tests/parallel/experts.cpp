// Parameters on two grids: dense and expert parameters of a model whose experts are sharded over ep and etp,
// on any layout of the ranks, against one rank that holds everything. The gradients are multiples of 1/16,
// whose sums are exact, so that a layout changes no bit.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/philox.hpp"
#include "comm/reduce.hpp"
#include "nn/param_list.hpp"
#include "support/devices.hpp"
#include "support/saves.hpp"
#include "support/shards.hpp"
#include "support/step_control.hpp"
#include "support/strategies.hpp"
#include "support/worlds.hpp"
#include "train/setup/model.hpp"
#include "train/setup/state.hpp"
#include "train/trainer/step_totals.hpp"

using namespace capstan;
using namespace capstan::test;
using config::ShardingStrategy;
using parallel::FlatStore;

namespace {

constexpr int kLayers = 4;
constexpr int64_t kExperts = 4, kHidden = 7, kWidth = 6;
constexpr double kTokens = 32;

// The parameters of layer `i`. The first half of the layers has no experts.
std::vector<ParamSpec> specs_of_layer(int i) {
  const nn::ModulePath path{"decoder.layers." + std::to_string(i), i, "layer " + std::to_string(i)};
  const Init normal{Init::Kind::normal, 0.1};
  std::vector<ParamSpec> specs;
  const auto add = [&](const char* name, Shape shape, Sharding sharding, bool partial = false) {
    ParamSpec& spec = specs.emplace_back(path.spec(name, shape, normal));
    spec.sharding = std::move(sharding);
    spec.partial_over_tensor = partial;
  };
  add("norm.weight", {kHidden}, {}, true);
  add("linear_qkv.weight", {12, kHidden}, {ShardingAxis::tensor, 0});
  add("linear_proj.weight", {kHidden, 12}, {ShardingAxis::tensor, 1});
  if (i < kLayers / 2) return specs;
  add("router.weight", {kExperts, kHidden}, {});
  add("experts.linear_fc1.weight", {kExperts, 2 * kWidth, kHidden},
      {{ShardingAxis::expert, 0}, {ShardingAxis::expert_tensor, 1, 2}});
  add("experts.linear_fc2.weight", {kExperts, kHidden, kWidth},
      {{ShardingAxis::expert, 0}, {ShardingAxis::expert_tensor, 2}});
  add("experts.linear_fc2.bias", {kExperts, kHidden}, {{ShardingAxis::expert, 0}});
  specs.back().no_weight_decay = true;
  add("experts.linear_fc1.adapter.linear_in.weight", {kExperts, 3, kHidden}, {{ShardingAxis::expert, 0}},
      true);
  return specs;
}

// Values of all parameters by name.
using Values = std::map<std::string, std::vector<float>>;

// One of sixteen parts of the gradient of an element of the global parameter.
constexpr int kParts = 16;
float part_of_gradient(const std::string& name, int64_t element, int step, int part) {
  const auto key =
      philox_key(random_sequence_of(name), purpose::test, static_cast<uint64_t>(step * kParts + part));
  const uint32_t word = philox4x32(key, 0, static_cast<uint64_t>(element))[0];
  return static_cast<float>(static_cast<int>(word % 15) - 7) / 16;
}

// Sums over the parameters whose names contain `trained`, each element once, from the definition of the
// gradients.
struct ExpectedTotals {
  double squares = 0;
  int64_t zeros = 0;
};
ExpectedTotals expected_totals(int step, const char* trained) {
  ExpectedTotals totals;
  for (int layer = 0; layer < kLayers; ++layer)
    for (const ParamSpec& spec : specs_of_layer(layer)) {
      if (spec.name.find(trained) == std::string::npos) continue;
      for (int64_t i = 0; i < spec.shape.elements(); ++i) {
        double gradient = 0;
        for (int part = 0; part < kParts; ++part)
          gradient += static_cast<double>(part_of_gradient(spec.name, i, step, part));
        totals.squares += gradient * gradient;
        totals.zeros += gradient == 0 ? 1 : 0;
      }
    }
  return totals;
}

struct Layout {
  const char* name;
  int64_t tp = 1, pp = 1, ep = 1, etp = 1, instances = 1;
};

std::vector<Layout> layouts(int ranks) {
  if (ranks == 2)
    return {{.name = "EP 2", .ep = 2},
            {.name = "DP 2"},
            {.name = "TP 2, ETP 2", .tp = 2, .etp = 2},
            {.name = "TP 2, EP 2", .tp = 2, .ep = 2},
            {.name = "TP 2, ETP 1", .tp = 2},
            {.name = "ETP 2", .etp = 2},
            {.name = "PP 2", .pp = 2}};
  if (ranks == 4)
    return {{.name = "EP 4", .ep = 4},
            {.name = "EP 2", .ep = 2},
            {.name = "EP 2, ETP 2", .ep = 2, .etp = 2},
            {.name = "TP 2, EP 2, ETP 2", .tp = 2, .ep = 2, .etp = 2},
            {.name = "TP 2, EP 2", .tp = 2, .ep = 2},
            {.name = "TP 4, EP 4", .tp = 4, .ep = 4},
            {.name = "PP 2, EP 2", .pp = 2, .ep = 2},
            {.name = "HSDP 2", .instances = 2},
            {.name = "HSDP 2, EP 2", .ep = 2, .instances = 2},
            {.name = "HSDP 2, TP 2, ETP 2", .tp = 2, .etp = 2, .instances = 2}};
  if (ranks == 8)
    return {{.name = "EP 4, ETP 2", .ep = 4, .etp = 2},
            {.name = "TP 2, PP 2, EP 2, ETP 2", .tp = 2, .pp = 2, .ep = 2, .etp = 2},
            {.name = "PP 2, EP 4", .pp = 2, .ep = 4},
            {.name = "HSDP 2, EP 2", .ep = 2, .instances = 2},
            {.name = "HSDP 2, TP 2, EP 2, PP 2", .tp = 2, .pp = 2, .ep = 2, .instances = 2}};
  return {{.name = "one rank"}};
}

comm::MeshSizes sizes_of(const Layout& layout, int64_t ranks) {
  return {.world = ranks,
          .tp = layout.tp,
          .pp = layout.pp,
          .experts = true,
          .ep = layout.ep,
          .etp = layout.etp,
          .optimizer_instances = layout.instances};
}

// The mesh of a layout of this world, or with null of one rank by itself. All ranks ask for the layouts in
// the same order.
const comm::Mesh& mesh_of(const Layout* layout) {
  static std::map<std::string, comm::Mesh> meshes;
  const auto [found, made] =
      layout ? meshes.try_emplace(layout->name, sizes_of(*layout, world().size()), world().rank())
             : meshes.try_emplace("alone", sizes_of({}, 1), 0);
  if (made) found->second.connect(world().communicator());
  return found->second;
}

FlatStore::Options options_of(ShardingStrategy strategy) {
  FlatStore::Options options;
  options.sharding = strategy;
  options.overlap_grad_reduce = options.overlap_param_gather = strategy != ShardingStrategy::no_shard;
  // Several buckets of each kind.
  options.bucket_elements = 300;
  return options;
}

config::OptimizerConfig optimizer_config(const FlatStore::Options& options,
                                         config::MuonTpMode mode = config::MuonTpMode::duplicated) {
  config::OptimizerConfig config;
  if (options.matrix) config.optimizer = config::OptimizerKind::muon;
  config.muon_tp_mode = mode;
  config.adam_eps = 1e-4;
  return config;
}

// A rank of a layout with its store, optimizer and sums.
template <class D>
class Run {
 public:
  Run(const Layout* layout, const FlatStore::Options& options, uint64_t seed = 5,
      config::MuonTpMode mode = config::MuonTpMode::duplicated)
      : device_(D::make(1)),
        mesh_(mesh_of(layout)),
        parameters_(make_parameters()),
        store_(*device_, parameters_, train::store_groups(mesh_), options),
        optimizer_config_(optimizer_config(options, mode)),
        optimizer_(optim::build(optimizer_config_, *device_, store_.flat_buffers(), seed)),
        totals_(mesh_, *device_, store_, *optimizer_) {
    train::initialize_parameters(store_, seed, device_->host_threads());
  }

  // One training step. acquired: the unsharded parameters that acquire() returns in the
  // forward pass; null: not checked.
  kernels::StepValues step(const Values* acquired = nullptr) {
    ++steps_;
    store_.zero_gradients(steps_);
    for (int m = 0; m < 2; ++m) run_micro_batch(m, acquired);
    store_.finish_gradients();
    train::MicroBatchRunner::Losses losses;
    const bool last = mesh_.index(comm::Axis::pp) + 1 == mesh_.size(comm::Axis::pp);
    if (last) losses.tokens = kTokens / mesh_.group("dp-cp").size();
    totals_.sum_losses(losses);
    totals_.sum_gradients(true);
    totals_.decide({.clip = 0.5});
    optimizer_->step({.lr = 1e-2, .decoupled_lr = 1e-2, .weight_decay = 0.1}, totals_.control());
    store_.after_update(totals_.control());
    totals_.sum_parameters();
    return totals_.read();
  }

  // The parameters as acquire() returns them, on a rank that holds them unsharded.
  Values values() {
    Values all;
    for (const auto& parameter : parameters_) {
      all[parameter->name()] = store_.acquire(*parameter).to_floats();
      store_.release(*parameter);
    }
    return all;
  }
  FlatStore& store() { return store_; }
  optim::Optimizer& optimizer() { return *optimizer_; }
  Device& device() { return *device_; }

 private:
  std::vector<std::unique_ptr<Parameter>> make_parameters() {
    nn::Parallel parallel;
    parallel.tensor.group = &mesh_.group("tp");
    parallel.experts = {&mesh_.group("ep"), &mesh_.group("etp"), &mesh_.group("etp-ep")};
    nn::ParamList list(parallel);
    const int64_t stages = mesh_.size(comm::Axis::pp), stage = mesh_.index(comm::Axis::pp);
    for (int layer = 0; layer < kLayers; ++layer)
      if (layer * stages / kLayers == stage)
        for (ParamSpec& spec : specs_of_layer(layer)) list.add(std::move(spec));
    return list.take();
  }

  void run_micro_batch(int m, const Values* acquired) {
    if (m == 1) store_.begin_last_micro_batch();
    PendingUses tape;
    store_.set_direction(ParamStore::PassDirection::forward);
    for (const auto& parameter : parameters_) {
      const ParamPin pin(store_, *parameter);
      if (acquired)
        CHECK_MESSAGE((pin->to_floats() == shard_of(*parameter, acquired->at(parameter->name()))),
                      parameter->name());
      if (store_.is_trainable(*parameter)) store_.note_use(*parameter, tape);
    }
    store_.set_direction(ParamStore::PassDirection::backward);
    for (size_t p = parameters_.size(); p-- > 0;) {
      const ParamPin pin(store_, *parameters_[p]);
      if (!store_.is_trainable(*parameters_[p])) continue;
      add_gradient(*parameters_[p], m);
      store_.note_weight_gradient(*parameters_[p], tape);
    }
  }

  // The ranks that see different tokens divide the parts of the micro-batch.
  void add_gradient(const Parameter& parameter, int m) {
    const bool expert = parameter.spec().grid() == ParameterGrid::expert;
    const comm::Communicator& data = mesh_.group(expert ? "edp" : "dp-cp");
    int holders = data.size(), holder = data.rank();
    if (parameter.spec().partial_over_tensor) {
      const comm::Communicator& tensor = mesh_.group(expert ? "etp" : "tp");
      holder = holder * tensor.size() + tensor.rank(), holders *= tensor.size();
    }
    bool uninitialized;
    const Tensor gradient = store_.gradient_for_write(parameter, uninitialized);
    std::vector<float> values(static_cast<size_t>(gradient.elements()));
    if (!uninitialized) values = gradient.to_floats();
    for_each_element(parameter, [&](int64_t local, int64_t global, const ShardSegment&) {
      for (int part = m; part < kParts; part += 2)
        if (part / 2 % holders == holder)
          values[static_cast<size_t>(local)] += part_of_gradient(parameter.name(), global, steps_, part);
    });
    gradient.copy_from_host_bytes(std::as_bytes(std::span(std::as_const(values))));
  }

  std::unique_ptr<Device> device_;
  const comm::Mesh& mesh_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  FlatStore store_;
  config::OptimizerConfig optimizer_config_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  train::StepTotals totals_;
  int steps_ = 0;
};

// All main parameters and moments in full, by name.
using State = std::map<std::string, std::vector<double>>;

// The values of a state one after the other, reduced over a group, and put back.
void reduce_state(comm::Communicator& group, State& state, comm::ReduceOp op) {
  std::vector<double> all;
  for (const auto& [name, values] : state) all.insert(all.end(), values.begin(), values.end());
  comm::all_reduce(group, all, op);
  auto from = all.begin();
  for (auto& [name, values] : state)
    for (double& value : values) value = *from++;
}

// From the shards of the ranks of `group`. Ranks that hold the same elements agree about them.
template <class D>
State full_state(Run<D>& run, comm::Communicator& group) {
  State least, most;
  const auto for_states = [&](const auto& body) {
    body(std::string("main"), nullptr);
    for (const auto& state : run.optimizer().state()) body(state.name, &state);
  };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (int layer = 0; layer < kLayers; ++layer)
    for (const ParamSpec& spec : specs_of_layer(layer))
      for_states([&](const std::string& state, const optim::Optimizer::State*) {
        const auto elements = static_cast<size_t>(spec.shape.elements());
        least[state + " " + spec.name].assign(elements, kInfinity);
        most[state + " " + spec.name].assign(elements, -kInfinity);
      });
  for (const auto& shard : run.store().parameter_shards()) {
    std::vector<int64_t> global_of(static_cast<size_t>(shard.parameter->shape().elements()));
    for_each_element(*shard.parameter, [&](int64_t local, int64_t global, const ShardSegment&) {
      global_of[static_cast<size_t>(local)] = global;
    });
    for_states([&](const std::string& state, const optim::Optimizer::State* moments) {
      if (moments && (shard.buffer < 0 || !moments->has(shard.buffer))) return;
      const auto values =
          moments ? run.optimizer().values(*moments, shard.buffer, shard.begin, shard.range.count).to_floats()
                  : shard.values().to_floats();
      const std::string name = state + " " + shard.parameter->name();
      for (size_t i = 0; i < values.size(); ++i) {
        const auto at = static_cast<size_t>(global_of[static_cast<size_t>(shard.range.begin) + i]);
        least[name][at] = most[name][at] = static_cast<double>(values[i]);
      }
    });
  }
  reduce_state(group, least, comm::ReduceOp::min);
  reduce_state(group, most, comm::ReduceOp::max);
  // A state that no rank has, for example of Muon: infinities of both signs.
  for (auto& [name, values] : least)
    if (values[0] != kInfinity) CHECK_MESSAGE((values == most[name]), name);
  return most;
}

// Two steps of one rank that holds everything.
struct Expected {
  struct Step {
    Values before;
    kernels::StepValues values;
    ExpectedTotals totals;
  };
  std::vector<Step> steps;
  State state;
};

template <class D>
Expected expected_of(FlatStore::Options options, const char* trained = "") {
  options.sharding = ShardingStrategy::no_shard, options.shard_over_replicas = false;
  Run<D> run(nullptr, options);
  Expected expected;
  for (int step = 1; step <= 2; ++step) {
    const Values before = run.values();
    expected.steps.push_back({before, run.step(), expected_totals(step, trained)});
  }
  expected.state = full_state(run, *comm::make_self_communicator("alone"));
  return expected;
}

// The same value on every rank.
void check_agreement(std::vector<double> values) {
  std::vector<double> least = values, most = values;
  comm::all_reduce(world().communicator(), least, comm::ReduceOp::min);
  comm::all_reduce(world().communicator(), most, comm::ReduceOp::max);
  CHECK(least == values);
  CHECK(most == values);
}

// Two steps of the layout: values, sums and state, bit by bit unless `bound` is above 0.
template <class D>
void check_layout(const Layout& layout, const FlatStore::Options& options, const Expected& expected,
                  double bound = 0, config::MuonTpMode mode = config::MuonTpMode::duplicated) {
  CAPTURE(std::string(layout.name));
  CAPTURE(std::string(config::enum_name(options.sharding)));
  Run<D> run(&layout, options, 5, mode);
  for (const Expected::Step& step : expected.steps) {
    const kernels::StepValues values = run.step(bound == 0 ? &step.before : nullptr);
    CHECK(values.gradient_squares == step.totals.squares);
    CHECK(values.norm == doctest::Approx(std::sqrt(step.totals.squares) / kTokens).epsilon(1e-14));
    CHECK(values.zero_gradients == step.totals.zeros);
    CHECK(step.totals.zeros > 0);
    CHECK(values.parameter_squares ==
          doctest::Approx(step.values.parameter_squares).epsilon(std::max(bound, 1e-13)));
    check_agreement({values.gradient_squares, values.parameter_squares, values.norm});
  }
  const State got = full_state(run, world().communicator());
  REQUIRE(expected.state.size() == got.size());
  for (const auto& [name, values] : expected.state) {
    int64_t different = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const double value = got.at(name)[i];
      different += value == values[i] || std::abs(value - values[i]) < bound ? 0 : 1;
    }
    CHECK_MESSAGE(different == 0, name);
  }
}

}  // namespace

// Calls body(layout, strategy) for every layout, with all strategies, or with one that changes from layout to
// layout. On slow devices for the layout in the middle only.
template <class D, class Body>
void for_layouts(bool all, size_t first, const Body& body) {
  const auto here = layouts(world().size());
  for (size_t i = 0; i < here.size(); ++i) {
    if (D::kSlow && i != here.size() / 2) continue;
    for (size_t s = 0; s < (all && !D::kSlow ? std::size(kStrategies) : 1); ++s)
      body(here[i], kStrategies[(first + i + s) % std::size(kStrategies)]);
  }
}

TEST_CASE("dense and expert parameters on every layout and strategy: the bits of one rank") {
  const Expected expected = expected_of<Cpu>(options_of(ShardingStrategy::no_shard));
  for_layouts<Cpu>(true, 0, [&](const Layout& layout, ShardingStrategy strategy) {
    FlatStore::Options options = options_of(strategy);
    check_layout<Cpu>(layout, options, expected);
    if (layout.instances == 1 || strategy == ShardingStrategy::no_shard) return;
    options.shard_over_replicas = true;
    check_layout<Cpu>(layout, options, expected);
  });
}

TEST_CASE_TEMPLATE("dense and expert parameters on every device", D, EVERY_DEVICE) {
  const Expected expected = expected_of<D>(options_of(ShardingStrategy::no_shard));
  for_layouts<D>(false, 3, [&](const Layout& layout, ShardingStrategy strategy) {
    check_layout<D>(layout, options_of(strategy), expected);
  });
}

TEST_CASE_TEMPLATE("parameters and gradients in bf16: the bits of one rank", D, EVERY_DEVICE) {
  for (const DType main_grads : {DType::f32, DType::bf16}) {
    FlatStore::Options options = options_of(ShardingStrategy::no_shard);
    options.compute = options.reduce = DType::bf16;
    options.main_grads = main_grads;
    const Expected expected = expected_of<D>(options);
    for_layouts<D>(false, main_grads == DType::bf16 ? 1 : 2,
                   [&](const Layout& layout, ShardingStrategy strategy) {
                     options.sharding = strategy;
                     check_layout<D>(layout, options, expected);
                   });
  }
}

TEST_CASE_TEMPLATE("main parameters and moments of both grids in host memory", D, EVERY_DEVICE) {
  FlatStore::Options options = options_of(ShardingStrategy::no_shard);
  options.compute = DType::bf16;
  options.offload_fraction = 0.5;
  const Expected expected = expected_of<D>(options);
  // The updates of the CPU and of a GPU round differently, and layouts offload other elements.
  const double bound = has_cuda_kernels(D::type) ? 1e-5 : 0;
  for_layouts<D>(false, 1, [&](const Layout& layout, ShardingStrategy strategy) {
    options.sharding = strategy;
    check_layout<D>(layout, options, expected, bound);
  });
}

TEST_CASE_TEMPLATE("frozen dense parameters beside adapters of experts", D, EVERY_DEVICE) {
  FlatStore::Options options = options_of(ShardingStrategy::no_shard);
  options.trainable = [](const Parameter& parameter) {
    return parameter.name().find(".adapter.") != std::string::npos;
  };
  const Expected expected = expected_of<D>(options, ".adapter.");
  for_layouts<D>(false, 0, [&](const Layout& layout, ShardingStrategy strategy) {
    options.sharding = strategy;
    check_layout<D>(layout, options, expected);
  });
}

TEST_CASE_TEMPLATE("Muon: each expert is a matrix", D, EVERY_DEVICE) {
  FlatStore::Options options = options_of(ShardingStrategy::no_shard);
  options.matrix = [](const Parameter& parameter) -> std::optional<std::vector<int64_t>> {
    const bool expert = parameter.spec().grid() == ParameterGrid::expert;
    if (parameter.spec().shape.rank() != (expert ? 3 : 2)) return std::nullopt;
    return std::vector<int64_t>();
  };
  const Expected expected = expected_of<D>(options);
  for (const auto mode : {config::MuonTpMode::duplicated, config::MuonTpMode::distributed})
    for_layouts<D>(false, mode == config::MuonTpMode::distributed ? 2 : 3,
                   [&](const Layout& layout, ShardingStrategy strategy) {
                     options.sharding = strategy;
                     check_layout<D>(layout, options, expected, 2e-5, mode);
                   });
}

TEST_CASE("Muon's update of an expert does not depend on the other experts") {
  // The same gradients in a model whose experts are dense parameters by themselves.
  const auto device = Cpu::make(1);
  const auto gradient = [](int64_t i) { return part_of_gradient("w", i, 1, 0); };
  const auto updated = [&](std::vector<ParamSpec> specs, const auto& first_of) {
    nn::ParamList list;
    for (ParamSpec& spec : specs) list.add(std::move(spec));
    const auto parameters = list.take();
    FlatStore::Options options;
    options.matrix = [](const Parameter&) { return std::optional(std::vector<int64_t>()); };
    FlatStore store(*device, parameters, {}, options);
    store.zero_gradients();
    for (const auto& parameter : parameters) {
      std::vector<float> values;
      for (int64_t i = 0; i < parameter->shape().elements(); ++i)
        values.push_back(gradient(first_of(parameter->index()) + i));
      store.gradient(*parameter).copy_from_host_bytes(std::as_bytes(std::span(std::as_const(values))));
    }
    store.finish_gradients();
    const auto config = optimizer_config(options);
    const auto optimizer = optim::build(config, *device, store.flat_buffers());
    optimizer->step({.lr = 1}, step_control(*device));
    std::vector<float> all;
    for (const auto& shard : store.parameter_shards()) {
      const auto values = shard.values().to_floats();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  };
  std::vector<ParamSpec> apart;
  for (int64_t e = 0; e < kExperts; ++e)
    apart.push_back({.name = "w" + std::to_string(e), .shape = {kWidth, kHidden}});
  const ParamSpec together{.name = "w",
                           .shape = {kExperts, kWidth, kHidden},
                           .sharding = {{ShardingAxis::expert, 0}, {ShardingAxis::expert_tensor, 1}}};
  CHECK(updated({together}, [](int) { return int64_t{0}; }) ==
        updated(apart, [](int e) { return e * kWidth * kHidden; }));
}

namespace {

// Every element of the state is in the region of one rank.
template <class D>
void check_written_once(Run<D>& run) {
  State written;
  for (int layer = 0; layer < kLayers; ++layer)
    for (const ParamSpec& spec : specs_of_layer(layer))
      for (const char* state : {"", "optimizer.exp_avg.", "optimizer.exp_avg_sq."})
        written[state + spec.name].assign(static_cast<size_t>(spec.shape.elements()), 0);
  for (const train::StateTensor& tensor : train::state_tensors(run.store(), &run.optimizer())) {
    std::vector<double>& counts = written.at(tensor.name);
    REQUIRE(fits(tensor.region, tensor.shape));
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      int64_t rest = i, at = 0, stride = 1;
      for (int d = tensor.shape.rank(); d-- > 0;) {
        at += (tensor.region.offsets[d] + rest % tensor.region.sizes[d]) * stride;
        rest /= tensor.region.sizes[d];
        stride *= tensor.shape[d];
      }
      ++counts[static_cast<size_t>(at)];
    }
  }
  reduce_state(world().communicator(), written, comm::ReduceOp::sum);
  for (const auto& [name, counts] : written)
    CHECK_MESSAGE((counts == std::vector<double>(counts.size(), 1)), name);
}

}  // namespace

TEST_CASE("checkpoints: every element is written once, and every layout reads those of every other") {
  const SharedDirectory root;
  const Expected expected = expected_of<Cpu>(options_of(ShardingStrategy::no_shard));
  const auto all = layouts(world().size());
  const auto options_for = [&](size_t i) {
    FlatStore::Options options = options_of(kStrategies[i % std::size(kStrategies)]);
    options.shard_over_replicas = all[i].instances > 1;
    return options;
  };
  for (size_t from = 0; from < all.size(); ++from) {
    CAPTURE(std::string(all[from].name));
    Run<Cpu> run(&all[from], options_for(from));
    for (int step = 0; step < 2; ++step) run.step();
    check_written_once(run);
    const train::SavePlan plan = plan_in(root.path() / std::to_string(from));
    train::save_state(world(), plan, {.step = 2}, run.store(), run.optimizer());
    for (size_t to = 0; to < all.size(); ++to) {
      CAPTURE(std::string(all[to].name));
      auto reader = newest_in(plan.root);
      Run<Cpu> other(&all[to], options_for(to), 17);
      train::load_state(reader, other.store(), &other.optimizer());
      CHECK((full_state(other, world().communicator()) == expected.state));
    }
    // One rank by itself.
    auto reader = newest_in(plan.root);
    Run<Cpu> single(nullptr, options_of(ShardingStrategy::no_shard), 17);
    train::load_state(reader, single.store(), &single.optimizer());
    CHECK((full_state(single, *comm::make_self_communicator("alone")) == expected.state));
  }
}

TEST_CASE("buckets hold parameters of one grid, padded for its ranks") {
  nn::ParamList list;
  for (int layer = 0; layer < kLayers; ++layer)
    for (ParamSpec& spec : specs_of_layer(layer)) list.add(std::move(spec));
  const auto parameters = list.take();
  const auto layout =
      parallel::plan_buckets(parameters, {.bucket_elements = 300, .shards = 5, .expert_shards = 3});
  std::set<const Parameter*> seen;
  for (const auto& bucket : layout.buckets) {
    CHECK(bucket.elements % (64 * (bucket.grid == ParameterGrid::expert ? 3 : 5)) == 0);
    for (const Parameter* parameter : bucket.parameters) {
      CHECK(parameter->spec().grid() == bucket.grid);
      CHECK(seen.insert(parameter).second);
    }
  }
  CHECK(seen.size() == parameters.size());
}

// An odd number of ranks with a copy divides no multiple of 64.
TEST_CASE("the bucket of a tied parameter is padded for the ranks that sum its gradients") {
  nn::ParamList list;
  for (const ParamSpec::Tied tied : {ParamSpec::Tied::no, ParamSpec::Tied::copy}) {
    ParamSpec spec = specs_of_layer(0).front();
    spec.name += tied == ParamSpec::Tied::no ? "" : ".copy";
    spec.shape = {32, 32};
    spec.tied = tied;
    list.add(std::move(spec));
  }
  const auto parameters = list.take();
  const auto layout = parallel::plan_buckets(
      parameters, {.bucket_elements = 300, .shards = 2, .holders = [](const Parameter&) { return 3; }});
  REQUIRE(layout.buckets.size() == 2);
  for (const auto& bucket : layout.buckets) {
    const bool tied = bucket.parameters.front()->spec().tied != ParamSpec::Tied::no;
    CHECK(bucket.elements == (tied ? 1152 : 1024));
  }
}
