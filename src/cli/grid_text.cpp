#include "cli/grid_text.hpp"

#include <algorithm>
#include <set>

#include "base/error.hpp"
#include "base/wording.hpp"
#include "cli/table.hpp"

namespace capstan::cli {

namespace {

using comm::Axis;
using Members = std::vector<int64_t>;

// "0-7", "0,2,4,6", "0-3,8-11"; of many ranges the first ones and the last.
std::string members_text(const Members& members) {
  std::vector<std::string> ranges;
  for (size_t i = 0; i < members.size();) {
    size_t end = i + 1;
    while (end < members.size() && members[end] == members[end - 1] + 1) ++end;
    if (end - i > 2) {
      ranges.push_back(std::to_string(members[i]) + "-" + std::to_string(members[end - 1]));
    } else {
      for (size_t j = i; j < end; ++j) ranges.push_back(std::to_string(members[j]));
    }
    i = end;
  }
  constexpr size_t kMaxShownRanges = 8, kFirstRanges = 3;
  std::string text;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges.size() > kMaxShownRanges && i == kFirstRanges) {
      text += ",…";
      i = ranges.size() - 1;
    }
    text += (i == 0 ? "" : ",") + ranges[i];
  }
  return text;
}

// "8 groups of 2", "[0,1] [2,3] … [14,15]"
std::vector<std::string> group_row(const comm::Mesh& mesh, int64_t world, const std::string& name) {
  const auto size = std::ssize(mesh.members(name, 0));
  if (size == 1) return {name, "every rank alone"};
  constexpr size_t kMaxShownGroups = 8, kFirstGroups = 3;
  // The smallest rank that is in no group yet begins the next one. In the middle of a pipeline ranks have no
  // embedding group.
  std::vector<Members> groups;
  std::set<int64_t> covered;
  bool all = true;
  for (int64_t rank = 0; rank < world; ++rank) {
    if (covered.contains(rank)) continue;
    auto members = mesh.members(name, rank);
    if (members.size() == 1) continue;
    if (groups.size() == kMaxShownGroups) {
      all = false;
      break;
    }
    covered.insert(members.begin(), members.end());
    groups.push_back(std::move(members));
  }
  const int64_t stages = name == "embedding" ? mesh.size(Axis::pp) : size;
  std::string text;
  for (size_t i = 0; i < (all ? groups.size() : kFirstGroups); ++i)
    text += (i == 0 ? "[" : " [") + members_text(groups[i]) + "]";
  if (!all) text += " … [" + members_text(mesh.members(name, world - 1)) + "]";
  if (stages > 2 && name == "embedding") text += ", the other stages alone";
  const int64_t count = world / stages;
  return {name, std::to_string(count) + (count == 1 ? " group of " : " groups of ") + std::to_string(size),
          text};
}

std::string product_text(const comm::Grid& grid, bool experts) {
  using enum Axis;
  const auto size = [&](Axis axis) { return std::to_string(grid.size(axis)); };
  return (experts ? "ETP " + size(tp) + " x EP " + size(ep) + " x EDP " + size(dp)
                  : "TP " + size(tp) + " x CP " + size(cp) + " x DP " + size(dp)) +
         " x PP " + size(pp) + " = " + std::to_string(grid.ranks());
}

std::string coordinates_text(const comm::Mesh& mesh, bool experts) {
  using enum Axis;
  const comm::Grid& grid = experts ? mesh.expert() : mesh.dense();
  const auto index = [&](Axis axis) { return std::to_string(grid.index(mesh.rank(), axis)); };
  return (experts ? "etp " + index(tp) + "  ep " + index(ep) + "  edp " + index(dp)
                  : "tp " + index(tp) + "  cp " + index(cp) + "  dp " + index(dp)) +
         "  pp " + index(pp);
}

}  // namespace

std::string grid_text(const comm::MeshSizes& sizes, std::optional<int64_t> rank) {
  if (rank && *rank >= sizes.world)
    fail(ErrorCode::usage,
         "--rank " + std::to_string(*rank) + ": the world has " + counted(sizes.world, "rank") +
             ", counted from 0",
         "--ranks N shows a larger world");
  const comm::Mesh mesh(sizes, rank.value_or(0));
  std::string text = counted(sizes.world, "rank") + ", order " +
                     (sizes.pp_before_dp ? "tp-cp-ep-pp-dp" : "tp-cp-ep-dp-pp") +
                     ": neighbors differ in the leftmost dimension\n";
  Table grids, groups;
  grids.add({"dense grid", product_text(mesh.dense(), false)});
  if (sizes.experts) grids.add({"expert grid", product_text(mesh.expert(), true)});
  if (rank) {
    grids.add({"rank " + std::to_string(*rank), coordinates_text(mesh, false)});
    if (sizes.experts) grids.add({"", coordinates_text(mesh, true)});
  }
  for (const std::string& name : mesh.group_names()) {
    if (comm::Mesh::repeated_group(name)) continue;
    if (!rank) {
      groups.add(group_row(mesh, sizes.world, name));
      continue;
    }
    const Members members = mesh.members(name, *rank);
    const auto index = std::find(members.begin(), members.end(), *rank) - members.begin();
    groups.add({name,
                members.size() == 1
                    ? "alone"
                    : "index " + std::to_string(index) + " of " + std::to_string(members.size()),
                members.size() == 1 ? "" : "[" + members_text(members) + "]"});
  }
  return text + grids.text() + "\n" + groups.text();
}

}  // namespace capstan::cli
