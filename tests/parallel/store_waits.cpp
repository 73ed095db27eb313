// The waits of the sharded store between its queues: where one is missing, the checked device reports it or
// the values are right without it. Sums of tied parameters over the first and the last stage, and updated
// slices that are gathered over the instances of the optimizer. Two ranks and four.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/table.hpp"
#include "parallel/flat_store.hpp"
#include "tensor/launch.hpp"
#include "tests/support/channels.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/sanitized.hpp"

using namespace capstan;
using namespace capstan::test;
using config::ShardingStrategy;
using parallel::FlatStore;

namespace {

using Values = std::vector<std::vector<float>>;

// Groups of two ranks; null: of one.
struct Groups {
  std::unique_ptr<comm::Communicator> shard, replica, embedding;
};
Groups groups_of(bool tied) {
  comm::Communicator& all = world().communicator();
  const int rank = all.rank(), pair = rank / 2, other = rank % 2;
  Groups groups;
  // Two ranks: no group to shard over.
  if (all.size() == 4) groups.shard = all.split(pair, rank, "shard");
  auto& across = tied ? groups.embedding : groups.replica;
  across = all.split(all.size() == 4 ? other : 0, rank, tied ? "embedding" : "replica");
  return groups;
}

std::vector<std::unique_ptr<Parameter>> parameters_of_test() {
  std::vector<std::unique_ptr<Parameter>> parameters;
  const auto add = [&](const std::string& name, Shape shape, ParamSpec::Tied tied) {
    ParamSpec spec;
    spec.name = spec.block = name;
    spec.shape = shape;
    spec.tied = tied;
    parameters.push_back(std::make_unique<Parameter>(spec, static_cast<int>(parameters.size())));
  };
  add("embedding", {7, 30}, ParamSpec::Tied::owner);
  for (int64_t layer = 0; layer < 3; ++layer)
    add("layer " + std::to_string(layer), {100 + 60 * layer}, ParamSpec::Tied::no);
  return parameters;
}

FlatStore::Options options_of(ShardingStrategy strategy, DType reduce = DType::f32) {
  FlatStore::Options options;
  options.sharding = strategy;
  options.shard_over_replicas = true;
  options.overlap_grad_reduce = options.overlap_param_gather = true;
  options.reduce = reduce;
  options.bucket_elements = 1;
  return options;
}

void write_gradients(FlatStore& store, int64_t step) {
  const auto rank = static_cast<float>(world().rank());
  for (size_t i = store.parameters().size(); i-- > 0;) {
    const Tensor gradient = store.gradient(*store.parameters()[i]);
    const float value = 1.0f + rank + 10.0f * static_cast<float>(i) + 100.0f * static_cast<float>(step);
    launch(store.device(), store.device().table().elementwise->fill, gradient, value, gradient.elements());
  }
}
// The updated parameters are their gradients.
void update(FlatStore& store) {
  for (const optim::FlatBuffer& buffer : store.flat_buffers())
    launch(store.device(), store.device().table().elementwise->cast, buffer.gradients, buffer.main,
           buffer.main.elements());
}

// The parameters after a step. The host waits at the end alone: after an error that it has found, transfers
// would begin on some ranks only.
Values train_a_step(Device& device, const Groups& groups, const FlatStore::Options& options) {
  const auto parameters = parameters_of_test();
  FlatStore store(device, parameters,
                  {.dense = {.shard = groups.shard.get(), .replica = groups.replica.get()},
                   .embedding = groups.embedding.get()},
                  options);
  store.zero_gradients();
  write_gradients(store, 0);
  store.finish_gradients();
  update(store);
  store.after_update();
  std::vector<Tensor> copies;
  for (const auto& parameter : parameters) {
    copies.push_back(Tensor::empty(device, parameter->shape()));
    launch(device, device.table().elementwise->cast, store.acquire(*parameter), copies.back(),
           copies.back().elements());
    store.release(*parameter);
  }
  // The writes of the next step wait for all transfers of these.
  store.zero_gradients(1);
  write_gradients(store, 1);
  update(store);
  device.synchronize();
  Values values;
  for (const Tensor& copy : copies) values.push_back(copy.to_host<float>());
  return values;
}

struct Case {
  bool tied;
  ShardingStrategy strategy;
  // Transfers by the stand-in for NCCL.
  bool stand_in;
  // Waits that are needed; others repeat them.
  int64_t needed;
  DType reduce = DType::f32;
};
std::vector<Case> cases() {
  if (world().size() == 2)
    return {{true, ShardingStrategy::no_shard, false, 3},
            {true, ShardingStrategy::no_shard, true, 2},
            {false, ShardingStrategy::optim, false, 10},
            {false, ShardingStrategy::optim, true, 16}};
  return {{true, ShardingStrategy::no_shard, false, 10, DType::bf16},
          {true, ShardingStrategy::optim_grads, true, 10},
          {false, ShardingStrategy::optim_grads_params, true, 16}};
}

// Blocking channels for the groups; none: transfers go through host memory.
struct Channels {
  Device& device;
  std::vector<std::unique_ptr<WithBlockingChannel>> blocking;
  Channels(const Groups& groups, Device& on, bool stand_in) : device(on) {
    for (comm::Communicator* group : {groups.shard.get(), groups.replica.get(), groups.embedding.get()})
      if (group && stand_in) blocking.push_back(std::make_unique<WithBlockingChannel>(*group, device));
  }
  // After an error there may be work that uses the channels.
  ~Channels() {
    error_of([&] { device.synchronize(); });
  }
};

}  // namespace

