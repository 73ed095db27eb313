// Run with any number of ranks.
#include "train/trainer/agreement.hpp"

#include <doctest/doctest.h>

#include <functional>

#include "base/error.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"

using namespace capstan;
using namespace capstan::train;

using test::world;

TEST_CASE("ranks that disagree are named on every rank, with host and both values") {
  const int rank = world().rank(), last = world().size() - 1;
  require_agreement(world(), {{"the program", program_identity()}, {"the step", "7"}, {"the data", ""}});
  if (last == 0) return;
  // Everybody sees the same, also where only a later value differs, and the group goes on afterward.
  for (const std::string what : {"the step", "the data"}) {
    const auto value = [&](const std::string& of) { return of == what && rank == last ? "b" : "a"; };
    try {
      require_agreement(world(), {{"the step", value("the step")}, {"the data", value("the data")}});
      FAIL("no error");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::rank_failure);
      CHECK(error.message() == "rank " + std::to_string(last) + " on host `" + world().host() +
                                   "` disagrees with rank 0 on host `" + world().host() + "` about " + what +
                                   ": `b` against `a`");
      CHECK(error.context().empty());
    }
  }
  try {
    require_agreement(world(), {{"the step", std::to_string(rank)}});
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

TEST_CASE(
    "any field of the recipe in which a rank differs is named: mathematics, layout, memory, intervals") {
  const int last = world().size() - 1;
  config::Config config = capstan::testing::tiny_config(true, world().size());
  CHECK_NOTHROW(require_same_recipe(world(), config));
  if (last == 0) return;
  const std::vector<std::pair<std::string, std::function<void(config::Config&)>>> changes{
      {"rng.seed", [](config::Config& c) { c.rng.seed += 1; }},
      {"dist.pipeline_model_parallel_layout",
       [](config::Config& c) { c.dist.pipeline_model_parallel_layout = "Et|tL"; }},
      {"dist.cp_comm_type", [](config::Config& c) { c.dist.cp_comm_type = {config::CpCommType::a2a}; }},
      // Before what follows from it, though that comes first in the alphabet.
      {"dist.pipeline_model_parallel_size",
       [](config::Config& c) {
         c.dist.pipeline_model_parallel_size = 2;
         c.comm_overlap.batch_p2p_comm = !c.comm_overlap.batch_p2p_comm.value_or(false);
       }},
      {"comm_overlap.batch_p2p_comm",
       [](config::Config& c) {
         c.comm_overlap.batch_p2p_comm = !c.comm_overlap.batch_p2p_comm.value_or(false);
       }},
      {"dist.use_tp_pp_dp_mapping", [](config::Config& c) { c.dist.use_tp_pp_dp_mapping = true; }},
      {"ddp.data_parallel_sharding_strategy",
       [](config::Config& c) { c.ddp.data_parallel_sharding_strategy = config::ShardingStrategy::optim; }},
      {"validation.eval_interval", [](config::Config& c) { c.validation.eval_interval = 7; }},
      {"checkpoint.save_interval", [](config::Config& c) { c.checkpoint.save_interval = 3; }},
      {"model.recompute_granularity",
       [](config::Config& c) { c.model.recompute_granularity = config::RecomputeGranularity::full; }},
  };
  for (const auto& [field, change] : changes) {
    CAPTURE(field);
    config::Config own = config;
    if (world().rank() == last) change(own);
    try {
      require_same_recipe(world(), own);
      FAIL_CHECK("no error");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::rank_failure);
      CHECK(error.message().find("rank " + std::to_string(last)) == 0);
      CHECK(error.message().find("`" + field + " = ") != std::string::npos);
    }
  }
}
