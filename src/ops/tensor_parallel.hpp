// Linear layers and rows that are sharded over tensor-parallel ranks (Shoeybi et al. 2019; sequence
// parallelism: Korthikanti et al. 2022). N rows in all, T ranks.
//
//   column  each rank holds out/T features: every rank needs all rows of x, and its dx is a partial sum
//   row     each rank holds in/T features: its y is a partial sum
//
// Between the two, rows are either all on every rank (sums: all-reduce), or each rank has its run of N/T
// (`sequence`; all-gather before, reduce-scatter after). Sums are made in rank order. Bytes that a rank sends
// for a tensor of B bytes: all-reduce 2 B (T-1)/T, all-gather and reduce-scatter B (T-1)/T.
#pragma once

#include "comm/communicator.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

struct TensorParallel {
  // Null or one rank: not sharded.
  comm::Communicator* group = nullptr;
  // Sequence parallelism: rows are sharded outside of the GEMMs.
  bool sequence = false;
  // Number of row blocks of a GEMM. The collective of one block overlaps with the GEMM of the next; 1: no
  // overlap. The backward pass always overlaps the collective of dx with the weight gradient.
  int64_t splits = 1;

  int size() const { return static_cast<int>(comm::ranks_of(group)); }
  int rank() const { return static_cast<int>(comm::rank_in(group)); }
  bool is_single() const { return size() == 1; }
  bool shards_rows() const { return sequence && !is_single(); }
};

// y[N, out/T] = x W^T (+ bias): x[N, in], or this rank's rows [N/T, in] with `sequence`. dx is summed over
// the ranks.
Var column_linear(Tape& tape, const Var& x, const Parameter& weight, const Parameter* bias,
                  const TensorParallel& parallel);

// y[N, out] (this rank's rows with `sequence`) = sum over ranks of x[N, in/T] W^T. A bias comes after the
// sum.
Var row_linear(Tape& tape, const Var& x, const Parameter& weight, const TensorParallel& parallel);

// Gathers all rows of x before a GEMM that does not reduce its input gradient (the head). Backward: the sum
// of dx over the ranks, sharded by rows where x was. purpose, here and below: what the rows are
// (comm::TransferBatch).
Var copy_to_tensor_parallel(Tape& tape, const Var& x, const TensorParallel& parallel,
                            const std::string& purpose);

// Completes a partial sum over the ranks (a vocabulary shard's embedding); with `sequence` the result is
// sharded by rows.
Var reduce_from_tensor_parallel(Tape& tape, const Var& x, const TensorParallel& parallel,
                                const std::string& purpose);

// This rank's rows of a replicated tensor without a gradient: token ids, positions.
Tensor local_rows(const Tensor& x, const TensorParallel& parallel);

}  // namespace capstan::ops
