// The rank status table: the state of every rank of a host, in shared memory. A rank publishes its state with
// a few stores around each collective; the watchdogs of the other ranks read it and name the rank at fault
// when the world stalls.
//
// Only the slot's own rank writes a slot: its main thread; its watchdog, which writes the heartbeat; and its
// watchdog or the queues of its device, which write what the device has done. Readers load fields one by one
// without a lock: diagnose_stall() acts only on states that have not changed for a long time.
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

// The batches of a group's channel that the devices carry out without the host (comm/nccl_channel.hpp and its
// stand-in comm/blocking_channel.hpp). They are numbered from 1, and the device works on one at a time.
struct DeviceBatches {
  // Batches that the host has started, and those that have begun and are done on the device.
  std::atomic<int64_t> started, begun, done;
  // CLOCK_MONOTONIC, ns: when the batch `begun` was first seen to have begun.
  std::atomic<int64_t> since;
  // Transfers of the batch, with world ranks: "receive of 32 bytes from rank 1".
  std::array<char, 96> text;
};

// The collectives of one group that a rank has entered: their count, and the arguments of the last few.
struct GroupSlot {
  static constexpr size_t kKeptCalls = 4;
  std::array<char, 24> name;
  // World rank of the first member: name and first are the group's identity.
  std::atomic<int32_t> first;
  // Collectives entered; the first has number 1.
  std::atomic<int64_t> sequence;
  // At s % kKeptCalls: encode_arguments() of collective s.
  std::array<std::atomic<int64_t>, kKeptCalls> arguments;
  // Written by the rank's main thread and by its watchdog or the device's queues.
  DeviceBatches batches;
};
// Call and size in one number, which members of a group compare.
inline int64_t encode_arguments(Call call, int64_t bytes) {
  return bytes * 16 + static_cast<int64_t>(call);
}

struct alignas(64) Slot {
  static constexpr size_t kGroups = 64;
  std::atomic<int32_t> rank, pid, state;
  // CLOCK_MONOTONIC, ns: when `state` began.
  std::atomic<int64_t> since;
  // Counts up while the process runs.
  std::atomic<int64_t> heartbeat;
  std::atomic<int64_t> step;
  // CLOCK_MONOTONIC, ns: when the rank could stop on request; negative: the earliest time; 0: unknown.
  std::atomic<int64_t> expected_end;
  // Steps that the newest checkpoint of the run holds, plus one; 0: there is none.
  std::atomic<int64_t> saved_steps;
  // Text of up to 16 bytes.
  std::array<std::atomic<uint64_t>, 2> phase;
  // The current or latest call.
  // Group: index below; peer: world rank, -1 for a collective.
  std::atomic<int32_t> call, group, peer;
  std::atomic<int64_t> sequence, bytes;
  std::array<char, 64> host;
  std::array<GroupSlot, kGroups> groups;
};

// One rank as a reader sees it.
struct RankStatus {
  int rank = 0, pid = 0;
  std::string host;
  RankState state = RankState::working;
  // Time since `state` began.
  double seconds = 0;
  // The process of the rank has ended without publishing `ended`, or (on another host) its heartbeat has
  // stopped.
  bool gone = false;
  // Stopped by a signal such as SIGSTOP.
  bool stopped = false;
  // The rank runs on another host.
  bool remote = false;
  int64_t heartbeat = 0;
  int64_t step = 0;
  std::string phase;
  // The current or latest call, as in Slot.
  Call call = Call::none;
  std::string group;
  int first = 0, peer = -1;
  int64_t sequence = 0, bytes = 0;
  struct Group {
    std::string name;
    int first = 0;
    int64_t sequence = 0;
    // As in DeviceBatches.
    int64_t started = 0, begun = 0, done = 0;
    // Since the batch `begun` was seen to have begun, and its transfers; where it is not done.
    double seconds = 0;
    std::string text;
    bool in_batch() const { return begun > done; }
  };
  std::vector<Group> groups;
};

// Finds a rank whose process has ended, a rank that kept others or their devices waiting for `timeout`
// seconds, or ranks that wait for each other. The error is ErrorCode::rank_failure and names rank, host,
// step, collective and group; nullopt: no failure.
std::optional<Error> diagnose_stall(const std::vector<RankStatus>& statuses, double timeout);
// The error of a rank whose transport has failed. problem: "in batch 3 of group `dp` (all_gather of 32
// bytes), NCCL reports …".
Error transport_error(const RankStatus& status, const std::string& problem);

class RankStatusTable {
 public:
  // Shared memory for `ranks` ranks that other processes can open by name. `parent`: the creator outlives the
  // ranks and prints the report itself.
  static std::unique_ptr<RankStatusTable> create(int ranks, bool parent);
  static std::unique_ptr<RankStatusTable> open(const std::filesystem::path& path);
  ~RankStatusTable();
  RankStatusTable(const RankStatusTable&) = delete;
  RankStatusTable& operator=(const RankStatusTable&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // Removes the name; the memory lives until the last process unmaps it.
  void unlink();
  int ranks() const;
  bool has_parent() const;
  Slot& slot(int index) { return slots()[index]; }
  // The phase of a slot; safe in a signal handler.
  static std::array<char, 17> phase_of(const Slot& slot);
  // `seconds` of the result counts from `not_before_ns` at the earliest.
  RankStatus read(int index, int64_t not_before_ns) const;

  // True for the first caller among all processes of the host, which then reports the failure.
  bool claim_report();
  bool report_claimed() const;
  // Call only after claim_report() returned true.
  void write_report(const Error& error);
  // nullopt until the report is complete.
  std::optional<Error> report() const;

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
