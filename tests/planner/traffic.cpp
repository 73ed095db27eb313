// Bytes that a rank sends in a step, by formula and by the trainer's own step on the meta device.
#include <doctest/doctest.h>

#include <map>

#include "models/registry.hpp"
#include "parallel/bucket.hpp"
#include "planner/pipeline.hpp"
#include "planner/resolver.hpp"
#include "train/trainer/estimate.hpp"
#include "train/trainer/recipe.hpp"

using namespace capstan;
using namespace capstan::planner;
using namespace capstan::planner::test;

namespace {

struct Bytes {
  double formula = 0, trainer = 0;
};

// Kinds of parallelism, and the groups over which the trainer sends their bytes.
const std::map<std::string, std::vector<std::string>> kGroups = {
    {"tensor_parallel", {"tp"}},
    {"context_parallel", {"cp"}},
    {"expert_parallel", {"ep", "etp-ep"}},
    {"pipeline_transfers", {"pp"}},
    {"data_parallel", {"shard", "replica", "expert-shard", "expert-replica"}}};

// Of the pipeline rank that sends the most, by kind of parallelism.
std::map<std::string, Bytes> bytes_of(const std::string& recipe, const std::vector<std::string>& overrides) {
  CAPTURE(recipe);
  auto config = resolve(recipe, overrides);
  REQUIRE(config.has_value());
  config->train.device = config::DeviceKind::cuda;
  const RunShape shape = run_shape(*config);
  const Cluster cluster = read_cluster("h100");
  std::map<std::string, Bytes> bytes;
  for (const LinkTraffic& one : link_traffic(shape, cluster, step_time(shape, cluster)))
    bytes[one.part].formula = one.fast_bytes + one.network_bytes;
  for (const int64_t rank : train::pipeline_ranks(*config)) {
    const auto sent = train::estimate_step(*config, rank, 8).sent;
    for (const auto& [part, groups] : kGroups) {
      double sum = 0;
      for (const std::string& group : groups)
        if (const auto found = sent.find(group); found != sent.end())
          sum += static_cast<double>(found->second);
      bytes[part].trainer = std::max(bytes[part].trainer, sum);
    }
  }
  return bytes;
}

void check_bytes(const std::string& recipe, const std::vector<std::string>& overrides, double bound) {
  for (const auto& [part, bytes] : bytes_of(recipe, overrides)) {
    CAPTURE(recipe);
    CAPTURE(overrides);
    CAPTURE(part);
    // Less than a megabyte are the sums of a few numbers.
    if (bytes.formula + bytes.trainer > 2e6)
      CHECK(bytes.formula == doctest::Approx(bytes.trainer).epsilon(bound));
  }
}

}  // namespace

TEST_CASE("optimizer instances divide the bytes of data parallelism as in the trainer's step") {
  const std::string instances = "ddp.num_distributed_optimizer_instances=4",
                    sharded = "ddp.outer_dp_sharding_strategy=optim";
  const std::vector<std::vector<std::string>> choices = {{}, {instances}, {instances, sharded}};
  const std::vector<std::string> few = {"dist.world_size=16", "train.global_batch_size=32",
                                        "train.micro_batch_size=1"};
  for (const std::string strategy : {"zero1", "zero2", "zero3"})
    for (const std::vector<std::string>& more : choices) {
      std::vector<std::string> overrides = few;
      overrides.push_back("ddp=" + strategy);
      overrides.insert(overrides.end(), more.begin(), more.end());
      check_bytes("llama3-8b", overrides, 0.01);
    }
  // Of routed experts, and of the other parameters.
  check_bytes("mixtral-8x7b", {"dist.pp=1", "dist.vpp=null", "dist.ep=4", instances, "ddp=zero1"}, 0.01);
}

TEST_CASE("optimizer instances within a node keep gathers off the network, and cost optimizer state") {
  const Cluster cluster = read_cluster("h100");
  const std::vector<std::string> base = {"dist.pp=1", "dist.vpp=null", "dist.ep=1", "ddp=zero3"};
  std::vector<std::string> in_node = base;
  in_node.push_back("ddp.num_distributed_optimizer_instances=4");
  const auto one = resolve("mixtral-8x7b", base), four = resolve("mixtral-8x7b", in_node);
  REQUIRE((one && four));
  const StepTime far = step_time(run_shape(*one), cluster), near = step_time(run_shape(*four), cluster);
  CHECK(near.data < 0.7 * far.data);
  CHECK(near.optimizer > 2 * far.optimizer);
}

