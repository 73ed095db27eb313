// The rank grid: sizes of the axes, their order, and the groups that follow from them by arithmetic alone. A mesh for 1024
// ranks is made on a laptop; `connect` turns a rank's groups into communicators.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"

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
  // The members of the group that contains `rank` and varies over `axes`, in rank-in-group order (leftmost axis fastest).
  std::vector<int64_t> group_of(int64_t rank, std::vector<Axis> axes) const;
  // All such groups, by their first members' order.
  std::vector<std::vector<int64_t>> groups(const std::vector<Axis>& axes) const;

 private:
  std::array<int64_t, kAxes> sizes_;
  std::array<Axis, kAxes> order_;
};

struct MeshSizes {
  int64_t world = 1, tp = 1, cp = 1, pp = 1, ep = 1, etp = 1;
  bool pp_before_dp = false;  // order tp-cp-ep-pp-dp (use_tp_pp_dp_mapping)
};

// The dense grid {tp, cp, dp, pp} and the expert grid {etp, ep, edp, pp} over the same ranks.
class Mesh {
 public:
  // ErrorCode::config when the world does not divide, with both products.
  Mesh(const MeshSizes& sizes, int64_t rank);
  const Grid& dense() const { return dense_; }
  const Grid& expert() const { return expert_; }
  int64_t rank() const { return rank_; }
  int64_t index(Axis axis) const { return dense_.index(rank_, axis); }
  int64_t size(Axis axis) const { return dense_.size(axis); }

  // Splits the world into this rank's groups "tp", "cp", "dp", "dp-cp", "pp", "tp-pp" …; collective over the world.
  void connect(Communicator& world);
  Communicator& group(const std::string& name) const;

 private:
  Grid dense_, expert_;
  int64_t rank_;
  std::map<std::string, std::unique_ptr<Communicator>> groups_;
};

}  // namespace capstan::comm
