#include "planner/optimizer_time.hpp"

#include <algorithm>
#include <vector>

#include "planner/collectives.hpp"
#include "planner/counts.hpp"
#include "planner/kernels.hpp"
#include "planner/linear_layers.hpp"

namespace capstan::planner {

double update_seconds(const RunShape& s, const Cluster& c, const RankParameters& trained) {
  const double parameters = updated_parameters(s, trained);
  // The gradient is read for the norm and for the update; the state is read and written.
  const double main = s.main_bytes > 0 ? 2 * s.main_bytes + s.parameter_bytes : 2 * s.parameter_bytes;
  const double norm = s.gradient_bytes, update = s.gradient_bytes + main + 2 * s.moment_bytes;
  const double on_host = s.frozen_base() ? 0 : s.offloaded_state * parameters,
               on_device = parameters - on_host;
  const double device = memory_seconds(c, parameters * norm + on_device * update, 10);
  if (on_host == 0) return device;
  // Copies in both directions, the host's update and the device's run at the same time, bucket after bucket.
  const double copied = on_host * std::max(s.gradient_bytes, s.parameter_bytes) / (1e9 * c.host_bandwidth);
  return std::max({device, copied, on_host * update / (1e9 * c.host_memory_bandwidth)});
}

namespace {

using config::MuonTpMode;

// Weight matrices that Muon updates, of one size.
struct Matrices {
  double rows = 0, columns = 0, count = 1;
  // Tensor-parallel ranks that share one, and whether they divide its rows.
  int64_t ranks = 1;
  bool divides_rows = true;
};

// Of the dense part of a layer, and of its routed experts on a rank.
struct LayerMatrices {
  std::vector<Matrices> dense, experts;
};

LayerMatrices layer_matrices(const RunShape& s, bool expert_layer) {
  using enum LinearLayer::Sharding;
  LayerMatrices m;
  const auto matrix = [](const LinearLayer& layer, double rows, double count, int64_t ranks) {
    return Matrices{rows, real(layer.in), count, layer.sharding == none ? 1 : ranks,
                    layer.sharding == outputs};
  };
  for (const LinearLayer& layer : dense_layers(s, expert_layer)) {
    std::vector<double> parts = {real(layer.out)};
    if (s.muon->split_qkv && layer.path.ends_with("linear_qkv"))
      parts = {real(s.query_width()), real(s.kv_width()), real(s.kv_width())};
    for (const double rows : parts) m.dense.push_back(matrix(layer, rows, 1, s.tp));
  }
  if (!expert_layer) return m;
  const ExpertShape& e = *s.experts;
  m.dense.push_back({real(e.count), real(s.hidden)});
  for (const LinearLayer& layer : routed_layers(s))
    m.experts.push_back(matrix(layer, real(layer.out), real(e.count) / real(s.ep), s.etp));
  return m;
}

// One matrix on the rank that orthogonalizes it, with those that share it.
double matrix_seconds(const RunShape& s, const Cluster& c, const Matrices& m) {
  const MuonTpMode mode = m.ranks > 1 ? s.muon->tp_mode : MuonTpMode::blockwise;
  const double part = mode == MuonTpMode::duplicated ? 1 : real(m.ranks);
  const double rows = m.divides_rows ? m.rows / part : m.rows,
               columns = m.divides_rows ? m.columns : m.columns / part;
  // The Gram matrix is of the smaller side, or of the side that is not divided.
  const bool of_rows = mode == MuonTpMode::distributed ? !m.divides_rows : rows <= columns;
  const double side = of_rows ? rows : columns, inner = of_rows ? columns : rows;
  const GemmFormat format = s.format == GemmFormat::tf32 ? GemmFormat::tf32 : GemmFormat::fp32;
  const Group ranks = group_of(c, 1, m.ranks, s.gpus());
  constexpr double kBytes = 4;
  double iteration = gemm_seconds(c, format, side, side, inner) + gemm_seconds(c, format, side, side, side) +
                     gemm_seconds(c, format, side, inner, side) +
                     memory_seconds(c, 2 * kBytes * (side * side + side * inner), 2);
  if (mode == MuonTpMode::distributed)
    iteration += collective_seconds(c, ranks, Collective::all_reduce, kBytes * side * side);
  const double gather = mode == MuonTpMode::duplicated
                            ? collective_seconds(c, ranks, Collective::all_gather, kBytes * rows * columns)
                            : 0;
  return gather + real(s.muon->steps) * iteration + memory_seconds(c, 3 * kBytes * rows * columns, 2);
}

// Seconds of all matrices that a rank holds, and of the largest.
struct MatrixTime {
  double all = 0, largest = 0;
  // On the rank that orthogonalizes the most, of `shards` that each have about as many.
  double on_one(int64_t shards) const { return std::max(all / real(shards), largest); }
};

void add(MatrixTime& time, const RunShape& s, const Cluster& c, const std::vector<Matrices>& matrices,
         double layers) {
  if (layers == 0) return;
  for (const Matrices& m : matrices) {
    const double one = matrix_seconds(s, c, m);
    time.all += layers * m.count * one, time.largest = std::max(time.largest, one);
  }
}

}  // namespace

double orthogonalization_seconds(const RunShape& s, const Cluster& c, int64_t pipeline_rank) {
  if (!s.muon || s.frozen_base()) return 0;
  double dense_layers = 0, expert_layers = 0;
  for (size_t i = 0; i < s.stages.size(); ++i) {
    if (s.stage_ranks[i] != pipeline_rank) continue;
    const StageShape& stage = s.stages[i];
    dense_layers += real(stage.dense_layers), expert_layers += real(stage.expert_layers);
    (s.is_expert_layer(s.layers - 1) ? expert_layers : dense_layers) += real(stage.mtp_layers);
  }
  MatrixTime dense, experts;
  add(dense, s, c, layer_matrices(s, false).dense, dense_layers);
  if (s.experts) {
    const LayerMatrices m = layer_matrices(s, true);
    add(dense, s, c, m.dense, expert_layers);
    add(experts, s, c, m.experts, expert_layers);
  }
  const bool sharded = s.sharding != config::ShardingStrategy::no_shard;
  const int64_t instances = s.shards_over_instances ? s.instances : 1;
  return dense.on_one(sharded ? s.dense_shards() * instances : 1) +
         experts.on_one(sharded ? s.expert_shards() * instances : 1);
}

}  // namespace capstan::planner
