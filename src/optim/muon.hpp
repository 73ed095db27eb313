// Muon (Jordan et al., 2024): the momentum of a weight matrix, orthogonalized by Newton-Schulz iterations.
#pragma once

#include <vector>

#include "optim/optimizer.hpp"

namespace capstan::optim {

// Replaces the momentum of each matrix by its orthogonalization times muon_scale() and
// muon_extra_scale_factor. A matrix that is sharded over data-parallel ranks is gathered on one of them;
// config.muon_tp_mode determines how matrices that are sharded over tensor-parallel ranks are orthogonalized.
class Orthogonalizer {
 public:
  Orthogonalizer(const config::OptimizerConfig& config, const MuonGroups& groups)
      : config_(config), groups_(groups) {}

  // Overwrites `slice`, the part of the bucket's momentum that this rank of MuonGroups::shard holds, fp32
  // [n]. Collective over the groups.
  //
  // A matrix with elements in the slices of several ranks is sent to the rank that holds its middle element,
  // which returns the results: at most 8 bytes per element. Other matrices are not sent. The compute queue
  // waits for these transfers.
  void run(const std::vector<Matrix>& matrices, const Tensor& slice) const;

 private:
  // Orthogonalizes the tensor-parallel shard of a matrix, in place. `shard`: all its elements.
  void orthogonalize_shard(const Matrix& matrix, const Tensor& shard) const;
  void orthogonalize_gathered(const Matrix& matrix, const Tensor& shard) const;

  // A matrix, or this rank's shard of it.
  struct MatrixShard {
    // fp32 [rows, columns], contiguous; the result overwrites it.
    Tensor x;
    // Size of the full matrix, on which the scale depends.
    int64_t rows = 0, columns = 0;
    // Dimension of the matrix that is sharded over `tensor`; -1: `x` is orthogonalized without other ranks.
    int sharded_dim = -1;
    // Whether another rank holds the same elements and counts them in sums over `tensor`.
    bool replicated = false;
  };
  // The layout of a fused matrix, for example of queries, keys and values: its rows are groups, each of which
  // consists of rows of every matrix in turn.
  struct FusedLayout {
    // Number of rows of each matrix in a group of this rank's shard; empty: the matrix is not fused.
    std::vector<int64_t> rows;
    // Number of groups in this rank's shard.
    int64_t groups = 1;
    // Number of rows of each full matrix.
    std::vector<int64_t> full_rows;
    // MatrixShard::replicated of all matrices but the first (keys and values).
    bool replicated = false;
  };
  static FusedLayout fused_layout_of(const Matrix& matrix);
  // Orthogonalizes each of the matrices that are fused, separately.
  void orthogonalize_fused(const MatrixShard& fused, const FusedLayout& layout) const;
  void orthogonalize(const MatrixShard& part) const;
  // Divides by the Frobenius norm of the matrix.
  void normalize(const MatrixShard& part) const;

  const config::OptimizerConfig& config_;
  MuonGroups groups_;
};

// The scale of the update of a matrix: spectral sqrt(max(rows, columns)), unit_rms_norm sqrt(rows / columns),
// shape_scaling sqrt(max(1, rows / columns)).
double muon_scale(config::MuonScaleMode mode, int64_t rows, int64_t columns);

}  // namespace capstan::optim
