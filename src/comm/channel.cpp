#include "comm/channel.hpp"

#include <array>

#include "base/error.hpp"

namespace capstan::comm {

Batch& Batch::send(const Tensor& data, int to) {
  transfers_.push_back({Kind::send, to, data, {}});
  return *this;
}
Batch& Batch::receive(const Tensor& data, int from) {
  transfers_.push_back({Kind::receive, from, {}, data});
  return *this;
}
Batch& Batch::all_gather(const Tensor& mine, const Tensor& all) {
  transfers_.push_back({Kind::all_gather, -1, mine, all});
  return *this;
}
Batch& Batch::all_to_all(const Tensor& data, const Tensor& received) {
  transfers_.push_back({Kind::all_to_all, -1, data, received});
  return *this;
}
Device& Batch::device() const {
  CAPSTAN_ASSERT(!transfers_.empty(), "a batch without transfers");
  const Transfer& first = transfers_.front();
  return (first.from.defined() ? first.from : first.to).device();
}

std::string_view name_of(Batch::Kind kind) {
  constexpr std::array<std::string_view, 4> names{"send", "receive", "all_gather", "all_to_all"};
  return names[static_cast<size_t>(kind)];
}

std::string text_of(const Batch& batch) {
  std::string text;
  for (const Batch::Transfer& t : batch.transfers()) {
    const int64_t bytes = (t.from.defined() ? t.from : t.to).bytes();
    text +=
        (text.empty() ? "" : ", ") + std::string(name_of(t.kind)) + " of " + std::to_string(bytes) + " bytes";
    if (t.peer >= 0) text += (t.from.defined() ? " to rank " : " from rank ") + std::to_string(t.peer);
  }
  return text;
}

Transfers::~Transfers() {
  release();
}
Transfers& Transfers::operator=(Transfers&& other) noexcept {
  release();
  batch_ = std::move(other.batch_);
  completion_ = std::move(other.completion_);
  return *this;
}
// The memory of the batch may be used again as soon as the compute queue waits for it. An error of the
// transport stays in the queues, where the host finds it.
void Transfers::release() noexcept {
  try {
    wait();
  } catch (...) {
    completion_ = nullptr;
  }
}
void Transfers::wait(Queue queue) {
  if (!completion_) return;
  completion_->wait(queue);
  if (queue != Queue::compute) return;
  completion_ = nullptr;
  batch_ = {};
}

namespace {

void check(const Batch::Transfer& transfer, int size) {
  for (const Tensor* tensor : {&transfer.from, &transfer.to})
    CAPSTAN_ASSERT(!tensor->defined() || tensor->is_contiguous(), "a transfer of " + tensor->text());
  if (transfer.kind == Batch::Kind::all_gather)
    CAPSTAN_ASSERT(transfer.to.bytes() == transfer.from.bytes() * size,
                   "all_gather of " + transfer.from.text() + " into " + transfer.to.text());
  if (transfer.kind == Batch::Kind::all_to_all)
    CAPSTAN_ASSERT(transfer.from.bytes() == transfer.to.bytes() && transfer.from.bytes() % size == 0,
                   "all_to_all of " + transfer.from.text() + " into " + transfer.to.text());
}

// Nothing is transferred on the meta device; the tensors live as long as in a real transfer.
struct Nothing final : Completion {
  void wait(Queue) override {}
};

void count(Communicator& group, const Batch::Transfer& transfer) {
  if (!group.plans()) return;
  switch (transfer.kind) {
    case Batch::Kind::send:
      group.start_send(nullptr, transfer.from.bytes(), transfer.peer);
      return;
    case Batch::Kind::receive:
      return;
    case Batch::Kind::all_gather:
      group.start_all_gather(nullptr, nullptr, transfer.from.bytes());
      return;
    case Batch::Kind::all_to_all:
      group.start_all_to_all(nullptr, nullptr, transfer.from.bytes() / group.size());
  }
}

}  // namespace

Transfers Channel::start(Batch batch, Queue after) {
  for (const Batch::Transfer& transfer : batch.transfers()) check(transfer, group_.size());
  std::unique_ptr<Completion> completion;
  if (batch.device().is_meta()) {
    for (const Batch::Transfer& transfer : batch.transfers()) count(group_, transfer);
    completion = std::make_unique<Nothing>();
  } else {
    completion = begin(batch, after);
  }
  return Transfers(std::move(batch), std::move(completion));
}

Communicator::Communicator() = default;
Communicator::~Communicator() = default;
Channel& Communicator::channel() {
  if (!channel_) channel_ = make_staging_channel(*this);
  return *channel_;
}
void Communicator::use_channel(std::unique_ptr<Channel> channel) {
  channel_ = std::move(channel);
}

}  // namespace capstan::comm
