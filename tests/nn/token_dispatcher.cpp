// Layers of experts that are sharded over ranks, each token sent to the ranks of its experts, against a layer
// on one rank with all experts and the tokens of that rank alone: outputs, gradients, capacity. 2 to 4 ranks.
#include "nn/token_dispatcher.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/philox.hpp"
#include "comm/reduce.hpp"
#include "nn/moe.hpp"
#include "nn/param_list.hpp"
#include "tests/support/channels.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/shards.hpp"
#include "tests/support/simple_store.hpp"

using namespace capstan;
using test::world;

namespace {

using Floats = std::vector<float>;
constexpr int64_t kHidden = 6, kWidth = 8;

Floats random_floats(int64_t count, uint64_t seed) {
  PhiloxSequence random(philox_key(seed, purpose::test, static_cast<uint64_t>(world().rank())));
  Floats values;
  for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(random.below(1000)) / 500 - 1);
  return values;
}

// How the experts lie over the ranks of the world, and the groups of the layout.
class ExpertLayout {
 public:
  explicit ExpertLayout(int tensor_ranks) {
    comm::Communicator& all = world().communicator();
    const int rank = all.rank();
    tensor_ = all.split(rank / tensor_ranks, rank, "etp");
    expert_ = all.split(rank % tensor_ranks, rank, "ep");
    both_ = all.split(0, rank, "etp-ep");
  }
  nn::Parallel parallel() const {
    nn::Parallel parallel;
    parallel.experts = {expert_.get(), tensor_.get(), both_.get()};
    return parallel;
  }
  std::vector<comm::Communicator*> groups() const { return {expert_.get(), tensor_.get(), both_.get()}; }

 private:
  std::unique_ptr<comm::Communicator> tensor_, expert_, both_;
};

struct Case {
  nn::TokenDispatcher::Kind kind = nn::TokenDispatcher::Kind::alltoall;
  int64_t tokens = 7;
  bool bias = false, recomputes = false, overlaps = false, balances = false;
  std::optional<double> capacity;
  bool pads = false;
  // All tokens choose the first two experts.
  bool one_sided = false;
  // Every third token is padding, on rank 1 all are.
  bool padded = false;
  int64_t experts_of_rank = 2;
  // Adapters of the experts with dropout: none, of the fused layers, of gate, up and fc2.
  enum class Adapters : uint8_t { none, fused, parts } adapters = Adapters::none;
};

const nn::AdapterOptions* adapters_of(const Case& c) {
  static const nn::AdapterOptions options[] = {
      {.adapts = [](std::string_view path) { return path.find(".experts.") != std::string_view::npos; },
       .rank = 3,
       .scale = 0.5,
       .dropout = 0.25},
      {.adapts = [](std::string_view path) { return path.find(".experts.") != std::string_view::npos; },
       .rank = 2,
       .scale = 2,
       .dropout = 0.4,
       .split_fused = true}};
  return c.adapters == Case::Adapters::none ? nullptr : &options[c.adapters == Case::Adapters::parts];
}

struct Result {
  Floats y, dx;
  // Of this rank: the choices of each expert, and how many choices were dropped.
  Floats choices;
  double dropped = 0;
  // By parameter; of the experts this rank's shards.
  std::map<std::string, Floats> gradients;
};

nn::Moe::Options options_of(const Case& c, int64_t experts) {
  nn::Moe::Options o;
  o.hidden = kHidden, o.experts = experts, o.ffn = kWidth;
  o.bias = c.bias;
  o.activation = {.kind = kernels::ActivationKind::silu, .slope = 1.702f, .limit = 0.75f, .up_offset = 1};
  o.router = {.topk = 2, .pre_softmax = true};
  o.dispatcher = c.kind;
  o.capacity_factor = c.capacity, o.pad_to_capacity = c.pads;
  if (c.overlaps) o.shared_ffn = kWidth;
  o.overlap_shared = c.overlaps;
  if (c.balances) o.balance = {{nn::Moe::BalanceLoss::Scope::micro_batch, 0.1}};
  o.init = o.output_init = {Init::Kind::normal, 0.5};
  return o;
}

