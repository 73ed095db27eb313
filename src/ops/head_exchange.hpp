// The all-to-all of DeepSpeed-Ulysses (Jacobs et al., 2023): before it a rank has all heads of its rows,
// after it a subset of the heads for the rows of all ranks of the group.
//
// The group's ranks are adjacent in the context-parallel order. Their first chunks are consecutive in the
// sequence, and their second chunks are consecutive in reverse (context_rows.hpp). So the gathered rows of I
// ranks of CP are those of one rank of CP / I, and all ranks give the full sequence in its natural order.
#pragma once

#include "comm/communicator.hpp"
#include "kernels/heads.hpp"
#include "tensor/tensor.hpp"

namespace capstan::ops {

class HeadExchange {
 public:
  // layout, rows: before the exchange; batch sequences of `seq` rows each. A rank receives complete groups of
  // heads where there are at least as many groups as ranks; otherwise an equal share of one group's query
  // heads, whose keys and values several ranks then hold. ErrorCode::config when heads and groups cannot be
  // divided this way. Null or a group of one: no exchange.
  HeadExchange(comm::Communicator* group, kernels::QkvLayout layout, int64_t batch, int64_t seq);

  bool is_single() const { return ranks_ == 1; }
  int64_t ranks() const { return ranks_; }
  // Rows of a sequence after the exchange.
  int64_t seq() const { return ranks_ * seq_; }
  // Layout of this rank's heads after the exchange.
  const kernels::QkvLayout& layout() const { return mine_; }
  // Index of the first of them before the exchange.
  int64_t first_head() const;
  // Several ranks hold the same keys and values.
  bool replicates() const { return copies_ > 1; }

  // All are collective. N = batch * seq local rows, M = ranks * N. A rank sends N rows of the narrower matrix
  // to each other rank.
  Tensor heads_of(const Tensor& qkv) const;  // [N, row] -> [M, row of layout()]
  // [M, heads of layout() * head_dim] -> [N, heads * head_dim].
  Tensor rows_of_output(const Tensor& out) const;
  // The inverse of rows_of_output().
  Tensor heads_of_output(const Tensor& dout) const;
  // The gradient of heads_of(): [M, row of layout()] -> [N, row]. Gradients of a group that several ranks
  // hold are summed in rank order, in fp32, and rounded once to `type`; where no group is replicated, `type`
  // must be that of dqkv.
  Tensor rows_of(const Tensor& dqkv, DType type) const;
  // An undefined tensor gives an undefined one.
  Tensor gathered(const Tensor& per_row) const;  // [N] -> [M]

 private:
  Tensor exchange(const Tensor& parts, std::string_view purpose) const;
  void reorder(const Tensor& by_rank, const Tensor& natural, bool back) const;
  Tensor part(const Tensor& parts, int64_t rank) const;

  comm::Communicator* group_;
  kernels::QkvLayout all_, mine_;
  int64_t ranks_, batch_, seq_, copies_ = 1;
};

}  // namespace capstan::ops
