// A communicator in which one call goes wrong: what a bug or a bad network would do to a rank, on demand.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "comm/communicator.hpp"

namespace capstan::test {

enum class Fault {
  // The rank comes to the call only after `delay`.
  late,
  // The rank does not take part in it, and goes on as if it had.
  lost,
  // The rank asks for fewer bytes.
  wrong_size,
};

class FaultyCommunicator final : public comm::Communicator {
 public:
  // The fault strikes at the call number `at`, from 1; all calls of one object are counted together.
  FaultyCommunicator(comm::Communicator& inner, Fault fault, int at, std::chrono::milliseconds delay = {})
      : inner_(inner), fault_(fault), at_(at), delay_(delay) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  const std::string& name() const override { return inner_.name(); }
  std::unique_ptr<comm::Communicator> split(int color, int key, const std::string& name) override {
    return inner_.split(color, key, name);
  }
  comm::WorkHandle start_all_gather(const void* mine, void* all, int64_t bytes) override {
    return call(bytes, [&](int64_t b) { return inner_.start_all_gather(mine, all, b); });
  }
  comm::WorkHandle start_all_to_all(const void* send, void* receive, int64_t bytes) override {
    return call(bytes, [&](int64_t b) { return inner_.start_all_to_all(send, receive, b); });
  }
  comm::WorkHandle start_broadcast(void* data, int64_t bytes, int root) override {
    return call(bytes, [&](int64_t b) { return inner_.start_broadcast(data, b, root); });
  }
  comm::WorkHandle start_send(const void* data, int64_t bytes, int to) override {
    return call(bytes, [&](int64_t b) { return inner_.start_send(data, b, to); });
  }
  comm::WorkHandle start_receive(void* data, int64_t bytes, int from) override {
    return call(bytes, [&](int64_t b) { return inner_.start_receive(data, b, from); });
  }
  void barrier() override {
    call(0, [&](int64_t) {
      inner_.barrier();
      return std::make_unique<Nothing>();
    });
  }

  int64_t sent_bytes() const override { return inner_.sent_bytes(); }

 private:
  struct Nothing final : comm::Work {
    void wait() override {}
  };
  template <class Start>
  comm::WorkHandle call(int64_t bytes, Start start) {
    if (++calls_ != at_) return start(bytes);
    if (fault_ == Fault::lost) return std::make_unique<Nothing>();
    if (fault_ == Fault::late) std::this_thread::sleep_for(delay_);
    return start(fault_ == Fault::wrong_size ? bytes / 2 : bytes);
  }
  comm::Communicator& inner_;
  Fault fault_;
  int at_, calls_ = 0;
  std::chrono::milliseconds delay_;
};

}  // namespace capstan::test
