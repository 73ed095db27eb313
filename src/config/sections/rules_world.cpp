// Do the axes of parallelism fit the world? Two grids share it: the dense one (TP, CP, DP, PP) and the
// experts' (ETP, EP, EDP, PP).
#include "config/sections/rule_tools.hpp"

namespace capstan::config {

namespace {

void world_divisible(const Config& c, RuleReport& report) {
  const auto& d = c.dist;
  const std::vector<int64_t> axes = {d.tensor_model_parallel_size, d.pipeline_model_parallel_size,
                                     d.context_parallel_size};
  const auto product = product_of(axes);
  if (product && d.world_size % *product == 0) return;
  auto& found =
      report.error("the world of " + text_of(d.world_size) +
                   " ranks is not a multiple of tensor * pipeline * context = " + product_text(axes));
  if (!product) return;
  std::string help = "nearest legal dist.world_size: " + nearest_multiples(d.world_size, *product);
  if (d.expert_model_parallel_size > 1)
    help += "; expert parallelism (" + text_of(d.expert_model_parallel_size) +
            ") is a part of data parallelism and does not multiply into the world";
  found.operand("tensor * pipeline * context", text_of(*product)).help(help);
}

void expert_world_divisible(const Config& c, RuleReport& report) {
  const auto& d = c.dist;
  if (!c.model.num_moe_experts || !d.expert_tensor_parallel_size) return;
  const std::vector<int64_t> axes = {*d.expert_tensor_parallel_size, d.expert_model_parallel_size,
                                     d.pipeline_model_parallel_size};
  const auto product = product_of(axes);
  if (product && d.world_size % *product == 0) return;
  auto& found =
      report.error("the world of " + text_of(d.world_size) +
                   " ranks is not a multiple of expert tensor * expert * pipeline = " + product_text(axes));
  if (!product) return;
  found.operand("expert tensor * expert * pipeline", text_of(*product));
  const int64_t layout = *d.expert_tensor_parallel_size * d.pipeline_model_parallel_size;
  std::string help = "nearest legal dist.world_size: " + nearest_multiples(d.world_size, *product);
  if (d.world_size % layout == 0)
    help += "; or dist.expert_model_parallel_size: " +
            nearest_divisors(d.expert_model_parallel_size, d.world_size / layout);
  found.help(help);
}

void data_parallel_size_agrees(const Config& c, RuleReport& report) {
  const auto& d = c.dist;
  const auto axes =
      product_of({d.tensor_model_parallel_size, d.pipeline_model_parallel_size, d.context_parallel_size});
  if (!d.data_parallel_size || !axes || d.world_size % *axes != 0 ||
      *d.data_parallel_size == d.world_size / *axes)
    return;
  report
      .error("`dist.data_parallel_size` " + text_of(*d.data_parallel_size) +
             " is not what the world leaves: " + text_of(d.world_size) + " / " + text_of(*axes) + " = " +
             text_of(d.world_size / *axes))
      .help("leave dist.data_parallel_size unset; it follows from dist.world_size");
}

void expert_data_parallel_size_agrees(const Config& c, RuleReport& report) {
  const auto& d = c.dist;
  if (!c.model.num_moe_experts || !d.expert_data_parallel_size || !d.expert_tensor_parallel_size) return;
  const auto axes = product_of(
      {*d.expert_tensor_parallel_size, d.expert_model_parallel_size, d.pipeline_model_parallel_size});
  if (!axes || d.world_size % *axes != 0 || *d.expert_data_parallel_size == d.world_size / *axes) return;
  report
      .error("`dist.expert_data_parallel_size` " + text_of(*d.expert_data_parallel_size) +
             " is not what the world leaves: " + text_of(d.world_size) + " / " + text_of(*axes) + " = " +
             text_of(d.world_size / *axes))
      .help("leave dist.expert_data_parallel_size unset; it follows from dist.world_size");
}

void pipeline_order_needs_one_data_axis(const Config& c, RuleReport& report) {
  const auto& d = c.dist;
  if (!d.use_tp_pp_dp_mapping || d.pipeline_model_parallel_size == 1 || !c.model.num_moe_experts) return;
  if (!d.data_parallel_size || !d.expert_data_parallel_size ||
      *d.data_parallel_size == *d.expert_data_parallel_size)
    return;
  report
      .error(
          "with `dist.use_tp_pp_dp_mapping` and pipeline stages, dense layers and experts need equal data "
          "parallelism, but have " +
          text_of(*d.data_parallel_size) + " and " + text_of(*d.expert_data_parallel_size))
      .help(
          "set dist.use_tp_pp_dp_mapping=false, or choose dist.expert_model_parallel_size and "
          "dist.expert_tensor_parallel_size so that both are equal");
}

bool uses_two_levels(const Config& c) {
  for (const CpCommType type : c.dist.cp_comm_type)
    if (type == CpCommType::a2a_p2p) return true;
  return false;
}

void hierarchical_sizes_multiply_to_context(const Config& c, RuleReport& report) {
  const auto& sizes = c.dist.hierarchical_context_parallel_sizes;
  if (sizes.empty()) return;
  bool positive = true;
  for (const int64_t size : sizes) positive = positive && size > 0;
  const auto product = product_of(sizes);
  if (positive && product == c.dist.context_parallel_size) return;
  report
      .error("`dist.hierarchical_context_parallel_sizes` multiply to " + product_text(sizes) +
             ", context parallelism is " + text_of(c.dist.context_parallel_size))
      .help("two sizes whose product is " + text_of(c.dist.context_parallel_size));
}

void hierarchical_sizes_given(const Config& c, RuleReport& report) {
  if (c.dist.context_parallel_size == 1) return;
  const size_t given = c.dist.hierarchical_context_parallel_sizes.size();
  if (uses_two_levels(c)) {
    if (given != 2)
      report
          .error(
              "`dist.cp_comm_type` a2a+p2p needs two sizes in `dist.hierarchical_context_parallel_sizes`, "
              "got " +
              text_of(static_cast<int64_t>(given)))
          .help("for instance dist.hierarchical_context_parallel_sizes=[2," +
                text_of(std::max<int64_t>(1, c.dist.context_parallel_size / 2)) + "]");
  } else if (given != 0) {
    report.error("`dist.hierarchical_context_parallel_sizes` is only for `dist.cp_comm_type` a2a+p2p")
        .help("set dist.cp_comm_type=a2a+p2p, or unset dist.hierarchical_context_parallel_sizes");
  }
}

void context_exchange_for_each_layer(const Config& c, RuleReport& report) {
  const auto given = static_cast<int64_t>(c.dist.cp_comm_type.size());
  if (given == 1 || given == c.model.num_layers) return;
  report
      .error("`dist.cp_comm_type` has " + text_of(given) + " items for " + text_of(c.model.num_layers) +
             " layers")
      .help("give one for all layers, or " + text_of(c.model.num_layers));
}

void state_groups_divide_data(const Config& c, RuleReport& report) {
  const int64_t groups = c.ddp.num_distributed_optimizer_instances;
  if (groups == 1 || !c.dist.data_parallel_size) return;
  const int64_t ranks = *c.dist.data_parallel_size * c.dist.context_parallel_size;
  if (ranks % groups != 0)
    report
        .error("`ddp.num_distributed_optimizer_instances` " + text_of(groups) +
               " does not divide data * context parallelism = " + text_of(ranks))
        .help("nearest legal values: " + nearest_divisors(groups, ranks));
  else if (c.dist.expert_data_parallel_size && *c.dist.expert_data_parallel_size % groups != 0)
    report
        .error("`ddp.num_distributed_optimizer_instances` " + text_of(groups) +
               " does not divide expert data parallelism = " + text_of(*c.dist.expert_data_parallel_size))
        .help("nearest legal values: " + nearest_divisors(groups, *c.dist.expert_data_parallel_size));
}

void state_groups_need_sharding(const Config& c, RuleReport& report) {
  if (c.ddp.num_distributed_optimizer_instances == 1 || shards(c)) return;
  report
      .error("`ddp.num_distributed_optimizer_instances` " +
             text_of(c.ddp.num_distributed_optimizer_instances) +
             " groups the shards of the optimizer state, but nothing is sharded")
      .help("set ddp.data_parallel_sharding_strategy=optim, or ddp.num_distributed_optimizer_instances=1");
}

void outer_sharding_fits(const Config& c, RuleReport& report) {
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

void backend_fits_device(const Config& c, RuleReport& report) {
  if (c.dist.distributed_backend != DistributedBackend::nccl || c.train.device == DeviceKind::automatic ||
      c.train.device == DeviceKind::cuda)
    return;
  report
      .error("`dist.distributed_backend` nccl carries GPU memory only, but `train.device` is " +
             std::string(enum_name(c.train.device)))
      .help("set dist.distributed_backend=auto");
}

}  // namespace

void register_world_rules(Schema& s) {
  s.rule<Config>(
      {"R0101",
       "world_divisible",
       "the world is a multiple of tensor * pipeline * context parallelism; the quotient is data parallelism",
       {"dist.world_size", "dist.tensor_model_parallel_size", "dist.pipeline_model_parallel_size",
        "dist.context_parallel_size"}},
      world_divisible);
  s.rule<Config>({"R0102",
                  "expert_world_divisible",
                  "the world is a multiple of expert tensor * expert * pipeline parallelism",
                  {"dist.world_size", "dist.expert_tensor_parallel_size", "dist.expert_model_parallel_size",
                   "dist.pipeline_model_parallel_size", "model.num_moe_experts"}},
                 expert_world_divisible);
  s.rule<Config>({"R0103",
                  "data_parallel_size_agrees",
                  "a given data_parallel_size is what the world leaves",
                  {"dist.data_parallel_size", "dist.world_size", "dist.tensor_model_parallel_size",
                   "dist.pipeline_model_parallel_size", "dist.context_parallel_size"}},
                 data_parallel_size_agrees);
  s.rule<Config>({"R0104",
                  "expert_data_parallel_size_agrees",
                  "a given expert_data_parallel_size is what the world leaves",
                  {"dist.expert_data_parallel_size", "dist.world_size", "dist.expert_tensor_parallel_size",
                   "dist.expert_model_parallel_size", "dist.pipeline_model_parallel_size"}},
                 expert_data_parallel_size_agrees);
  s.rule<Config>({"R0105",
                  "pipeline_order_needs_one_data_axis",
                  "the order tp-cp-ep-pp-dp needs the same data parallelism for dense layers and experts",
                  {"dist.use_tp_pp_dp_mapping", "dist.data_parallel_size", "dist.expert_data_parallel_size"}},
                 pipeline_order_needs_one_data_axis);
  s.rule<Config>({"R0106",
                  "hierarchical_sizes_multiply_to_context",
                  "the sizes of hierarchical context parallelism multiply to context_parallel_size",
                  {"dist.hierarchical_context_parallel_sizes", "dist.context_parallel_size"}},
                 hierarchical_sizes_multiply_to_context);
  s.rule<Config>({"R0107",
                  "hierarchical_sizes_given",
                  "two hierarchical sizes are given exactly when cp_comm_type has a2a+p2p",
                  {"dist.hierarchical_context_parallel_sizes", "dist.cp_comm_type"}},
                 hierarchical_sizes_given);
  s.rule<Config>({"R0108",
                  "context_exchange_for_each_layer",
                  "cp_comm_type has one item, or one for each layer",
                  {"dist.cp_comm_type", "model.num_layers"}},
                 context_exchange_for_each_layer);
  s.rule<Config>(
      {"R0109",
       "state_groups_divide_data",
       "num_distributed_optimizer_instances divides data * context parallelism and expert data parallelism",
       {"ddp.num_distributed_optimizer_instances", "dist.data_parallel_size", "dist.context_parallel_size"}},
      state_groups_divide_data);
  s.rule<Config>({"R0110",
                  "state_groups_need_sharding",
                  "groups of optimizer state need optimizer state that is sharded",
                  {"ddp.num_distributed_optimizer_instances", "ddp.data_parallel_sharding_strategy"}},
                 state_groups_need_sharding);
  s.rule<Config>({"R0111",
                  "outer_sharding_fits",
                  "outer_dp_sharding_strategy is no_shard or optim, and needs more than one group",
                  {"ddp.outer_dp_sharding_strategy", "ddp.num_distributed_optimizer_instances"}},
                 outer_sharding_fits);
  s.rule<Config>({"R0112",
                  "backend_fits_device",
                  "nccl carries collectives of GPUs only",
                  {"dist.distributed_backend", "train.device"}},
                 backend_fits_device);
}

}  // namespace capstan::config