// Initial values; the biases too are not zero. With one_sided the router prefers two experts for x > 0.
Floats values_of(const ParamSpec& spec, bool one_sided) {
  ParamSpec normal = spec;
  normal.init = {Init::Kind::normal, 0.5};
  Floats values = test::initial_values(normal, 3);
  if (one_sided && spec.name.ends_with("router.weight"))
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = std::abs(values[i]) * (static_cast<int64_t>(i) < 2 * kHidden ? 1.0f : -1.0f);
  return values;
}

// Names of the observed events in their order, with the phase: "F linear", "C start exchange of …".
struct EventNames final : TapeObserver {
  std::vector<std::string> names;
  void observe(const TapeEvent& event) override {
    names.push_back(std::string(1, event.phase) + " " + event.name);
  }
};

// A layer's forward and backward pass. sum_gradients: parameters of experts get the tokens of all ranks.
Result run(Device& device, const nn::Parallel& parallel, const Case& c, int64_t experts, bool sum_gradients,
           TapeObserver* observer = nullptr) {
  nn::ParamList list(parallel, adapters_of(c));
  const nn::Moe layer(list, {"layer", 3, "layer 3"}, options_of(c, experts));
  const auto parameters = list.take();
  test::SimpleStore store(device, parameters, DType::f32, /*gathered=*/true);
  for (const auto& p : parameters) store.set(*p, test::shard_of(*p, values_of(p->spec(), c.one_sided)));
  store.begin();
  store.begin_last_micro_batch();
  StepContext context{device, store, observer};
  nn::RouterStatistics statistics(device, {3}, experts, c.balances ? 1 : 0);
  Floats x_values = random_floats(c.tokens * kHidden, 7);
  if (c.one_sided)
    for (float& value : x_values) value = std::abs(value) + 0.1f;
  const auto upload = [&](const Floats& values) {
    return Tensor::from_host<float>(device, {c.tokens, kHidden}, values);
  };
  nn::TokenContext tokens;
  tokens.batch = 1, tokens.seq = c.tokens;
  tokens.training = true;
  tokens.router_statistics = &statistics;
  tokens.tokens = c.tokens * comm::ranks_of(parallel.context.group);
  if (c.padded) {
    std::vector<int32_t> padding;
    for (int64_t i = 0; i < c.tokens; ++i) padding.push_back(i % 3 == 1 || world().rank() == 1 ? 1 : 0);
    tokens.padding = Tensor::from_host<int32_t>(device, {c.tokens}, padding);
  }
  if (adapters_of(c)) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < c.tokens; ++i) ids.push_back((int64_t{world().rank()} << 40) + (i << 24) + 5 * i);
    tokens.hidden_dropout_rows = Tensor::from_host<int64_t>(device, {c.tokens}, ids);
  }
  Result result;
  {
    Tape tape(context);
    const Var x = tape.input("x", upload(x_values), true);
    const Var y = c.recomputes
                      ? tape.recompute("moe", {x},
                                       [&](Tape& inner, std::span<const Var> arguments) {
                                         return std::vector<Var>{layer.forward(inner, arguments[0], tokens)};
                                       })[0]
                      : layer.forward(tape, x, tokens);
    result.y = y.value.to_floats();
    tape.output("y", y);
    tape.backward({{"y", upload(random_floats(c.tokens * kHidden, 8))}});
    result.dx = tape.input_gradient("x").to_floats();
  }
  CHECK(store.pins == 0);
  result.choices = statistics.sums().to_floats();
  result.dropped = static_cast<double>(result.choices.back());
  result.choices.resize(static_cast<size_t>(experts));
  for (const auto& p : parameters) {
    Floats gradient = store.gradient(*p).to_floats();
    if (sum_gradients && p->spec().grid() == ParameterGrid::expert) {
      std::vector<double> sum(gradient.begin(), gradient.end());
      comm::all_reduce(world().communicator(), sum);
      gradient.assign(sum.begin(), sum.end());
    }
    // Of a part of the width.
    if (p->spec().grid() == ParameterGrid::expert && p->spec().partial_over_tensor) {
      std::vector<double> sum(gradient.begin(), gradient.end());
      comm::all_reduce(*parallel.experts.tensor, sum);
      gradient.assign(sum.begin(), sum.end());
    }
    result.gradients[p->name()] = std::move(gradient);
  }
  return result;
}

