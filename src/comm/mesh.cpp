#include "comm/mesh.hpp"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <set>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace capstan::comm {

std::string_view name_of(Axis axis) {
  constexpr std::array<std::string_view, kAxes> names{"tp", "cp", "ep", "dp", "pp"};
  return names[static_cast<size_t>(axis)];
}

int64_t Grid::ranks() const {
  int64_t product = 1;
  for (const int64_t size : sizes_) product *= size;
  return product;
}

int64_t Grid::stride(Axis axis) const {
  int64_t stride = 1;
  for (const Axis other : order_) {
    if (other == axis) return stride;
    stride *= size(other);
  }
  return stride;
}

std::vector<int64_t> Grid::group_of(int64_t rank, std::vector<Axis> axes) const {
  const auto position = [&](Axis a) { return std::find(order_.begin(), order_.end(), a) - order_.begin(); };
  std::sort(axes.begin(), axes.end(), [&](Axis a, Axis b) { return position(a) < position(b); });
  int64_t base = rank;
  for (const Axis axis : axes) base -= index(rank, axis) * stride(axis);
  std::vector<int64_t> members{base};
  for (const Axis axis : axes) {
    const std::vector<int64_t> before = members;
    for (int64_t i = 1; i < size(axis); ++i)
      for (const int64_t member : before) members.push_back(member + i * stride(axis));
  }
  return members;
}

namespace {
std::array<Axis, kAxes> order_of(const MeshSizes& sizes) {
  if (sizes.pp_before_dp) return {Axis::tp, Axis::cp, Axis::ep, Axis::pp, Axis::dp};
  return {Axis::tp, Axis::cp, Axis::ep, Axis::dp, Axis::pp};
}

std::string product_text(std::initializer_list<int64_t> factors) {
  std::string text;
  for (const int64_t factor : factors) text += (text.empty() ? "" : " x ") + std::to_string(factor);
  return text;
}
int64_t product_of(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (factor < 1)
      fail(ErrorCode::config, "parallel sizes " + product_text(factors) + ": all must be positive");
    product = checked_mul(product, factor);
  }
  return product;
}

// The message shows both grids, because an error in one often explains the other.
void check_world(const MeshSizes& s) {
  const int64_t dense = product_of({s.tp, s.cp, s.pp}),
                expert = s.experts ? product_of({s.etp, s.ep, s.pp}) : 1;
  if (s.world >= 1 && s.world % dense == 0 && s.world % expert == 0) return;
  const int64_t both = checked_mul(dense / std::gcd(dense, expert), expert);
  const int64_t below = s.world / both * both;
  std::string help = "the nearest worlds are ";
  if (below > 0) help += std::to_string(below) + " and ";
  help += std::to_string(below + both);
  if (s.experts && s.ep > 1) help += "; EP is part of data parallelism and does not multiply into the world";
  fail(ErrorCode::config,
       "a world of " + std::to_string(s.world) +
           " ranks does not divide into the dense grid TP x CP x PP = " + product_text({s.tp, s.cp, s.pp}) +
           " = " + std::to_string(dense) +
           (s.experts ? " and the expert grid ETP x EP x PP = " + product_text({s.etp, s.ep, s.pp}) + " = " +
                            std::to_string(expert)
                      : ""),
       help);
}

Grid dense_grid(const MeshSizes& s) {
  check_world(s);
  return Grid({s.tp, s.cp, 1, s.world / (s.tp * s.cp * s.pp), s.pp}, order_of(s));
}
Grid expert_grid(const MeshSizes& s) {
  if (!s.experts) return Grid({1, 1, 1, s.world, 1}, order_of(s));
  return Grid({s.etp, 1, s.ep, s.world / (s.etp * s.ep * s.pp), s.pp}, order_of(s));
}