TEST_CASE("a wait between queues that is missing is found: tied gradients, slices over instances") {
  if (world().size() != 2 && world().size() != 4) return;
  for (const Case& one : cases()) {
    if (test::kSanitized && (one.tied || world().size() > 2)) continue;
    const Groups groups = groups_of(one.tied);
    const FlatStore::Options options = options_of(one.strategy, one.reduce);
    const Values expected = train_a_step(*Cpu::make(1), groups, options);
    // Sums over the ranks of the group, of what each has written.
    for (const std::vector<float>& values : expected) CHECK(values.front() > 0);
    CAPTURE(one.tied);
    CAPTURE(std::string(config::enum_name(one.strategy)));
    CAPTURE(one.stand_in);
    int64_t found = 0, in_vain = 0;
    for (int64_t ignored = -1; in_vain < 15; ++ignored) {
      CAPTURE(ignored);
      const auto device =
          make_checked_device(kernels::cpu_table(), 1, {.patient = true, .ignored_wait = ignored});
      const Channels channels(groups, *device, one.stand_in);
      Values values;
      const std::string error = error_of([&] { values = train_a_step(*device, groups, options); });
      if (error.empty()) CHECK(values == expected);
      if (!error.empty()) CHECK_MESSAGE(error.find("missing wait: ") != std::string::npos, error);
      if (ignored < 0) REQUIRE(error.empty());
      in_vain = error.empty() ? in_vain + 1 : 0;
      found += error.empty() ? 0 : 1;
    }
    CAPTURE(found);
    CHECK(found >= one.needed);
  }
}

TEST_CASE("the compute queue runs on while updated slices are gathered over the instances") {
  comm::Communicator& all = world().communicator();
  if (all.size() != 2 && all.size() != 4) return;
  // Two instances.
  const bool second = all.rank() >= all.size() / 2;
  for (const auto strategy : {ShardingStrategy::optim, ShardingStrategy::optim_grads_params}) {
    CAPTURE(std::string(config::enum_name(strategy)));
    const auto device = Checked::make(1);
    const Groups groups = groups_of(false);
    const Channels channels(groups, *device, true);
    const auto parameters = parameters_of_test();
    FlatStore store(*device, parameters,
                    {.dense = {.shard = groups.shard.get(), .replica = groups.replica.get()}},
                    options_of(strategy));
    store.after_load();
    store.zero_gradients();
    write_gradients(store, 0);
    store.finish_gradients();
    update(store);
    device->synchronize();
    // The second instance comes to the gathers after the compute queues of the first have run on.
    if (second) all.barrier();
    store.after_update();
    const Tensor other = Tensor::zeros(*device, {8});
    launch(*device, device->table().elementwise->fill, other, 1.0f, 8);
    const auto done = device->record(Queue::compute);
    if (!second) {
      // The queue holds work that nothing waits for, until there is much of it.
      for (int i = 0; i < 1'000'000 && !done->done(); ++i) {
        launch(*device, device->table().elementwise->fill, other, 1.0f, 8);
        if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      CHECK(done->done());
      all.barrier();
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      const int ranks = all.size();
      const auto sum = static_cast<float>(ranks * (1 + 10 * static_cast<int>(i)) + ranks * (ranks - 1) / 2);
      CHECK(store.acquire(*parameters[i]).to_host<float>() ==
            std::vector<float>(static_cast<size_t>(parameters[i]->shape().elements()), sum));
      store.release(*parameters[i]);
    }
  }
}