// What experts drop whose capacity is that of the tokens on one rank (all: of those of all ranks).
double expected_drops(const Case& c, const Floats& choices, bool all) {
  if (!c.capacity) return 0;
  std::vector<double> of_expert(choices.begin(), choices.end());
  int64_t tokens = c.tokens;
  if (all) comm::all_reduce(world().communicator(), of_expert), tokens *= world().size();
  const double capacity =
      std::ceil(static_cast<double>(2 * tokens) / static_cast<double>(choices.size()) * *c.capacity);
  double dropped = 0;
  for (const double count : of_expert) dropped += std::max(0.0, count - capacity);
  return dropped;
}

void check_close(const std::string& what, const Floats& got, const Floats& expected) {
  REQUIRE_MESSAGE(got.size() == expected.size(), what);
  double most = 1e-3, apart = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(expected[i])));
    apart = std::max(apart, std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i])));
  }
  CHECK_MESSAGE(apart <= 2e-5 * most, what, ": ", apart, " apart, largest ", most);
}

void check_case(Device& device, const ExpertLayout& layout, const Case& c) {
  CAPTURE(c.bias);
  CAPTURE(c.recomputes);
  CAPTURE(c.overlaps);
  CAPTURE(c.capacity.value_or(0));
  CAPTURE(c.pads);
  CAPTURE(c.one_sided);
  CAPTURE(c.padded);
  CAPTURE(c.experts_of_rank);
  CAPTURE(static_cast<int>(c.adapters));
  const nn::Parallel parallel = layout.parallel();
  const int64_t experts = c.experts_of_rank * parallel.experts.expert->size();
  const Result expected = run(device, {}, c, experts, true), got = run(device, parallel, c, experts, false);
  check_close("y", got.y, expected.y);
  check_close("dx", got.dx, expected.dx);
  CHECK(got.choices == expected.choices);
  CHECK(got.dropped == expected_drops(c, got.choices, false));
  CHECK(got.dropped == expected.dropped);
  // The shapes of the shards.
  nn::ParamList list(parallel, adapters_of(c));
  const nn::Moe layer(list, {"layer", 3, "layer 3"}, options_of(c, experts));
  for (const auto& p : list.take())
    check_close(p->name(), got.gradients.at(p->name()), test::shard_of(*p, expected.gradients.at(p->name())));
}

std::vector<Case> cases() {
  return {{},
          {.bias = true},
          {.recomputes = true},
          {.overlaps = true},
          {.recomputes = true, .overlaps = true},
          {.one_sided = true},
          {.bias = true, .recomputes = true, .one_sided = true, .experts_of_rank = 3},
          {.padded = true},
          {.overlaps = true, .capacity = 0.75, .padded = true},
          {.experts_of_rank = 1},
          {.adapters = Case::Adapters::fused},
          {.recomputes = true, .overlaps = true, .adapters = Case::Adapters::parts},
          {.bias = true, .one_sided = true, .experts_of_rank = 1, .adapters = Case::Adapters::fused},
          {.capacity = 0.75},
          {.bias = true, .capacity = 0.75, .one_sided = true},
          {.recomputes = true, .capacity = 0.75, .pads = true},
          {.overlaps = true, .capacity = 1.5, .pads = true, .one_sided = true},
          {.capacity = 0.75, .pads = true, .adapters = Case::Adapters::parts}};
}