struct GridGroup {
  const char* name;
  bool expert;
  std::vector<Axis> axes;
  // The group with the same ranks, if this one exists only to keep its messages apart from that group's.
  const char* repeats = nullptr;
};
const std::vector<GridGroup>& grid_groups() {
  using enum Axis;
  static const std::vector<GridGroup> all{{"tp", false, {tp}},
                                          {"cp", false, {cp}},
                                          {"dp", false, {dp}},
                                          {"dp-cp", false, {dp, cp}},
                                          {"pp", false, {pp}},
                                          {"tp-pp", false, {tp, pp}},
                                          {"tp-gradients", false, {tp}, "tp"},
                                          {"tp-cp", false, {tp, cp}},
                                          {"tp-dp-cp", false, {tp, dp, cp}},
                                          {"etp", true, {tp}},
                                          {"etp-gradients", true, {tp}, "etp"},
                                          {"ep", true, {ep}},
                                          {"edp", true, {dp}},
                                          {"etp-ep", true, {tp, ep}},
                                          {"etp-ep-pp", true, {tp, ep, pp}}};
  return all;
}

int64_t index_of(const std::vector<int64_t>& members, int64_t rank) {
  return std::find(members.begin(), members.end(), rank) - members.begin();
}
// Links between stages; names end with their number (mesh.hpp).
constexpr const char* kForwardLink = "pp-forward-";
constexpr const char* kBackwardLink = "pp-backward-";

MeshSizes with_embedding_ranks(MeshSizes sizes) {
  const auto& map = sizes.stage_ranks;
  const int64_t first = map.empty() ? 0 : map.front(), last = map.empty() ? sizes.pp - 1 : map.back();
  if (sizes.embedding_ranks.empty())
    sizes.embedding_ranks = first == last ? std::vector{first} : std::vector{first, last};
  if (sizes.position_ranks.empty()) sizes.position_ranks = {first};
  return sizes;
}

// Divides the members into runs of `length` consecutive ones. Returns the run with `rank`, or the members at
// the same index of every run.
std::vector<int64_t> run_with(const std::vector<int64_t>& members, int64_t rank, int64_t length) {
  const auto begin = members.begin() + index_of(members, rank) / length * length;
  return {begin, begin + length};
}
std::vector<int64_t> across_runs(const std::vector<int64_t>& members, int64_t rank, int64_t length) {
  std::vector<int64_t> result;
  for (auto i = index_of(members, rank) % length; i < std::ssize(members); i += length)
    result.push_back(members[static_cast<size_t>(i)]);
  return result;
}
}  // namespace

Mesh::Mesh(const MeshSizes& sizes, int64_t rank)
    : sizes_(with_embedding_ranks(sizes)),
      dense_(dense_grid(sizes)),
      expert_(expert_grid(sizes)),
      rank_(rank),
      boundaries_(boundaries_of(sizes)) {
  CAPSTAN_ASSERT(rank >= 0 && rank < sizes.world, "rank " + std::to_string(rank) + " in the mesh");
  if (sizes.experts && sizes.pp > 1 && dense_.stride(Axis::pp) != expert_.stride(Axis::pp))
    fail(ErrorCode::config,
         "the pipeline groups of dense and of expert layers differ: with the order tp-cp-ep-pp-dp the "
         "data-parallel size, " +
             std::to_string(dense_.size(Axis::dp)) + ", and the expert data-parallel size, " +
             std::to_string(expert_.size(Axis::dp)) + ", must be equal",
         "set dist.use_tp_pp_dp_mapping=false, the order tp-cp-ep-dp-pp, in which they may differ");
  if (!sizes.hierarchical_cp.empty() &&
      (sizes.hierarchical_cp.size() != 2 || sizes.hierarchical_cp[0] < 1 || sizes.hierarchical_cp[1] < 1 ||
       sizes.hierarchical_cp[0] * sizes.hierarchical_cp[1] != sizes.cp))
    fail(ErrorCode::config, "hierarchical context parallelism needs two sizes with the product CP = " +
                                std::to_string(sizes.cp));
  if (sizes.kv_replicas < 1 || sizes.tp % sizes.kv_replicas != 0)
    fail(ErrorCode::config, std::to_string(sizes.kv_replicas) +
                                " tensor-parallel ranks for the same keys and values do not divide TP = " +
                                std::to_string(sizes.tp));
  const int64_t data = dense_.size(Axis::dp) * dense_.size(Axis::cp);
  if (sizes.optimizer_instances < 1 || data % sizes.optimizer_instances != 0)
    fail(ErrorCode::config,
         std::to_string(sizes.optimizer_instances) +
             " distributed optimizer instances do not divide DP x CP = " + std::to_string(data));
  if (sizes.experts && expert_.size(Axis::dp) % sizes.optimizer_instances != 0)
    fail(ErrorCode::config,
         std::to_string(sizes.optimizer_instances) +
             " distributed optimizer instances do not divide the expert data-parallel size " +
             std::to_string(expert_.size(Axis::dp)));
}

