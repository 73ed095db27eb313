// The trainer's pipeline schedules, simulated with published times of their actions.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "parallel/schedule.hpp"
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
    const auto run =
        simulate(shape, make_schedule(shape),
                 std::vector(static_cast<size_t>(shape.ranks * shape.chunks), one), ticks(profiled[3]));
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
