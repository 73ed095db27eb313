// Memory of a step that is recorded with few micro-batches and played with all of them, against the same step
// with all of them, which is the truth: every byte has to be the same.
#include "train/trainer/memory_trace.hpp"

#include <doctest/doctest.h>

#include <deque>
#include <map>
#include <random>

#include "config/resolve/resolve.hpp"
#include "config/sections/pipeline_layout.hpp"
#include "kernels/table.hpp"
#include "train/setup/device.hpp"
#include "train/trainer/estimate.hpp"

using namespace capstan;
using namespace capstan::train;
using parallel::ActionKind;
using parallel::PipelineAction;
using parallel::PipelineShape;

namespace {

// Allocates and frees in the manner of a trainer: activations from the forward to the backward pass, operands
// of weight gradients until these are computed, sent tensors until the second send after them, a buffer from
// the first backward pass to the end of the step, pinned memory of a micro-batch, and temporary blocks of odd
// sizes.
class Program {
 public:
  Program(Device& device, const PipelineShape& shape, uint64_t seed, MemoryTrace* trace)
      : device_(device), shape_(shape), seed_(seed), trace_(trace) {
    device_.listen_to_memory(trace);
    parameters_ = allocate(5'000'000);
  }
  ~Program() {
    device_.free(parameters_.data, parameters_.bytes, MemoryCategory::activations);
    device_.listen_to_memory(nullptr);
  }

  void step(const std::vector<PipelineAction>& actions) {
    if (trace_) trace_->begin_step();
    const Block kept = allocate(3'000'001);
    for (const PipelineAction& action : actions) {
      if (trace_) trace_->begin_action();
      run(action);
    }
    for (std::deque<Block>* sent : {&sent_[0], &sent_[1]})
      for (; !sent->empty(); sent->pop_front()) free(sent->front());
    free(*buffer_);
    buffer_.reset();
    free(kept);
    if (trace_) trace_->end_step();
  }

 private:
  struct Block {
    std::byte* data = nullptr;
    int64_t bytes = 0;
  };
  Block allocate(int64_t bytes) { return {device_.allocate(bytes, MemoryCategory::activations), bytes}; }
  void free(const Block& block) { device_.free(block.data, block.bytes, MemoryCategory::activations); }

