#include "optim/muon.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <span>

#include "base/error.hpp"
#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/flat_range.hpp"
#include "tensor/launch.hpp"

namespace capstan::optim {

using config::MuonTpMode;
using ops::Transpose;

namespace {

Tensor range_of(const Tensor& flat, const FlatRange& range) {
  return flat.flat_range(range.begin, range.count, {range.count});
}
// The shard of a rank of MuonGroups::tensor.
Shard shard_on(const Matrix& matrix, int64_t rank, int64_t ranks) {
  return shard_of("", matrix.global, matrix.sharding,
                  {.tensor = {static_cast<int>(rank), static_cast<int>(ranks)}});
}
void copy(const Tensor& from, const Tensor& to) {
  launch(to.device(), to.device().table().elementwise->cast, from, to, from.elements());
}

// One Newton-Schulz iteration: X <- a X + b (X X^T) X + c (X X^T)^2 X. kSimple: the constants of Jordan et
// al. for every iteration. kQuintic: iteration i uses set i mod 5. kPolarExpress: set min(i, 7).
struct Coefficients {
  float a, b, c;
};
constexpr std::array<Coefficients, 1> kSimple{{{3.4445f, -4.7750f, 2.0315f}}};
constexpr std::array<Coefficients, 5> kQuintic{{{4.0848f, -6.8946f, 2.9270f},
                                                {3.9505f, -6.3029f, 2.6377f},
                                                {3.7418f, -5.5913f, 2.3037f},
                                                {2.8769f, -3.1427f, 1.2046f},
                                                {2.8366f, -3.0525f, 1.2012f}}};
// Amsel et al., "The Polar Express" (2025).
constexpr std::array<Coefficients, 8> kPolarExpress{{{8.2051f, -22.9019f, 16.4607f},
                                                     {4.0664f, -2.8612f, 0.5184f},
                                                     {3.9096f, -2.8234f, 0.5250f},
                                                     {3.2856f, -2.4153f, 0.4853f},
                                                     {2.2779f, -1.6198f, 0.3985f},
                                                     {1.8726f, -1.2307f, 0.3585f},
                                                     {1.8564f, -1.2132f, 0.3568f},
                                                     {1.8750f, -1.2500f, 0.3750f}}};

Coefficients coefficients_of(config::MuonCoefficients type, int64_t iteration) {
  switch (type) {
    case config::MuonCoefficients::simple:
      return kSimple[0];
    case config::MuonCoefficients::quintic:
      return kQuintic[static_cast<size_t>(iteration) % kQuintic.size()];
    case config::MuonCoefficients::polar_express:
      break;
  }
  return kPolarExpress[std::min(static_cast<size_t>(iteration), kPolarExpress.size() - 1)];
}

}  // namespace

double muon_scale(config::MuonScaleMode mode, int64_t rows, int64_t columns) {
  const auto m = static_cast<double>(rows), n = static_cast<double>(columns);
  switch (mode) {
    case config::MuonScaleMode::spectral:
      return std::sqrt(std::max(m, n));
    case config::MuonScaleMode::unit_rms_norm:
      return std::sqrt(m / n);
    case config::MuonScaleMode::shape_scaling:
      break;
  }
  return std::sqrt(std::max(1.0, m / n));
}

void Orthogonalizer::run(const std::vector<Matrix>& matrices, const Tensor& slice) const {
  CategoryScope scope(MemoryCategory::workspace);
  const int64_t size = slice.elements();
  const auto self = static_cast<int>(comm::rank_in(groups_.shard));
  const auto slice_of = [&](int64_t rank) { return FlatRange{rank * size, size}; };
  const auto local = [&](const FlatRange& range) {
    return range_of(slice, {range.begin - self * size, range.count});
  };
  // A matrix that this rank orthogonalizes.
  struct Owned {
    const Matrix* matrix;
    // Elements of the matrix in the bucket.
    FlatRange range;
    // [range.count]: a view of `slice`, or a buffer into which the parts of several ranks are gathered.
    Tensor values;
    bool gathered;
  };
  std::vector<Owned> owned;
  comm::TransferBatch to_owners("matrices to their owners");
  for (const Matrix& matrix : matrices) {
    const Shard shard = shard_on(matrix, comm::rank_in(groups_.tensor), comm::ranks_of(groups_.tensor));
    const FlatRange range{matrix.begin, shard.shape.elements()};
    const auto owner = static_cast<int>((range.begin + range.end()) / 2 / size);
    const FlatRange mine = intersection(range, slice_of(self));
    if (owner != self) {
      if (mine.count > 0) to_owners.send(local(mine), owner);
      continue;
    }
    if (mine.count == range.count) {
      owned.push_back({&matrix, range, local(range), false});
      continue;
    }
    const Tensor values = Tensor::empty(slice.device(), {range.count});
    for (int rank = 0; rank < comm::ranks_of(groups_.shard); ++rank) {
      const FlatRange part = intersection(range, slice_of(rank));
      if (part.count == 0) continue;
      const Tensor region = range_of(values, {part.begin - range.begin, part.count});
      if (rank == self)
        copy(local(part), region);
      else
        to_owners.receive(region, rank);
    }
    owned.push_back({&matrix, range, values, true});
  }
  const bool exchanges = !to_owners.transfers().empty();
  if (exchanges) groups_.shard->channel().start(to_owners).wait();
  for (const Owned& o : owned) orthogonalize_shard(*o.matrix, o.values);
  if (!exchanges) return;
  // Returns the parts: the same transfers with source and destination swapped.
  comm::TransferBatch from_owners("orthogonalized matrices");
  for (const comm::TransferBatch::Transfer& transfer : to_owners.transfers())
    if (transfer.kind == comm::TransferBatch::Kind::send)
      from_owners.receive(transfer.from, transfer.peer);
    else
      from_owners.send(transfer.to, transfer.peer);
  groups_.shard->channel().start(from_owners).wait();
  for (const Owned& o : owned) {
    if (!o.gathered) continue;
    const FlatRange part = intersection(o.range, slice_of(self));
    copy(range_of(o.values, {part.begin - o.range.begin, part.count}), local(part));
  }
}

void Orthogonalizer::orthogonalize_shard(const Matrix& matrix, const Tensor& shard) const {
  const int64_t ranks = matrix.sharding.over(ShardingAxis::tensor) ? comm::ranks_of(groups_.tensor) : 1;
  if (ranks > 1 && config_.muon_tp_mode == MuonTpMode::duplicated)
    return orthogonalize_gathered(matrix, shard);
  const Shard here = shard_on(matrix, ranks > 1 ? groups_.tensor->rank() : 0, ranks);
  const int64_t rows = here.shape[0], columns = here.shape[1];
  const bool distributed = ranks > 1 && config_.muon_tp_mode == MuonTpMode::distributed;
  const MatrixShard fused{.x = shard.view({rows, columns}),
                          .rows = distributed ? matrix.global[0] : rows,
                          .columns = distributed ? matrix.global[1] : columns,
                          .sharded_dim = distributed ? here.dim : -1};
  FusedLayout layout = fused_layout_of(matrix);
  if (ranks > 1 && !layout.rows.empty()) {
    const ShardSegment& last = here.segments.back();
    layout.groups = std::max<int64_t>(1, layout.groups / ranks);
    layout.replicated = distributed && !last.owned();
    // Ranks that share a group of heads each hold an equal part of the group's queries.
    if (last.replicas > 1) layout.rows[0] = here.segments.front().count;
    if (!distributed)
      for (size_t p = 0; p < layout.rows.size(); ++p) layout.full_rows[p] = layout.rows[p] * layout.groups;
  }
  orthogonalize_fused(fused, layout);
}

Orthogonalizer::FusedLayout Orthogonalizer::fused_layout_of(const Matrix& matrix) {
  FusedLayout layout{.rows = matrix.split};
  if (layout.rows.empty()) return layout;
  const int64_t group = std::accumulate(layout.rows.begin(), layout.rows.end(), int64_t{0});
  CAPSTAN_ASSERT(group > 0, "the matrices of a fused weight have rows");
  layout.groups = matrix.global[0] / group;
  for (const int64_t rows : layout.rows) layout.full_rows.push_back(rows * layout.groups);
  return layout;
}

// Gathers the full matrix on every rank of `tensor`, orthogonalizes it there, and keeps this rank's shard.
void Orthogonalizer::orthogonalize_gathered(const Matrix& matrix, const Tensor& shard) const {
  comm::Communicator& tensor = *groups_.tensor;
  const int ranks = tensor.size();
  const Tensor all = Tensor::empty(shard.device(), {ranks * shard.elements()});
  tensor.channel().start(comm::TransferBatch("shards of a matrix").all_gather(shard, all)).wait();
  const Tensor full = Tensor::empty(shard.device(), matrix.global);
  const auto for_segments = [&](int rank, bool all_replicas, const auto& body) {
    const Shard there = shard_on(matrix, rank, ranks);
    const Tensor values = rank == tensor.rank() && all_replicas
                              ? shard.view(there.shape)
                              : all.flat_range(rank * shard.elements(), shard.elements(), there.shape);
    int64_t begin = 0;
    for (const ShardSegment& segment : there.segments) {
      if (all_replicas || segment.owned())
        body(values.slice(there.dim, begin, segment.count),
             full.slice(there.dim, segment.global, segment.count));
      begin += segment.count;
    }
  };
  for (int rank = 0; rank < ranks; ++rank)
    for_segments(rank, false,
                 [](const Tensor& part, const Tensor& region) { ops::copy_matrix(part, region); });
  orthogonalize_fused({.x = full, .rows = matrix.global[0], .columns = matrix.global[1]},
                      fused_layout_of(matrix));
  for_segments(tensor.rank(), true,
               [](const Tensor& part, const Tensor& region) { ops::copy_matrix(region, part); });
}

void Orthogonalizer::orthogonalize_fused(const MatrixShard& fused, const FusedLayout& layout) const {
  if (layout.rows.empty()) return orthogonalize(fused);
  const int64_t groups = layout.groups, columns = fused.x.size(1), group = fused.x.size(0) / groups;
  const Tensor by_group = fused.x.view({groups, group * columns});
  int64_t begin = 0;
  for (size_t p = 0; p < layout.rows.size(); ++p) {
    const int64_t rows = layout.rows[p];
    const Tensor strided = by_group.slice(1, begin * columns, rows * columns);
    MatrixShard part = fused;
    part.replicated = p > 0 && layout.replicated;
    part.rows = layout.full_rows[p];
    part.x = groups == 1 ? fused.x.slice(0, begin, rows)
                         : Tensor::empty(fused.x.device(), {groups * rows, columns});
    const Tensor contiguous = part.x.view({groups, rows * columns});
    if (groups > 1) ops::copy_matrix(strided, contiguous);
    orthogonalize(part);
    if (groups > 1) ops::copy_matrix(contiguous, strided);
    begin += rows;
  }
}

void Orthogonalizer::normalize(const MatrixShard& part) const {
  constexpr float kEpsilon = 1e-7f;
  Device& device = part.x.device();
  const Tensor squares = Tensor::empty(device, {1}, DType::f64);
  const int64_t elements = part.x.elements();
  const kernels::Elementwise& elementwise = *device.table().elementwise;
  const int64_t counted = part.replicated ? 0 : elements;
  launch(device, elementwise.weighted_sum_workspace(counted), elementwise.weighted_sum, part.x, part.x,
         counted, squares, false);
  if (part.sharded_dim >= 0) comm::all_reduce_numbers(*groups_.tensor, squares, "squares of a matrix");
  launch(device, device.table().optimizers->normalize, squares, kEpsilon, part.x, elements);
}

void Orthogonalizer::orthogonalize(const MatrixShard& part) const {
  const double scale =
      muon_scale(config_.muon_scale_mode, part.rows, part.columns) * config_.muon_extra_scale_factor;
  normalize(part);
  // The Gram matrix is X X^T or X^T X, whichever is smaller. If X is sharded, it is the one that sums over
  // the sharded dimension, so that the Gram matrices of the shards add up to that of the full matrix.
  const bool of_rows = part.sharded_dim >= 0 ? part.sharded_dim == 1 : part.x.size(0) <= part.x.size(1);
  const auto sides =
      of_rows ? std::pair(Transpose::no, Transpose::yes) : std::pair(Transpose::yes, Transpose::no);
  Device& device = part.x.device();
  const int64_t n = part.x.size(of_rows ? 0 : 1);
  const Tensor gram = Tensor::empty(device, {n, n}), polynomial = Tensor::empty(device, {n, n});
  Tensor x = part.x, next = Tensor::empty(device, x.shape());
  for (int64_t i = 0; i < config_.muon_num_ns_steps; ++i) {
    const Coefficients k = coefficients_of(config_.muon_coefficient_type, i);
    const float factor = i + 1 == config_.muon_num_ns_steps ? static_cast<float>(scale) : 1.0f;
    ops::matmul(sides.first, sides.second, x, x, gram);
    if (part.sharded_dim >= 0) {
      if (part.replicated) launch(device, device.table().elementwise->fill, gram, 0.0f, gram.elements());
      comm::all_reduce_sum_any(*groups_.tensor, gram, "Gram matrix");
    }
    copy(gram, polynomial);
    ops::matmul(Transpose::no, Transpose::no, gram, gram, polynomial, k.b, k.c);
    copy(x, next);
    ops::matmul(Transpose::no, Transpose::no, of_rows ? polynomial : x, of_rows ? x : polynomial, next,
                factor * k.a, factor);
    std::swap(x, next);
  }
  if (config_.muon_num_ns_steps % 2 == 1) copy(x, part.x);
}

}  // namespace capstan::optim
