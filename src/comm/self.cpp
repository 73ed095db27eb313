#include <cstring>

#include "base/error.hpp"
#include "comm/communicator.hpp"

namespace capstan::comm {

namespace {

class CompletedWork final : public Work {
 public:
  void wait() override {}
};

class SelfCommunicator final : public Communicator {
 public:
  explicit SelfCommunicator(std::string name) : name_(std::move(name)) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  const std::string& name() const override { return name_; }
  std::unique_ptr<Communicator> split(int, int, const std::string& name) override {
    return make_self_communicator(name);
  }
  WorkHandle start_all_gather(const void* mine, void* all, int64_t bytes) override {
    return copy(mine, all, bytes);
  }
  WorkHandle start_all_to_all(const void* send, void* receive, int64_t bytes) override {
    return copy(send, receive, bytes);
  }
  WorkHandle start_broadcast(void*, int64_t, int) override { return std::make_unique<CompletedWork>(); }
  WorkHandle start_send(const void*, int64_t, int) override { return no_peer(); }
  WorkHandle start_receive(void*, int64_t, int) override { return no_peer(); }
  void barrier() override {}
  int64_t sent_bytes() const override { return 0; }

 private:
  static WorkHandle copy(const void* from, void* to, int64_t bytes) {
    if (from != to && bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    return std::make_unique<CompletedWork>();
  }
  [[noreturn]] WorkHandle no_peer() {
    fail(ErrorCode::internal, "internal error: group `" + name_ + "` has one rank and no peer");
  }
  std::string name_;
};

class MetaCommunicator final : public Communicator {
 public:
  MetaCommunicator(int rank, int size, std::string name) : rank_(rank), size_(size), name_(std::move(name)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }
  // Without peers the members of a subgroup are unknown here: the mesh makes its groups by arithmetic.
  std::unique_ptr<Communicator> split(int, int, const std::string& name) override {
    fail(ErrorCode::internal,
         "internal error: a meta group `" + name + "` is made by the mesh, not by a split");
  }
  WorkHandle start_all_gather(const void*, void*, int64_t bytes) override {
    return count(bytes * (size_ - 1));
  }
  WorkHandle start_all_to_all(const void*, void*, int64_t bytes) override {
    return count(bytes * (size_ - 1));
  }
  WorkHandle start_broadcast(void*, int64_t bytes, int root) override {
    return count(root == rank_ ? bytes : 0);
  }
  WorkHandle start_send(const void*, int64_t bytes, int) override { return count(bytes); }
  WorkHandle start_receive(void*, int64_t, int) override { return count(0); }
  void barrier() override {}
  int64_t sent_bytes() const override { return sent_; }
  bool is_meta() const override { return true; }

 private:
  WorkHandle count(int64_t bytes) {
    sent_ += bytes;
    return std::make_unique<CompletedWork>();
  }
  int rank_, size_;
  std::string name_;
  int64_t sent_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator(const std::string& name) {
  return std::make_unique<SelfCommunicator>(name);
}
std::unique_ptr<Communicator> make_meta_communicator(int rank, int size, const std::string& name) {
  return std::make_unique<MetaCommunicator>(rank, size, name);
}

}  // namespace capstan::comm
