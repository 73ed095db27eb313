// The trainer's pipeline schedules, simulated with published times of their actions; the timeline of a step,
// and its bytes by link.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "planner/pipeline.hpp"
#include "planner/published_rows.hpp"

using namespace capstan;
using namespace capstan::planner;
using namespace capstan::planner::test;

namespace {

// Nanoseconds, of milliseconds.
int64_t ticks(double milliseconds) {
  return std::llround(1e6 * milliseconds);
}

parallel::PipelineShape pipeline_of(const PublishedRow& row) {
  parallel::PipelineShape shape;
  shape.ranks = row.size("pp"), shape.chunks = row.size("vpp");
  shape.micro_batches = row.size("gbs") / row.size("mbs");
  shape.group = shape.ranks;
  shape.order = shape.chunks > 1 ? config::PipelineSchedule::interleaved
                : row.text("model").find("ZB-1p") != std::string::npos
                    ? config::PipelineSchedule::zb_h1
                    : config::PipelineSchedule::one_f_one_b;
  return shape;
}

// The largest fraction of the time of a rank, from its first to its last action, in which it waits.
double bubble_rate(const parallel::ScheduleRun& run) {
  double most = 0;
  for (size_t rank = 0; rank < run.end.size(); ++rank) {
    const auto span = static_cast<double>(run.end[rank] - run.start[rank].front());
    most = std::max(most, static_cast<double>(run.idle_between[rank]) / span);
  }
  return most;
}

}  // namespace

// V4
TEST_CASE("simulated schedules have the bubble rates of Zero Bubble") {
  double worst = 0;
  for (const PublishedRow& row : published_rows("zero_bubble.csv")) {
    CAPTURE(row.name());
    const parallel::PipelineShape shape = pipeline_of(row);
    const std::vector<double> profiled = row.noted("TF/TB/TW/Tcomm = ");
    REQUIRE(profiled.size() == 4);
    const auto chunks = static_cast<double>(shape.chunks);
    parallel::ActionTicks one{ticks(profiled[0] / chunks), ticks(profiled[1] / chunks),
                              ticks(profiled[2] / chunks)};
    if (!shape.separates_weight_gradients()) one.backward += one.weight_gradients, one.weight_gradients = 0;
    const auto run = simulate(
        shape, make_schedule(shape), std::vector(static_cast<size_t>(shape.ranks * shape.chunks), one),
        std::vector(static_cast<size_t>(shape.ranks * shape.chunks), ticks(profiled[3])));
    REQUIRE(run.problem == "");
    const double published = row.noted("bubble rate (computed from profile) ").front();
    const double error = std::abs(bubble_rate(run) - published);
    CHECK(error <= 0.01);
    worst = std::max(worst, error);
  }
  MESSAGE("V4: largest error ", worst);
}

namespace {

// Seconds of a step whose stages take `chunk` seconds for forward and backward pass of a micro-batch.
double step_seconds(const PublishedRow& row, int64_t micro_batches, double chunk) {
  parallel::PipelineShape shape;
  shape.ranks = shape.group = row.size("pp"), shape.chunks = row.size("vpp");
  shape.micro_batches = micro_batches;
  shape.order =
      shape.chunks > 1 ? config::PipelineSchedule::interleaved : config::PipelineSchedule::one_f_one_b;
  const auto run = simulate(shape, make_schedule(shape), {ticks(1e3 * chunk / 3), ticks(2e3 * chunk / 3), 0});
  REQUIRE(run.problem == "");
  return static_cast<double>(run.ticks) / 1e9;
}

int64_t micro_batches_of(const PublishedRow& row) {
  return row.size("gbs") / (row.size("mbs") * row.size("dp"));
}

}  // namespace

