#include "comm/mesh.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>

#include "base/error.hpp"
#include "comm/stage_map.hpp"

using namespace capstan;
using namespace capstan::comm;
using Groups = std::vector<std::vector<int64_t>>;

namespace {
// All groups of one name, by their first members.
Groups groups_of(const MeshSizes& sizes, const std::string& name) {
  Groups groups;
  const Mesh mesh(sizes, 0);
  for (int64_t rank = 0; rank < sizes.world; ++rank) {
    auto members = mesh.members(name, rank);
    if (members.front() == rank) groups.push_back(std::move(members));
  }
  return groups;
}
}  // namespace

TEST_CASE("16 ranks, TP 2, CP 2, DP 2, PP 2: the worked example") {
  const MeshSizes sizes{.world = 16, .tp = 2, .cp = 2, .pp = 2, .experts = true, .ep = 4};
  const Groups pairs{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}};
  const Groups across_stages{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}};
  const Groups data{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}};
  CHECK(groups_of(sizes, "tp") == pairs);
  CHECK(groups_of(sizes, "cp") ==
        Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}});
  CHECK(groups_of(sizes, "dp") == data);
  CHECK(groups_of(sizes, "dp-cp") == Groups{{0, 2, 4, 6}, {1, 3, 5, 7}, {8, 10, 12, 14}, {9, 11, 13, 15}});
  CHECK(groups_of(sizes, "pp") == across_stages);
  CHECK(groups_of(sizes, "tp-pp") == Groups{{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}});
  CHECK(groups_of(sizes, "tp-cp") == Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}});
  CHECK(groups_of(sizes, "tp-dp-cp") == Groups{{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}});
  CHECK(groups_of(sizes, "embedding") == across_stages);
  CHECK(groups_of(sizes, "position_embedding").size() == 16);
  CHECK(groups_of(sizes, "etp").size() == 16);
  CHECK(groups_of(sizes, "ep") == Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}});
  CHECK(groups_of(sizes, "edp") == data);
  CHECK(groups_of(sizes, "etp-ep-pp") == Groups{{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}});
  const MeshSizes folded{.world = 16, .tp = 2, .cp = 2, .pp = 2, .experts = true, .ep = 2, .etp = 2};
  CHECK(groups_of(folded, "etp") == pairs);
  CHECK(groups_of(folded, "ep") == groups_of(sizes, "cp"));
  CHECK(groups_of(folded, "edp") == data);
  CHECK(Mesh(sizes, 0).text() == "tp2 cp2 dp2 pp2 ep4 etp1");
  CHECK(Mesh(folded, 0).text() == "tp2 cp2 dp2 pp2 ep2");
  const Mesh mesh(sizes, 5);
  CHECK(mesh.index(Axis::tp) == 1);
  CHECK(mesh.index(Axis::cp) == 0);
  CHECK(mesh.index(Axis::dp) == 1);
  CHECK(mesh.index(Axis::pp) == 0);
}

TEST_CASE("a group that repeats another one has its ranks") {
  const MeshSizes sizes{.world = 32, .tp = 4, .cp = 2, .pp = 2, .experts = true, .ep = 2, .kv_replicas = 2};
  CHECK(Mesh::repeated_group("tp-gradients") == "tp");
  size_t repeating = 0;
  for (const std::string& name : Mesh(sizes, 0).group_names()) {
    const auto repeated = Mesh::repeated_group(name);
    if (!repeated) continue;
    ++repeating;
    CHECK(groups_of(sizes, name) == groups_of(sizes, *repeated));
  }
  CHECK(repeating == 2);
}

TEST_CASE("links between stages, and groups without tensors") {
  CHECK(Mesh::is_link("pp-forward-0"));
  CHECK(Mesh::is_link("pp-backward-2"));
  CHECK_FALSE(Mesh::is_link("pp"));
  for (const char* name : {"tp", "cp", "dp-cp", "pp", "shard", "tp-gradients", "embedding",
                           "position_embedding", "pp-forward-1"})
    CHECK_MESSAGE(Mesh::carries_tensors(name), name);
  for (const char* name : {"dp", "tp-cp", "edp"}) CHECK_FALSE_MESSAGE(Mesh::carries_tensors(name), name);
}

