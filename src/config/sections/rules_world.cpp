// Do the axes of parallelism fit the world? Two grids share it: the dense one (TP, CP, DP, PP) and the
// experts' (ETP, EP, EDP, PP).
#include <numeric>

#include "base/checked.hpp"
#include "base/wording.hpp"
#include "config/sections/rule_tools.hpp"

namespace capstan::config {

RULES_OF_FILE(world_rules)

namespace {

// One of the two grids: the axes that are given, and the data axis, which is what they leave of the world.
struct Grid {
  // TP, CP, PP, or ETP, EP, PP.
  int64_t outer, middle, pipeline;
  // The data-parallel size as given or derived. Unset if no size fits.
  std::optional<int64_t> data;
  // "DP" or "EDP".
  const char* data_name;

  std::optional<int64_t> product() const { return product_of({outer, middle, pipeline}); }
  bool divides(int64_t world) const {
    const auto model_parallel = product();
    return model_parallel && world % *model_parallel == 0;
  }
  // "2 * 1 * 4 * 2 = 16", or with an open data axis "2 * 1 * DP * 2 = 4 * DP"
  std::string text() const {
    if (data) return product_text({outer, middle, *data, pipeline});
    const auto model_parallel = product();
    return to_text(outer) + " * " + to_text(middle) + " * " + data_name + " * " + to_text(pipeline) +
           (model_parallel ? " = " + to_text(*model_parallel) + " * " + data_name : "");
  }
};

Grid dense_grid(const Config& c) {
  const auto& d = c.dist;
  return {d.tensor_model_parallel_size, d.context_parallel_size, d.pipeline_model_parallel_size,
          d.data_parallel_size, "DP"};
}
std::optional<Grid> expert_grid(const Config& c) {
  const auto& d = c.dist;
  if (!c.model.num_moe_experts || !d.expert_tensor_parallel_size) return std::nullopt;
  return Grid{*d.expert_tensor_parallel_size, d.expert_model_parallel_size, d.pipeline_model_parallel_size,
              d.expert_data_parallel_size, "EDP"};
}

// Every finding about the world shows both products, because a wrong one is often fixed by the other.
void add_grids(const Config& c, Violation& found) {
  const auto experts = expert_grid(c);
  found.operand("dist.world_size")
      .operand("dist.tensor_model_parallel_size")
      .operand("dist.context_parallel_size")
      .operand("dist.pipeline_model_parallel_size");
  if (experts) found.operand("dist.expert_tensor_parallel_size").operand("dist.expert_model_parallel_size");
  found.operand("dense grid TP * CP * DP * PP", dense_grid(c).text());
  if (experts) found.operand("expert grid ETP * EP * EDP * PP", experts->text());
}

std::string expert_parallelism_does_not_multiply(const Config& c) {
  return "expert parallelism (" + to_text(c.dist.expert_model_parallel_size) +
         ") takes the ranks of a pipeline stage and does not multiply into the world";
}

// The worlds around this one that both grids divide.
std::string nearest_worlds(const Config& c) {
  const auto experts = expert_grid(c);
  std::optional<int64_t> step = dense_grid(c).product();
  if (step && experts) {
    const auto other = experts->product();
    step = other ? try_mul(*step / std::gcd(*step, *other), *other) : std::nullopt;
  }
  return step ? "nearest legal dist.world_size: " + nearest_multiples(c.dist.world_size, *step) : "";
}

// The dense grid needs nothing of the model: R0101 and R0103 also hold where the model's preset is unknown.
RULE("R0101", world_divisible,
     "the world is a multiple of tensor * pipeline * context parallelism; the quotient is data parallelism",
     "dist.world_size", "dist.tensor_model_parallel_size", "dist.pipeline_model_parallel_size",
     "dist.context_parallel_size", "?dist.expert_tensor_parallel_size", "dist.expert_model_parallel_size",
     "?model.num_moe_experts") {
  const auto& d = c.dist;
  const Grid dense = dense_grid(c);
  if (dense.divides(d.world_size)) return;
  std::string message =
      "the world of " + counted(d.world_size, "rank") +
      " is not a multiple of tensor * pipeline * context = " +
      product_text({d.tensor_model_parallel_size, d.pipeline_model_parallel_size, d.context_parallel_size});
  const auto experts = expert_grid(c);
  if (experts && !experts->divides(d.world_size))
    message += ", nor of expert tensor * expert * pipeline = " +
               product_text({experts->outer, experts->middle, experts->pipeline});
  auto& found = report.error(message);
  add_grids(c, found);
  std::string help = nearest_worlds(c);
  if (help.empty()) help = "choose smaller sizes: no world is as large as their product";
  if (d.expert_model_parallel_size > 1) help += "; " + expert_parallelism_does_not_multiply(c);
  found.help(help);
}

RULE("R0102", expert_world_divisible,
     "the world is a multiple of expert tensor * expert * pipeline parallelism", "dist.world_size",
     "dist.expert_tensor_parallel_size", "dist.expert_model_parallel_size",
     "dist.pipeline_model_parallel_size", "dist.tensor_model_parallel_size", "dist.context_parallel_size",
     "model.num_moe_experts") {
  const auto& d = c.dist;
  const auto experts = expert_grid(c);
  if (!experts || experts->divides(d.world_size) || !dense_grid(c).divides(d.world_size)) return;
  // The rule expert_parallel_divides_experts reports the others.
  if (*c.model.num_moe_experts % d.expert_model_parallel_size != 0) return;
  auto& found = report.error(
      "the world of " + counted(d.world_size, "rank") +
      " is not a multiple of expert tensor * expert * pipeline = " +
      product_text({experts->outer, experts->middle, experts->pipeline}) +
      ", though it is one of tensor * pipeline * context = " + to_text(*dense_grid(c).product()));
  add_grids(c, found);
  std::string help = nearest_worlds(c);
  if (help.empty()) help = "choose smaller sizes: no world is as large as their product";
  const auto layout = try_mul(experts->outer, experts->pipeline);
  if (layout && d.world_size % *layout == 0)
    help += "; or dist.expert_model_parallel_size: " +
            nearest_divisors(d.expert_model_parallel_size,
                             std::gcd(*c.model.num_moe_experts, d.world_size / *layout));
  found.help(help);
}

bool dense_data_agrees(const Config& c) {
  const Grid dense = dense_grid(c);
  return !dense.data || !dense.divides(c.dist.world_size) ||
         *dense.data == c.dist.world_size / *dense.product();
}

RULE("R0103", data_parallel_size_agrees, "a given data_parallel_size matches the world size",
     "dist.data_parallel_size", "dist.world_size", "dist.tensor_model_parallel_size",
     "dist.pipeline_model_parallel_size", "dist.context_parallel_size", "?dist.expert_tensor_parallel_size",
     "dist.expert_model_parallel_size", "?model.num_moe_experts") {
  if (dense_data_agrees(c)) return;
  const int64_t world = c.dist.world_size, given = *c.dist.data_parallel_size;
  const int64_t axes = *dense_grid(c).product();
  auto& found = report.error("`dist.data_parallel_size` " + to_text(given) +
                             " does not match the world size: " + to_text(world) + " / " + to_text(axes) +
                             " = " + to_text(world / axes));
  found.operand("dist.data_parallel_size");
  add_grids(c, found);
  std::string help = "leave dist.data_parallel_size unset; it follows from dist.world_size";
  const auto multiplied = product_of({axes, given, c.dist.expert_model_parallel_size});
  if (c.dist.expert_model_parallel_size > 1 && multiplied == world)
    help = expert_parallelism_does_not_multiply(c) + ": set dist.world_size=" + to_text(axes * given) +
           ", or " + help;
  found.help(help);
}

RULE("R0104", expert_data_parallel_size_agrees, "a given expert_data_parallel_size matches the world size",
     "dist.expert_data_parallel_size", "dist.world_size", "dist.expert_tensor_parallel_size",
     "dist.expert_model_parallel_size", "dist.pipeline_model_parallel_size", "dist.data_parallel_size",
     "dist.tensor_model_parallel_size", "dist.context_parallel_size", "model.num_moe_experts") {
  const int64_t world = c.dist.world_size;
  const auto experts = expert_grid(c);
  if (!experts || !experts->data || !experts->divides(world) || !dense_data_agrees(c)) return;
  const int64_t axes = *experts->product();
  if (*experts->data == world / axes) return;
  auto& found = report.error("`dist.expert_data_parallel_size` " + to_text(*experts->data) +
                             " does not match the world size: " + to_text(world) + " / " + to_text(axes) +
                             " = " + to_text(world / axes));
  found.operand("dist.expert_data_parallel_size");
  add_grids(c, found);
  found.help("leave dist.expert_data_parallel_size unset; it follows from dist.world_size");
}

RULE("R0105", pipeline_order_needs_one_data_axis,
     "the order tp-cp-ep-pp-dp needs the same data parallelism for dense layers and experts",
     "dist.use_tp_pp_dp_mapping", "dist.data_parallel_size", "dist.expert_data_parallel_size") {
  const auto& d = c.dist;
  if (!d.use_tp_pp_dp_mapping || d.pipeline_model_parallel_size == 1 || !c.model.num_moe_experts) return;
  if (!d.data_parallel_size || !d.expert_data_parallel_size ||
      *d.data_parallel_size == *d.expert_data_parallel_size)
    return;
  report
      .error(
          "with `dist.use_tp_pp_dp_mapping` and pipeline stages, dense layers and experts need equal data "
          "parallelism, but have " +
          to_text(*d.data_parallel_size) + " and " + to_text(*d.expert_data_parallel_size))
      .help(
          "set dist.use_tp_pp_dp_mapping=false, or choose dist.expert_model_parallel_size and "
          "dist.expert_tensor_parallel_size so that both are equal");
}

bool uses_two_levels(const Config& c) {
  for (const CpCommType type : c.dist.cp_comm_type)
    if (type == CpCommType::a2a_p2p) return true;
  return false;
}

RULE("R0106", hierarchical_sizes_multiply_to_context,
     "the sizes of hierarchical context parallelism multiply to context_parallel_size",
     "dist.hierarchical_context_parallel_sizes", "dist.context_parallel_size") {
  const auto& sizes = c.dist.hierarchical_context_parallel_sizes;
  if (sizes.empty()) return;
  bool positive = true;
  for (const int64_t size : sizes) positive = positive && size > 0;
  const auto product = product_of(sizes);
  if (positive && product == c.dist.context_parallel_size) return;
  report
      .error("`dist.hierarchical_context_parallel_sizes` multiply to " + product_text(sizes) +
             ", context parallelism is " + to_text(c.dist.context_parallel_size))
      .help("give two sizes whose product is " + to_text(c.dist.context_parallel_size));
}

RULE("R0107", hierarchical_sizes_given,
     "hierarchical_context_parallel_sizes has two sizes if and only if cp_comm_type contains a2a+p2p",
     "dist.hierarchical_context_parallel_sizes", "dist.cp_comm_type") {
  if (c.dist.context_parallel_size == 1) return;
  const size_t given = c.dist.hierarchical_context_parallel_sizes.size();
  if (uses_two_levels(c)) {
    if (given != 2)
      report
          .error(
              "`dist.cp_comm_type` a2a+p2p needs two sizes in `dist.hierarchical_context_parallel_sizes`, "
              "got " +
              to_text(static_cast<int64_t>(given)))
          .help("for example, set dist.hierarchical_context_parallel_sizes=[2," +
                to_text(std::max<int64_t>(1, c.dist.context_parallel_size / 2)) + "]");
  } else if (given != 0) {
    report.error("`dist.hierarchical_context_parallel_sizes` is only for `dist.cp_comm_type` a2a+p2p")
        .help("set dist.cp_comm_type=a2a+p2p, or unset dist.hierarchical_context_parallel_sizes");
  }
}

RULE("R0108", context_exchange_for_each_layer, "cp_comm_type has one item, or one item for each layer",
     "dist.cp_comm_type", "model.num_layers") {
  const auto given = static_cast<int64_t>(c.dist.cp_comm_type.size());
  if (given == 1 || given == c.model.num_layers) return;
  report
      .error("`dist.cp_comm_type` has " + to_text(given) + " items for " + to_text(c.model.num_layers) +
             " layers")
      .help("give one for all layers, or " + to_text(c.model.num_layers));
}

RULE("R0109", state_groups_divide_data,
     "num_distributed_optimizer_instances divides data * context parallelism and expert data parallelism",
     "ddp.num_distributed_optimizer_instances", "dist.data_parallel_size", "dist.context_parallel_size") {
  const int64_t groups = c.ddp.num_distributed_optimizer_instances;
  if (groups == 1 || !c.dist.data_parallel_size) return;
  const int64_t ranks = *c.dist.data_parallel_size * c.dist.context_parallel_size;
  if (ranks % groups != 0)
    report
        .error("`ddp.num_distributed_optimizer_instances` " + to_text(groups) +
               " does not divide data * context parallelism = " + to_text(ranks))
        .help("nearest legal values: " + nearest_divisors(groups, ranks));
  else if (c.dist.expert_data_parallel_size && *c.dist.expert_data_parallel_size % groups != 0)
    report
        .error("`ddp.num_distributed_optimizer_instances` " + to_text(groups) +
               " does not divide expert data parallelism = " + to_text(*c.dist.expert_data_parallel_size))
        .help("nearest legal values: " + nearest_divisors(groups, *c.dist.expert_data_parallel_size));
}

RULE("R0110", state_groups_need_sharding,
     "num_distributed_optimizer_instances above 1 needs sharded optimizer state",
     "ddp.num_distributed_optimizer_instances", "ddp.data_parallel_sharding_strategy") {
  if (c.ddp.num_distributed_optimizer_instances == 1 || shards(c)) return;
  report
      .error("`ddp.num_distributed_optimizer_instances` " +
             to_text(c.ddp.num_distributed_optimizer_instances) +
             " groups the shards of the optimizer state, but nothing is sharded")
      .help("set ddp.data_parallel_sharding_strategy=optim, or ddp.num_distributed_optimizer_instances=1");
}

RULE("R0111", outer_sharding_fits,
     "outer_dp_sharding_strategy is no_shard or optim, and needs more than one group",
     "ddp.outer_dp_sharding_strategy", "ddp.num_distributed_optimizer_instances") {
  const auto outer = c.ddp.outer_dp_sharding_strategy;
  if (outer == ShardingStrategy::no_shard) return;
  if (outer != ShardingStrategy::optim)
    report
        .error("`ddp.outer_dp_sharding_strategy` is " + std::string(enum_name(outer)) +
               ", between groups only the optimizer state can be split")
        .help("legal values: no_shard, optim");
  else if (c.ddp.num_distributed_optimizer_instances == 1)
    report
        .error(
            "`ddp.outer_dp_sharding_strategy` splits between groups, but "
            "`ddp.num_distributed_optimizer_instances` is 1")
        .help("set ddp.num_distributed_optimizer_instances to 2 or more");
}

RULE("R0112", backend_fits_device,
     "nccl transfers between GPUs only, and nccl_stand_in between checked or simulated devices only",
     "dist.distributed_backend", "train.device") {
  if (c.dist.distributed_backend == DistributedBackend::nccl_stand_in) {
    if (c.train.device == DeviceKind::checked || c.train.device == DeviceKind::simulated) return;
    report
        .error(
            "`dist.distributed_backend` nccl_stand_in is for `train.device` checked or simulated, which is " +
            std::string(enum_name(c.train.device)))
        .help("set dist.distributed_backend=auto, or train.device=checked");
    return;
  }
  if (c.dist.distributed_backend != DistributedBackend::nccl || c.train.device == DeviceKind::automatic ||
      c.train.device == DeviceKind::cuda)
    return;
  report
      .error("`dist.distributed_backend` nccl transfers between GPUs only, but `train.device` is " +
             std::string(enum_name(c.train.device)))
      .help("set dist.distributed_backend=auto");
}

RULE("R0113", cuda_graphs_need_a_gpu, "cuda_graph_impl has an effect only on GPUs", "model.cuda_graph_impl",
     "train.device") {
  if (c.model.cuda_graph_impl == CudaGraphImpl::none ||
      (c.train.device != DeviceKind::cpu && c.train.device != DeviceKind::checked))
    return;
  report
      .warning("`model.cuda_graph_impl` " + std::string(enum_name(c.model.cuda_graph_impl)) +
               " has no effect: `train.device` " + std::string(enum_name(c.train.device)) +
               " has no launches to save")
      .help("set model.cuda_graph_impl=none, or train.device=auto");
}

}  // namespace

}  // namespace capstan::config