std::string Mesh::text() const {
  std::string text;
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::dp, Axis::pp})
    if (axis == Axis::dp || size(axis) > 1)
      text += (text.empty() ? "" : " ") + std::string(name_of(axis)) + std::to_string(size(axis));
  if (!sizes_.experts) return text;
  if (sizes_.ep > 1) text += " ep" + std::to_string(sizes_.ep);
  if (sizes_.etp != sizes_.tp) text += " etp" + std::to_string(sizes_.etp);
  return text;
}

std::vector<std::string> Mesh::group_names() const {
  std::vector<std::string> names;
  for (const GridGroup& group : grid_groups())
    if (!group.expert || sizes_.experts) names.emplace_back(group.name);
  names.insert(names.end(), {"embedding", "position_embedding", "shard", "replica"});
  if (sizes_.experts) names.insert(names.end(), {"expert-shard", "expert-replica"});
  if (!sizes_.hierarchical_cp.empty()) names.insert(names.end(), {"cp-inner", "cp-outer"});
  if (sizes_.kv_replicas > 1) names.emplace_back("tp-kv");
  for (const char* direction : {kForwardLink, kBackwardLink})
    for (int64_t i = 0; i < link_names(); ++i) names.push_back(direction + std::to_string(i));
  return names;
}

std::optional<std::string> Mesh::repeated_group(const std::string& name) {
  for (const GridGroup& group : grid_groups())
    if (name == group.name && group.repeats) return group.repeats;
  return std::nullopt;
}

bool Mesh::carries_tensors(std::string_view name) {
  // Positions in the grid.
  constexpr std::string_view kWithout[] = {"dp", "tp-cp", "tp-dp-cp", "edp"};
  return std::ranges::find(kWithout, name) == std::end(kWithout);
}

bool Mesh::is_link(std::string_view name) {
  return name.starts_with(kForwardLink) || name.starts_with(kBackwardLink);
}

std::vector<int64_t> Mesh::members(const std::string& name, int64_t rank) const {
  for (const GridGroup& group : grid_groups())
    if (name == group.name && (!group.expert || sizes_.experts))
      return (group.expert ? expert_ : dense_).group_of(rank, group.axes);
  if (name == "embedding" || name == "position_embedding") {
    const auto stages = dense_.group_of(rank, {Axis::pp});
    std::vector<int64_t> holders;
    for (const int64_t holder : name == "embedding" ? sizes_.embedding_ranks : sizes_.position_ranks)
      holders.push_back(stages[static_cast<size_t>(holder)]);
    return std::ranges::find(holders, rank) != holders.end() ? holders : std::vector{rank};
  }
  if (is_link(name)) return link_members(name, rank);
  const auto of_instance = [&](const std::vector<int64_t>& data, bool shard) {
    const int64_t length = std::ssize(data) / sizes_.optimizer_instances;
    return shard ? run_with(data, rank, length) : across_runs(data, rank, length);
  };
  if (name == "shard" || name == "replica")
    return of_instance(dense_.group_of(rank, {Axis::dp, Axis::cp}), name == "shard");
  if (sizes_.experts && (name == "expert-shard" || name == "expert-replica"))
    return of_instance(expert_.group_of(rank, {Axis::dp}), name == "expert-shard");
  if (!sizes_.hierarchical_cp.empty() && (name == "cp-inner" || name == "cp-outer")) {
    const auto context = dense_.group_of(rank, {Axis::cp});
    const int64_t inner = sizes_.hierarchical_cp[0];
    return name == "cp-inner" ? run_with(context, rank, inner) : across_runs(context, rank, inner);
  }
  if (sizes_.kv_replicas > 1 && name == "tp-kv")
    return run_with(dense_.group_of(rank, {Axis::tp}), rank, sizes_.kv_replicas);
  fail(ErrorCode::internal, "internal error: no group `" + name + "` in the mesh");
}