TEST_CASE("a map of stages decides which ranks have links and hold the embedding together") {
  // Stages 0 … 3 on ranks 0 … 3, stages 4 … 7 on ranks 3 … 0.
  const MeshSizes v{.world = 8, .pp = 4, .stage_ranks = {0, 1, 2, 3, 3, 2, 1, 0}};
  std::set<std::vector<int64_t>> pairs, backward;
  for (const std::string& name : Mesh(v, 0).group_names()) {
    if (!Mesh::is_link(name)) continue;
    for (int64_t rank = 0; rank < 8; ++rank) {
      const auto members = Mesh(v, 0).members(name, rank);
      CHECK(std::count(members.begin(), members.end(), rank) == 1);
      if (members.size() == 2 && members.front() == rank)
        CHECK((name.starts_with("pp-forward") ? pairs : backward).insert(members).second);
    }
  }
  // Two data-parallel ranks for each stage: ranks 0 and 1 in stage 0.
  const std::set<std::vector<int64_t>> down{{0, 2}, {2, 4}, {4, 6}, {1, 3}, {3, 5}, {5, 7}};
  std::set<std::vector<int64_t>> both = down;
  for (const auto& pair : down) both.insert({pair[1], pair[0]});
  CHECK(pairs == both);
  CHECK(backward == both);
  for (int64_t rank = 0; rank < 8; ++rank) CHECK(Mesh(v, 0).members("embedding", rank).size() == 1);
  // Multi-token prediction on a rank of its own, beside a tied output layer: three tables of words.
  const MeshSizes three{.world = 8, .pp = 4, .embedding_ranks = {0, 2, 3}, .position_ranks = {0, 2}};
  CHECK(groups_of(three, "embedding") == Groups{{0, 4, 6}, {1, 5, 7}, {2}, {3}});
  CHECK(groups_of(three, "position_embedding") == Groups{{0, 4}, {1, 5}, {2}, {3}, {6}, {7}});
  // A map that ends elsewhere.
  const MeshSizes other{.world = 3, .pp = 3, .stage_ranks = {1, 0, 2}};
  CHECK(groups_of(other, "embedding") == Groups{{0}, {1, 2}});
}

TEST_CASE("the other order of axes: pipeline stages are neighbors, data replicas apart") {
  const MeshSizes sizes{.world = 16, .tp = 2, .pp = 2, .pp_before_dp = true};
  CHECK(groups_of(sizes, "tp").front() == std::vector<int64_t>{0, 1});
  CHECK(groups_of(sizes, "pp") ==
        Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}});
  CHECK(groups_of(sizes, "dp") == Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}});
  CHECK(groups_of(sizes, "dp-cp") == groups_of(sizes, "dp"));
  CHECK(groups_of(sizes, "tp-pp") == Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}});
  const MeshSizes experts{.world = 16, .tp = 2, .pp = 2, .experts = true, .ep = 2, .pp_before_dp = true};
  CHECK(groups_of(experts, "ep") ==
        Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}});
  CHECK(groups_of(experts, "edp") == groups_of(sizes, "dp"));
}

TEST_CASE("stages, hierarchical context parallelism and instances of the optimizer split groups further") {
  const MeshSizes stages{.world = 8, .pp = 4};
  CHECK(groups_of(stages, "embedding") == Groups{{0, 6}, {1, 7}, {2}, {3}, {4}, {5}});
  const MeshSizes context{.world = 16, .tp = 2, .cp = 8, .hierarchical_cp = {2, 4}};
  CHECK(groups_of(context, "cp-inner") ==
        Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}});
  CHECK(groups_of(context, "cp-outer") ==
        Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}});
  const MeshSizes hybrid{.world = 16, .tp = 2, .cp = 2, .optimizer_instances = 2};
  CHECK(groups_of(hybrid, "dp-cp").front() == std::vector<int64_t>{0, 2, 4, 6, 8, 10, 12, 14});
  CHECK(groups_of(hybrid, "shard") == Groups{{0, 2, 4, 6}, {1, 3, 5, 7}, {8, 10, 12, 14}, {9, 11, 13, 15}});
  CHECK(groups_of(hybrid, "replica") ==
        Groups{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}});
  // The ranks of an optimizer instance are the same for dense and expert parameters: 0 to 7 and 8 to 15.
  const MeshSizes experts{.world = 16, .tp = 2, .experts = true, .ep = 2, .etp = 2, .optimizer_instances = 2};
  CHECK(groups_of(experts, "expert-shard").front() == std::vector<int64_t>{0, 4});
  CHECK(groups_of(experts, "expert-replica") == groups_of(hybrid, "replica"));
  CHECK_THROWS_AS(Mesh({.world = 4, .experts = true, .ep = 4, .optimizer_instances = 2}, 0), Error);
}

