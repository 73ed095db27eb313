// Checkpoints over layouts: what one sharding strategy saved, every other one loads, bit by bit.
#include <doctest/doctest.h>

#include <limits>
#include <numeric>
#include <random>

#include "comm/reduce.hpp"
#include "support/running.hpp"
#include "support/shards.hpp"
#include "support/tiny.hpp"
#include "support/worlds.hpp"
#include "train/setup/shard_regions.hpp"
#include "train/trainer/step_runner.hpp"

using namespace capstan;
using namespace capstan::train;
using config::ShardingStrategy;

namespace {

using test::world;

struct Layout {
  ShardingStrategy sharding, outer = ShardingStrategy::no_shard;
  int64_t instances = 1;
  bool overlap = false;
};

std::vector<Layout> layouts() {
  std::vector<Layout> all{{ShardingStrategy::no_shard},
                          {ShardingStrategy::optim},
                          {ShardingStrategy::optim_grads, ShardingStrategy::no_shard, 1, true},
                          {ShardingStrategy::optim_grads_params, ShardingStrategy::no_shard, 1, true}};
  if (world().size() == 4)
    all.insert(all.end(), {{ShardingStrategy::optim, ShardingStrategy::no_shard, 2},
                           {ShardingStrategy::optim_grads_params, ShardingStrategy::optim, 2, true}});
  return all;
}

config::Config config_of(const Layout& layout) {
  config::Config c = capstan::testing::tiny_config(true, world().size());
  c.model.ffn_hidden_size = 70;
  c.train.micro_batch_size = 1;
  c.train.global_batch_size = world().size();
  c.ddp.data_parallel_sharding_strategy = layout.sharding;
  c.ddp.outer_dp_sharding_strategy = layout.outer;
  c.ddp.num_distributed_optimizer_instances = layout.instances;
  c.ddp.overlap_grad_reduce = c.ddp.overlap_param_gather = layout.overlap;
  c.ddp.bucket_size = 5000;
  return c;
}

double step(StepRunner& runner, const config::Config& config) {
  return test::run_until(runner, config, runner.state().step + 1)[0];
}

// Full parameters and moments, from the shards of all ranks.
std::vector<std::vector<double>> gathered(StepRunner& runner) {
  std::vector<std::vector<double>> all;
  const auto add = [&](const std::vector<Tensor>* buffers) {
    const size_t first = all.size();
    for (const auto& parameter : runner.store().parameters())
      all.emplace_back(static_cast<size_t>(parameter->shape().elements()),
                       -std::numeric_limits<double>::infinity());
    for (const auto& piece : runner.store().parameter_shards()) {
      const auto values =
          (buffers ? parallel::FlatStore::range_of(piece, piece.range, *buffers) : piece.values())
              .to_floats();
      std::copy(values.begin(), values.end(),
                all[first + static_cast<size_t>(piece.parameter->index())].begin() + piece.range.begin);
    }
  };
  add(nullptr);
  for (const auto& state : runner.optimizer().state()) add(&state.buffers);
  for (auto& values : all) comm::all_reduce(world().communicator(), values, comm::ReduceOp::max);
  return all;
}

}  // namespace

TEST_CASE(
    "a checkpoint of any strategy loads into every strategy: parameters and moments bitwise, the next loss "
    "the same") {
  const test::SharedDirectory root;
  const auto all = layouts();
  std::vector<std::vector<std::vector<double>>> saved;
  std::vector<double> next;
  for (size_t i = 0; i < all.size(); ++i) {
    const auto config = config_of(all[i]);
    StepRunner runner(config, world());
    runner.initialize();
    step(runner, config);
    step(runner, config);
    test::save_in(root.path() / std::to_string(i), runner);
    saved.push_back(gathered(runner));
    next.push_back(step(runner, config));
  }
  for (size_t from = 0; from < all.size(); ++from)
    for (size_t to = 0; to < all.size(); ++to) {
      CAPTURE(from);
      CAPTURE(to);
      const auto config = config_of(all[to]);
      StepRunner runner(config, world());
      runner.initialize();
      test::load_into(runner, test::newest_in(root.path() / std::to_string(from)));
      CHECK(runner.optimizer().steps() == 2);
      CHECK(gathered(runner) == saved[from]);
      CHECK(step(runner, config) == doctest::Approx(next[from]).epsilon(1e-6));
    }
  // Weights alone, as evaluation reads them.
  for (size_t from = 0; from < all.size(); ++from) {
    const auto config = config_of(all[from]);
    StepRunner runner(config, world());
    auto reader = test::newest_in(root.path() / std::to_string(from));
    load_parameters(reader, runner.store());
    const auto values = gathered(runner);
    for (size_t p = 0; p < runner.model().parameters().size(); ++p) CHECK(values[p] == saved[from][p]);
  }
}

TEST_CASE("initial values do not depend on how parameters are sharded") {
  std::vector<std::vector<double>> expected;
  for (const Layout& layout : layouts()) {
    const auto config = config_of(layout);
    StepRunner runner(config, world());
    runner.initialize();
    const auto values = gathered(runner);
    if (expected.empty()) {
      expected = values;
      for (const auto& parameter : runner.model().parameters()) {
        const auto full = test::initial_values(parameter->spec(), static_cast<uint64_t>(config.rng.seed));
        CHECK(std::vector<double>(full.begin(), full.end()) ==
              values[static_cast<size_t>(parameter->index())]);
      }
    }
    CHECK(values == expected);
  }
}

