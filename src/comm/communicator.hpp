// A named group of ranks: its collectives over host memory, for control, and its channel for device memory
// (channel.hpp). Counts are bytes. reduce.hpp adds the numbers in rank order, so that layouts and ZeRO stages
// agree bitwise.
//
// Every member calls the same collectives in the same order; messages between two members are matched in the
// order of the calls. The caller leaves the buffers untouched until wait() returns. Transport errors are
// ErrorCode::rank_failure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace capstan::comm {

class Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;
};
using WorkHandle = std::unique_ptr<Work>;

class TensorChannel;
struct DeviceBatches;

class Communicator {
 public:
  Communicator();
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // For example "world", "dp" or "tp".
  virtual const std::string& name() const = 0;
  // Ranks with the same color form a group, ordered by key. Collective over this group.
  virtual std::unique_ptr<Communicator> split(int color, int key, const std::string& name) = 0;

  virtual WorkHandle start_all_gather(const void* mine, void* all, int64_t bytes_per_rank) = 0;
  virtual WorkHandle start_all_to_all(const void* send, void* receive, int64_t bytes_per_rank) = 0;
  virtual WorkHandle start_broadcast(void* data, int64_t bytes, int root) = 0;
  virtual WorkHandle start_send(const void* data, int64_t bytes, int to) = 0;
  virtual WorkHandle start_receive(void* data, int64_t bytes, int from) = 0;
  virtual void barrier() = 0;

  // Bytes that this rank has sent to other members of this group so far.
  virtual int64_t sent_bytes() const = 0;
  // True on a meta communicator: it counts the bytes of each call and reads no memory.
  virtual bool is_meta() const { return false; }
  // Where the group's channel publishes what its device does (watchdog/rank_status.hpp); null: nowhere. It
  // lives as long as the world.
  virtual DeviceBatches* device_batches() { return nullptr; }

  void all_gather(const void* mine, void* all, int64_t bytes_per_rank) {
    start_all_gather(mine, all, bytes_per_rank)->wait();
  }
  void all_to_all(const void* send, void* receive, int64_t bytes_per_rank) {
    start_all_to_all(send, receive, bytes_per_rank)->wait();
  }
  void broadcast(void* data, int64_t bytes, int root) { start_broadcast(data, bytes, root)->wait(); }

  bool is_single() const { return size() == 1; }

  // Carries the group's tensors. Unless another one is set, it goes through host memory and this
  // communicator.
  TensorChannel& channel();
  void use_channel(std::unique_ptr<TensorChannel> channel);

 private:
  std::unique_ptr<TensorChannel> channel_;
};

// The number of ranks of a group, and the index of this rank in it. A null group has one rank.
inline int64_t ranks_of(const Communicator* group) {
  return group ? group->size() : 1;
}
inline int64_t rank_in(const Communicator* group) {
  return group ? group->rank() : 0;
}

// A group of one: every collective is a copy.
std::unique_ptr<Communicator> make_self_communicator(const std::string& name);
// A group of any size without peers, for memory and traffic estimates on the meta device. Collectives only
// count bytes.
std::unique_ptr<Communicator> make_meta_communicator(int rank, int size, const std::string& name);

}  // namespace capstan::comm
