#include "parallel/schedule.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace capstan::parallel {

namespace {

struct Position {
  int32_t micro_batch, chunk;
};

// The order in which (micro-batch, chunk) pairs go forward on a rank: a group of micro-batches through chunk
// 0, the same through chunk 1 and so on, then the next group.
std::vector<Position> forward_order(const PipelineShape& s) {
  std::vector<Position> order;
  order.reserve(static_cast<size_t>(s.micro_batches * s.chunks));
  for (int64_t first = 0; first < s.micro_batches; first += s.group)
    for (int64_t chunk = 0; chunk < s.chunks; ++chunk)
      for (int64_t m = first; m < std::min(first + s.group, s.micro_batches); ++m)
        order.push_back({static_cast<int32_t>(m), static_cast<int32_t>(chunk)});
  return order;
}

void check(const PipelineShape& s) {
  if (s.ranks < 1 || s.chunks < 1 || s.micro_batches < 1)
    fail(ErrorCode::config, "a pipeline needs at least one rank, chunk and micro-batch, not " +
                                std::to_string(s.ranks) + " ranks, " + std::to_string(s.chunks) +
                                " chunks and " + std::to_string(s.micro_batches) + " micro-batches");
  if (s.chunks > 1 && s.all_forward_first)
    fail(ErrorCode::config, "all forward passes first: " + std::to_string(s.chunks) +
                                " chunks on a rank are for interleaved schedules");
  if (s.chunks > 1 && s.group < s.ranks)
    fail(ErrorCode::config,
         "dist.microbatch_group_size_per_vp_stage=" + std::to_string(s.group) + " is below " +
             std::to_string(s.ranks) +
             " pipeline ranks: a chunk would need a micro-batch before the chunk before it has finished it",
         "dist.microbatch_group_size_per_vp_stage=" + std::to_string(s.ranks));
  const int64_t last = s.micro_batches % s.group;
  if (s.chunks > 1 && last != 0 && last < s.ranks)
    fail(ErrorCode::config,
         std::to_string(s.micro_batches) + " micro-batches leave a last group of " + std::to_string(last) +
             ", below " + std::to_string(s.ranks) + " pipeline ranks: the schedule would deadlock",
         "a number of micro-batches that groups of " + std::to_string(s.group) + " divide");
}

}  // namespace

Schedule make_schedule(const PipelineShape& shape) {
  check(shape);
  PipelineShape s = shape;
  if (s.chunks == 1) s.group = s.micro_batches;
  const std::vector<Position> order = forward_order(s);
  const auto total = static_cast<int64_t>(order.size());
  Schedule schedule(static_cast<size_t>(s.ranks));
  for (int64_t rank = 0; rank < s.ranks; ++rank) {
    auto& actions = schedule[static_cast<size_t>(rank)];
    actions.reserve(static_cast<size_t>(2 * total));
    const int64_t after = s.ranks - rank - 1;
    const int64_t warm_up =
        s.all_forward_first ? total
                            : std::min(total, s.chunks == 1 ? after : 2 * after + (s.chunks - 1) * s.group);
    int64_t forward = 0, backward = 0;
    const auto go_forward = [&] {
      const Position p = order[static_cast<size_t>(forward++)];
      actions.push_back({ActionKind::forward, p.micro_batch, p.chunk});
    };
    // The same order, from the last chunk to the first.
    const auto go_backward = [&] {
      const Position p = order[static_cast<size_t>(backward++)];
      actions.push_back({ActionKind::backward, p.micro_batch, static_cast<int32_t>(s.chunks - 1 - p.chunk)});
    };
    while (forward < warm_up) go_forward();
    while (forward < total) go_forward(), go_backward();
    while (backward < total) go_backward();
  }
  return schedule;
}

static std::string action_text(size_t rank, const PipelineAction& action) {
  const char* kind = action.kind == ActionKind::forward    ? "forward"
                     : action.kind == ActionKind::backward ? "backward"
                                                           : "weight gradients";
  return std::string(kind) + " of micro-batch " + std::to_string(action.micro_batch) + ", chunk " +
         std::to_string(action.chunk) + " on rank " + std::to_string(rank);
}

