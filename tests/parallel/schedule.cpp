// Pipeline schedules, checked by the clock and by the formulas of their papers, up to 64 ranks with 8 chunks
// each.
#include "parallel/schedule.hpp"

#include <doctest/doctest.h>

#include <algorithm>

#include "base/error.hpp"

using namespace capstan;
using namespace capstan::parallel;

TEST_CASE("1F1B: every step once, the bubble and the live micro-batches of the formulas") {
  for (int64_t ranks : {1, 2, 3, 4, 8, 64})
    for (int64_t micro_batches : {1, 2, 3, 7, 8, 64, 100}) {
      CAPTURE(ranks);
      CAPTURE(micro_batches);
      const PipelineShape shape{.ranks = ranks, .micro_batches = micro_batches};
      for (const ActionTicks ticks : {ActionTicks{1, 2, 0}, ActionTicks{1, 1, 0}, ActionTicks{3, 5, 0}}) {
        const ScheduleRun run = simulate(shape, make_schedule(shape), ticks);
        REQUIRE(run.problem == "");
        const int64_t both = ticks.forward + ticks.backward;
        CHECK(run.ticks == (micro_batches + ranks - 1) * both);
        for (int64_t rank = 0; rank < ranks; ++rank) {
          CHECK(run.idle[static_cast<size_t>(rank)] == (ranks - 1) * both);
          CHECK(run.live[static_cast<size_t>(rank)] == std::min(ranks - rank, micro_batches));
        }
      }
    }
}

TEST_CASE("GPipe: the bubble of 1F1B, and every micro-batch held") {
  for (int64_t ranks : {1, 2, 5, 64})
    for (int64_t micro_batches : {1, 3, 64}) {
      const PipelineShape shape{.ranks = ranks, .micro_batches = micro_batches, .all_forward_first = true};
      const ScheduleRun run = simulate(shape, make_schedule(shape));
      CHECK(run.problem.empty());
      CHECK(run.ticks == 3 * (micro_batches + ranks - 1));
      for (const int64_t live : run.live) CHECK(live == micro_batches);
    }
  CHECK_THROWS_AS(
      make_schedule({.ranks = 2, .chunks = 2, .micro_batches = 4, .group = 2, .all_forward_first = true}),
      Error);
}

TEST_CASE("interleaved: V chunks divide the bubble by V") {
  for (int64_t ranks : {2, 3, 4, 8, 64})
    for (int64_t chunks : {2, 3, 8})
      for (int64_t rounds : {1, 2, 5}) {
        CAPTURE(ranks);
        CAPTURE(chunks);
        CAPTURE(rounds);
        const PipelineShape shape{ranks, chunks, rounds * ranks, ranks};
        const ScheduleRun run = simulate(shape, make_schedule(shape));
        REQUIRE(run.problem == "");
        // In ticks of a chunk: M V (f + b) of work and (P - 1)(f + b) of bubble, where 1F1B has (P - 1) V (f
        // + b).
        CHECK(run.ticks == (rounds * ranks * chunks + ranks - 1) * 3);
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const int64_t warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks;
          CHECK(run.live[static_cast<size_t>(rank)] == std::min(warm_up + 1, rounds * ranks * chunks));
        }
      }
}

TEST_CASE("interleaved: groups above P end, and a last group that is not full, if it has P micro-batches") {
  for (int64_t ranks : {2, 3, 4, 8})
    for (int64_t chunks : {2, 3, 5})
      for (int64_t group = ranks; group <= 2 * ranks + 1; ++group)
        for (int64_t micro_batches = 1; micro_batches <= 3 * ranks + 2; ++micro_batches) {
          CAPTURE(ranks);
          CAPTURE(chunks);
          CAPTURE(group);
          CAPTURE(micro_batches);
          const PipelineShape shape{ranks, chunks, micro_batches, group};
          if (micro_batches % group != 0 && micro_batches % group < ranks) {
            CHECK_THROWS_AS(make_schedule(shape), Error);
            continue;
          }
          CHECK(simulate(shape, make_schedule(shape)).problem == "");
        }
}

TEST_CASE("the order of Megatron's worked example: 2 ranks, 2 chunks, 5 micro-batches in groups of 3") {
  const Schedule schedule = make_schedule({2, 2, 5, 3});
  std::string micro_batches, chunks, back_micro_batches, back_chunks;
  for (const PipelineAction& step : schedule[0]) {
    const bool forward = step.kind == ActionKind::forward;
    (forward ? micro_batches : back_micro_batches) += std::to_string(step.micro_batch);
    (forward ? chunks : back_chunks) += std::to_string(step.chunk);
  }
  CHECK(micro_batches == "0120123434");
  CHECK(chunks == "0001110011");
  CHECK(back_micro_batches == "0120123434");
  CHECK(back_chunks == "1110001100");
  // Rank 0 begins with 2 (P - 1) + (V - 1) 3 = 5 forward passes and one more.
  for (size_t i = 0; i < 6; ++i) CHECK(schedule[0][i].kind == ActionKind::forward);
  CHECK(schedule[0][6].kind == ActionKind::backward);
}

TEST_CASE("the check sees what is wrong with a schedule") {
  const PipelineShape shape{.ranks = 2, .micro_batches = 3};
  const Schedule good = make_schedule(shape);
  // Rank 0 wants the first micro-batch back before it has sent the second, rank 1 wants the second first.
  Schedule waits = good;
  std::swap(waits[1][0], waits[1][1]);
  CHECK(simulate(shape, waits).problem == "backward of micro-batch 0, chunk 0 on rank 0 waits forever");
  Schedule missing = good;
  missing[1].pop_back();
  CHECK(simulate(shape, missing).problem == "backward of micro-batch 2, chunk 0 on rank 0 waits forever");
  missing = good;
  missing[0].pop_back();
  CHECK(simulate(shape, missing).problem == "micro-batch 2 never passes stage 0");
  Schedule twice = good;
  twice[0].push_back(twice[0].front());
  CHECK(simulate(shape, twice).problem == "forward of micro-batch 0, chunk 0 on rank 0 comes twice");
  Schedule strange = good;
  strange[0][0].micro_batch = 9;
  CHECK(simulate(shape, strange).problem == "forward of micro-batch 9, chunk 0 on rank 0 does not exist");
  CHECK(simulate(shape, Schedule(3)).problem == "3 lists of actions for 2 ranks");
  CHECK_THROWS_AS(make_schedule({4, 2, 8, 3}), Error);
  CHECK_THROWS_AS(make_schedule({0, 1, 8, 1}), Error);
}

TEST_CASE("a backward pass in two parts") {
  const PipelineShape shape{.ranks = 2, .micro_batches = 2};
  Schedule schedule = make_schedule(shape);
  for (auto& steps : schedule)
    for (size_t i = steps.size(); i-- > 0;)
      if (steps[i].kind == ActionKind::backward)
        steps.push_back({ActionKind::weight_gradients, steps[i].micro_batch, steps[i].chunk});
  const ScheduleRun run = simulate(shape, schedule, {1, 1, 1});
  CHECK(run.problem == "");
  CHECK(run.ticks == 8);  // 6 of the forward and backward passes, and two more on the rank that ends last
}

TEST_CASE("the picture") {
  const PipelineShape plain{.ranks = 2, .micro_batches = 3};
  const Schedule schedule = make_schedule(plain);
  CHECK(draw(plain, schedule, simulate(plain, schedule), 80) ==
        "rank 0    0  1  .  . [0][0] 2 [1][1] . [2][2]\n"
        "rank 1    .  0 [0][0] 1 [1][1] 2 [2][2] .  .\n");
}