// V5: the time of a chunk follows from the row of three stages, that of nine is predicted.
TEST_CASE("the bubble of nine stages is predicted from a run of three with the same chunks") {
  const std::vector<PublishedRow> rows = published_rows("proxies.csv");
  int predicted = 0;
  for (const std::string precision : {"bf16", "fp8"}) {
    const auto find = [&](int64_t stages) {
      return std::find_if(rows.begin(), rows.end(), [&](const PublishedRow& row) {
        return row.size("pp") == stages && row.text("precision") == precision && row.size("dp") == 4;
      });
    };
    const auto three = find(3), nine = find(9);
    REQUIRE((three != rows.end() && nine != rows.end()));
    // Two layers in each chunk of both.
    REQUIRE(three->size("layers") / (3 * 7) == nine->size("layers") / (9 * 7));
    const double chunk = three->number("iter_time_s") / step_seconds(*three, micro_batches_of(*three), 1);
    const double seconds = step_seconds(*nine, micro_batches_of(*nine), chunk);
    const double error = seconds / nine->number("iter_time_s") - 1;
    MESSAGE("V5, 405B ", precision, ": ", seconds, " s for ", nine->text("iter_time_s"), " s, error ", error);
    CHECK(std::abs(error) <= 0.02);
    ++predicted;
  }
  CHECK(predicted == 2);
}

// V5: time of a micro-batch, and of gradients and optimizer, from the smallest and the largest batch.
TEST_CASE("the step times of BLOOM at other batch sizes follow from two of them") {
  const std::vector<PublishedRow> rows = published_rows("bloom_batch.csv");
  REQUIRE(rows.size() == 4);
  const auto units = [&](const PublishedRow& row) { return step_seconds(row, micro_batches_of(row), 1); };
  const auto measured = [](const PublishedRow& row) { return row.number("iter_time_s"); };
  const double chunk = (measured(rows[3]) - measured(rows[0])) / (units(rows[3]) - units(rows[0]));
  const double constant = measured(rows[0]) - chunk * units(rows[0]);
  CHECK(constant > 0);
  for (const PublishedRow& row : {rows[1], rows[2]}) {
    const double error = (chunk * units(row) + constant) / measured(row) - 1;
    MESSAGE("V5, BLOOM, batch ", row.size("gbs"), ": error ", error);
    CHECK(std::abs(error) <= 0.02);
  }
}

namespace {

// Eight layers on 32 GPUs: tensor parallelism of 4, four stages, two replicas.
RunShape four_stages() {
  RunShape shape;
  shape.layers = 8, shape.hidden = 4096, shape.heads = 32, shape.kv_groups = 32, shape.head_dim = 128;
  shape.ffn = 16'384, shape.vocab = 51'200, shape.seq = 2048;
  shape.tp = 4, shape.pp = 4, shape.dp = 2, shape.etp = 4, shape.sequence_parallel = true;
  shape.micro_batch = 1, shape.global_batch = 24;
  shape.sharding = config::ShardingStrategy::optim;
  split_evenly(shape);
  return shape;
}

}  // namespace

TEST_CASE("the timeline of a step keeps the order of stages, fills the step and has the bubble of the plan") {
  RunShape shape = four_stages();
  const Cluster cluster = read_cluster("h100");
  for (const int64_t chunks : {1, 2}) {
    CAPTURE(chunks);
    shape.vpp = chunks;
    shape.schedule =
        chunks > 1 ? config::PipelineSchedule::interleaved : config::PipelineSchedule::one_f_one_b;
    split_evenly(shape);
    const StepTime time = step_time(shape, cluster);
    const Timeline timeline = simulate_timeline(shape, cluster, time);
    REQUIRE(timeline.ranks.size() == 4);
    CHECK(timeline.seconds == doctest::Approx(time.seconds).epsilon(1e-6));
    std::map<std::pair<int64_t, int64_t>, double> forward_end;  // of micro-batch and stage
    double busiest = 0;
    for (size_t rank = 0; rank < 4; ++rank) {
      double at = 0, busy = 0;
      size_t actions = 0;
      for (const Span& span : timeline.ranks[rank]) {
        CHECK(span.begin >= at - 1e-9);
        CHECK(span.communication <= span.end - span.begin + 1e-9);
        at = span.end;
        if (span.kind > Span::Kind::weight_gradients) continue;
        busy += span.end - span.begin, ++actions;
        if (span.kind == Span::Kind::forward)
          forward_end[{span.micro_batch, span.chunk * 4 + static_cast<int64_t>(rank)}] = span.end;
      }
      CHECK(actions == static_cast<size_t>(2 * shape.micro_batches() * chunks));
      CHECK(at == doctest::Approx(time.seconds).epsilon(1e-6));
      const double pipeline = time.seconds - time.data - time.optimizer - time.other;
      CHECK(busy + timeline.idle[rank] == doctest::Approx(pipeline).epsilon(1e-6));
      busiest = std::max(busiest, busy);
    }
    CHECK(busiest == doctest::Approx(time.work.total() + time.recompute.total()).epsilon(1e-6));
    // A stage begins a micro-batch when it has arrived from the one before.
    const double transfer = stage_transfer_seconds(shape, cluster);
    for (const auto& [key, end] : forward_end)
      if (key.second > 0) CHECK(end > forward_end.at({key.first, key.second - 1}) + transfer - 1e-9);
  }
}

