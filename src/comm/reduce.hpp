// Sums over a group, in rank order, in fp32 (or double for scalars): the same bits for a plain all-reduce and for a
// reduce-scatter followed by a gather, whatever the transport.
#pragma once

#include <span>

#include "comm/communicator.hpp"
#include "comm/exchange.hpp"
#include "tensor/tensor.hpp"

namespace capstan::comm {

enum class ReduceOp : uint8_t { sum, max, min };

// Small host values (flags, counts, norms): every rank gets the same result; sums are made in rank order.
void all_reduce(Communicator& group, std::span<double> values, ReduceOp op = ReduceOp::sum);
double all_reduce(Communicator& group, double value, ReduceOp op = ReduceOp::sum);

// Contiguous tensors; elements() must divide by group.size() (buckets are padded for it). fp32, or bf16 whose sum is made in
// fp32 and rounded once.
//   reduce_scatter_sum: rank r's slice r of `values` becomes the sum over ranks; the other slices are undefined after.
//   all_gather_slices:  slice r is taken from rank r.
//   all_reduce_sum:     both.
void reduce_scatter_sum(Communicator& group, const Tensor& values);
void all_gather_slices(Communicator& group, const Tensor& values);  // any element type
void all_reduce_sum(Communicator& group, const Tensor& values);
// Any length: what the ranks do not divide is summed in a padded copy.
void all_reduce_sum_any(Communicator& group, const Tensor& values);
// The largest of all ranks' values, any length. For small tensors: everybody gets everything.
void all_reduce_max(Communicator& group, const Tensor& values);

// A sum that other work runs beside: started by its function, complete after finish(). Takes a second tensor of the size of
// `values` for as long.
class Reduction {
 public:
  // sum = slice `group.rank()` of the sum over ranks; it may be that slice of `values`, which are undefined after.
  static Reduction scatter(Communicator& group, const Tensor& values, const Tensor& sum);
  // In place, on every rank.
  static Reduction everywhere(Communicator& group, const Tensor& values);
  void finish();  // a second call does nothing

 private:
  Reduction(Communicator& group, const Tensor& values, const Tensor& sum);
  Communicator* group_;
  Tensor values_, received_, sum_;
  bool gather_ = false;
  Exchange exchange_;
};

}  // namespace capstan::comm