TEST_CASE("groups of each name partition the world, and sizes multiply") {
  std::mt19937_64 random(7);
  const auto pick = [&](std::initializer_list<int64_t> values) {
    return values.begin()[random() % values.size()];
  };
  int made = 0;
  for (int trial = 0; trial < 400; ++trial) {
    MeshSizes sizes{.tp = pick({1, 2, 3, 4}),
                    .cp = pick({1, 2, 4, 6}),
                    .pp = pick({1, 2, 3, 4}),
                    .experts = trial % 2 == 0,
                    .ep = pick({1, 2, 3, 4}),
                    .etp = pick({1, 2, 3}),
                    .pp_before_dp = trial % 3 == 0};
    const int64_t dp = pick({1, 2, 3, 4});
    sizes.world = sizes.tp * sizes.cp * sizes.pp * dp;
    if (sizes.cp % 2 == 0) sizes.hierarchical_cp = {2, sizes.cp / 2};
    if (dp * sizes.cp % 3 == 0) sizes.optimizer_instances = 3;
    const auto stride = sizes.tp * sizes.cp, expert_stride = sizes.etp * sizes.ep;
    const bool legal =
        !sizes.experts || (sizes.world % (expert_stride * sizes.pp) == 0 &&
                           (sizes.pp == 1 || !sizes.pp_before_dp || stride == expert_stride) &&
                           sizes.world / (expert_stride * sizes.pp) % sizes.optimizer_instances == 0);
    CAPTURE(trial);
    if (!legal) {
      CHECK_THROWS_AS(Mesh(sizes, 0), Error);
      continue;
    }
    ++made;
    const Mesh mesh(sizes, 0);
    const auto size = [&](const std::string& name) { return std::ssize(mesh.members(name, 0)); };
    for (const std::string& name : mesh.group_names()) {
      CAPTURE(name);
      std::vector<int> seen(static_cast<size_t>(sizes.world));
      for (const auto& group : groups_of(sizes, name)) {
        // Of a link the sender is first.
        if (!name.starts_with("pp-")) CHECK(std::is_sorted(group.begin(), group.end()));
        for (const int64_t member : group) {
          ++seen[static_cast<size_t>(member)];
          CHECK(mesh.members(name, member) == group);
        }
      }
      CHECK(std::count(seen.begin(), seen.end(), 1) == sizes.world);
    }
    CHECK(size("tp") * size("cp") * size("dp") * size("pp") == sizes.world);
    CHECK(size("dp-cp") == size("dp") * size("cp"));
    CHECK(size("tp-dp-cp") * size("pp") == sizes.world);
    CHECK(size("shard") * size("replica") == size("dp-cp"));
    if (!sizes.hierarchical_cp.empty()) CHECK(size("cp-inner") * size("cp-outer") == size("cp"));
    if (!sizes.experts) continue;
    CHECK(size("etp") * size("ep") * size("edp") * size("pp") == sizes.world);
    CHECK(size("expert-shard") * size("expert-replica") == size("edp"));
    for (int64_t rank = 0; rank < sizes.world; ++rank)
      CHECK(mesh.expert().group_of(rank, {Axis::pp}) == mesh.members("pp", rank));
  }
  CHECK(made > 100);
}

TEST_CASE("any rank of any world without peers") {
  Mesh mesh({.world = 1024, .tp = 8, .cp = 2, .pp = 8}, 777);
  mesh.connect_meta();
  CHECK(mesh.group("tp").size() == 8);
  CHECK(mesh.group("tp").rank() == 777 % 8);
  CHECK(mesh.group("dp-cp").size() == 16);
  CHECK(mesh.group("pp").rank() == 777 / 128);
  CHECK(mesh.group("embedding").is_single());  // a stage in the middle
}

TEST_CASE("a world that does not divide is an error with both products and the nearest worlds") {
  const auto error_of = [](const MeshSizes& sizes) {
    try {
      Mesh(sizes, 0);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::config);
      return error.message() + "; " + error.help();
    }
    return std::string("no error");
  };
  CHECK(error_of({.world = 12, .tp = 4, .pp = 2}) ==
        "a world of 12 ranks does not divide into the dense grid TP x CP x PP = 4 x 1 x 2 = 8; "
        "the nearest worlds are 8 and 16");
  CHECK(
      error_of({.world = 20, .tp = 2, .pp = 2, .experts = true, .ep = 4}) ==
      "a world of 20 ranks does not divide into the dense grid TP x CP x PP = 2 x 1 x 2 = 4 and the expert "
      "grid ETP x EP x PP = 1 x 4 x 2 = 8; the nearest worlds are 16 and 24; EP is part of data parallelism "
      "and does not multiply into the world");
  CHECK(error_of({.world = 8, .cp = 4, .hierarchical_cp = {2, 4}}).find("product CP = 4") !=
        std::string::npos);
  CHECK(error_of({.world = 8, .tp = 2, .optimizer_instances = 3}).find("do not divide DP x CP = 4") !=
        std::string::npos);
  CHECK(error_of({.world = 16, .tp = 2, .pp = 2, .experts = true, .ep = 4, .pp_before_dp = true})
            .find("must be equal") != std::string::npos);
}

TEST_CASE("a map of stages names the ranks that it refuses") {
  const auto error_of_map = [](std::vector<int64_t> ranks) {
    try {
      return std::to_string(StageMap(std::move(ranks)).chunks());
    } catch (const Error& error) {
      return error.message();
    }
  };
  CHECK(error_of_map({1, 0, 0, 1}) == "2");
  CHECK(error_of_map({}) == "a pipeline needs at least one stage");
  CHECK(error_of_map({0, 1, 3, 0}) == "4 pipeline stages are not divided evenly over 4 ranks");
  CHECK(error_of_map({0, 4, 1, 0}) == "pipeline stage 1 is on rank 4, not in 0 … 3");
  CHECK(error_of_map({0, -1}) == "pipeline stage 1 is on rank -1, not in 0 … 1");
}
