// The rank grid: sizes of the axes, their order, and the groups that follow from them by arithmetic alone.
// Making a mesh needs no other process; `connect` turns a rank's groups into communicators.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/channel.hpp"

namespace capstan::comm {

enum class Axis : uint8_t { tp, cp, ep, dp, pp };
inline constexpr size_t kAxes = 5;
std::string_view name_of(Axis axis);

// One grid: order "tp-cp-ep-dp-pp", leftmost fastest. rank = sum of index_i * product of the sizes before i.
class Grid {
 public:
  Grid(std::array<int64_t, kAxes> sizes, std::array<Axis, kAxes> order) : sizes_(sizes), order_(order) {}
  int64_t size(Axis axis) const { return sizes_[static_cast<size_t>(axis)]; }
  int64_t ranks() const;
  int64_t stride(Axis axis) const;
  int64_t index(int64_t rank, Axis axis) const { return rank / stride(axis) % size(axis); }
  // The members of the group that contains `rank` and varies over `axes`, in rank-in-group order (leftmost
  // axis fastest).
  std::vector<int64_t> group_of(int64_t rank, std::vector<Axis> axes) const;

 private:
  std::array<int64_t, kAxes> sizes_;
  std::array<Axis, kAxes> order_;
};

struct MeshSizes {
  int64_t world = 1, tp = 1, cp = 1, pp = 1;
  // Mixture of experts: adds the expert grid.
  bool experts = false;
  int64_t ep = 1, etp = 1;
  // Order tp-cp-ep-pp-dp (use_tp_pp_dp_mapping).
  bool pp_before_dp = false;
  // [a2a, p2p], product CP; empty: one level.
  std::vector<int64_t> hierarchical_cp;
  // num_distributed_optimizer_instances: equal parts of dp-cp and of edp, each of which shards the optimizer
  // state by itself.
  int64_t optimizer_instances = 1;
  // Tensor-parallel ranks that hold the same key and value heads; divides TP.
  int64_t kv_replicas = 1;
  // The pipeline rank of each stage (StageMap); empty: 0 … PP - 1, once or several times.
  std::vector<int64_t> stage_ranks = {};
  // The pipeline ranks with a table of word embeddings; empty: those of the first and of the last stage. And
  // those with a table of position embeddings; empty: that of the first stage.
  std::vector<int64_t> embedding_ranks = {}, position_ranks = {};
};

// The ranks in the group of a link between two pipeline stages.
struct StageLink {
  static constexpr int kSender = 0, kReceiver = 1;
};

// The dense grid {tp, cp, dp, pp} and, for a mixture of experts, the expert grid {etp, ep, edp, pp} over the
// same ranks; the groups of both:
//   dense    tp cp dp dp-cp pp tp-pp tp-cp tp-dp-cp
//   stages   embedding and position_embedding (the ranks of a pp group with a copy of the table), other ranks
//            alone
//   links    pp-forward-0, -1, …: the rank of a stage and that of the next one, where the map of stages has
//            such a pair; without a map each rank and the next one, also the last and the first.
//            pp-backward-0, …: the same pairs in the other direction. Links of one name have no rank in
//            common: each pair has the first number that its ranks have no link of yet. Hidden states share
//            a link only with those of other boundaries between the same two ranks.
//   CP       cp-inner (adjacent ranks, a2a) and cp-outer (p2p), with hierarchical sizes only
//   TP       tp-kv (adjacent ranks with the same keys and values), with kv_replicas > 1 only; tp-gradients
//            (the ranks of tp: sums of gradients do not wait behind the transfers of the passes)
//   HSDP     shard (consecutive ranks of dp-cp, one set for each instance), replica (the same rank of every
//            instance)
//   experts  etp ep edp etp-ep etp-ep-pp, expert-shard and expert-replica (shard and replica of edp), and
//            etp-gradients (the ranks of etp), with experts only
// The groups of one name partition the world.
class Mesh {
 public:
  // ErrorCode::config if the sizes do not divide the world, or if a group cannot be split into the parts that
  // the sizes name.
  Mesh(const MeshSizes& sizes, int64_t rank);
  const Grid& dense() const { return dense_; }
  // Grid of the expert layers. Without experts, all ranks of a data-parallel group lie along its data axis.
  const Grid& expert() const { return expert_; }
  bool has_experts() const { return sizes_.experts; }
  bool has_kv_replicas() const { return sizes_.kv_replicas > 1; }
  int64_t rank() const { return rank_; }
  int64_t index(Axis axis) const { return dense_.index(rank_, axis); }
  int64_t size(Axis axis) const { return dense_.size(axis); }

  // For messages: "tp2 dp4 pp2 ep4 etp1". Omits axes of size 1 other than dp, and etp if it equals tp.
  std::string text() const;
  std::vector<std::string> group_names() const;
  // The group with the same ranks as this one, which exists to keep messages apart: "tp" for "tp-gradients".
  static std::optional<std::string> repeated_group(const std::string& name);
  // Whether the group is a link between pipeline stages, over which tensors go in one direction.
  static bool is_link(std::string_view name);
  // Whether the ranks exchange tensors over groups of this name, and not only values of the host.
  static bool carries_tensors(std::string_view name);
  // World ranks of the group of this name that contains `rank`, in the order of their ranks in it.
  std::vector<int64_t> members(const std::string& name, int64_t rank) const;

  // Splits the world into this rank's groups; collective over the world. Groups of one cost nothing.
  // make_channel: called for each group of several ranks, by all its members in the same order; empty: the
  // channels of the communicators.
  using ChannelFactory = std::function<std::unique_ptr<TensorChannel>(Communicator& group)>;
  void connect(Communicator& world, const ChannelFactory& make_channel = {});
  // The same groups without peers: any rank of any world can be estimated on the meta device.
  void connect_meta(const ChannelFactory& make_channel = {});
  Communicator& group(const std::string& name) const;
  // forward: activations go to the next stage; backward: their gradients go to the previous stage.
  enum class PipelineDirection : uint8_t { forward, backward };
  // The link over which pipeline rank `from` sends to `to`; this rank is one of them.
  Communicator& stage_link(PipelineDirection direction, int64_t from, int64_t to) const;

 private:
  // Two pipeline ranks of which the first holds a stage, the second the next one, and the number of their
  // links.
  struct Boundary {
    int64_t from, to, number;
  };
  static std::vector<Boundary> boundaries_of(const MeshSizes& sizes);
  // Numbers of links in one direction.
  int64_t link_names() const;
  bool alone_everywhere(const std::string& name) const;
  // The two stages of the link that a rank has under this name, sender first; the rank alone where it has
  // none.
  std::vector<int64_t> link_members(const std::string& name, int64_t rank) const;

  MeshSizes sizes_;
  Grid dense_, expert_;
  int64_t rank_;
  std::vector<Boundary> boundaries_;
  std::map<std::string, std::unique_ptr<Communicator>> groups_;
};

}  // namespace capstan::comm
