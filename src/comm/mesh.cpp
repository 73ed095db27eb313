#include "comm/mesh.hpp"

#include <algorithm>

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
  const auto place = [&](Axis a) { return std::find(order_.begin(), order_.end(), a) - order_.begin(); };
  std::sort(axes.begin(), axes.end(), [&](Axis a, Axis b) { return place(a) < place(b); });
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

std::vector<std::vector<int64_t>> Grid::groups(const std::vector<Axis>& axes) const {
  std::vector<std::vector<int64_t>> result;
  for (int64_t rank = 0; rank < ranks(); ++rank) {
    auto group = group_of(rank, axes);
    if (group.front() == rank) result.push_back(std::move(group));
  }
  return result;
}

namespace {
std::array<Axis, kAxes> order_of(const MeshSizes& sizes) {
  if (sizes.pp_before_dp) return {Axis::tp, Axis::cp, Axis::ep, Axis::pp, Axis::dp};
  return {Axis::tp, Axis::cp, Axis::ep, Axis::dp, Axis::pp};
}
int64_t quotient(int64_t world, int64_t product, const std::string& grid) {
  if (product <= 0 || world % product != 0)
    fail(ErrorCode::config,
         "a world of " + std::to_string(world) + " ranks does not divide into " + grid + " = " +
             std::to_string(product),
         "the nearest worlds are " + std::to_string(std::max<int64_t>(product, world / product * product)) +
             " and " + std::to_string((world / product + 1) * product));
  return world / product;
}
Grid dense_grid(const MeshSizes& s) {
  const int64_t dp = quotient(s.world, s.tp * s.cp * s.pp, "TP x CP x PP");
  return Grid({s.tp, s.cp, 1, dp, s.pp}, order_of(s));
}
Grid expert_grid(const MeshSizes& s) {
  const int64_t dp = quotient(s.world, s.etp * s.ep * s.pp,
                              "ETP x EP x PP (expert grid: EP is part of the data-parallel ranks)");
  return Grid({s.etp, 1, s.ep, dp, s.pp}, order_of(s));
}
}  // namespace

Mesh::Mesh(const MeshSizes& sizes, int64_t rank)
    : dense_(dense_grid(sizes)), expert_(expert_grid(sizes)), rank_(rank) {}

void Mesh::connect(Communicator& world) {
  const std::vector<std::pair<std::string, std::vector<Axis>>> wanted{
      {"tp", {Axis::tp}}, {"cp", {Axis::cp}},
      {"dp", {Axis::dp}}, {"dp-cp", {Axis::dp, Axis::cp}},
      {"pp", {Axis::pp}}, {"tp-pp", {Axis::tp, Axis::pp}}};
  for (const auto& [name, axes] : wanted) {
    const auto members = dense_.group_of(rank_, axes);
    const auto place = std::find(members.begin(), members.end(), rank_) - members.begin();
    groups_[name] = world.split(static_cast<int>(members.front()), static_cast<int>(place), name);
  }
}

Communicator& Mesh::group(const std::string& name) const {
  const auto found = groups_.find(name);
  CAPSTAN_ASSERT(found != groups_.end(), "no group `" + name + "` in the mesh");
  return *found->second;
}

}  // namespace capstan::comm
