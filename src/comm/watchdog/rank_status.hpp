// The failure board: what every rank of a host does at this moment, in memory that they share. A rank posts with a few
// stores around each collective; the others' watchdogs read it and name the rank that lags when nothing moves any more.
//
// A slot is written by its own rank only (its main thread, and the watchdog for the heartbeat). Readers take fields one by one:
// what they judge has not changed for a long time, so that a torn picture of a moving rank does no harm.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace capstan::comm {

enum class RankState : int32_t { absent, working, waiting, ended };
enum class Call : int32_t {
  none,
  all_gather,
  all_to_all,
  broadcast,
  send,
  receive,
  barrier,
  split,
  finalize
};
std::string_view name_of(Call call);

// The collectives of one group that a rank has entered: their number, and the last few with what was asked for.
struct GroupSlot {
  static constexpr size_t kKept = 4;
  std::array<char, 24> name;
  std::atomic<int32_t> first;     // world rank of the first member: name and first are the group's identity
  std::atomic<int64_t> sequence;  // collectives entered; the first has number 1
  std::array<std::atomic<int64_t>, kKept> asked;  // of collective s at s % kKept: bytes * 16 + call
};
inline int64_t asked_of(Call call, int64_t bytes) {
  return bytes * 16 + static_cast<int64_t>(call);
}

struct alignas(64) Slot {
  static constexpr size_t kGroups = 64;
  std::atomic<int32_t> rank, pid, state;
  std::atomic<int64_t> since;      // CLOCK_MONOTONIC of this host, ns: when `doing` began
  std::atomic<int64_t> heartbeat;  // counts up while the process runs
  std::atomic<int64_t> step;
  std::atomic<int64_t>
      expected_end;  // CLOCK_MONOTONIC, ns: when the rank can stop if it is asked to; 0: unknown
  std::array<std::atomic<uint64_t>, 2> phase;  // text of up to 16 bytes
  // The call that the rank is in, or was in last.
  std::atomic<int32_t> call, group, peer;  // group: index below; peer: world rank, -1 for a collective
  std::atomic<int64_t> sequence, bytes;
  std::array<char, 64> host;
  std::array<GroupSlot, kGroups> groups;
};

// One rank as a reader sees it.
struct RankStatus {
  int rank = 0, pid = 0;
  std::string host;
  RankState state = RankState::working;
  double seconds = 0;                  // since `doing` began
  bool gone = false, stopped = false;  // its process has ended without a word; is stopped (SIGSTOP)
  bool remote = false;                 // on another host: `gone` means no sign of life
  int64_t heartbeat = 0;
  int64_t step = 0;
  std::string phase;
  Call call = Call::none;  // it is in, or was in last
  std::string group;
  int first = 0, peer = -1;
  int64_t sequence = 0, bytes = 0;
  struct Group {
    std::string name;
    int first = 0;
    int64_t sequence = 0;
  };
  std::vector<Group> groups;  // that it is a member of
};

// What is wrong in a world, if anything is: a rank that is gone, or one that kept others waiting for `timeout` seconds, or
// ranks that all wait for each other. The error is ErrorCode::rank_failure and names rank, host, step, collective and group.
std::optional<Error> diagnose_stall(const std::vector<RankStatus>& statuses, double timeout);

class RankStatusTable {
 public:
  // Memory for `ranks` ranks under a name that other processes can open. `parent`: the creator outlives the ranks and tells
  // the report itself.
  static std::unique_ptr<RankStatusTable> create(int ranks, bool parent);
  static std::unique_ptr<RankStatusTable> open(const std::filesystem::path& path);
  ~RankStatusTable();
  RankStatusTable(const RankStatusTable&) = delete;
  RankStatusTable& operator=(const RankStatusTable&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void unlink();  // the name goes, the memory stays until the last process has left
  int ranks() const;
  bool has_parent() const;
  Slot& slot(int index) { return slots()[index]; }
  // The phase of a slot; safe in a signal handler.
  static std::array<char, 17> phase_of(const Slot& slot);
  RankStatus read(int index, int64_t not_before_ns) const;  // `seconds` counts from then at the earliest

  // The first to claim tells what went wrong; everybody else keeps quiet.
  bool claim();
  bool claimed() const;
  void write_report(const Error& error);  // by whoever has claimed
  std::optional<Error> report() const;    // once it is complete

 private:
  struct Header;
  RankStatusTable(std::filesystem::path path, void* memory, size_t bytes);
  Header& header() const { return *static_cast<Header*>(memory_); }
  Slot* slots() const;
  std::filesystem::path path_;
  void* memory_;
  size_t bytes_;
};

int64_t monotonic_ns();

}  // namespace capstan::comm
