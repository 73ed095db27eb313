// Schedules executed by real ranks: what arrives is what the neighbor sent, whatever the order. Any
// number of ranks.
#include "parallel/pipeline.hpp"

#include <doctest/doctest.h>

#include <chrono>
#include <set>
#include <thread>

#include "config/sections/pipeline_layout.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"
#include "tests/support/channels.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/simple_store.hpp"
#include "tests/support/worlds.hpp"

using namespace capstan;
using namespace capstan::parallel;
using namespace capstan::test;
using capstan::config::PipelineSchedule;

namespace {

using test::world;

// A stage adds its number to the first element of the hidden states, and takes its number from the
// gradient's: the values that arrive show the path of the tensor.
class Counting final : public StageComputation {
 public:
  Counting(Device& device, const PipelineShape& shape, int64_t rank, int64_t rows)
      : device_(device), shape_(shape), stages_(shape.stages()), rank_(rank), rows_(rows) {}
  Tensor make_input(const PipelineAction& action) override {
    const int64_t stage = stages_.stage_of(rank_, action.chunk);
    return Tensor::empty(
        device_, shape_of(action.micro_batch, action.kind == ActionKind::forward ? stage - 1 : stage));
  }
  Tensor forward(int64_t m, int64_t chunk, const Tensor& hidden_states) override {
    const int64_t stage = stages_.stage_of(rank_, chunk);
    CHECK(hidden_states.defined() == (stage > 0));
    CHECK(live_.insert({m, chunk}).second);
    CHECK(held_.insert({m, chunk}).second);
    most = std::max(most, static_cast<int64_t>(live_.size()));
    most_held = std::max(most_held, static_cast<int64_t>(held_.size()));
    if (stage > 0) check(hidden_states, m, stage - 1, stage * (stage - 1) / 2);
    return last(stage) ? Tensor() : numbers(m, stage, stage * (stage + 1) / 2);
  }
  Tensor backward(int64_t m, int64_t chunk, const Tensor& gradient) override {
    const int64_t stage = stages_.stage_of(rank_, chunk);
    CHECK(gradient.defined() == !last(stage));
    CHECK(live_.erase({m, chunk}) == 1);
    if (!shape_.separates_weight_gradients()) CHECK(held_.erase({m, chunk}) == 1);
    if (!last(stage)) check(gradient, m, stage, -(stage + 1));
    ++backwards;
    return stage == 0 ? Tensor() : numbers(m, stage - 1, -stage);
  }
  void weight_gradients(int64_t m, int64_t chunk) override {
    CHECK(live_.count({m, chunk}) == 0);
    CHECK(held_.erase({m, chunk}) == 1);
    ++weights;
  }
  int64_t most = 0, most_held = 0, backwards = 0, weights = 0;

 private:
  bool last(int64_t stage) const { return stage + 1 == shape_.ranks * shape_.chunks; }
  // Micro-batches have different lengths, and stages add rows to what they send.
  Shape shape_of(int64_t m, int64_t sender) const { return {rows_ + (m % 3 + sender) * 6, 5}; }
  Tensor numbers(int64_t m, int64_t sender, int64_t first) {
    std::vector<float> values(static_cast<size_t>(shape_of(m, sender).elements()));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] =
          static_cast<float>(first) + 100.0f * static_cast<float>(m) + 10000.0f * static_cast<float>(i);
    return Tensor::from_host<float>(device_, shape_of(m, sender), values);
  }
  void check(const Tensor& got, int64_t m, int64_t sender, int64_t first) {
    CHECK(got.shape() == shape_of(m, sender));
    CHECK(got.to_host<float>() == numbers(m, sender, first).to_host<float>());
  }
  Device& device_;
  const PipelineShape& shape_;
  const comm::StageMap stages_;
  int64_t rank_, rows_;
  // Micro-batches and chunks before their backward pass, and before their weight gradients.
  std::set<std::pair<int64_t, int64_t>> live_, held_;
};

// All ranks as the stages of a pipeline, or with two tensor ranks for each stage.
comm::Mesh connected_mesh(int64_t tensor_ranks, const comm::Mesh::ChannelFactory& make_channel = {},
                          std::vector<int64_t> stage_ranks = {}) {
  const int64_t ranks = world().size();
  comm::Mesh mesh(
      {.world = ranks, .tp = tensor_ranks, .pp = ranks / tensor_ranks, .stage_ranks = std::move(stage_ranks)},
      world().rank());
  mesh.connect(world().communicator(), make_channel);
  return mesh;
}

