#include "comm/world.hpp"

#include <mpi.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"
#include "comm/collective_errors.hpp"
#include "comm/publishing_communicator.hpp"
#include "comm/watchdog/rank_status_files.hpp"
#include "comm/watchdog/watchdog.hpp"

namespace capstan::comm {

namespace {

[[noreturn]] void fail_mpi(const std::string& group, const char* call, int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  fail(ErrorCode::rank_failure, std::string(call) + " in group `" + group + "` failed: " + text.data());
}

class Requests final : public Work {
 public:
  Requests(std::vector<MPI_Request> requests, const std::string& group)
      : requests_(std::move(requests)), group_(group) {}
  ~Requests() override {
    if (!requests_.empty())
      MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
  }
  void wait() override {
    const int code = MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
    requests_.clear();
    if (code != MPI_SUCCESS) fail_mpi(group_, "MPI_Waitall", code);
  }

 private:
  std::vector<MPI_Request> requests_;
  std::string group_;
};

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, std::string name, bool owned)
      : comm_(comm), name_(std::move(name)), owned_(owned) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }
  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (owned_ && !finalized) MPI_Comm_free(&comm_);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }

  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    MPI_Comm subgroup = MPI_COMM_NULL;
    check("MPI_Comm_split", MPI_Comm_split(comm_, color, key, &subgroup));
    int size = 0;
    MPI_Comm_size(subgroup, &size);
    auto result = std::make_unique<MpiCommunicator>(subgroup, name, true);
    if (size > 1) return result;
    // No communication in a group of one.
    return make_self_communicator(name);
  }

  WorkHandle start_all_gather(const void* mine, void* all, int64_t bytes) override {
    sent_ += bytes * (size_ - 1);
    // A member may gather in place: `mine` then points to its slice of `all`.
    const bool in_place = mine == static_cast<const std::byte*>(all) + rank_ * bytes;
    return start_in_chunks(bytes, [&](int64_t offset, int count, std::vector<MPI_Request>& requests) {
      if (offset == 0 && count == bytes) {
        requests.emplace_back();
        check("MPI_Iallgather", MPI_Iallgather(in_place ? MPI_IN_PLACE : mine, count, MPI_BYTE, all, count,
                                               MPI_BYTE, comm_, &requests.back()));
        return;
      }
      for (int root = 0; root < size_; ++root) {
        std::byte* part = static_cast<std::byte*>(all) + root * bytes + offset;
        if (root == rank_ && !in_place)
          std::memcpy(part, static_cast<const std::byte*>(mine) + offset, static_cast<size_t>(count));
        requests.emplace_back();
        check("MPI_Ibcast", MPI_Ibcast(part, count, MPI_BYTE, root, comm_, &requests.back()));
      }
    });
  }
  WorkHandle start_all_to_all(const void* send, void* receive, int64_t bytes) override {
    sent_ += bytes * (size_ - 1);
    return start_in_chunks(bytes, [&](int64_t offset, int count, std::vector<MPI_Request>& requests) {
      for (int peer = 0; peer < size_; ++peer) {
        requests.emplace_back();
        check("MPI_Irecv", MPI_Irecv(static_cast<std::byte*>(receive) + peer * bytes + offset, count,
                                     MPI_BYTE, peer, kCollectiveTag, comm_, &requests.back()));
      }
      // Every rank starts with a different peer.
      for (int shift = 0; shift < size_; ++shift) {
        const int peer = (rank_ + shift) % size_;
        requests.emplace_back();
        check("MPI_Isend", MPI_Isend(static_cast<const std::byte*>(send) + peer * bytes + offset, count,
                                     MPI_BYTE, peer, kCollectiveTag, comm_, &requests.back()));
      }
    });
  }
  WorkHandle start_broadcast(void* data, int64_t bytes, int root) override {
    if (root == rank_) sent_ += bytes;
    return start_in_chunks(bytes, [&](int64_t offset, int count, std::vector<MPI_Request>& requests) {
      requests.emplace_back();
      check("MPI_Ibcast", MPI_Ibcast(static_cast<std::byte*>(data) + offset, count, MPI_BYTE, root, comm_,
                                     &requests.back()));
    });
  }
  WorkHandle start_send(const void* data, int64_t bytes, int to) override {
    sent_ += bytes;
    return start_in_chunks(bytes, [&](int64_t offset, int count, std::vector<MPI_Request>& requests) {
      requests.emplace_back();
      check("MPI_Isend", MPI_Isend(static_cast<const std::byte*>(data) + offset, count, MPI_BYTE, to,
                                   kMessageTag, comm_, &requests.back()));
    });
  }
  WorkHandle start_receive(void* data, int64_t bytes, int from) override {
    return start_in_chunks(bytes, [&](int64_t offset, int count, std::vector<MPI_Request>& requests) {
      requests.emplace_back();
      check("MPI_Irecv", MPI_Irecv(static_cast<std::byte*>(data) + offset, count, MPI_BYTE, from, kMessageTag,
                                   comm_, &requests.back()));
    });
  }
  void barrier() override { check("MPI_Barrier", MPI_Barrier(comm_)); }
  int64_t sent_bytes() const override { return sent_; }

 private:
  static constexpr int kMessageTag = 0, kCollectiveTag = 1;
  // MPI counts are int.
  static constexpr int64_t kMaxTransferBytes = int64_t{1} << 30;

  void check(const char* call, int code) const {
    if (code != MPI_SUCCESS) fail_mpi(name_, call, code);
  }
  // `start` takes the offset and size of a chunk and adds its requests.
  template <class Start>
  WorkHandle start_in_chunks(int64_t bytes, Start start) {
    std::vector<MPI_Request> requests;
    for (int64_t offset = 0; offset < bytes; offset += kMaxTransferBytes)
      start(offset, static_cast<int>(std::min(kMaxTransferBytes, bytes - offset)), requests);
    return std::make_unique<Requests>(std::move(requests), name_);
  }

  MPI_Comm comm_;
  std::string name_;
  bool owned_;
  int rank_ = 0, size_ = 1;
  int64_t sent_ = 0;
};