// The numbers of expert tensor-parallel ranks that the world allows.
std::vector<int> tensor_ranks() {
  return world().size() == 4 ? std::vector<int>{1, 2} : std::vector<int>{1};
}

}  // namespace

TEST_CASE_TEMPLATE("tokens that are sent to their experts give what all experts on one rank do", D,
                   EVERY_DEVICE) {
  if (world().size() == 1) return;
  const auto device = D::make(1);
  for (const int tensor : tensor_ranks()) {
    CAPTURE(tensor);
    const ExpertLayout layout(tensor);
    const std::vector<Case> all = cases();
    const auto check = [&](size_t stride) {
      for (size_t i = 0; i < all.size(); i += stride) check_case(*device, layout, all[i]);
    };
    check(D::kSlow ? 5 : 1);
    if (!test::has_blocking_channels(*device)) continue;
    std::vector<std::unique_ptr<test::WithBlockingChannel>> channels;
    for (comm::Communicator* group : layout.groups())
      channels.push_back(std::make_unique<test::WithBlockingChannel>(*group, *device));
    check(D::kSlow ? 5 : 1);
  }
}

TEST_CASE("ranks may have different numbers of tokens, also none") {
  if (world().size() == 1) return;
  const auto device = test::Checked::make(1);
  for (const int tensor : tensor_ranks()) {
    const ExpertLayout layout(tensor);
    for (const bool recomputes : {false, true}) {
      Case c{.tokens = 3 * world().rank(), .recomputes = recomputes};
      check_case(*device, layout, c);
    }
  }
}

TEST_CASE("both dispatchers give the same layer without a capacity") {
  if (world().size() == 1) return;
  const auto device = test::Cpu::make(1);
  for (const int tensor : tensor_ranks()) {
    const ExpertLayout layout(tensor);
    for (const Case& made : {Case{}, Case{.bias = true}, Case{.one_sided = true}, Case{.padded = true},
                             Case{.adapters = Case::Adapters::fused},
                             Case{.one_sided = true, .adapters = Case::Adapters::parts}}) {
      Case c = made;
      const int64_t experts = 2 * layout.parallel().experts.expert->size();
      const Result exchanged = run(*device, layout.parallel(), c, experts, false);
      c.kind = nn::TokenDispatcher::Kind::allgather;
      const Result gathered = run(*device, layout.parallel(), c, experts, false);
      check_close("y", exchanged.y, gathered.y);
      check_close("dx", exchanged.dx, gathered.dx);
      for (const auto& [name, gradient] : gathered.gradients)
        check_close(name, exchanged.gradients.at(name), gradient);
    }
  }
}

TEST_CASE("choices that gathered tokens lose to the capacity are counted on one rank each") {
  if (world().size() == 1) return;
  const auto device = test::Cpu::make(1);
  for (const int tensor : tensor_ranks())
    for (const Case& made :
         {Case{.capacity = 0.4}, Case{.recomputes = true, .capacity = 0.75, .one_sided = true},
          Case{.capacity = 0.75, .pads = true}, Case{.capacity = 0.3, .padded = true}}) {
      CAPTURE(tensor);
      const ExpertLayout layout(tensor);
      Case c = made;
      c.kind = nn::TokenDispatcher::Kind::allgather;
      const Result got =
          run(*device, layout.parallel(), c, 2 * layout.parallel().experts.expert->size(), false);
      std::vector<double> dropped{got.dropped};
      comm::all_reduce(world().communicator(), dropped);
      CHECK(dropped[0] > 0);
      CHECK(dropped[0] == expected_drops(c, got.choices, true));
    }
}