void run_schedule(Device& device, const comm::Mesh& mesh, const PipelineShape& shape, bool early) {
  const Schedule schedule = make_schedule(shape);
  const ScheduleRun plan = simulate(shape, schedule);
  REQUIRE(plan.problem.empty());
  const auto rank = static_cast<size_t>(mesh.index(comm::Axis::pp));
  Counting work(device, shape, mesh.index(comm::Axis::pp), 6);
  PipelineComm comm = pipeline_comm(mesh, {});
  comm.overlap_p2p = early;
  run_actions(shape, schedule[rank], comm, work);
  CHECK(work.backwards == shape.micro_batches * shape.chunks);
  CHECK(work.weights == (shape.separates_weight_gradients() ? work.backwards : 0));
  CHECK(work.most == plan.live[rank]);
  CHECK(work.most_held == plan.held[rank]);
}

void run_every_schedule(Device& device, const comm::Mesh& mesh) {
  using enum PipelineSchedule;
  const int64_t ranks = mesh.size(comm::Axis::pp);
  for (const int64_t micro_batches : {1, 2, 7, 12})
    for (const int64_t chunks : {1, 2, 3})
      for (const auto order : {one_f_one_b, gpipe, zb_h1})
        for (const bool early : {false, true}) {
          if (chunks > 1 && (order != one_f_one_b || micro_batches % ranks != 0)) continue;
          run_schedule(device, mesh, {ranks, chunks, micro_batches, ranks, order}, early);
        }
}

// On a mesh whose stages go down and up again.
std::vector<int64_t> v_stages() {
  return config::stage_ranks(PipelineSchedule::zb_v, world().size(), 2);
}
void run_v_schedules(Device& device, const comm::Mesh& mesh) {
  const int64_t ranks = mesh.size(comm::Axis::pp);
  for (const int64_t micro_batches : {1, 2, 7, 12})
    for (const bool early : {false, true})
      run_schedule(device, mesh, {ranks, 2, micro_batches, ranks, PipelineSchedule::zb_v, v_stages()}, early);
}

}  // namespace

TEST_CASE_TEMPLATE("hidden states arrive in every schedule, and no more are held than it says", D,
                   EVERY_DEVICE) {
  const auto device = D::make(1);
  run_every_schedule(*device, connected_mesh(1));
  run_v_schedules(*device, connected_mesh(1, {}, v_stages()));
}

TEST_CASE("every schedule runs on channels that buffer nothing") {
  const auto device = Checked::make(1);
  const auto make_channel = [&](comm::Communicator& group) {
    return comm::make_blocking_channel(group, *device, transfer_status());
  };
  run_every_schedule(*device, connected_mesh(1, make_channel));
  run_v_schedules(*device, connected_mesh(1, make_channel, v_stages()));
}