  void run(const PipelineAction& action) {
    // The same sizes in every micro-batch.
    std::mt19937_64 random(seed_ + static_cast<uint64_t>(100 * action.chunk) +
                           static_cast<uint64_t>(action.kind));
    const auto size = [&] {
      return 1 + static_cast<int64_t>(random() % (random() % 3 ? 40'000 : 4'000'000));
    };
    std::vector<Block>& held = held_[{action.micro_batch, action.chunk}];
    if (action.kind == ActionKind::weight_gradients) {
      for (const Block& block : held) free(block);
      held_.erase({action.micro_batch, action.chunk});
      return;
    }
    const bool forward = action.kind == ActionKind::forward;
    if (forward && action.chunk == 0)
      pinned_[action.micro_batch] = device_.allocate_pinned(10'000, MemoryCategory::data);
    if (!forward && !buffer_) buffer_ = allocate(2'000'003);
    std::vector<Block> operands;
    for (int i = 0; i < 12; ++i) {
      const Block temporary = allocate(size());
      if (forward)
        held.push_back(allocate(size()));
      else if (shape_.separates_weight_gradients() && i % 3 == 0)
        operands.push_back(allocate(size()));
      if (!forward) {
        free(held.back());
        held.pop_back();
      }
      free(temporary);
    }
    std::deque<Block>& sent = sent_[forward];
    sent.push_back(allocate(300'000));
    if (sent.size() > 2) free(sent.front()), sent.pop_front();
    if (forward) return;
    if (action.chunk == 0) device_.free_pinned(pinned_[action.micro_batch], 10'000, MemoryCategory::data);
    held = operands;
  }

  Device& device_;
  const PipelineShape shape_;
  const uint64_t seed_;
  MemoryTrace* trace_;
  Block parameters_;
  std::optional<Block> buffer_;
  std::map<std::pair<int32_t, int32_t>, std::vector<Block>> held_;
  std::map<int32_t, std::byte*> pinned_;
  std::deque<Block> sent_[2];
};

std::unique_ptr<Device> meta() {
  return make_meta_device_for(config::DeviceKind::cuda, 0, 1);
}

void check_same(const MemoryUse& played, const MemoryUse& all) {
  CHECK(played.peak == all.peak);
  CHECK(played.peak_by_category == all.peak_by_category);
  CHECK(played.reserved == all.reserved);
}

}  // namespace

TEST_CASE("memory of few micro-batches, played for all of them, is that of all of them") {
  using enum config::PipelineSchedule;
  for (const PipelineShape& shape :
       std::initializer_list<PipelineShape>{{.micro_batches = 53},
                                            {.ranks = 4, .micro_batches = 61},
                                            {.ranks = 3, .chunks = 2, .micro_batches = 60, .group = 4},
                                            {.ranks = 4, .micro_batches = 47, .order = zb_h1},
                                            {.ranks = 3,
                                            .chunks = 2,
                                            .micro_batches = 50,
                                            .order = zb_v,
                                            .stage_ranks = config::stage_ranks(zb_v, 3, 2)}})
    for (int64_t rank = 0; rank < shape.ranks; ++rank)
      for (const uint64_t seed : {1, 2, 3}) {
        INFO("chunks: ", shape.chunks, ", rank: ", rank, ", seed: ", seed);
        const std::unique_ptr<Device> with_all = meta();
        {
          Program program(*with_all, shape, seed, nullptr);
          for (int step = 0; step < 2; ++step) program.step(make_actions(shape, rank));
        }
        // Until what the first micro-batches have alone is freed.
        const std::unique_ptr<Device> played = meta();
        for (int64_t more = 0;; ++more) {
          const parallel::ShorterStep part = parallel::shorter_step(shape, rank, more);
          REQUIRE(part.times > 0);
          PipelineShape few = shape;
          few.micro_batches = part.micro_batches;
          const std::vector<PipelineAction> actions = make_actions(few, rank);
          MemoryTrace trace(actions, part);
          const std::unique_ptr<Device> with_few = meta();
          Program program(*with_few, few, seed, &trace);
          for (int step = 0; step < 2; ++step) program.step(actions);
          if (!trace.repeats()) continue;
          trace.replay(*played);
          break;
        }
        check_same(played->memory(), with_all->memory());
        check_same(played->memory(MemoryKind::host), with_all->memory(MemoryKind::host));
      }
}

TEST_CASE("the estimate of a step is that of all of its micro-batches") {
  const std::string pipeline = "dist.pipeline_model_parallel_size=4", eight = "dist.world_size=8";
  for (const std::vector<std::string>& overrides : std::initializer_list<std::vector<std::string>>{
           {"dist.world_size=1"},
           {eight, "ddp=zero3"},
           {eight, pipeline},
           {eight, pipeline, "dist.virtual_pipeline_model_parallel_size=2"},
           {eight, pipeline, "dist.pipeline_schedule=zb_h1", "train.device=cuda"},
           {eight, pipeline, "dist.virtual_pipeline_model_parallel_size=2", "dist.pipeline_schedule=zb_v",
            "train.device=cuda"}}) {
    CAPTURE(overrides.back());
    config::Request request;
    request.recipe = "llama3-8b";
    for (const char* text : {"model.num_layers=8", "train.global_batch_size=104", "dist.tp=1", "dist.cp=1",
                             "model.seq_length=1024", "~model.recompute_num_layers",
                             "~model.recompute_granularity", "~model.recompute_method"})
      request.overrides.push_back(config::Override::token(text));
    for (const std::string& text : overrides) request.overrides.push_back(config::Override::token(text));
    const config::Resolution resolution = config::resolve(request);
    REQUIRE(resolution.ok());
    for (const int64_t rank : {0, 1}) {
      const int64_t of_stage = rank * (resolution.config.dist.world_size / 8) * 2;
      const StepEstimate few = estimate_step(resolution.config, of_stage),
                         all = estimate_step(resolution.config, of_stage, 1, 0, std::nullopt, true);
      check_same(few.memory, all.memory);
      check_same(few.host_memory, all.host_memory);
      CHECK(few.memory.peak > 0);
      CHECK(few.sent == all.sent);
      CHECK(few.launches_by_queue == all.launches_by_queue);
      CHECK(few.copied_to_device == all.copied_to_device);
      CHECK(few.copied_to_host == all.copied_to_host);
      CHECK(few.flops == doctest::Approx(all.flops));
    }
  }
}

TEST_CASE("a period that does not come again is no part to play") {
  const PipelineShape shape{.micro_batches = 40};
  const parallel::ShorterStep part = parallel::shorter_step(shape, 0);
  PipelineShape few = shape;
  few.micro_batches = part.micro_batches;
  const std::vector<PipelineAction> actions = make_actions(few, 0);
  MemoryTrace trace(actions, part);
  const std::unique_ptr<Device> device = meta();
  device->listen_to_memory(&trace);
  trace.begin_step();
  // Each action allocates more than the one before.
  std::vector<std::pair<std::byte*, int64_t>> blocks;
  for (size_t i = 0; i < actions.size(); ++i) {
    trace.begin_action();
    const int64_t bytes = 1000 * static_cast<int64_t>(i + 1);
    blocks.emplace_back(device->allocate(bytes, MemoryCategory::workspace), bytes);
  }
  for (const auto& [data, bytes] : blocks) device->free(data, bytes, MemoryCategory::workspace);
  trace.end_step();
  device->listen_to_memory(nullptr);
  CHECK_FALSE(trace.repeats());
}