TEST_CASE("bytes of a step by link are those of its collectives") {
  const RunShape shape = four_stages();
  const Cluster cluster = read_cluster("h100");
  const auto traffic = link_traffic(shape, cluster, step_time(shape, cluster));
  const auto of = [&](const std::string& part) {
    return *std::find_if(traffic.begin(), traffic.end(), [&](const auto& t) { return t.part == part; });
  };
  REQUIRE(traffic.size() == 3);
  // The hidden states of a micro-batch: 2048 tokens of 4096 in two bytes. Each of 4 ranks sends three
  // quarters in a collective: two layers with 4 of them forward, 4 backward and 2 for saved inputs. The
  // output layer of the last stage has two forward and two backward, as the time of a step counts them.
  const double states = 2.0 * 2048 * 4096;
  CHECK(of("tensor_parallel").fast_bytes == doctest::Approx(12 * (2 * 10 + 4) * 0.75 * states));
  CHECK(of("tensor_parallel").network_bytes == 0);
  // Two replicas of a stage are 4 ranks apart, within a node: each sends half of the gradients in four bytes,
  // and half of the parameters in two.
  CHECK(of("data_parallel").network_bytes == 0);
  CHECK(of("data_parallel").fast_bytes > 0.5 * 6 * 2 * 12.0 * 4096 * 4096 / 4);
  // Stages are 8 ranks apart: a quarter of the states to the next stage, and as much back.
  CHECK(of("pipeline_transfers").network_bytes == doctest::Approx(12 * 2 * states / 4));
  CHECK(of("pipeline_transfers").fast_bytes == 0);
}

TEST_CASE(
    "multi-token prediction before the stage of the loss: its time there, its losses and transfers after") {
  const Cluster cluster = read_cluster("h100");
  RunShape shape = four_stages();
  // The last stage is the output layer alone.
  shape.stages[3].dense_layers = 0;
  const std::vector<StageTime> without = stage_times(shape, cluster);
  shape.mtp_layers = 2;
  shape.stages[2].mtp_layers = 2;
  for (const size_t stage : {2, 3}) shape.stages[stage].states_out = 3;
  const std::vector<StageTime> with = stage_times(shape, cluster);
  const double layer = without[1].total().total() / real(shape.stages[1].layers()),
               added = with[2].total().total() - without[2].total().total();
  CHECK(added == doctest::Approx(2 * layer));
  CHECK(with[3].total().total() == doctest::Approx(3 * without[3].total().total()));
  // The third rank sends three tensors on and one back.
  const auto ticks_of = transfer_ticks(shape, cluster);
  REQUIRE(ticks_of.size() == 4);
  CHECK(ticks_of[0] == ticks_of[1]);
  CHECK(ticks_of[2] > 2 * ticks_of[1]);
  const auto traffic = link_traffic(shape, cluster, step_time(shape, cluster));
  const auto found = std::ranges::find(traffic, "pipeline_transfers", &LinkTraffic::part);
  REQUIRE(found != traffic.end());
  CHECK(found->network_bytes == doctest::Approx(12 * 4 * 2.0 * 2048 * 4096 / 4));
}

TEST_CASE("a group that leaves its fast domain costs time, and none within a larger domain") {
  RunShape shape = four_stages();
  shape.tp = 16, shape.etp = 16, shape.pp = 1, shape.group = 1;
  split_evenly(shape);
  const Cluster cluster = read_cluster("h100");
  const StepTime time = step_time(shape, cluster), joined = time_within_one_domain(shape, cluster);
  CHECK(time.work.tensor > joined.work.tensor);
  Cluster rack = cluster;
  rack.fast_domain_size = 32;
  CHECK(step_time(shape, rack).seconds == doctest::Approx(joined.seconds));
}
