// Asynchronous transfers of tensors between ranks: rings of keys and values, boundary tensors between
// pipeline stages, gathers that overlap with kernels.
#pragma once

#include <utility>
#include <vector>

#include "comm/communicator.hpp"
#include "tensor/host_view.hpp"
#include "tensor/tensor.hpp"

namespace capstan::comm {

// One or more transfers over a group, each started by its call and all ended by wait(). Tensors are
// contiguous and kept alive until then. A sent tensor may be read meanwhile; the transfer sends the results
// of all kernels launched before the call. A received tensor must not be used before wait() returns. On the
// meta device, transfers only count bytes. Transport errors are ErrorCode::rank_failure.
class Exchange {
 public:
  explicit Exchange(Communicator& group) : group_(&group) {}
  ~Exchange() { works_.clear(); }  // waits: the buffers below must outlive the transport
  Exchange(Exchange&&) noexcept = default;
  Exchange& operator=(Exchange&&) = delete;

  // Sends and receives match by (from, tag), in the order of the calls. Both sides give the same number of
  // bytes.
  void send(const Tensor& data, int to, int tag);
  void receive(const Tensor& data, int from, int tag);
  // all: the `mine` of all ranks, concatenated by rank.
  void all_gather(const Tensor& mine, const Tensor& all);
  // Slice r of `data` goes to rank r; slice r of `received` comes from rank r.
  void all_to_all(const Tensor& data, const Tensor& received);

  // Completes all transfers: kernels launched later read the received values. A second call does nothing.
  void wait();
  // True when wait() would return at once, so that sent tensors can be released.
  bool done();

 private:
  HostView& view(const Tensor& tensor, HostView::Contents contents);
  Communicator* group_;
  std::vector<HostView> sent_, received_;
  // Meta device: keeps them alive as a transfer would.
  std::vector<Tensor> planned_;
  std::vector<WorkHandle> works_;
};

// The next and the previous rank of a ring.
inline int next_in(const Communicator& group) {
  return (group.rank() + 1) % group.size();
}
inline int previous_in(const Communicator& group) {
  return (group.rank() + group.size() - 1) % group.size();
}

}  // namespace capstan::comm