TEST_CASE("a stage computes on while two tensors that it has sent are not received") {
  comm::Communicator& stages = world().communicator();
  if (stages.size() != 2) return;
  // The first stage computes its third micro-batch before the second stage receives anything.
  struct SendsBeforeReceives final : StageComputation {
    SendsBeforeReceives(Counting& counting, Device& on, comm::Communicator& all)
        : work(counting), device(on), group(all) {}
    Tensor make_input(const PipelineAction& action) override { return work.make_input(action); }
    Tensor forward(int64_t m, int64_t c, const Tensor& hidden_states) override {
      const Tensor sent = work.forward(m, c, hidden_states);
      if (group.rank() == 0 && m == static_cast<int64_t>(kPendingSends)) {
        const auto computed = device.record(Queue::compute);
        // The queue holds work that nothing waits for, until there is much of it.
        const Tensor other = Tensor::zeros(device, {8});
        for (int i = 0; i < 1'000'000 && !computed->done(); ++i) {
          launch(device, device.table().elementwise->fill, other, 1.0f, 8);
          if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        CHECK(computed->done());
        group.barrier();
      }
      return sent;
    }
    Tensor backward(int64_t m, int64_t c, const Tensor& gradient) override {
      return work.backward(m, c, gradient);
    }
    Counting& work;
    Device& device;
    comm::Communicator& group;
  };
  const auto device = Checked::make(1);
  const comm::Mesh mesh = connected_mesh(1, [&](comm::Communicator& group) {
    return comm::make_blocking_channel(group, *device, transfer_status());
  });
  const PipelineShape shape{.ranks = 2, .micro_batches = 4, .order = PipelineSchedule::gpipe};
  Counting counting(*device, shape, stages.rank(), 6);
  SendsBeforeReceives work(counting, *device, stages);
  if (stages.rank() == 1) stages.barrier();
  run_actions(shape, make_schedule(shape)[static_cast<size_t>(stages.rank())], pipeline_comm(mesh, {}), work);
  CHECK(counting.backwards == 4);
}

TEST_CASE_TEMPLATE("tensor ranks send a share each and gather what arrives", D, EVERY_DEVICE) {
  comm::Communicator& all = world().communicator();
  if (all.size() % 2 != 0) return;
  const auto device = D::make(1);
  const comm::Mesh mesh = connected_mesh(2);
  const int64_t ranks = mesh.size(comm::Axis::pp), rank = mesh.index(comm::Axis::pp);
  for (const int64_t rows : {6, 7}) {  // 7 rows cannot be shared out: each sends all
    const PipelineShape shape{.ranks = ranks, .micro_batches = 3};
    Counting work(*device, shape, rank, rows);
    run_actions(shape, make_schedule(shape)[static_cast<size_t>(rank)],
                pipeline_comm(mesh, {&mesh.group("tp"), false, 1}), work);
    CHECK(work.backwards == 3);
  }
}

TEST_CASE(
    "inputs of a step are received while the step before it is computed, and outputs sent once computed") {
  comm::Communicator& stages = world().communicator();
  const int64_t ranks = stages.size();
  if (ranks < 2) return;
  struct Order final : TapeObserver {
    void observe(const TapeEvent& event) override { order.push_back(event.name); }
    std::vector<std::string> order;
  };
  struct Logging final : StageComputation {
    Logging(Counting& counting, std::vector<std::string>& to) : work(counting), order(to) {}
    Tensor make_input(const PipelineAction& action) override { return work.make_input(action); }
    Tensor forward(int64_t m, int64_t c, const Tensor& hidden_states) override {
      order.push_back("F" + std::to_string(m));
      return work.forward(m, c, hidden_states);
    }
    Tensor backward(int64_t m, int64_t c, const Tensor& gradient) override {
      order.push_back("B" + std::to_string(m));
      return work.backward(m, c, gradient);
    }
    Counting& work;
    std::vector<std::string>& order;
  };
  using Names = std::vector<std::string>;
  const auto device = Cpu::make(1);
  SimpleStore store(*device);
  const comm::Mesh connected = connected_mesh(1);
  const auto order_of = [&](const PipelineShape& shape) {
    Order observer;
    StepContext context{*device, store, &observer};
    Counting counting(*device, shape, stages.rank(), 6);
    Logging work(counting, observer.order);
    PipelineComm comm = pipeline_comm(connected, {});
    comm.context = &context;
    run_actions(shape, make_schedule(shape)[static_cast<size_t>(stages.rank())], comm, work);
    return observer.order;
  };
  const Names order = order_of({.ranks = ranks, .micro_batches = 3});
  if (stages.rank() + 1 == ranks)
    CHECK(order == Names{"start receive of hidden states 0", "wait for hidden states 0", "F0",
                         "start receive of hidden states 1", "B0", "send gradient 0",
                         "wait for hidden states 1", "F1", "start receive of hidden states 2", "B1",
                         "send gradient 1", "wait for hidden states 2", "F2", "B2", "send gradient 2"});
  if (stages.rank() == 0 && ranks == 2)
    CHECK(order == Names{"F0", "send hidden states 0", "start receive of gradient 0", "F1",
                         "send hidden states 1", "wait for gradient 0", "B0", "start receive of gradient 1",
                         "F2", "send hidden states 2", "wait for gradient 1", "start receive of gradient 2",
                         "B1", "wait for gradient 2", "B2"});

  // A gradient that depends on the output is not received before that is computed and sent.
  const Names one = order_of({.ranks = ranks, .micro_batches = 1});
  if (stages.rank() == 0)
    CHECK(one ==
          Names{"F0", "send hidden states 0", "start receive of gradient 0", "wait for gradient 0", "B0"});
}
