// Run with any number of ranks.
#include "train/agreement.hpp"

#include <doctest/doctest.h>

#include "base/error.hpp"

using namespace capstan;
using namespace capstan::train;

TEST_CASE("ranks that disagree are named on every rank, with host and both values") {
  static const auto world = comm::World::join();
  const int rank = world->rank(), last = world->size() - 1;
  require_agreement(*world, {{"the program", program_identity()}, {"the step", "7"}, {"the data", ""}});
  if (last == 0) return;
  // Everybody sees the same, also where only a later value differs, and the group goes on afterwards.
  for (const std::string what : {"the step", "the data"}) {
    const auto value = [&](const std::string& of) { return of == what && rank == last ? "b" : "a"; };
    try {
      require_agreement(*world, {{"the step", value("the step")}, {"the data", value("the data")}});
      FAIL("no error");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::rank_failure);
      CHECK(error.message() == "rank " + std::to_string(last) + " on host `" + world->host() +
                                   "` disagrees with rank 0 on host `" + world->host() + "` about " + what +
                                   ": `b` against `a`");
      CHECK(error.context().empty());
    }
  }
  try {
    require_agreement(*world, {{"the step", std::to_string(rank)}});
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(static_cast<int>(error.context().size()) == last - 1);  // each of the others has its line
  }
}

TEST_CASE("the program knows its build") {
  CHECK(program_identity().find("capstan ") == 0);
  CHECK(program_identity().find("unknown") == std::string::npos);
  CHECK(program_identity() == program_identity());
}
