// Muon (Jordan et al., 2024): the momentum of a weight matrix, orthogonalized by Newton-Schulz iterations.
#pragma once

#include <vector>

#include "optim/optimizer.hpp"

namespace capstan::optim {

// Replaces the momenta of matrices by their orthogonalizations, scaled. Matrices that several ranks hold
// parts of are put together first; config.muon_tp_mode says how for the tensor-parallel ranks.
class Orthogonalizer {
 public:
  Orthogonalizer(const config::OptimizerConfig& config, const Groups& groups)
      : config_(config), groups_(groups) {}

  // slice: the elements of this rank of Groups::shard, fp32. Collective over the groups.
  //
  // A matrix that several ranks of `shard` hold parts of is sent to the one with its middle, and its parts
  // are sent back: at most 8 bytes an element. Other matrices stay where they are.
  void run(const std::vector<Matrix>& matrices, const Tensor& slice) const;

 private:
  // The full local shard of a matrix, in place.
  void orthogonalize_shard(const Matrix& matrix, const Tensor& shard) const;
  void orthogonalize_gathered(const Matrix& matrix, const Tensor& shard) const;

  // A matrix, or this rank's shard of it.
  struct MatrixShard {
    // fp32 [rows, columns], contiguous; the result overwrites it.
    Tensor x;
    // Size of the full matrix, on which the scale depends.
    int64_t rows = 0, columns = 0;
    // Dimension that is sharded over `tensor`; -1: the matrix is complete.
    int sharded_dim = -1;
    // Another rank contributes these elements to sums over `tensor`.
    bool copy = false;
  };
  // How matrices are packed in one: groups of rows, in each those of every matrix.
  struct Packing {
    // Number of rows of each matrix in a group of this rank's shard; empty: there is one matrix.
    std::vector<int64_t> rows;
    // Number of groups in this rank's shard.
    int64_t groups = 1;
    // Number of rows of each full matrix.
    std::vector<int64_t> full_rows;
    // MatrixShard::copy of all but the first.
    bool copies = false;
  };
  static Packing packing_of(const Matrix& matrix);
  void orthogonalize_packed(const MatrixShard& packed, const Packing& packing) const;
  void orthogonalize(const MatrixShard& part) const;
  void normalize(const MatrixShard& part) const;

  const config::OptimizerConfig& config_;
  Groups groups_;
};

// The factor of the update of a matrix of this size.
double muon_scale(config::MuonScaleMode mode, int64_t rows, int64_t columns);

}  // namespace capstan::optim
