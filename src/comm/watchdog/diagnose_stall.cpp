// Finds the rank at fault when a world stalls, from the rank status table alone.
#include <algorithm>

#include "base/text.hpp"
#include "comm/watchdog/rank_status.hpp"

namespace capstan::comm {

namespace {

std::string rank_text(const RankStatus& status) {
  return "rank " + std::to_string(status.rank) + " on host `" + status.host + "` (process " +
         std::to_string(status.pid) + ")";
}
// "all_gather 31 of group `dp` (48 bytes)", "receive of 48 bytes from rank 3 in group `pp`"
std::string call_text(const RankStatus& status) {
  const std::string call(name_of(status.call)), group = "group `" + status.group + "`";
  switch (status.call) {
    case Call::none:
      return "no collective yet";
    case Call::finalize:
      return "the end of the run";
    case Call::send:
    case Call::receive:
      return call + " of " + std::to_string(status.bytes) + " bytes " +
             (status.call == Call::send ? "to" : "from") + " rank " + std::to_string(status.peer) + " in " +
             group;
    case Call::barrier:
    case Call::split:
      return call + " " + std::to_string(status.sequence) + " of " + group;
    default:
      return call + " " + std::to_string(status.sequence) + " of " + group + " (" +
             std::to_string(status.bytes) + " bytes)";
  }
}
std::string step_text(const RankStatus& status) {
  return "step " + std::to_string(status.step) + (status.phase.empty() ? "" : ", " + status.phase);
}
// "transfer batch 3 of group `dp` (all_gather of 32 bytes)"
std::string batch_text(const RankStatus::Group& group) {
  return "transfer batch " + std::to_string(group.begun) + " of group `" + group.name + "` (" + group.text +
         ")";
}
// The batch that the device has been in for the longest time; null: it is in none.
const RankStatus::Group* longest_batch(const RankStatus& status) {
  const RankStatus::Group* longest = nullptr;
  for (const RankStatus::Group& group : status.groups)
    if (group.in_batch() && (!longest || group.seconds > longest->seconds)) longest = &group;
  return longest;
}
std::string state_text(const RankStatus& status) {
  if (status.state == RankState::waiting) return "in " + call_text(status);
  if (status.state == RankState::ended) return "ended";
  return status.call == Call::none ? "before its first collective" : "working after " + call_text(status);
}

// The state of the other ranks, longest waiting first, truncated for large worlds.
void add_others(Error& error, std::vector<RankStatus> statuses, int except) {
  constexpr size_t kShownRanks = 8;
  std::erase_if(statuses, [&](const RankStatus& status) {
    return status.rank == except || status.state == RankState::absent;
  });
  std::stable_sort(statuses.begin(), statuses.end(), [](const RankStatus& a, const RankStatus& b) {
    const bool first = a.state == RankState::waiting, second = b.state == RankState::waiting;
    return first != second ? first : a.seconds > b.seconds;
  });
  for (size_t i = 0; i < std::min(statuses.size(), kShownRanks); ++i) {
    const RankStatus& status = statuses[i];
    const RankStatus::Group* const batch = longest_batch(status);
    const bool waits = status.state == RankState::waiting;
    error.in("rank " + std::to_string(status.rank) +
             (waits || batch ? " waits for " + fixed(waits ? status.seconds : batch->seconds, 1) + " s in " +
                                   (waits ? call_text(status) : batch_text(*batch))
                             : " is " + state_text(status)) +
             ", " + step_text(status));
  }
  if (statuses.size() > kShownRanks)
    error.in("and " + std::to_string(statuses.size() - kShownRanks) + " more ranks");
}

bool is_collective(Call call) {
  return call != Call::none && call != Call::send && call != Call::receive && call != Call::finalize;
}

// The rank that `waiter` waits for: the peer of its send or receive, or the member of its group that has
// entered the fewest collectives. Null: none is missing.
const RankStatus* awaited_rank(const RankStatus& waiter, const std::vector<RankStatus>& statuses) {
  const RankStatus* found = nullptr;
  int64_t fewest = waiter.sequence;
  for (const RankStatus& status : statuses) {
    if (status.rank == waiter.rank) continue;
    if (waiter.peer >= 0) {
      if (status.rank == waiter.peer) return &status;
      continue;
    }
    for (const RankStatus::Group& group : status.groups)
      if (is_collective(waiter.call) && group.name == waiter.group && group.first == waiter.first &&
          group.sequence < fewest)
        found = &status, fewest = group.sequence;
  }
  return found;
}

// Members that entered the same collective of a group with different arguments.
std::optional<Error> find_mismatch(const std::vector<RankStatus>& statuses) {
  for (const RankStatus& a : statuses)
    for (const RankStatus& b : statuses)
      if (a.rank < b.rank && a.state == RankState::waiting && b.state == RankState::waiting &&
          is_collective(a.call) && is_collective(b.call) && a.group == b.group && a.first == b.first &&
          a.sequence == b.sequence &&
          encode_arguments(a.call, a.bytes) != encode_arguments(b.call, b.bytes)) {
        Error error(ErrorCode::rank_failure, "ranks disagree about collective " + std::to_string(a.sequence) +
                                                 " of group `" + a.group + "`: " + rank_text(a) + " is in " +
                                                 call_text(a) + ", " + rank_text(b) + " in " + call_text(b));
        error.in(step_text(a) + " on rank " + std::to_string(a.rank) + ", " + step_text(b) + " on rank " +
                 std::to_string(b.rank));
        return error;
      }
  return std::nullopt;
}

// ---- transfers that the devices carry out

// A rank whose device is in a batch.
struct DeviceWait {
  const RankStatus* status;
  const RankStatus::Group* batch;
};

// The longest wait of a device that has reached the timeout; nullopt: there is none.
std::optional<DeviceWait> longest_wait(const std::vector<RankStatus>& statuses, double timeout) {
  std::optional<DeviceWait> longest;
  for (const RankStatus& status : statuses) {
    const RankStatus::Group* const batch = longest_batch(status);
    if (status.state == RankState::ended || !batch || batch->seconds < timeout) continue;
    if (!longest || batch->seconds > longest->batch->seconds) longest = {&status, batch};
  }
  return longest;
}

// A member of the group that has not begun the batch, the one that is furthest behind; its status and its
// entry of the group. Null: all members have begun it.
DeviceWait missing_member(const DeviceWait& wait, const std::vector<RankStatus>& statuses) {
  DeviceWait missing{};
  int64_t fewest = wait.batch->begun;
  for (const RankStatus& status : statuses)
    for (const RankStatus::Group& group : status.groups)
      if (group.name == wait.batch->name && group.first == wait.batch->first && group.begun < fewest)
        missing = {&status, &group}, fewest = group.begun;
  return missing;
}

Error lagging_device(const DeviceWait& wait, const DeviceWait& missing,
                     const std::vector<RankStatus>& statuses, double timeout) {
  const RankStatus& status = *missing.status;
  const bool started = missing.batch->started >= wait.batch->begun;
  Error error(ErrorCode::rank_failure,
              rank_text(status) + (status.stopped ? " is stopped" : " lags") + " at " + step_text(status) +
                  ": the device of rank " + std::to_string(wait.status->rank) + " waits for it in " +
                  batch_text(*wait.batch) + ", which its " +
                  (started ? "device has not reached" : "host has not started") + "; it has been " +
                  state_text(status) + " for " + fixed(status.seconds, 1) + " s (resilience.timeout " +
                  fixed(timeout, 1) + " s)",
              status.stopped ? "SIGSTOP, a debugger or a batch system has stopped it"
                             : "raise resilience.timeout if such a step is normal");
  add_others(error, statuses, status.rank);
  return error;
}

// The error if all members have begun the batch and none completes it.
Error batch_without_progress(const DeviceWait& wait, const std::vector<RankStatus>& statuses) {
  std::string members;
  for (const RankStatus& status : statuses)
    for (const RankStatus::Group& group : status.groups)
      if (group.name == wait.batch->name && group.first == wait.batch->first && group.in_batch())
        members += (members.empty() ? "" : ", ") + rank_text(status) + " in " +
                   (group.begun == wait.batch->begun ? group.text : batch_text(group));
  Error error(ErrorCode::rank_failure,
              "transfer batch " + std::to_string(wait.batch->begun) + " of group `" + wait.batch->name +
                  "` makes no progress for " + fixed(wait.batch->seconds, 1) + " s at " +
                  step_text(*wait.status) + " although all its ranks have begun it: " + members,
              "if the transfers do not match, they wait forever; if they match, check the network");
  add_others(error, statuses, -1);
  return error;
}

Error devices_in_a_cycle(const std::vector<DeviceWait>& cycle, const std::vector<RankStatus>& statuses) {
  std::string text;
  for (const DeviceWait& wait : cycle)
    text += (text.empty() ? "" : ", ") + rank_text(*wait.status) + " in " + batch_text(*wait.batch);
  Error error(ErrorCode::rank_failure, "devices wait for each other: " + text,
              "all ranks must start the batches of two groups in the same order");
  add_others(error, statuses, -1);
  return error;
}

// Begins with the device that has waited longest, goes to the rank that it waits for, and repeats this until
// it reaches a rank that has not begun its batch, a cycle, or a batch without progress.
std::optional<Error> diagnose_device_waits(const std::vector<RankStatus>& statuses, double timeout) {
  const auto longest = longest_wait(statuses, timeout);
  if (!longest) return std::nullopt;
  std::vector<DeviceWait> path{*longest};
  while (true) {
    const DeviceWait& wait = path.back();
    const DeviceWait missing = missing_member(wait, statuses);
    if (!missing.status) return batch_without_progress(wait, statuses);
    const RankStatus::Group* const batch = longest_batch(*missing.status);
    if (!batch || missing.status->stopped) return lagging_device(wait, missing, statuses, timeout);
    // The device of the missing rank makes progress, so this is no stall.
    if (batch->seconds < timeout) return std::nullopt;
    const auto before = std::find_if(path.begin(), path.end(),
                                     [&](const DeviceWait& w) { return w.status == missing.status; });
    if (before != path.end()) return devices_in_a_cycle({before, path.end()}, statuses);
    path.push_back({missing.status, batch});
  }
}

}  // namespace

Error transport_error(const RankStatus& status, const std::string& problem) {
  return {ErrorCode::rank_failure, rank_text(status) + " at " + step_text(status) + ": " + problem,
          "set NCCL_DEBUG=WARN for NCCL's own log; a resumed run goes on from the newest checkpoint"};
}

std::optional<Error> diagnose_stall(const std::vector<RankStatus>& statuses, double timeout) {
  const std::string resume = "a resumed run goes on from the newest checkpoint";
  for (const RankStatus& status : statuses) {
    if (!status.gone || status.state == RankState::ended || status.state == RankState::absent) continue;
    Error error(ErrorCode::rank_failure,
                rank_text(status) + (status.remote ? " has sent no heartbeat since " : " is gone at ") +
                    step_text(status) + ": it was " + state_text(status),
                (status.remote ? "its host or the network to it may be down; "
                               : "look for the OOM killer in the kernel log (dmesg); ") +
                    resume);
    add_others(error, statuses, status.rank);
    return error;
  }

  if (auto error = diagnose_device_waits(statuses, timeout)) return error;
  const RankStatus *waiter = nullptr, *lagging = nullptr;
  bool all_wait = true;
  for (const RankStatus& status : statuses) {
    if (status.state == RankState::waiting && status.seconds >= timeout &&
        (!waiter || status.seconds > waiter->seconds))
      waiter = &status;
    if (status.state == RankState::working ||
        (status.state == RankState::waiting && status.seconds < timeout))
      all_wait = false;
  }
  if (!waiter) return std::nullopt;
  // A stopped process first, wherever it was stopped; then the rank that has been silent the longest.
  for (const RankStatus& status : statuses) {
    const bool silent = status.state == RankState::working && status.seconds >= timeout;
    if (!(status.stopped || silent) || status.state == RankState::ended || status.state == RankState::absent)
      continue;
    if (!lagging || (status.stopped && !lagging->stopped) ||
        (status.stopped == lagging->stopped && status.seconds > lagging->seconds))
      lagging = &status;
  }
  if (lagging) {
    Error error(ErrorCode::rank_failure,
                rank_text(*lagging) + (lagging->stopped ? " is stopped" : " lags") + " at " +
                    step_text(*lagging) + ": it has been " + state_text(*lagging) + " for " +
                    fixed(lagging->seconds, 1) + " s, and the others wait (resilience.timeout " +
                    fixed(timeout, 1) + " s)",
                lagging->stopped ? "SIGSTOP, a debugger or a batch system has stopped it; " + resume
                                 : "raise resilience.timeout if such a step is normal; " + resume);
    add_others(error, statuses, lagging->rank);
    return error;
  }
  if (!all_wait) return std::nullopt;
  if (auto error = find_mismatch(statuses)) {
    error->in("each has waited for resilience.timeout " + fixed(timeout, 1) + " s");
    return error;
  }
  const RankStatus* missing = awaited_rank(*waiter, statuses);
  Error error(ErrorCode::rank_failure,
              rank_text(*waiter) + " waits in " + call_text(*waiter) + " for " + fixed(waiter->seconds, 1) +
                  " s at " + step_text(*waiter) +
                  (missing ? ", where rank " + std::to_string(missing->rank) + " on host `" + missing->host +
                                 "` has not called it: it is " + state_text(*missing)
                           : ", though all members are there: a message was lost"),
              resume);
  add_others(error, statuses, waiter->rank);
  return error;
}

}  // namespace capstan::comm
