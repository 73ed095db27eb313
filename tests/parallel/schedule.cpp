// Pipeline schedules, checked by the clock and by the formulas of their papers, up to 64 ranks with 8 chunks
// each.
#include "parallel/schedule.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "base/error.hpp"
#include "config/sections/pipeline_layout.hpp"

using namespace capstan;
using namespace capstan::parallel;
using capstan::config::PipelineSchedule;

namespace {

PipelineShape v_shape(int64_t ranks, int64_t micro_batches) {
  return {.ranks = ranks,
          .chunks = 2,
          .micro_batches = micro_batches,
          .order = PipelineSchedule::zb_v,
          .stage_ranks = config::stage_ranks(PipelineSchedule::zb_v, ranks, 2)};
}

// The micro-batches of each kind and chunk, in the order of their actions on a rank.
std::map<std::pair<ActionKind, int32_t>, std::vector<int32_t>> orders(
    const std::vector<PipelineAction>& rank) {
  std::map<std::pair<ActionKind, int32_t>, std::vector<int32_t>> result;
  for (const PipelineAction& action : rank) result[{action.kind, action.chunk}].push_back(action.micro_batch);
  return result;
}

}  // namespace

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
      const PipelineShape shape{
          .ranks = ranks, .micro_batches = micro_batches, .order = PipelineSchedule::gpipe};
      const ScheduleRun run = simulate(shape, make_schedule(shape));
      CHECK(run.problem.empty());
      CHECK(run.ticks == 3 * (micro_batches + ranks - 1));
      for (const int64_t live : run.live) CHECK(live == micro_batches);
    }
  CHECK_THROWS_AS(
      make_schedule(
          {.ranks = 2, .chunks = 2, .micro_batches = 4, .group = 2, .order = PipelineSchedule::gpipe}),
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

TEST_CASE("ZB-H1: the bubble (P - 1)(F + B - W) of Qi et al. 2023, and the micro-batches of 1F1B's rank 0") {
  for (int64_t ranks : {1, 2, 3, 4, 8, 64})
    for (int64_t micro_batches : {1, 2, 3, 7, 8, 64, 100}) {
      CAPTURE(ranks);
      CAPTURE(micro_batches);
      const PipelineShape shape{
          .ranks = ranks, .micro_batches = micro_batches, .order = PipelineSchedule::zb_h1};
      const Schedule schedule = make_schedule(shape);
      for (const ActionTicks t : {ActionTicks{1, 1, 1}, {2, 2, 1}, {4, 5, 3}, {2, 3, 2}, {3, 3, 3}}) {
        const ScheduleRun run = simulate(shape, schedule, t);
        REQUIRE(run.problem == "");
        for (size_t rank = 0; rank < schedule.size(); ++rank) {
          CHECK(run.held[rank] == std::min(ranks, micro_batches));
          CHECK(run.live[rank] <= std::min(ranks, micro_batches));
          if (micro_batches >= ranks)
            CHECK(run.idle[rank] == (ranks - 1) * (t.forward + t.backward - t.weight_gradients));
        }
        // Never more than 1F1B, whose backward pass has both parts.
        const PipelineShape usual{.ranks = ranks, .micro_batches = micro_batches};
        const ActionTicks joined{t.forward, t.backward + t.weight_gradients, 0};
        CHECK(run.ticks <= simulate(usual, make_schedule(usual), joined).ticks);
      }
    }
}

TEST_CASE("ZB-V: no bubble with equal times, and the activations of P micro-batches") {
  for (int64_t ranks : {1, 2, 3, 4, 8, 64})
    for (int64_t micro_batches : {1, 2, 3, 5, 7, 15, 16, 127, 200}) {
      CAPTURE(ranks);
      CAPTURE(micro_batches);
      const PipelineShape shape = v_shape(ranks, micro_batches);
      const ScheduleRun run = simulate(shape, make_schedule(shape), {1, 1, 1});
      REQUIRE(run.problem == "");
      const int64_t work = 6 * micro_batches;
      // Of half the layers: as much memory as P micro-batches of 1F1B.
      for (const int64_t held : run.held) CHECK(held <= 2 * ranks);
      if (micro_batches < 2 * ranks - 1) continue;
      CHECK(run.ticks == work + ranks - 1);
      for (const int64_t idle : run.idle_between) CHECK(idle == 0);
      for (const int64_t held : run.held) CHECK(held == 2 * ranks);
    }
}

TEST_CASE("weight gradients are computed in the order of the micro-batches, each after its input gradients") {
  for (int64_t ranks : {1, 2, 3, 5, 8})
    for (int64_t micro_batches : {1, 2, 4, 9, 17})
      for (const PipelineShape& shape :
           {PipelineShape{.ranks = ranks, .micro_batches = micro_batches, .order = PipelineSchedule::zb_h1},
            v_shape(ranks, micro_batches)}) {
        const Schedule schedule = make_schedule(shape);
        // Any times: the lists alone make it right.
        for (const ActionTicks ticks : {ActionTicks{1, 7, 2}, ActionTicks{5, 1, 3}, ActionTicks{1, 1, 9}})
          CHECK(simulate(shape, schedule, ticks).problem == "");
        std::vector<int32_t> all(static_cast<size_t>(micro_batches));
        std::iota(all.begin(), all.end(), 0);
        for (const auto& rank : schedule)
          for (const auto& [what, order] : orders(rank)) CHECK(order == all);
      }
}

TEST_CASE("zero-bubble schedules: what does not fit them, and what the check sees") {
  CHECK_THROWS_AS(make_schedule({.ranks = 2, .chunks = 2, .order = PipelineSchedule::zb_h1}), Error);
  // Stages that are not in the shape of a V.
  CHECK_THROWS_AS(make_schedule({.ranks = 2, .chunks = 2, .order = PipelineSchedule::zb_v}), Error);
  CHECK_THROWS_AS(make_schedule({.ranks = 2, .order = PipelineSchedule::zb_v}), Error);
  // Maps that are none.
  CHECK_THROWS_AS(make_schedule({.ranks = 2, .stage_ranks = {0, 2}}), Error);
  CHECK_THROWS_AS(make_schedule({.ranks = 2, .chunks = 2, .stage_ranks = {0, 1, 1, 1}}), Error);
  CHECK_THROWS_AS(make_schedule({.ranks = 3, .stage_ranks = {0, 1}}), Error);
  const PipelineShape shape = v_shape(2, 4);
  Schedule missing = make_schedule(shape);
  missing[0].pop_back();
  CHECK(simulate(shape, missing).problem == "micro-batch 3 has no weight gradients in stage 0");
  Schedule early = make_schedule(shape);
  const PipelineAction weights = early[0].back();
  early[0].pop_back();
  early[0].insert(early[0].begin(), weights);
  CHECK(simulate(shape, early).problem ==
        "weight gradients of micro-batch 3, chunk 0 on rank 0 waits forever");
}

TEST_CASE("a transfer takes the time of its boundary, forward and backward") {
  const PipelineShape three{.ranks = 3, .micro_batches = 1};
  const auto run = simulate(three, make_schedule(three), {{1, 2, 0}, {1, 2, 0}, {1, 2, 0}}, {3, 10, 100});
  CHECK(run.problem == "");
  CHECK(run.start[1] == std::vector<int64_t>{1 + 3, 1 + 3 + 1 + 10 + 3 + 10});
  CHECK(run.ticks == 3 * (1 + 2) + 2 * (3 + 10));
  // Stages of one rank transfer nothing.
  const PipelineShape v{.ranks = 2,
                        .chunks = 2,
                        .micro_batches = 1,
                        .group = 2,
                        .order = PipelineSchedule::zb_v,
                        .stage_ranks = {0, 1, 1, 0}};
  const auto of_v = simulate(v, make_schedule(v), std::vector(4, ActionTicks{1, 1, 0}), {3, 100, 7, 100});
  CHECK(of_v.ticks == 8 + 2 * (3 + 7));
}

TEST_CASE("any map of stages: the same lists over ranks in another order, and transfers in unequal order") {
  // 1F1B from the last rank to the first.
  const PipelineShape forward{.ranks = 3, .micro_batches = 5},
      reversed{.ranks = 3, .micro_batches = 5, .stage_ranks = {2, 1, 0}};
  Schedule lists = make_schedule(forward);
  std::swap(lists[0], lists[2]);
  const ScheduleRun run = simulate(reversed, lists);
  CHECK(run.problem == "");
  CHECK(run.ticks == simulate(forward, make_schedule(forward)).ticks);
  // Rank 0 sends micro-batches in their order, rank 1 takes the second one first.
  const PipelineShape two{.ranks = 2, .micro_batches = 2, .order = PipelineSchedule::gpipe};
  Schedule unequal = make_schedule(two);
  std::swap(unequal[1][0], unequal[1][1]);
  CHECK(simulate(two, unequal).problem ==
        "rank 1 receives hidden states in another order than rank 0 sends them");
}

TEST_CASE("the picture of the zero-bubble schedules") {
  const PipelineShape h1{.ranks = 2, .micro_batches = 3, .order = PipelineSchedule::zb_h1};
  CHECK(draw(h1, make_schedule(h1), simulate(h1, make_schedule(h1)), 200) ==
        "rank 0    0  1  . [0]w0  2 [1]w1 [2]w2\n"
        "rank 1    .  0 [0] 1 [1]w0  2 [2]w1 w2\n");
  const PipelineShape v = v_shape(2, 3);
  CHECK(draw(v, make_schedule(v), simulate(v, make_schedule(v)), 200) ==
        "rank 0    0a  1a  2a  0b [0b]w0b  1b [1b]w1b [0a]w0a  2b [2b]w2b [1a]w1a [2a]w2a   .\n"
        "rank 1     .  0a  0b  1a  1b [0b]w0b  2a [0a]w0a  2b [1b]w1b [1a][2b][2a]w1a w2b w2a\n");
}

TEST_CASE("the picture") {
  const PipelineShape plain{.ranks = 2, .micro_batches = 3};
  const Schedule schedule = make_schedule(plain);
  CHECK(draw(plain, schedule, simulate(plain, schedule), 80) ==
        "rank 0    0  1  .  . [0][0] 2 [1][1] . [2][2]\n"
        "rank 1    .  0 [0][0] 1 [1][1] 2 [2][2] .  .\n");
}

TEST_CASE("a shorter step has the actions of a longer one, but for periods that come again") {
  const auto check = [](const PipelineShape& shape) {
    for (int64_t rank = 0; rank < shape.ranks; ++rank)
      for (const int64_t more : {0, 3}) {
        CAPTURE(rank);
        const ShorterStep few = shorter_step(shape, rank, more);
        PipelineShape shorter = shape;
        shorter.micro_batches = few.micro_batches;
        std::vector<PipelineAction> actions = make_actions(shorter, rank);
        const auto later = [&](PipelineAction action, int64_t periods) {
          action.micro_batch += static_cast<int32_t>(periods * few.group);
          return action;
        };
        std::vector<PipelineAction> all(actions.begin(), actions.begin() + few.begin + few.length);
        for (int64_t period = 1; period <= few.times; ++period)
          for (int64_t i = 0; i < few.length; ++i)
            all.push_back(later(actions[static_cast<size_t>(few.begin + i)], period));
        for (int64_t i = few.begin + few.length; i < std::ssize(actions); ++i)
          all.push_back(later(actions[static_cast<size_t>(i)], few.times));
        CHECK(few.micro_batches + few.times * few.group == shape.micro_batches);
        if (few.times == 0) all = actions;
        CHECK(all == make_actions(shape, rank));
      }
    return shorter_step(shape, 0).micro_batches;
  };
  using enum PipelineSchedule;
  CHECK(check({.micro_batches = 100}) < 10);
  CHECK(check({.ranks = 4, .micro_batches = 101}) < 20);
  CHECK(check({.ranks = 4, .micro_batches = 101, .order = zb_h1}) < 20);
  CHECK(check(v_shape(4, 101)) < 30);
  CHECK(check({.ranks = 4, .chunks = 5, .micro_batches = 128, .group = 4}) <= 32);
  CHECK(check({.ranks = 3, .chunks = 2, .micro_batches = 128, .group = 5}) <= 43);
  // None is shorter.
  CHECK(check({.ranks = 4, .micro_batches = 100, .order = gpipe}) == 100);
  CHECK(check({.ranks = 8, .micro_batches = 9}) == 9);
}