TEST_CASE("adapters send what the trainer's step sends") {
  const std::vector<std::string> base = {"model=llama3-8b", "dist.world_size=8"};
  for (const std::string strategy : {"no_shard", "zero1", "zero3"}) {
    std::vector<std::string> overrides = base;
    overrides.push_back("ddp=" + strategy);
    check_bytes("lora", overrides, 0.02);
  }
  // Adapters of experts have fewer replicas.
  check_bytes("lora", {"model=mixtral-8x7b", "dist.world_size=16", "dist.ep=4"}, 0.02);
}

TEST_CASE("recomputation repeats its collectives, as in the trainer's step") {
  check_bytes("llama3-8b",
              {"dist.tp=2", "dist.sp=true", "model.recompute_granularity=full",
               "model.recompute_method=uniform", "model.recompute_num_layers=1"},
              0.01);
}

TEST_CASE("a pipeline rank sends to its neighbors only") {
  const std::vector<std::vector<std::string>> layouts = {{"dist.pp=2"},
                                                         {"dist.pp=4"},
                                                         {"dist.pp=2", "dist.vpp=4"},
                                                         {"dist.pp=4", "dist.pipeline_schedule=zb_v"}};
  for (std::vector<std::string> overrides : layouts) {
    overrides.push_back("dist.cp=1");
    check_bytes("llama3-8b", overrides, 0.01);
  }
}

TEST_CASE("tokens that are gathered by all ranks of experts are bytes of expert parallelism") {
  check_bytes("mixtral-8x7b",
              {"dist.pp=1", "dist.vpp=null", "dist.ep=4", "model.moe_token_dispatcher_type=allgather"}, 0.01);
}

TEST_CASE("the capacity of experts decides how many tokens are sent") {
  const std::string factor = "model.moe_expert_capacity_factor=";
  check_bytes("mixtral-8x7b", {"dist.ep=8", factor + "0.5"}, 0.01);
  check_bytes("mixtral-8x7b", {"dist.ep=8", factor + "2", "model.moe_pad_expert_input_to_capacity=true"},
              0.01);
}

// On 64 GPUs, eight nodes: the collectives of a step pass seven hops of a ring each.
TEST_CASE("data parallelism pays a latency for each bucket of the trainer") {
  for (const std::string recipe : {"llama3-8b", "llama3-70b", "gpt2-124m", "mixtral-8x7b"})
    for (const std::string strategy : {"zero1", "zero2", "zero3"}) {
      CAPTURE(recipe);
      CAPTURE(strategy);
      const auto config =
          resolve(recipe, {"dist.world_size=64", "dist.cp=1", "dist.tp=1", "dist.sp=false", "dist.pp=1",
                           "dist.vpp=null", "dist.ep=1", "ddp=" + strategy, "comm_overlap=none",
                           "train.micro_batch_size=1", "train.global_batch_size=128",
                           "ddp.overlap_grad_reduce=false", "ddp.overlap_param_gather=false"});
      REQUIRE(config.has_value());
      const bool by_block = strategy == "zero3", each = strategy != "zero1";
      const auto model = models::build(config->model);
      int64_t trained = 0;
      for (const auto& parameter : model->parameters()) trained += parameter->shape().elements();
      const auto layout =
          parallel::plan_buckets(model->parameters(), {.bucket_elements = config->ddp.bucket_size.value_or(
                                                           parallel::default_bucket_elements(trained, 64)),
                                                       .by_block = by_block});
      const auto buckets = static_cast<double>(layout.buckets.size());
      // Two micro-batches: gradients are reduced once or for each; parameters are gathered once, or twice
      // for each.
      const double collectives = (each ? 2 : 1) * buckets + (by_block ? 4 : 1) * buckets;
      const RunShape shape = run_shape(*config);
      Cluster near = read_cluster("h100"), far = near;
      far.inter_latency += 1000;
      const double found = (step_time(shape, far).data - step_time(shape, near).data) / 7e-3;
      CHECK(found == doctest::Approx(collectives).epsilon(0.1));
    }
}
