#include "comm/mesh.hpp"

#include <doctest/doctest.h>

#include <cstdlib>

#include "base/error.hpp"
#include "comm/world.hpp"

using namespace capstan;
using namespace capstan::comm;
using Groups = std::vector<std::vector<int64_t>>;

TEST_CASE("16 ranks, TP 2, CP 2, DP 2, PP 2: the worked example") {
  const Mesh mesh({.world = 16, .tp = 2, .cp = 2, .pp = 2, .ep = 4}, 5);
  const Grid& g = mesh.dense();
  CHECK(g.groups({Axis::tp}) == Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}});
  CHECK(g.groups({Axis::cp}) == Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}});
  CHECK(g.groups({Axis::dp}) == Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}});
  CHECK(g.groups({Axis::dp, Axis::cp}) ==
        Groups{{0, 2, 4, 6}, {1, 3, 5, 7}, {8, 10, 12, 14}, {9, 11, 13, 15}});
  CHECK(g.groups({Axis::pp}) == Groups{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}});
  CHECK(g.groups({Axis::pp, Axis::tp}) ==
        Groups{{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}});
  const Grid& e = mesh.expert();
  CHECK(e.groups({Axis::ep}) == Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}});
  CHECK(e.group_of(0, {Axis::dp}) == std::vector<int64_t>{0, 4});
  CHECK(e.groups({Axis::tp, Axis::ep, Axis::pp}) ==
        Groups{{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}});
  CHECK(mesh.index(Axis::tp) == 1);
  CHECK(mesh.index(Axis::cp) == 0);
  CHECK(mesh.index(Axis::dp) == 1);
  CHECK(mesh.index(Axis::pp) == 0);
}

TEST_CASE("expert tensor parallelism and the other order of axes") {
  const Mesh expert({.world = 16, .tp = 2, .cp = 2, .pp = 2, .ep = 2, .etp = 2}, 0);
  CHECK(expert.expert().group_of(0, {Axis::tp}) == std::vector<int64_t>{0, 1});
  CHECK(expert.expert().group_of(0, {Axis::ep}) == std::vector<int64_t>{0, 2});
  CHECK(expert.expert().group_of(1, {Axis::dp}) == std::vector<int64_t>{1, 5});
  const Mesh other({.world = 16, .tp = 2, .pp = 2, .pp_before_dp = true}, 0);
  CHECK(other.dense().group_of(0, {Axis::pp}) == std::vector<int64_t>{0, 2});
  CHECK(other.dense().group_of(0, {Axis::dp}) == std::vector<int64_t>{0, 4, 8, 12});
  CHECK(other.dense().group_of(1, {Axis::dp}) == std::vector<int64_t>{1, 5, 9, 13});
}

TEST_CASE("a world that does not divide is an error with the nearest ones") {
  try {
    Mesh({.world = 12, .tp = 4, .pp = 2}, 0);
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::config);
    CHECK(error.message().find("12 ranks does not divide into TP x CP x PP = 8") != std::string::npos);
    CHECK(error.help() == "the nearest worlds are 8 and 16");
  }
}

TEST_CASE("the launcher's variables name the rank; contradictions and torchrun are errors") {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
                           "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "RANK", "WORLD_SIZE"})
    ::unsetenv(name);
  CHECK(launched_as().size == 1);
  ::setenv("RANK", "1", 1), ::setenv("WORLD_SIZE", "4", 1);
  CHECK_THROWS_AS(launched_as(), Error);
  ::setenv("OMPI_COMM_WORLD_RANK", "3", 1), ::setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
  CHECK(launched_as().rank == 3);
  CHECK(launched_as().source == "Open MPI");
  ::setenv("OMPI_COMM_WORLD_RANK", "4", 1);
  CHECK_THROWS_AS(launched_as(), Error);
  ::setenv("OMPI_COMM_WORLD_RANK", "x", 1);
  CHECK_THROWS_AS(launched_as(), Error);
}
