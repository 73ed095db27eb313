// Tensors that travel between ranks while the program goes on: rings of keys and values, boundary tensors between pipeline
// stages, gathers that a kernel does not wait for yet. Bytes move as they are; sums are in reduce.hpp.
#pragma once

#include <utility>
#include <vector>

#include "comm/communicator.hpp"
#include "tensor/host_view.hpp"
#include "tensor/tensor.hpp"

namespace capstan::comm {

// One or more transfers over a group, each started by its call and all ended by wait(). Tensors are contiguous and kept alive
// until then. A tensor that is sent may be read meanwhile, and holds what was launched on it before the call; a tensor that is
// received must not be touched before wait() has returned. On the meta device nothing is touched; a
// group that plans counts the bytes.
// Errors of the transport: ErrorCode::rank_failure.
class Exchange {
 public:
  explicit Exchange(Communicator& group) : group_(&group) {}
  ~Exchange() { works_.clear(); }  // waits: the buffers below must outlive the transport
  Exchange(Exchange&&) noexcept = default;
  Exchange& operator=(Exchange&&) = delete;

  // Matched by (from, tag) in the order of the calls; of the same number of bytes on both sides.
  void send(const Tensor& data, int to, int tag);
  void receive(const Tensor& data, int from, int tag);
  // all: as many bytes as all ranks' `mine` together, by rank.
  void all_gather(const Tensor& mine, const Tensor& all);
  // Part r of `data` goes to rank r; part r of `received` comes from rank r.
  void all_to_all(const Tensor& data, const Tensor& received);

  // What is launched later on the received tensors finds the values. A second call does nothing.
  void wait();
  // Whether wait() would return at once. Of use where nothing is received: what was sent may then be let go.
  bool done();

 private:
  HostView& view(const Tensor& tensor, HostView::Contents contents);
  Communicator* group_;
  std::vector<HostView> sent_, received_;
  std::vector<Tensor> planned_;  // on the meta device: kept as the others are
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
