// Sums over a group, in rank order, in fp32 (or double for scalars): the same bits for a plain all-reduce and
// for a reduce-scatter followed by a gather, whatever the transport.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "comm/channel.hpp"
#include "tensor/tensor.hpp"

namespace capstan::comm {

enum class ReduceOp : uint8_t { sum, max, min };

// Reduces small host values (flags, counts, norms), sums in rank order. Every rank gets the same result.
void all_reduce(Communicator& group, std::span<double> values, ReduceOp op = ReduceOp::sum);
double all_reduce(Communicator& group, double value, ReduceOp op = ReduceOp::sum);

// Contiguous tensors; elements() must divide by group.size() (buckets are padded for it). fp32, or
// bf16 and fp16, summed in fp32 and rounded once.
//   reduce_scatter_sum   rank r's slice r of `values` becomes the sum over ranks; the others become undefined
//   start_gather_slices  slice r is taken from rank r
//   all_reduce_sum       both
// purpose, here and below: that of the transfers (TransferBatch).
void reduce_scatter_sum(Communicator& group, const Tensor& values, std::string_view purpose);
// Any element type. After the present work of the compute queue, which continues meanwhile.
PendingTransfers start_gather_slices(Communicator& group, const Tensor& values, std::string_view purpose);
void all_reduce_sum(Communicator& group, const Tensor& values, std::string_view purpose);
// The same for any length; pads a copy where the length is no multiple of the group size.
void all_reduce_sum_any(Communicator& group, const Tensor& values, std::string_view purpose);
// The element-wise maximum over ranks, any length. For small tensors: every rank receives all values.
void all_reduce_max(Communicator& group, const Tensor& values, std::string_view purpose);
// Sums of a few numbers, fp64 or i64, in rank order and on the device: every rank receives all values.
void all_reduce_numbers(Communicator& group, const Tensor& values, std::string_view purpose);

// An asynchronous sum over ranks: reduce_scatter() or all_reduce() start its transfer, after the work that
// was queued before on `written_on`, the queue on which `values` were written, and on the compute queue.
// start_sum() adds up on `queue` what the transfer brings. After finish(), later work of the compute queue
// may use the sum; until then the reduction holds a second tensor of the size of `values`. The host does not
// wait if the group's channel runs without the host.
//
// Several reductions can be under way. The transfer of one waits for the sum of another only if that sum was
// queued before on `written_on`: on a queue other than compute, start the sums after further transfers.
class Reduction {
 public:
  // Starts sum = slice `group.rank()` of the sum over ranks. `sum` may be that slice of `values`. The
  // contents of `values` become undefined.
  static Reduction reduce_scatter(Communicator& group, const Tensor& values, const Tensor& sum,
                                  std::string_view purpose, Queue queue = Queue::compute,
                                  Queue written_on = Queue::compute);
  // Starts values = the sum over ranks, in place on every rank.
  static Reduction all_reduce(Communicator& group, const Tensor& values, std::string_view purpose,
                              Queue queue = Queue::compute, Queue written_on = Queue::compute);
  // Queues the sum, and for all_reduce() the transfer of its slices. Later work of `queue` may use it. A
  // second call does nothing.
  void start_sum();
  // Starts the sum if start_sum() was not called. A second call does nothing.
  void finish();

 private:
  Reduction(Communicator& group, const Tensor& values, const Tensor& sum, bool gather,
            std::string_view purpose, Queue queue, Queue written_on);
  void add_parts();
  void gather_slices();
  Communicator* group_;
  Queue queue_;
  Tensor values_, received_, sum_;
  // all_reduce(): every rank receives all slices of the sum.
  bool gather_;
  std::string purpose_;
  PendingTransfers transfers_, gathered_;
  // `sum_` is complete; null before start_sum().
  std::unique_ptr<Event> summed_;
};

}  // namespace capstan::comm
