// Heads for sequence, the exchange of DeepSpeed-Ulysses (Jacobs et al., 2023): before it a rank has all heads of its rows,
// after it its share of the heads for the rows of all ranks of the group.
//
// The group's ranks are adjacent in the context-parallel order. Their first chunks follow one another in the sequence, and so do
// their second ones in reverse (context_rows.hpp): I ranks of CP gathered are one rank of CP / I, and all of them the whole
// sequence in its natural order.
#pragma once

#include "comm/communicator.hpp"
#include "kernels/attention.hpp"
#include "tensor/tensor.hpp"

namespace capstan::ops {

class HeadExchange {
 public:
  // layout, rows: before the exchange; batch sequences of `seq` rows each. A rank gets whole groups of heads where there are
  // at least as many as ranks; else an equal part of one group's query heads, and its keys and values are on several ranks.
  // ErrorCode::config when heads and groups do not divide so. Null or a group of one: nothing is exchanged.
  HeadExchange(comm::Communicator* group, kernels::QkvLayout layout, int64_t batch, int64_t seq);

  bool alone() const { return ranks_ == 1; }
  int64_t ranks() const { return ranks_; }
  int64_t seq() const { return ranks_ * seq_; }               // rows of a sequence after the exchange
  const kernels::QkvLayout& layout() const { return mine_; }  // of the heads that this rank has then
  int64_t first_head() const;                                 // the first of them among those before
  bool replicates() const { return copies_ > 1; }             // keys and values are on several ranks

  // All are collective. N = batch * seq rows here, M = ranks * N; a rank sends N rows of the narrower matrix to each of the others.
  Tensor heads_of(const Tensor& qkv) const;  // [N, row] -> [M, row of layout()]
  Tensor rows_of_output(
      const Tensor& out) const;  // [M, heads of layout() * head_dim] -> [N, heads * head_dim]
  Tensor heads_of_output(const Tensor& dout) const;  // its inverse
  // The gradient back: [M, row of layout()] -> [N, row]. What several ranks have for one group is summed in rank order, in
  // fp32, and rounded once to `type`; where no group is on several ranks `type` is that of dqkv.
  Tensor rows_of(const Tensor& dqkv, DType type) const;
  Tensor gathered(const Tensor& per_row) const;  // [N] -> [M]; undefined stays so

 private:
  Tensor exchange(const Tensor& parts) const;
  void reorder(const Tensor& by_rank, const Tensor& natural, bool back) const;
  Tensor part(const Tensor& parts, int64_t rank) const;

  comm::Communicator* group_;
  kernels::QkvLayout all_, mine_;
  int64_t ranks_, batch_, seq_, copies_ = 1;
};

}  // namespace capstan::ops