ScheduleRun simulate(const PipelineShape& s, const Schedule& schedule, ActionTicks ticks) {
  ScheduleRun run;
  run.lengths = ticks;
  const auto ranks = static_cast<size_t>(s.ranks);
  if (schedule.size() != ranks) {
    run.problem =
        std::to_string(schedule.size()) + " lists of actions for " + std::to_string(s.ranks) + " ranks";
    return run;
  }
  const int64_t stages = s.ranks * s.chunks;
  constexpr int64_t kNever = -1;
  // When each stage had ended its part of each micro-batch.
  const auto at = [&](int64_t stage, int64_t micro_batch) {
    return static_cast<size_t>(stage * s.micro_batches + micro_batch);
  };
  std::vector<int64_t> forward(static_cast<size_t>(stages * s.micro_batches), kNever),
      backward = forward, weight_gradients = forward;
  run.start.resize(ranks);
  run.idle.assign(ranks, 0);
  run.live.assign(ranks, 0);
  std::vector<size_t> next(ranks, 0);
  std::vector<int64_t> free_at(ranks, 0), held(ranks, 0), worked(ranks, 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (; next[rank] < schedule[rank].size(); ++next[rank]) {
        const PipelineAction& action = schedule[rank][next[rank]];
        if (action.micro_batch < 0 || action.micro_batch >= s.micro_batches || action.chunk < 0 ||
            action.chunk >= s.chunks) {
          run.problem = action_text(rank, action) + " does not exist";
          return run;
        }
        const int64_t stage = action.chunk * s.ranks + static_cast<int64_t>(rank);
        const size_t here = at(stage, action.micro_batch);
        int64_t needed = 0, length = ticks.forward;
        std::vector<int64_t>* ended = &forward;
        if (action.kind == ActionKind::forward) {
          if (stage > 0) needed = forward[at(stage - 1, action.micro_batch)];
        } else if (action.kind == ActionKind::backward) {
          ended = &backward, length = ticks.backward;
          needed = stage + 1 < stages ? backward[at(stage + 1, action.micro_batch)] : forward[here];
          if (forward[here] == kNever) needed = kNever;
        } else {
          ended = &weight_gradients, length = ticks.weight_gradients;
          needed = backward[here];
        }
        if ((*ended)[here] != kNever) {
          run.problem = action_text(rank, action) + " comes twice";
          return run;
        }
        if (needed == kNever) break;
        const int64_t start = std::max(free_at[rank], needed);
        run.start[rank].push_back(start);
        free_at[rank] = (*ended)[here] = start + length;
        worked[rank] += length;
        if (action.kind == ActionKind::forward) run.live[rank] = std::max(run.live[rank], ++held[rank]);
        if (action.kind == ActionKind::backward) --held[rank];
        moved = true;
      }
    }
  }
  for (size_t rank = 0; rank < ranks && run.problem.empty(); ++rank)
    if (next[rank] < schedule[rank].size())
      run.problem = action_text(rank, schedule[rank][next[rank]]) + " waits forever";
  for (size_t i = 0; i < forward.size() && run.problem.empty(); ++i)
    if (forward[i] == kNever || backward[i] == kNever)
      run.problem = "micro-batch " + std::to_string(static_cast<int64_t>(i) % s.micro_batches) +
                    " never passes stage " + std::to_string(static_cast<int64_t>(i) / s.micro_batches);
  run.ticks = *std::max_element(free_at.begin(), free_at.end());
  for (size_t rank = 0; rank < ranks; ++rank) run.idle[rank] = run.ticks - worked[rank];
  return run;
}

std::string draw(const PipelineShape& s, const Schedule& schedule, const ScheduleRun& run, int64_t columns) {
  const size_t digits = std::to_string(s.micro_batches - 1).size() + (s.chunks > 1 ? 1 : 0);
  // Including brackets.
  const size_t width = digits + 2;
  const auto shown = std::min(run.ticks, std::max<int64_t>(1, columns / static_cast<int64_t>(width)));
  std::string text;
  for (size_t rank = 0; rank < schedule.size(); ++rank) {
    std::vector<std::string> cells(static_cast<size_t>(shown),
                                   std::string(width, ' ').replace(width / 2, 1, "."));
    for (size_t i = 0; i < run.start[rank].size(); ++i) {
      const PipelineAction& action = schedule[rank][i];
      std::string label = std::to_string(action.micro_batch);
      if (s.chunks > 1) label += static_cast<char>('a' + action.chunk % 26);
      label = action.kind == ActionKind::forward    ? label
              : action.kind == ActionKind::backward ? "[" + label + "]"
                                                    : "w" + label;
      label.insert(0, (width - label.size()) / 2, ' ');
      label.resize(width, ' ');
      const int64_t length = action.kind == ActionKind::forward    ? run.lengths.forward
                             : action.kind == ActionKind::backward ? run.lengths.backward
                                                                   : run.lengths.weight_gradients;
      const int64_t begin = run.start[rank][i];
      for (int64_t t = begin; t < std::min(shown, begin + length); ++t) cells[static_cast<size_t>(t)] = label;
    }
    std::string row = "rank " + std::to_string(rank);
    row.resize(std::max<size_t>(row.size() + 1, 9), ' ');
    for (const std::string& cell : cells) row += cell;
    row.erase(row.find_last_not_of(' ') + 1);
    text += row + "\n";
  }
  if (shown < run.ticks)
    text += "… ticks " + std::to_string(shown + 1) + " to " + std::to_string(run.ticks) + " are not shown\n";
  return text;
}

}  // namespace capstan::parallel
