// Worlds for tests: the one that was launched, a part of its ranks, and one whose sent bytes are counted.
#pragma once

#include <doctest/doctest.h>

#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "comm/world.hpp"
#include "support/listener.hpp"

namespace capstan::test {

// The world that this test program was launched into. A process joins MPI once, whatever number of files its
// tests have.
inline comm::World& world() {
  static const std::unique_ptr<comm::World> joined = comm::World::join();
  return *joined;
}

// A rank whose test case has failed does not meet the others any more, who would wait for it until the time
// is over.
struct EndTogether final : Listener {
  using Listener::Listener;
  void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
    if (stats.failure_flags == 0 || world().size() == 1) return;
    std::cout.flush();
    world().abort(1);
  }
};
REGISTER_LISTENER("end_together", 1, EndTogether);

// Some of another world's ranks, those of the same color. Collective over that world.
struct PartWorld final : comm::World {
  PartWorld(comm::World& all, int color)
      : real(all), part(all.communicator().split(color, all.rank(), "world")) {}
  comm::World& real;
  std::unique_ptr<comm::Communicator> part;
  comm::Communicator& communicator() override { return *part; }
  int local_rank() const override { return part->rank(); }
  int local_size() const override { return part->size(); }
  const std::string& host() const override { return real.host(); }
  [[noreturn]] void abort(int code) override {
    real.abort(code);
    std::abort();
  }
};

// Bytes that this rank sends to others, by group.
using SentBytes = std::map<std::string, int64_t>;

class CountingCommunicator final : public comm::Communicator {
 public:
  CountingCommunicator(comm::Communicator& real, SentBytes& sent) : real_(&real), sent_(sent) {}
  CountingCommunicator(std::unique_ptr<comm::Communicator> real, SentBytes& sent)
      : own_(std::move(real)), real_(own_.get()), sent_(sent) {}
  int rank() const override { return real_->rank(); }
  int size() const override { return real_->size(); }
  const std::string& name() const override { return real_->name(); }
  std::unique_ptr<comm::Communicator> split(int color, int key, const std::string& name) override {
    return std::make_unique<CountingCommunicator>(real_->split(color, key, name), sent_);
  }
  comm::WorkHandle start_all_gather(const void* mine, void* all, int64_t bytes) override {
    count(bytes * (size() - 1));
    return real_->start_all_gather(mine, all, bytes);
  }
  comm::WorkHandle start_all_to_all(const void* send, void* receive, int64_t bytes) override {
    count(bytes * (size() - 1));
    return real_->start_all_to_all(send, receive, bytes);
  }
  comm::WorkHandle start_broadcast(void* data, int64_t bytes, int root) override {
    if (rank() == root) count(bytes);
    return real_->start_broadcast(data, bytes, root);
  }
  comm::WorkHandle start_send(const void* data, int64_t bytes, int to) override {
    count(bytes);
    return real_->start_send(data, bytes, to);
  }
  comm::WorkHandle start_receive(void* data, int64_t bytes, int from) override {
    return real_->start_receive(data, bytes, from);
  }
  void barrier() override { real_->barrier(); }
  int64_t sent_bytes() const override { return real_->sent_bytes(); }

 private:
  void count(int64_t bytes) { sent_[name()] += bytes; }
  std::unique_ptr<comm::Communicator> own_;
  comm::Communicator* real_;
  SentBytes& sent_;
};

struct CountingWorld final : comm::World {
  explicit CountingWorld(comm::World& w) : real(w) {}
  comm::World& real;
  SentBytes sent;
  CountingCommunicator counting{real.communicator(), sent};
  comm::Communicator& communicator() override { return counting; }
  int local_rank() const override { return real.local_rank(); }
  int local_size() const override { return real.local_size(); }
  const std::string& host() const override { return real.host(); }
  [[noreturn]] void abort(int code) override {
    real.abort(code);
    std::abort();
  }
};

}  // namespace capstan::test
