#include "support/fake_nccl.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace capstan::cuda {
struct OpenCommunicator {};
}  // namespace capstan::cuda

namespace capstan::test {

namespace {

using cuda::OpenCommunicator;
using cuda::OpenDevice;
using cuda::Status;
using cuda::StatusCode;

FakeNccl planted;

constexpr int kMaxRanks = 16;
constexpr int64_t kChunk = int64_t{16} << 10;  // bytes

enum class Kind : int32_t { point_to_point, all_gather };

// The transfers from one rank to another: at most one chunk at a time.
struct alignas(64) Mailbox {
  // Whether the sender's and the receiver's host have called a transfer.
  std::atomic<int32_t> sender_connects, receiver_connects;
  // Messages that both streams have come to, and the last one as each of them describes it.
  std::atomic<int64_t> sends, receives, sender_transfer, receiver_transfer;
  // Chunks written and read so far.
  std::atomic<int64_t> written, read;
  std::array<std::byte, kChunk> data;
};
// Of a communicator; behind it the mailboxes [from][to].
struct alignas(64) Shared {
  std::atomic<int32_t> joined;
  std::array<std::atomic<int32_t>, kMaxRanks> gpus;
};

int64_t encode(Kind kind, int64_t bytes) {
  return bytes * 2 + static_cast<int64_t>(kind);
}

struct FakeTransfer {
  Kind kind;
  bool sends;
  int peer;
  std::byte* data;
  int64_t bytes;
  int64_t done = 0, number = 0;
  bool matched = false, finished = false;
};

// One rank of a communicator. Work on streams shares it.
class Rank {
 public:
  Rank(std::string name, int ranks, int rank) : name_(std::move(name)), ranks_(ranks), rank_(rank) {
    const auto count = static_cast<size_t>(ranks);
    bytes_ = sizeof(Shared) + sizeof(Mailbox) * count * count;
    sends_.resize(count), receives_.resize(count);
    const int file = ::open(name_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CAPSTAN_ASSERT(file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes_)) == 0, name_);
    memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CAPSTAN_ASSERT(memory_ != MAP_FAILED, "mmap");
    ::close(file);
    shared().gpus[static_cast<size_t>(rank)] = planted.gpu >= 0 ? planted.gpu + 1 : 0;
    // The memory lives until the last process unmaps it: processes that are killed leave no file.
    if (shared().joined.fetch_add(1) + 1 == ranks) ::unlink(name_.c_str());
  }
  ~Rank() {
    // Of ranks that have not all joined.
    ::unlink(name_.c_str());
    ::munmap(memory_, bytes_);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  const char* error() const { return error_; }

  bool all_joined() {
    if (shared().joined.load() < ranks_) return false;
    for (int a = 0; a < ranks_ && !error_; ++a)
      for (int b = 0; b < a; ++b)
        if (const int32_t gpu = shared().gpus[static_cast<size_t>(a)];
            gpu != 0 && gpu == shared().gpus[static_cast<size_t>(b)])
          error_ = "invalid usage: two ranks have the same GPU";
    return true;
  }

  // A group of transfers that waits for its peers to connect.
  void start(std::vector<FakeTransfer> transfers, void* stream, const std::shared_ptr<Rank>& self) {
    for (const FakeTransfer& transfer : transfers)
      if (transfer.peer != rank_) my_side(transfer) = 1;
    waiting_ = {std::move(transfers), stream, self};
  }
  // False: it still waits.
  bool queue_connected() {
    if (!waiting_.rank) return true;
    for (const FakeTransfer& transfer : waiting_.transfers)
      if (transfer.peer != rank_ && their_side(transfer).load() == 0) return false;
    auto [transfers, stream, rank] = std::exchange(waiting_, {});
    fake_launch(stream, [rank, moved = std::move(transfers)]() mutable { rank->run(moved); });
    return true;
  }
  void abort() {
    aborted_ = true;
    waiting_ = {};
    while (running_.load() > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  // Blocks its stream, and has an error some time after that.
  void break_down(void* stream, const std::shared_ptr<Rank>& self) {
    fake_launch(stream, [self] {
      ++self->running_;
      for (int milliseconds = 0; !self->aborted_.load(); ++milliseconds) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (milliseconds == 300) self->error_ = "remote process exited or there was a network error";
      }
      --self->running_;
    });
  }

 private:
  struct Waiting {
    std::vector<FakeTransfer> transfers;
    void* stream = nullptr;
    std::shared_ptr<Rank> rank;
  };

  Shared& shared() const { return *static_cast<Shared*>(memory_); }
  Mailbox& mailbox(const FakeTransfer& transfer) const {
    auto* const first = reinterpret_cast<Mailbox*>(static_cast<std::byte*>(memory_) + sizeof(Shared));
    const int from = transfer.sends ? rank_ : transfer.peer, to = transfer.sends ? transfer.peer : rank_;
    return first[from * ranks_ + to];
  }
  std::atomic<int32_t>& my_side(const FakeTransfer& transfer) const {
    Mailbox& box = mailbox(transfer);
    return transfer.sends ? box.sender_connects : box.receiver_connects;
  }
  std::atomic<int32_t>& their_side(const FakeTransfer& transfer) const {
    Mailbox& box = mailbox(transfer);
    return transfer.sends ? box.receiver_connects : box.sender_connects;
  }

  // On the stream, until all transfers are done or the communicator is aborted.
  void run(std::vector<FakeTransfer>& transfers) {
    ++running_;
    copy_own(transfers);
    for (FakeTransfer& transfer : transfers)
      transfer.number = ++(transfer.sends ? sends_ : receives_)[static_cast<size_t>(transfer.peer)];
    // Busy for a time, not for a number of polls: on a busy machine a thread that yields waits for a turn of
    // all others.
    using Clock = std::chrono::steady_clock;
    auto idle_since = Clock::now();
    for (size_t open = transfers.size(); open > 0 && !aborted_.load();) {
      bool progress = false;
      open = 0;
      for (size_t i = 0; i < transfers.size(); ++i) {
        if (!transfers[i].finished) progress |= advance(transfers, i);
        open += transfers[i].finished ? 0 : 1;
      }
      if (progress)
        idle_since = Clock::now();
      else if (Clock::now() - idle_since < std::chrono::microseconds(50))
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    --running_;
  }
  // Transfers of a rank with itself, in their order.
  void copy_own(std::vector<FakeTransfer>& transfers) const {
    std::vector<const FakeTransfer*> from, to;
    for (const FakeTransfer& transfer : transfers)
      if (transfer.peer == rank_) (transfer.sends ? from : to).push_back(&transfer);
    for (size_t i = 0; i < std::min(from.size(), to.size()); ++i)
      if (from[i]->data != to[i]->data)
        std::memcpy(to[i]->data, from[i]->data, static_cast<size_t>(from[i]->bytes));
    std::erase_if(transfers, [&](const FakeTransfer& transfer) { return transfer.peer == rank_; });
  }
  // One step of a transfer. Messages between two ranks are numbered: the next one of a group begins after
  // this one.
  bool advance(std::vector<FakeTransfer>& transfers, size_t index) const {
    FakeTransfer& transfer = transfers[index];
    Mailbox& box = mailbox(transfer);
    auto& mine = transfer.sends ? box.sends : box.receives;
    if (mine.load() < transfer.number) {
      for (size_t i = 0; i < index; ++i)
        if (transfers[i].peer == transfer.peer && transfers[i].sends == transfer.sends &&
            !transfers[i].finished)
          return false;
      (transfer.sends ? box.sender_transfer : box.receiver_transfer)
          .store(encode(transfer.kind, transfer.bytes));
      mine.store(transfer.number);
      return true;
    }
    if (!transfer.matched) {
      if ((transfer.sends ? box.receives : box.sends).load() < transfer.number) return false;
      transfer.matched = box.sender_transfer.load() == box.receiver_transfer.load();
      return transfer.matched;
    }
    return move_chunk(transfer, box);
  }
  // A sender waits until its chunk is read, and writes the next one.
  static bool move_chunk(FakeTransfer& transfer, Mailbox& box) {
    const int64_t size = std::min(kChunk, transfer.bytes - transfer.done);
    const int64_t written = box.written.load(), read = box.read.load();
    if (transfer.sends ? written != read : written == read) return false;
    if (size == 0) return transfer.finished = true;
    std::byte* const place = transfer.data + transfer.done;
    if (transfer.sends) {
      std::memcpy(box.data.data(), place, static_cast<size_t>(size));
      box.written.store(written + 1);
    } else {
      std::memcpy(place, box.data.data(), static_cast<size_t>(size));
      box.read.store(read + 1);
      transfer.finished = transfer.done + size == transfer.bytes;
    }
    transfer.done += size;
    return true;
  }

  const std::string name_;
  const int ranks_, rank_;
  size_t bytes_ = 0;
  void* memory_ = nullptr;
  std::atomic<const char*> error_ = nullptr;
  std::atomic<bool> aborted_ = false;
  std::atomic<int> running_ = 0;
  Waiting waiting_;
  // Messages so far, by peer; on the stream.
  std::vector<int64_t> sends_, receives_;
};

struct FakeCommunicator : OpenCommunicator {
  std::shared_ptr<Rank> rank;
};
const std::shared_ptr<Rank>& rank_of(OpenCommunicator* communicator) {
  return static_cast<FakeCommunicator*>(communicator)->rank;
}

thread_local char nccl_status_text[128];
Status nccl_failed(const char* function, const char* why, StatusCode code = StatusCode::failed) {
  std::snprintf(nccl_status_text, sizeof nccl_status_text, "fake_nccl_%s: %s", function, why);
  return {code, nccl_status_text};
}
#define FAKE_NCCL_FUNCTION(name) \
  if (planted.failing == (name)) return nccl_failed(name, "planted error")

// The transfers of this thread's group; all are of one communicator and stream.
struct Group {
  int depth = 0;
  OpenCommunicator* communicator = nullptr;
  void* stream = nullptr;
  std::vector<FakeTransfer> transfers;
};
thread_local Group group;

// Communicators are aborted by several threads.
void count(int64_t& what, int64_t change) {
  std::atomic_ref(what).fetch_add(change);
}

Status load(int32_t* version) {
  *version = 22809;
  if (planted.missing.empty()) return {};
  return {StatusCode::unavailable, planted.missing.c_str()};
}

Status get_unique_id(cuda::UniqueId* id) {
  FAKE_NCCL_FUNCTION("get_unique_id");
  // The number of a process is used again, and a file of the same name would bring the counts of an earlier
  // communicator, with which transfers wait forever.
  static std::random_device random;
  *id = {};
  std::snprintf(id->bytes, sizeof id->bytes, "/dev/shm/capstan-fake-nccl-%d-%08x%08x", ::getpid(), random(),
                random());
  return {};
}

Status init_rank(OpenDevice*, int32_t ranks, const cuda::UniqueId* id, int32_t rank,
                 OpenCommunicator** communicator) {
  FAKE_NCCL_FUNCTION("init_rank");
  if (ranks > kMaxRanks) return nccl_failed("init_rank", "more ranks than the fake has");
  const std::string name = std::string(id->bytes) + (planted.wrong_id ? "-wrong" : "");
  auto* const opened = new FakeCommunicator;
  opened->rank = std::make_shared<Rank>(name, ranks, rank);
  *communicator = opened;
  count(planted.open, 1);
  return {StatusCode::not_ready, nullptr};
}

Status group_start() {
  FAKE_NCCL_FUNCTION("group_start");
  ++group.depth;
  return {};
}
Status group_end() {
  if (group.depth == 0) return nccl_failed("group_end", "no group has begun");
  if (--group.depth > 0) return {};
  const Group ended = std::exchange(group, {});
  FAKE_NCCL_FUNCTION("group_end");
  if (!ended.communicator) return {};
  const std::shared_ptr<Rank>& rank = rank_of(ended.communicator);
  if (++planted.groups == planted.fails_at) {
    rank->break_down(ended.stream, rank);
    return {};
  }
  rank->start(ended.transfers, ended.stream, rank);
  if (rank->queue_connected()) return {};
  while (planted.blocking && !rank->queue_connected())
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  return {planted.blocking ? StatusCode::ok : StatusCode::not_ready, nullptr};
}

Status add(OpenCommunicator* communicator, FakeTransfer transfer, void* stream) {
  const bool alone = group.depth == 0;
  if (alone) ++group.depth;
  CAPSTAN_ASSERT(!group.communicator || (group.communicator == communicator && group.stream == stream),
                 "a group on two communicators, or streams");
  group.communicator = communicator, group.stream = stream;
  if (transfer.bytes > 0) group.transfers.push_back(transfer);
  return alone ? group_end() : Status{};
}
// NCCL only reads what is sent.
std::byte* sent(const void* data) {
  return static_cast<std::byte*>(const_cast<void*>(data));
}
Status send(OpenCommunicator* communicator, const void* data, int64_t bytes, int32_t peer, void* stream) {
  FAKE_NCCL_FUNCTION("send");
  return add(communicator, {Kind::point_to_point, true, peer, sent(data), bytes}, stream);
}
Status receive(OpenCommunicator* communicator, void* data, int64_t bytes, int32_t peer, void* stream) {
  FAKE_NCCL_FUNCTION("receive");
  return add(communicator, {Kind::point_to_point, false, peer, static_cast<std::byte*>(data), bytes}, stream);
}
Status all_gather(OpenCommunicator* communicator, const void* mine, void* all, int64_t bytes, void* stream) {
  FAKE_NCCL_FUNCTION("all_gather");
  if (const Status status = group_start(); !status.ok()) return status;
  const int ranks = rank_of(communicator)->ranks();
  for (int shift = 0; shift < ranks; ++shift) {
    const int peer = (rank_of(communicator)->rank() + shift) % ranks;
    (void)add(communicator, {Kind::all_gather, true, peer, sent(mine), bytes}, stream);
    (void)add(communicator,
              {Kind::all_gather, false, peer, static_cast<std::byte*>(all) + peer * bytes, bytes}, stream);
  }
  return group_end();
}

Status get_async_error(OpenCommunicator* communicator) {
  FAKE_NCCL_FUNCTION("get_async_error");
  Rank& rank = *rank_of(communicator);
  const bool joined = rank.all_joined();
  if (rank.error()) return nccl_failed("get_async_error", rank.error());
  const bool ready = joined && rank.queue_connected();
  return {ready ? StatusCode::ok : StatusCode::not_ready, nullptr};
}
Status finalize(OpenCommunicator*) {
  FAKE_NCCL_FUNCTION("finalize");
  return {StatusCode::not_ready, nullptr};
}
Status destroy(OpenCommunicator* communicator) {
  delete static_cast<FakeCommunicator*>(communicator);
  count(planted.open, -1);
  return {};
}
Status abort(OpenCommunicator* communicator) {
  rank_of(communicator)->abort();
  delete static_cast<FakeCommunicator*>(communicator);
  count(planted.open, -1), count(planted.aborted, 1);
  return {};
}

constexpr cuda::Communicator kFakeCommunicator{.load = load,
                                               .get_unique_id = get_unique_id,
                                               .init_rank = init_rank,
                                               .group_start = group_start,
                                               .group_end = group_end,
                                               .send = send,
                                               .receive = receive,
                                               .all_gather = all_gather,
                                               .get_async_error = get_async_error,
                                               .finalize = finalize,
                                               .destroy = destroy,
                                               .abort = abort};

}  // namespace

FakeNccl& fake_nccl() {
  return planted;
}
FakeNccl& reset_fake_nccl() {
  return planted = {};
}
const cuda::Backend& fake_nccl_backend() {
  static const cuda::Backend backend = [] {
    cuda::Backend made = fake_backend();
    made.communicator = &kFakeCommunicator;
    return made;
  }();
  return backend;
}

}  // namespace capstan::test