TEST_CASE(
    "regions of shards: every element of the global tensor once over model and data ranks, in its place") {
  if (world().rank() != 0) return;
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const int tensor = static_cast<int>(draw(1, 4));
    // Of expert parameters the ranks of ep; `tensor` is then the number of those of etp.
    int experts = 1;
    const auto data = draw(1, 5);
    ParamSpec spec{.name = "weight"};
    const int rank = static_cast<int>(draw(0, 3));
    std::vector<int64_t> sizes;
    for (int d = 0; d < rank; ++d) sizes.push_back(draw(1, 6));
    if (rank > 0 && draw(0, 3) > 0) {
      const bool expert = rank > 1 && draw(0, 1) == 0;
      const int dim = static_cast<int>(draw(expert ? 1 : 0, rank - 1));
      DimSharding sharding{expert ? ShardingAxis::expert_tensor : ShardingAxis::tensor, dim};
      const auto d = static_cast<size_t>(dim);
      switch (draw(0, expert ? 1 : 2)) {
        case 0:
          sizes[d] *= tensor;
          break;
        case 1:
          sharding.blocks = 2;
          sizes[d] *= tensor * 2;
          break;
        default:  // groups of heads, fewer than the ranks or as many
          sharding.groups = tensor % 2 == 0 ? draw(1, 2) * tensor / 2 : tensor;
          sharding.shared = draw(1, 2) * 2;
          sizes[d] = sharding.groups * (sharding.shared + sizes[d] * tensor);
      }
      spec.sharding = {sharding};
      if (expert) {
        experts = static_cast<int>(draw(1, 3));
        sizes[0] *= experts;
        spec.sharding = {{ShardingAxis::expert, 0}, sharding};
      }
    }
    spec.shape = Shape(std::span<const int64_t>(sizes));
    CAPTURE(seed);
    CAPTURE(spec.shape.text());
    std::vector<Region> written;
    for (int holder = 0; holder < experts * tensor; ++holder) {
      const ShardRanks::AxisRank on_tensor{holder % tensor, tensor}, on_expert{holder / tensor, experts};
      const Parameter parameter(spec, 0,
                                {.tensor = on_tensor, .expert = on_expert, .expert_tensor = on_tensor});
      const int64_t count = parameter.shape().elements();
      std::vector<int64_t> global_of(static_cast<size_t>(count), 0);
      if (rank > 0)
        test::for_each_element(parameter, [&](int64_t local, int64_t global, const ShardSegment&) {
          global_of[static_cast<size_t>(local)] = global;
        });
      // Data ranks hold ranges of any size.
      std::vector<int64_t> bounds{0, count};
      for (int64_t r = 1; r < data; ++r) bounds.push_back(draw(0, count));
      std::sort(bounds.begin(), bounds.end());
      for (size_t r = 0; r + 1 < bounds.size(); ++r) {
        int64_t at = bounds[r];
        for (const ShardRegion& part :
             shard_regions(spec.shape, parameter.shard(), {bounds[r], bounds[r + 1] - bounds[r]})) {
          REQUIRE(fits(part.where, spec.shape));
          REQUIRE(part.elements.begin == at);
          REQUIRE(part.elements.count == part.where.sizes.elements());
          if (part.owned && (spec.sharding.over_tensor_ranks() || on_tensor.rank == 0))
            written.push_back(part.where);
          // Row-major through the region: each element is the global element that the plain arithmetic says.
          Shape index = part.where.offsets;
          bool same = true;
          for (int64_t e = 0; e < part.elements.count; ++e) {
            int64_t flat = 0;
            for (size_t d = 0; d < index.size(); ++d) flat = flat * sizes[d] + index[d];
            same &= global_of[static_cast<size_t>(at + e)] == flat;
            for (size_t d = index.size(); d-- > 0;) {
              if (++index[d] < part.where.offsets[d] + part.where.sizes[d]) break;
              index[d] = part.where.offsets[d];
            }
          }
          CHECK(same);
          at += part.elements.count;
        }
        REQUIRE(at == bounds[r + 1]);
      }
    }
    const auto problem = tiling_problem(spec.shape, written);
    CHECK_MESSAGE(!problem, problem.value_or(""));
  }
}

TEST_CASE("slices of regions that several ranks hold: disjoint, complete, and distributed") {
  for (const int64_t count : {int64_t{1}, int64_t{100}, int64_t{16384}, int64_t{100'001}, int64_t{5'000'000}})
    for (const int64_t holders : {1, 2, 3, 7})
      for (const int64_t turn : {0, 1, 5}) {
        std::vector<FlatRange> parts;
        for (int64_t place = 0; place < holders; ++place) {
          const auto part = parallel::replica_slice({11, count}, place, holders, turn);
          if (part.count > 0) parts.push_back(part);
          CHECK(part.count <= std::max<int64_t>(16384, (count + holders - 1) / holders + 64));
        }
        std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
        int64_t at = 11;
        for (const auto& part : parts) {
          CHECK(part.begin == at);
          at = part.end();
        }
        CHECK(at == 11 + count);
      }
}