class SingleWorld final : public World {
 public:
  Communicator& communicator() override { return *self_; }
  int local_rank() const override { return 0; }
  int local_size() const override { return 1; }
  const std::string& host() const override { return host_; }
  [[noreturn]] void abort(int exit_code) override { std::_Exit(exit_code); }

 private:
  std::unique_ptr<Communicator> self_ = make_self_communicator("world");
  std::string host_ = host_name();
};

class MpiWorld final : public World {
 public:
  // embedded: `ranks` is a duplicate that this world frees, and the embedding program finalizes MPI.
  MpiWorld(MPI_Comm ranks, bool embedded, const FailureWatch& watch) : ranks_(ranks), embedded_(embedded) {
    auto world = std::make_unique<MpiCommunicator>(ranks, "world", embedded);
    MPI_Comm host_ranks = MPI_COMM_NULL;
    MPI_Comm_split_type(ranks, MPI_COMM_TYPE_SHARED, world->rank(), MPI_INFO_NULL, &host_ranks);
    MpiCommunicator local(host_ranks, "host", true);
    local_rank_ = local.rank();
    local_size_ = local.size();
    auto status_table = open_status_table(local);
    const int slot = local_rank_;
    // Ranks of this host are those with the same first local rank.
    std::array<int32_t, 2> mine{world->rank(), local_rank_};
    local.broadcast(mine.data(), sizeof mine[0], 0);
    std::vector<int32_t> all(2 * static_cast<size_t>(world->size()));
    world->all_gather(mine.data(), all.data(), sizeof mine);
    std::vector<int> slots;
    host_rank_ = mine[0];
    for (size_t r = 0; r < all.size(); r += 2) hosts_.insert(all[r]);
    for (size_t r = 0; r < all.size(); r += 2) slots.push_back(all[r] == mine[0] ? all[r + 1] : -1);
    publisher_ = std::make_shared<StatusPublisher>(status_table, std::move(slots), world->rank(), host_);
    // This call is collective; after it all ranks have published their process ids.
    world_ = make_publishing_communicator(std::move(world), publisher_);
    watchdog_ = std::make_unique<Watchdog>(*status_table, slot, watch);
  }
  ~MpiWorld() override {
    world_.reset();
    publisher_->publish_call(Call::finalize, -1, -1, 0, 0);
    publisher_->publish_state(RankState::waiting);
    // A rank has ended once all ranks have reached this barrier. The launcher may end the other ranks as soon
    // as one rank exits with another code than 0; that is not a rank failure.
    if (!embedded_) MPI_Barrier(ranks_);
    publisher_->publish_state(RankState::ended);
    if (!embedded_) MPI_Finalize();
  }
  Communicator& communicator() override { return *world_; }
  int local_rank() const override { return local_rank_; }
  int local_size() const override { return local_size_; }
  const std::string& host() const override { return host_; }
  void publish_step(int64_t step) override { publisher_->publish_step(step); }
  void publish_phase(std::string_view phase) override { publisher_->publish_phase(phase); }
  void publish_expected_end(int64_t expected_end) override { publisher_->slot().expected_end = expected_end; }
  void publish_saved_step(int64_t step) override { publisher_->slot().saved_steps = step + 1; }
  void share_rank_status(const std::filesystem::path& directory) override {
    if (hosts_.size() == 1) return;
    run_collectively(*world_, "sharing the rank status", [&] {
      if (world_->rank() == 0) RankStatusFiles::clear(directory);
    });
    if (local_rank_ == 0)
      watchdog_->watch_other_hosts(std::make_unique<RankStatusFiles>(
          directory, host_rank_, std::vector<int>(hosts_.begin(), hosts_.end())));
  }
  std::shared_ptr<TransferWatch> transfer_watch() override { return watchdog_->transfers(); }
  bool failure_reported() const override { return publisher_->status_table().report_claimed(); }
  [[noreturn]] void abort(int exit_code) override {
    // Watchdogs must not report ranks that the launcher ends now.
    static_cast<void>(publisher_->status_table().claim_report());
    publisher_->publish_state(RankState::ended);
    MPI_Abort(ranks_, exit_code);
    std::_Exit(exit_code);
  }