std::vector<int64_t> Mesh::link_members(const std::string& name, int64_t rank) const {
  const auto stages = dense_.group_of(rank, {Axis::pp});
  const int64_t mine = index_of(stages, rank), number = std::stoll(name.substr(name.rfind('-') + 1));
  for (const Boundary& boundary : boundaries_) {
    if (boundary.number != number || (boundary.from != mine && boundary.to != mine)) continue;
    std::vector<int64_t> pair{stages[static_cast<size_t>(boundary.from)],
                              stages[static_cast<size_t>(boundary.to)]};
    if (name.starts_with(kBackwardLink)) std::swap(pair[0], pair[1]);
    return pair;
  }
  return {rank};
}

std::vector<Mesh::Boundary> Mesh::boundaries_of(const MeshSizes& sizes) {
  std::vector<Boundary> boundaries;
  if (sizes.pp == 1) return boundaries;
  const auto add = [&](int64_t from, int64_t to) {
    std::set<int64_t> taken;
    for (const Boundary& other : boundaries) {
      if (other.from == from && other.to == to) return;
      if (other.from == from || other.to == to || other.from == to || other.to == from)
        taken.insert(other.number);
    }
    int64_t number = 0;
    while (taken.contains(number)) ++number;
    boundaries.push_back({from, to, number});
  };
  const auto& map = sizes.stage_ranks;
  for (int64_t rank = 0; map.empty() && rank < sizes.pp; ++rank) add(rank, (rank + 1) % sizes.pp);
  for (size_t stage = 1; stage < map.size(); ++stage)
    if (map[stage - 1] != map[stage]) add(map[stage - 1], map[stage]);
  return boundaries;
}

int64_t Mesh::link_names() const {
  int64_t names = 0;
  for (const Boundary& boundary : boundaries_) names = std::max(names, boundary.number + 1);
  return names;
}

Communicator& Mesh::stage_link(PipelineDirection direction, int64_t from, int64_t to) const {
  const bool forward = direction == PipelineDirection::forward;
  const auto found = std::ranges::find_if(boundaries_, [&](const Boundary& boundary) {
    return forward ? boundary.from == from && boundary.to == to : boundary.from == to && boundary.to == from;
  });
  CAPSTAN_ASSERT(found != boundaries_.end(),
                 "no link between pipeline ranks " + std::to_string(from) + " and " + std::to_string(to));
  return group((forward ? kForwardLink : kBackwardLink) + std::to_string(found->number));
}

// All ranks agree whether a split is needed: rank 0 is in a largest group of every name, links left out.
bool Mesh::alone_everywhere(const std::string& name) const {
  return is_link(name) ? size(Axis::pp) == 1 : members(name, 0).size() == 1;
}

void Mesh::connect(Communicator& world, const ChannelFactory& make_channel) {
  for (const std::string& name : group_names()) {
    const auto mine = members(name, rank_);
    auto& group = groups_[name];
    if (alone_everywhere(name))
      group = make_self_communicator(name);
    else
      group = world.split(static_cast<int>(mine.front()), static_cast<int>(index_of(mine, rank_)), name);
    if (make_channel && !group->is_single()) group->use_channel(make_channel(*group));
  }
}

void Mesh::connect_meta(const ChannelFactory& make_channel) {
  for (const std::string& name : group_names()) {
    const auto mine = members(name, rank_);
    auto& group = groups_[name];
    group =
        make_meta_communicator(static_cast<int>(index_of(mine, rank_)), static_cast<int>(mine.size()), name);
    if (make_channel) group->use_channel(make_channel(*group));
  }
}

Communicator& Mesh::group(const std::string& name) const {
  const auto found = groups_.find(name);
  CAPSTAN_ASSERT(found != groups_.end(), "no group `" + name + "` in the mesh");
  return *found->second;
}

}  // namespace capstan::comm
