#include "comm/channel.hpp"

#include <array>

#include "base/error.hpp"

namespace capstan::comm {

TransferBatch& TransferBatch::send(const Tensor& data, int to) {
  transfers_.push_back({Kind::send, to, data, {}});
  return *this;
}
TransferBatch& TransferBatch::receive(const Tensor& data, int from) {
  transfers_.push_back({Kind::receive, from, {}, data});
  return *this;
}
TransferBatch& TransferBatch::all_gather(const Tensor& mine, const Tensor& all) {
  transfers_.push_back({Kind::all_gather, -1, mine, all});
  return *this;
}
TransferBatch& TransferBatch::all_to_all(const Tensor& data, const Tensor& received) {
  transfers_.push_back({Kind::all_to_all, -1, data, received});
  return *this;
}
Device& TransferBatch::device() const {
  CAPSTAN_ASSERT(!transfers_.empty(), "a batch without transfers");
  const Transfer& first = transfers_.front();
  return (first.from.defined() ? first.from : first.to).device();
}

std::string_view name_of(TransferBatch::Kind kind) {
  constexpr std::array<std::string_view, 4> names{"send", "receive", "all_gather", "all_to_all"};
  return names[static_cast<size_t>(kind)];
}

std::string text_of(const TransferBatch& batch, std::span<const int> ranks) {
  std::string text;
  const auto name_of_rank = [&](int rank) {
    return std::to_string(ranks.empty() ? rank : ranks[static_cast<size_t>(rank)]);
  };
  for (const TransferBatch::Transfer& t : batch.transfers()) {
    const int64_t bytes = (t.from.defined() ? t.from : t.to).bytes();
    text +=
        (text.empty() ? "" : ", ") + std::string(name_of(t.kind)) + " of " + std::to_string(bytes) + " bytes";
    if (t.peer >= 0) text += (t.from.defined() ? " to rank " : " from rank ") + name_of_rank(t.peer);
  }
  return text;
}

PendingTransfers::~PendingTransfers() {
  release();
}
PendingTransfers& PendingTransfers::operator=(PendingTransfers&& other) noexcept {
  release();
  batch_ = std::move(other.batch_);
  completion_ = std::move(other.completion_);
  return *this;
}
// The memory of the batch may be used again as soon as the compute queue waits for it. An error of the
// transport stays in the queues, where the host finds it.
void PendingTransfers::release() noexcept {
  try {
    wait();
  } catch (...) {
    completion_ = nullptr;
  }
}
void PendingTransfers::wait(Queue queue) {
  if (!completion_) return;
  completion_->wait(queue);
  if (queue != Queue::compute) return;
  completion_ = nullptr;
  batch_ = {};
}

namespace {

void check(const TransferBatch::Transfer& transfer, int size) {
  for (const Tensor* tensor : {&transfer.from, &transfer.to})
    CAPSTAN_ASSERT(!tensor->defined() || tensor->is_contiguous(), "a transfer of " + tensor->text());
  if (transfer.kind == TransferBatch::Kind::all_gather)
    CAPSTAN_ASSERT(transfer.to.bytes() == transfer.from.bytes() * size,
                   "all_gather of " + transfer.from.text() + " into " + transfer.to.text());
  if (transfer.kind == TransferBatch::Kind::all_to_all)
    CAPSTAN_ASSERT(transfer.from.bytes() == transfer.to.bytes() && transfer.from.bytes() % size == 0,
                   "all_to_all of " + transfer.from.text() + " into " + transfer.to.text());
}

// The meta device transfers nothing; the tensors live as long as in a real transfer.
struct NoTransfer final : Completion {
  void wait(Queue) override {}
};

void count(Communicator& group, const TransferBatch::Transfer& transfer) {
  if (!group.is_meta()) return;
  switch (transfer.kind) {
    case TransferBatch::Kind::send:
      group.start_send(nullptr, transfer.from.bytes(), transfer.peer);
      return;
    case TransferBatch::Kind::receive:
      return;
    case TransferBatch::Kind::all_gather:
      group.start_all_gather(nullptr, nullptr, transfer.from.bytes());
      return;
    case TransferBatch::Kind::all_to_all:
      group.start_all_to_all(nullptr, nullptr, transfer.from.bytes() / group.size());
  }
}

}  // namespace

std::unique_ptr<Completion> TensorChannel::begin_on_meta(const TransferBatch&) {
  return std::make_unique<NoTransfer>();
}

PendingTransfers TensorChannel::start(TransferBatch batch, Queue after) {
  for (const TransferBatch::Transfer& transfer : batch.transfers()) check(transfer, group_.size());
  const RangeScope range(batch.device(),
                         [&] { return "start in `" + group_.name() + "`: " + text_of(batch); });
  std::unique_ptr<Completion> completion;
  if (batch.device().is_meta()) {
    for (const TransferBatch::Transfer& transfer : batch.transfers()) count(group_, transfer);
    completion = begin_on_meta(batch);
  } else {
    completion = begin(batch, after);
  }
  return PendingTransfers(std::move(batch), std::move(completion));
}

namespace {
class DirectMetaChannel final : public TensorChannel {
 public:
  explicit DirectMetaChannel(Communicator& group) : TensorChannel(group) {}

 protected:
  std::unique_ptr<Completion> begin(const TransferBatch& batch, Queue) override {
    fail(ErrorCode::internal, "internal error: `" + group_.name() + "` transfers nothing: " + text_of(batch));
  }
};
}  // namespace

std::unique_ptr<TensorChannel> make_direct_meta_channel(Communicator& group) {
  return std::make_unique<DirectMetaChannel>(group);
}

Communicator::Communicator() = default;
Communicator::~Communicator() = default;
TensorChannel& Communicator::channel() {
  if (!channel_) channel_ = make_staging_channel(*this);
  return *channel_;
}
void Communicator::use_channel(std::unique_ptr<TensorChannel> channel) {
  channel_ = std::move(channel);
}

}  // namespace capstan::comm