 private:
  // The parent's table, or one that the first rank of this host creates and unlinks after all ranks have
  // opened it.
  static std::shared_ptr<RankStatusTable> open_status_table(MpiCommunicator& local) {
    std::shared_ptr<RankStatusTable> status_table;
    std::array<char, 256> path{};
    if (local.rank() == 0) {
      const char* parent_path = std::getenv(kStatusTableVariable);
      if (parent_path && std::filesystem::exists(parent_path))
        status_table = RankStatusTable::open(parent_path);
      if (!status_table || status_table->ranks() != local.size())
        status_table = RankStatusTable::create(local.size(), false);
      const std::string text = status_table->path().string();
      CAPSTAN_ASSERT(text.size() < path.size(), "the path of the rank status table is too long: " + text);
      text.copy(path.data(), text.size());
    }
    local.broadcast(path.data(), path.size(), 0);
    if (!status_table) status_table = RankStatusTable::open(path.data());
    local.barrier();
    if (local.rank() == 0) status_table->unlink();
    return status_table;
  }

  MPI_Comm ranks_;
  bool embedded_;
  std::shared_ptr<StatusPublisher> publisher_;
  std::unique_ptr<Communicator> world_;
  // Destroyed first, before the memory that it reads.
  std::unique_ptr<Watchdog> watchdog_;
  int local_rank_ = 0, local_size_ = 1;
  // The first rank of this host.
  int host_rank_ = 0;
  // The first rank of each host.
  std::set<int> hosts_;
  std::string host_ = host_name();
};

}  // namespace

std::unique_ptr<World> World::single_process() {
  return std::make_unique<SingleWorld>();
}

std::unique_ptr<World> World::join(const FailureWatch& watch) {
  const LaunchedAs launched = launched_as();
  if (launched.size == 1) return single_process();
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  if (provided < MPI_THREAD_FUNNELED)
    fail(ErrorCode::unsupported, "this MPI provides less than MPI_THREAD_FUNNELED");
  auto world = std::make_unique<MpiWorld>(MPI_COMM_WORLD, false, watch);
  if (world->size() != launched.size || world->rank() != launched.rank)
    fail(ErrorCode::usage,
         launched.source + " says rank " + std::to_string(launched.rank) + " of " +
             std::to_string(launched.size) + ", MPI says rank " + std::to_string(world->rank()) + " of " +
             std::to_string(world->size()),
         "start the processes with the mpirun or srun that belongs to the MPI library of this build");
  return world;
}

std::unique_ptr<World> World::from_mpi(const void* communicator, const FailureWatch& watch) {
  int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE, main_thread = 0, between_groups = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (!initialized || finalized)
    fail(
        ErrorCode::usage,
        std::string("a communicator was given while MPI is ") + (finalized ? "finalized" : "not initialized"),
        "call MPI_Init_thread before, and MPI_Finalize after the last run");
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_FUNNELED)
    fail(ErrorCode::unsupported, "MPI was initialized with a thread level below MPI_THREAD_FUNNELED",
         "MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided)");
  MPI_Is_thread_main(&main_thread);
  if (level == MPI_THREAD_FUNNELED && !main_thread)
    fail(ErrorCode::usage, "under MPI_THREAD_FUNNELED only the thread that initialized MPI may train");
  MPI_Comm ranks = MPI_COMM_NULL;
  const MPI_Comm given = *static_cast<const MPI_Comm*>(communicator);
  if (given == MPI_COMM_NULL) fail(ErrorCode::usage, "the communicator given is MPI_COMM_NULL");
  MPI_Comm_test_inter(given, &between_groups);
  if (between_groups) fail(ErrorCode::usage, "the communicator given is an intercommunicator");
  if (const int code = MPI_Comm_dup(given, &ranks); code != MPI_SUCCESS)
    fail_mpi("given by the embedding program", "MPI_Comm_dup", code);
  int size = 0;
  MPI_Comm_size(ranks, &size);
  if (size == 1) {
    MPI_Comm_free(&ranks);
    return single_process();
  }
  return std::make_unique<MpiWorld>(ranks, true, watch);
}

}  // namespace capstan::comm
