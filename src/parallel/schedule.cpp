#include "parallel/schedule.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>

#include "base/division.hpp"
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

void check_sizes(const PipelineShape& s) {
  if (s.ranks < 1 || s.chunks < 1 || s.micro_batches < 1)
    fail(ErrorCode::config, "a pipeline needs at least one rank, chunk and micro-batch, not " +
                                std::to_string(s.ranks) + " ranks, " + std::to_string(s.chunks) +
                                " chunks and " + std::to_string(s.micro_batches) + " micro-batches");
  const comm::StageMap stages = s.stages();
  if (stages.ranks() != s.ranks || stages.chunks() != s.chunks)
    fail(ErrorCode::config, "a map of " + std::to_string(stages.stages()) + " stages over " +
                                std::to_string(stages.ranks()) + " ranks for " + std::to_string(s.ranks) +
                                " ranks with " + std::to_string(s.chunks) + " chunks");
}

void check_chunks(const PipelineShape& s) {
  using enum config::PipelineSchedule;
  if (s.order == zb_v) {
    bool v_shaped = s.chunks == 2;
    const comm::StageMap stages = s.stages();
    for (int64_t stage = 0; v_shaped && stage < stages.stages(); ++stage)
      v_shaped = stages.rank_of(stage) == std::min(stage, 2 * s.ranks - 1 - stage);
    if (!v_shaped) fail(ErrorCode::config, "zb_v needs stage r and stage 2 P - 1 - r on each of P ranks r");
    return;
  }
  if (s.chunks > 1 && (s.order == gpipe || s.order == zb_h1))
    fail(ErrorCode::config, std::string(config::enum_name(s.order)) + ": " + std::to_string(s.chunks) +
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

// GPipe, 1F1B and interleaved 1F1B.
std::vector<PipelineAction> joined_actions(const PipelineShape& s, const std::vector<Position>& order,
                                           int64_t rank) {
  const auto total = static_cast<int64_t>(order.size());
  std::vector<PipelineAction> actions;
  actions.reserve(static_cast<size_t>(2 * total));
  const int64_t after = s.ranks - rank - 1;
  int64_t warm_up = std::min(total, s.chunks == 1 ? after : 2 * after + (s.chunks - 1) * s.group);
  if (s.order == config::PipelineSchedule::gpipe) warm_up = total;
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
  return actions;
}

// Appends the actions of each kind and chunk in the order of the micro-batches.
class ActionList {
 public:
  void forward(int32_t chunk) { add(ActionKind::forward, chunk); }
  void backward(int32_t chunk) { add(ActionKind::backward, chunk); }
  void weight_gradients(int32_t chunk) { add(ActionKind::weight_gradients, chunk); }
  void full_backward(int32_t chunk) { backward(chunk), weight_gradients(chunk); }
  int64_t forwards(size_t chunk) const { return counts_[0][chunk]; }
  int64_t backwards(size_t chunk) const { return counts_[1][chunk]; }
  // Backward passes without their weight gradients.
  int64_t pending(size_t chunk) const { return counts_[1][chunk] - counts_[2][chunk]; }
  // The actions of the first `micro_batches`.
  std::vector<PipelineAction> take(int64_t micro_batches) {
    std::erase_if(actions_, [=](const PipelineAction& a) { return a.micro_batch >= micro_batches; });
    return std::move(actions_);
  }

 private:
  void add(ActionKind kind, int32_t chunk) {
    actions_.push_back({kind, counts_[static_cast<size_t>(kind)][static_cast<size_t>(chunk)]++, chunk});
  }
  std::vector<PipelineAction> actions_;
  // Actions of each kind and chunk so far.
  std::array<std::array<int32_t, 2>, 3> counts_{};
};

std::vector<PipelineAction> zb_h1_actions(const PipelineShape& s, int64_t rank) {
  ActionList list;
  while (list.forwards(0) < std::min(s.ranks - rank - 1, s.micro_batches)) list.forward(0);
  while (list.forwards(0) < s.micro_batches) {
    list.forward(0), list.backward(0);
    if (list.pending(0) > rank) list.weight_gradients(0);
  }
  // A backward pass arrives after the time of a backward and a forward pass: weight gradients take its place.
  while (list.backwards(0) < s.micro_batches) list.full_backward(0);
  while (list.pending(0) > 0) list.weight_gradients(0);
  return list.take(s.micro_batches);
}

// The schedule of at least 2 P - 1 micro-batches, which fill the V; the actions of those that do not exist
// are left out.
std::vector<PipelineAction> zb_v_actions(const PipelineShape& s, int64_t rank) {
  const int64_t total = std::max(s.micro_batches, 2 * s.ranks - 1), after = s.ranks - rank;
  ActionList list;
  for (int64_t i = 0; i < 2 * after - 1; ++i) list.forward(0);
  for (int64_t i = 0; i < rank; ++i) list.forward(1), list.forward(0);
  for (int64_t i = 0; i < after; ++i) list.forward(1), list.full_backward(1);
  while (list.forwards(1) < total) {
    if (list.forwards(0) < total) list.forward(0);
    list.full_backward(0), list.forward(1), list.full_backward(1);
  }
  for (int64_t i = 0; i < rank; ++i) list.backward(0), list.backward(1);
  for (int64_t i = 0; i < after; ++i) list.full_backward(0);
  for (const int32_t chunk : {1, 0})
    while (list.pending(static_cast<size_t>(chunk)) > 0) list.weight_gradients(chunk);
  return list.take(s.micro_batches);
}

}  // namespace

std::vector<PipelineAction> make_actions(const PipelineShape& shape, int64_t rank) {
  using enum config::PipelineSchedule;
  check_sizes(shape);
  check_chunks(shape);
  PipelineShape s = shape;
  if (s.chunks == 1) s.group = s.micro_batches;
  return s.order == zb_h1  ? zb_h1_actions(s, rank)
         : s.order == zb_v ? zb_v_actions(s, rank)
                           : joined_actions(s, forward_order(s), rank);
}

Schedule make_schedule(const PipelineShape& shape) {
  check_sizes(shape);
  Schedule schedule;
  for (int64_t rank = 0; rank < shape.ranks; ++rank) schedule.push_back(make_actions(shape, rank));
  return schedule;
}

namespace {

// Whether the actions of `all` from `begin` on are those of `few` from `from` on, `count` of them, for
// micro-batches that come `later`.
bool same_actions(const std::vector<PipelineAction>& all, int64_t begin,
                  const std::vector<PipelineAction>& few, int64_t from, int64_t count, int64_t later) {
  return std::equal(
      few.begin() + from, few.begin() + from + count, all.begin() + begin,
      [later](const PipelineAction& a, const PipelineAction& b) {
        return b == PipelineAction{a.kind, a.micro_batch + static_cast<int32_t>(later), a.chunk};
      });
}

// The most micro-batches that a chunk holds between a forward pass and the last action of the micro-batch.
int64_t most_held(const PipelineShape& s, const std::vector<PipelineAction>& actions) {
  const ActionKind last =
      s.separates_weight_gradients() ? ActionKind::weight_gradients : ActionKind::backward;
  std::vector<int64_t> held(static_cast<size_t>(s.chunks));
  int64_t most = 0;
  for (const PipelineAction& action : actions) {
    int64_t& count = held[static_cast<size_t>(action.chunk)];
    if (action.kind == ActionKind::forward) most = std::max(most, ++count);
    if (action.kind == last) --count;
  }
  return most;
}

}  // namespace

ShorterStep shorter_step(const PipelineShape& shape, int64_t rank, int64_t more) {
  const ShorterStep complete{.micro_batches = shape.micro_batches};
  if (shape.order == config::PipelineSchedule::gpipe) return complete;
  const bool separate = shape.separates_weight_gradients();
  const int64_t group = shape.chunks > 1 && !separate ? shape.group : 1,
                length = group * shape.chunks * (separate ? 3 : 2);
  const std::vector<PipelineAction> all = make_actions(shape, rank);
  const int64_t periods = 2 + more + ceil_div(most_held(shape, all), group);
  PipelineShape fewer = shape;
  for (fewer.micro_batches = shape.micro_batches % group + group; fewer.micro_batches < shape.micro_batches;
       fewer.micro_batches += group) {
    const std::vector<PipelineAction> few = make_actions(fewer, rank);
    // The cool-down of the shorter step begins here. The forward passes of the last micro-batches belong to
    // it, and what is prepared for them before.
    const int32_t last = static_cast<int32_t>(fewer.micro_batches - 1);
    const int64_t last_forward =
        std::find(few.begin(), few.end(), PipelineAction{ActionKind::forward, last, 0}) - few.begin();
    const int64_t other = std::mismatch(few.begin(), few.end(), all.begin()).first - few.begin(),
                  end = std::min(other, last_forward) - length, begin = end - length,
                  settled = begin - periods * length,
                  times = (shape.micro_batches - fewer.micro_batches) / group;
    if (settled < 0) continue;
    if (same_actions(all, settled + length, all, settled, begin + times * length - settled, group) &&
        same_actions(all, end + times * length, few, end, std::ssize(few) - end, times * group))
      return {fewer.micro_batches, begin, length, group, times};
  }
  return complete;
}

ActionTicks usual_ticks(const PipelineShape& shape) {
  return shape.separates_weight_gradients() ? ActionTicks{1, 1, 1} : ActionTicks{1, 2, 0};
}

namespace {

std::string action_text(size_t rank, const PipelineAction& action) {
  const char* kind = action.kind == ActionKind::forward    ? "forward"
                     : action.kind == ActionKind::backward ? "backward"
                                                           : "weight gradients";
  return std::string(kind) + " of micro-batch " + std::to_string(action.micro_batch) + ", chunk " +
         std::to_string(action.chunk) + " on rank " + std::to_string(rank);
}

// Runs the lists of actions by the clock.
class Simulation {
 public:
  Simulation(const PipelineShape& shape, const Schedule& schedule, ScheduleRun& run,
             const std::vector<int64_t>& transfers)
      : s_(shape), schedule_(schedule), run_(run), stages_(shape.stages()), transfers_(transfers) {
    for (auto& ended : ended_) ended.assign(static_cast<size_t>(stages_.stages() * s_.micro_batches), kNever);
    const size_t ranks = schedule.size();
    next_.assign(ranks, 0);
    free_at_.assign(ranks, 0), held_.assign(ranks, 0), live_.assign(ranks, 0);
    run.start.resize(ranks);
    for (auto* values : {&run.idle, &run.idle_between, &run.live, &run.held}) values->assign(ranks, 0);
  }

  void run() {
    for (bool moved = true; moved && run_.problem.empty();) {
      moved = false;
      for (size_t rank = 0; rank < schedule_.size(); ++rank)
        while (next_[rank] < schedule_[rank].size() && try_next(rank)) moved = true;
    }
    if (run_.problem.empty()) find_missing();
    if (run_.problem.empty()) compare_transfers();
    count_idle();
  }

 private:
  static constexpr int64_t kNever = -1;
  // When each stage has ended its part of each micro-batch.
  int64_t& ended(ActionKind kind, int64_t stage, int64_t micro_batch) {
    return ended_[static_cast<size_t>(kind)][static_cast<size_t>(stage * s_.micro_batches + micro_batch)];
  }
  bool exists(const PipelineAction& action) const {
    return action.micro_batch >= 0 && action.micro_batch < s_.micro_batches && action.chunk >= 0 &&
           action.chunk < s_.chunks;
  }
  // When the inputs of an action are there.
  int64_t needed(const PipelineAction& action, int64_t stage) {
    const int64_t m = action.micro_batch;
    switch (action.kind) {
      case ActionKind::forward:
        return stage == 0 ? 0 : arrived(ActionKind::forward, stage - 1, stage, m);
      case ActionKind::backward:
        if (ended(ActionKind::forward, stage, m) == kNever) return kNever;
        return stage + 1 < stages_.stages() ? arrived(ActionKind::backward, stage + 1, stage, m)
                                            : ended(ActionKind::forward, stage, m);
      case ActionKind::weight_gradients:
        break;
    }
    return ended(ActionKind::backward, stage, m);
  }
  // When what stage `from` computed is at stage `to`.
  int64_t arrived(ActionKind kind, int64_t from, int64_t to, int64_t micro_batch) {
    const int64_t end = ended(kind, from, micro_batch);
    if (end == kNever || stages_.rank_of(from) == stages_.rank_of(to) || transfers_.empty()) return end;
    return end + transfers_[static_cast<size_t>(std::min(from, to))];
  }

  // Runs the next action of a rank; false: its inputs are not there, or there is an error.
  bool try_next(size_t rank) {
    const PipelineAction& action = schedule_[rank][next_[rank]];
    if (!exists(action)) {
      run_.problem = action_text(rank, action) + " does not exist";
      return false;
    }
    const int64_t stage = stages_.stage_of(static_cast<int64_t>(rank), action.chunk);
    int64_t& end = ended(action.kind, stage, action.micro_batch);
    if (end != kNever) {
      run_.problem = action_text(rank, action) + " comes twice";
      return false;
    }
    const int64_t ready = needed(action, stage);
    if (ready == kNever) return false;
    const int64_t start = std::max(free_at_[rank], ready);
    run_.start[rank].push_back(start);
    free_at_[rank] = end = start + run_.lengths[static_cast<size_t>(stage)].of(action.kind);
    count_held(rank, action.kind);
    ++next_[rank];
    return true;
  }

  void count_held(size_t rank, ActionKind kind) {
    if (kind == ActionKind::forward) ++live_[rank], ++held_[rank];
    if (kind == ActionKind::backward) --live_[rank];
    const bool last =
        s_.separates_weight_gradients() ? kind == ActionKind::weight_gradients : kind == ActionKind::backward;
    if (last) --held_[rank];
    run_.live[rank] = std::max(run_.live[rank], live_[rank]);
    run_.held[rank] = std::max(run_.held[rank], held_[rank]);
  }

  void find_missing() {
    for (size_t rank = 0; rank < schedule_.size(); ++rank)
      if (next_[rank] < schedule_[rank].size()) {
        run_.problem = action_text(rank, schedule_[rank][next_[rank]]) + " waits forever";
        return;
      }
    for (int64_t stage = 0; stage < stages_.stages(); ++stage)
      for (int64_t m = 0; m < s_.micro_batches; ++m) {
        const bool passed =
            ended(ActionKind::forward, stage, m) != kNever && ended(ActionKind::backward, stage, m) != kNever;
        const bool has_gradients =
            !s_.separates_weight_gradients() || ended(ActionKind::weight_gradients, stage, m) != kNever;
        if (passed && has_gradients) continue;
        run_.problem = "micro-batch " + std::to_string(m) +
                       (passed ? " has no weight gradients in stage " : " never passes stage ") +
                       std::to_string(stage);
        return;
      }
  }

  // Transfers over a link match by their order alone.
  void compare_transfers() {
    // Kind, sender, receiver.
    using Link = std::tuple<ActionKind, int64_t, int64_t>;
    // Micro-batch and receiving stage.
    using Order = std::vector<std::pair<int32_t, int64_t>>;
    std::map<Link, Order> sent, received;
    for (size_t index = 0; index < schedule_.size(); ++index) {
      const auto rank = static_cast<int64_t>(index);
      // The links of the forward and backward pass of each chunk; null: there is no other rank at this end.
      struct Links {
        int64_t receiver = 0, stage = 0;
        Order *out = nullptr, *in = nullptr;
      };
      std::vector<std::array<Links, 2>> chunks(static_cast<size_t>(s_.chunks));
      for (size_t chunk = 0; chunk < chunks.size(); ++chunk)
        for (const ActionKind kind : {ActionKind::forward, ActionKind::backward}) {
          Links& links = chunks[chunk][static_cast<size_t>(kind)];
          links.stage = stages_.stage_of(rank, static_cast<int64_t>(chunk));
          const int64_t step = kind == ActionKind::forward ? 1 : -1, from = links.stage - step;
          links.receiver = links.stage + step;
          const auto elsewhere = [&](int64_t stage) {
            return stage >= 0 && stage < stages_.stages() && stages_.rank_of(stage) != rank;
          };
          if (elsewhere(links.receiver)) links.out = &sent[{kind, rank, stages_.rank_of(links.receiver)}];
          if (elsewhere(from)) links.in = &received[{kind, stages_.rank_of(from), rank}];
        }
      for (const PipelineAction& action : schedule_[index]) {
        if (action.kind == ActionKind::weight_gradients) continue;
        const Links& links = chunks[static_cast<size_t>(action.chunk)][static_cast<size_t>(action.kind)];
        if (links.out) links.out->emplace_back(action.micro_batch, links.receiver);
        if (links.in) links.in->emplace_back(action.micro_batch, links.stage);
      }
    }
    for (const auto& [link, order] : sent)
      if (received[link] != order) {
        run_.problem = "rank " + std::to_string(std::get<2>(link)) + " receives " +
                       (std::get<0>(link) == ActionKind::forward ? "hidden states" : "gradients") +
                       " in another order than rank " + std::to_string(std::get<1>(link)) + " sends them";
        return;
      }
  }

  void count_idle() {
    run_.ticks = *std::max_element(free_at_.begin(), free_at_.end());
    run_.end = free_at_;
    for (size_t rank = 0; rank < schedule_.size(); ++rank) {
      int64_t worked = 0;
      for (size_t i = 0; i < run_.start[rank].size(); ++i) {
        const PipelineAction& action = schedule_[rank][i];
        const int64_t stage = stages_.stage_of(static_cast<int64_t>(rank), action.chunk);
        worked += run_.lengths[static_cast<size_t>(stage)].of(action.kind);
      }
      run_.idle[rank] = run_.ticks - worked;
      if (worked > 0) run_.idle_between[rank] = free_at_[rank] - run_.start[rank].front() - worked;
    }
  }

  const PipelineShape& s_;
  const Schedule& schedule_;
  ScheduleRun& run_;
  const comm::StageMap stages_;
  const std::vector<int64_t>& transfers_;
  // By kind of action.
  std::array<std::vector<int64_t>, 3> ended_;
  std::vector<size_t> next_;
  // For each rank: end of its last action, and number of pairs in flight.
  std::vector<int64_t> free_at_, held_, live_;
};

}  // namespace

ScheduleRun simulate(const PipelineShape& shape, const Schedule& schedule, ActionTicks ticks) {
  return simulate(shape, schedule, std::vector(static_cast<size_t>(shape.ranks * shape.chunks), ticks));
}

ScheduleRun simulate(const PipelineShape& shape, const Schedule& schedule, std::vector<ActionTicks> ticks,
                     const std::vector<int64_t>& transfers) {
  CAPSTAN_ASSERT(std::ssize(ticks) == shape.ranks * shape.chunks, "durations of every stage");
  ScheduleRun run;
  run.lengths = std::move(ticks);
  if (std::ssize(schedule) != shape.ranks) {
    run.problem =
        std::to_string(schedule.size()) + " lists of actions for " + std::to_string(shape.ranks) + " ranks";
    return run;
  }
  Simulation(shape, schedule, run, transfers).run();
  return run;
}

std::string draw(const PipelineShape& s, const Schedule& schedule, const ScheduleRun& run, int64_t columns) {
  const comm::StageMap stages = s.stages();
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
      const auto stage = static_cast<size_t>(stages.stage_of(static_cast<int64_t>(rank), action.chunk));
      const int64_t length = run.lengths[stage].of(action.kind);
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