TEST_CASE("the shared expert is computed while rows are under way, forward and backward") {
  if (world().size() == 1) return;
  const auto device = test::Cpu::make(1);
  const ExpertLayout layout(1);
  for (const bool overlaps : {true, false}) {
    CAPTURE(overlaps);
    const Case c{.overlaps = overlaps};
    EventNames events;
    (void)run(*device, layout.parallel(), c, 2 * world().size(), false, &events);
    for (const std::string what : {"", "gradients of "}) {
      CAPTURE(what);
      const std::string rows = "rows of the experts of layer 3";
      const auto at = [&](const std::string& name) {
        const auto found = std::ranges::find(events.names, name);
        REQUIRE_MESSAGE(found != events.names.end(), name);
        return found;
      };
      const auto started = at("C start exchange of " + what + rows),
                 waited = at("C wait for " + (what.empty() ? "exchange of " : what) + rows);
      // The shared expert has two GEMMs.
      const auto gemms = std::count_if(started, waited, [](const std::string& name) {
        return name.ends_with(" column_linear") || name.ends_with(" row_linear") || name.ends_with(" linear");
      });
      CHECK((gemms >= 2) == overlaps);
    }
  }
}

TEST_CASE("a recomputed layer has the gathered choices and the summed counts of its first pass") {
  if (world().size() == 1) return;
  const auto device = test::Cpu::make(1);
  const ExpertLayout layout(1);
  nn::Parallel parallel = layout.parallel();
  parallel.context.group = &world().communicator();
  const Case c{.kind = nn::TokenDispatcher::Kind::allgather, .recomputes = true, .balances = true};
  EventNames events;
  (void)run(*device, parallel, c, 2 * world().size(), false, &events);
  CHECK(std::ranges::count(events.names, "F permute") == 2);
  CHECK(std::ranges::count(events.names, "F balance_loss") == 2);
  CHECK(std::ranges::count(events.names, "C gather of chosen experts") == 1);
  CHECK(std::ranges::count(events.names, "F all_reduce_" + world().communicator().name()) == 1);
}

TEST_CASE("on the meta device the load is equal, and rows of a capacity are exact") {
  if (world().size() == 1) return;
  const auto device = make_meta_device(kernels::cpu_table());
  test::SimpleStore store(*device);
  StepContext context{*device, store};
  const int size = world().size();
  const auto expert = comm::make_meta_communicator(0, size, "ep"),
             tensor = comm::make_meta_communicator(0, 2, "etp");
  nn::Parallel parallel;
  parallel.experts = {expert.get(), tensor.get(), nullptr};
  const int64_t experts = 2 * size, tokens = 12;
  const auto rows = [&](std::optional<double> capacity, bool pads) {
    const auto dispatcher = nn::make_token_dispatcher(nn::TokenDispatcher::Kind::alltoall, parallel,
                                                      {.layer = 3,
                                                       .experts = experts,
                                                       .topk = 2,
                                                       .capacity_factor = capacity,
                                                       .pad_to_capacity = pads,
                                                       .weights_activations = true});
    Tape tape(context);
    const Var x = tape.input("x", Tensor::empty(*device, {tokens, kHidden}), true);
    const ops::Routing routing{Tensor::empty(*device, {tokens, 2}, DType::i32),
                               Var{Tensor::empty(*device, {tokens, 2})}};
    const auto dispatch = dispatcher->start(tape, x, routing);
    const nn::ExpertInput input = dispatch->receive(tape);
    CHECK(input.weights.size(0) == input.rows.size(0));
    CHECK((dispatch->combine(tape, input.rows).shape() == Shape{tokens, kHidden}));
    return input.rows.size(0);
  };
  // The tokens of `size` expert ranks and two expert tensor-parallel ranks, spread over the expert ranks.
  CHECK(rows(std::nullopt, false) == 2 * tokens * 2);
  const int64_t capacity = ops::expert_capacity(tokens, 2, experts, 1.5);
  CHECK(rows(1.5, true) == 2 * 2 * size * capacity);
}
