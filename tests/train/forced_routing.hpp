// Degenerate routing for tests: biases of the experts are set such that only some of them are ever chosen.
#pragma once

#include <doctest/doctest.h>

#include <set>
#include <span>
#include <string>
#include <vector>

#include "train/trainer/step_runner.hpp"

namespace capstan::test {

enum class Routing : uint8_t {
  // The router's own choices.
  free,
  // All tokens of a layer choose the same experts, whose ranks differ from layer to layer.
  collapsed,
  // Tokens choose among half of the experts; the others stay empty.
  empty_experts,
};

// The experts that tokens of this layer can choose.
inline std::set<int64_t> open_experts(Routing routing, const config::ModelConfig& model, int64_t layer) {
  const int64_t experts = *model.num_moe_experts;
  std::set<int64_t> open;
  if (routing == Routing::collapsed)
    for (int64_t i = 0; i < model.moe_router_topk; ++i) open.insert((2 * layer + i) % experts);
  else
    // One of each pair: the first of one, the second of the next.
    for (int64_t pair = 0; 2 * pair + 1 < experts; ++pair) open.insert(2 * pair + pair % 2);
  return open;
}

// Sets the biases by which experts are chosen, the same on every layout: those of sigmoid scores, which lie
// between 0 and 1, or those of the logits of a softmax. Closed experts are then never chosen, as long as the
// updates of the biases stay small.
inline void force_routing(train::StepRunner& runner, const config::ModelConfig& model, Routing routing) {
  const bool expert_bias = model.moe_router_enable_expert_bias;
  const std::string name = expert_bias ? "mlp.router.expert_bias" : "mlp.router.bias";
  const float high = expert_bias ? 4 : 32;
  runner.store().before_load();
  for (const auto& shard : runner.store().parameter_shards()) {
    if (!shard.parameter->name().ends_with(name)) continue;
    const std::set<int64_t> open = open_experts(routing, model, shard.parameter->spec().layer);
    std::vector<float> biases(static_cast<size_t>(shard.range.count));
    for (size_t i = 0; i < biases.size(); ++i)
      biases[i] = open.contains(shard.range.begin + static_cast<int64_t>(i)) ? high : 0;
    shard.values().copy_from_host_bytes(std::as_bytes(std::span(std::as_const(biases))));
    shard.set_changed();
  }
  runner.store().after_load();
}

// Checks the loads of all layers with experts after a step: closed experts got no token of any rank, and the
// chosen ones of a collapsed layer are on one rank of expert parallelism.
inline void check_routing(const train::StepResult& step, const config::Config& config, Routing routing) {
  const bool collapsed = routing == Routing::collapsed;
  const int64_t per_rank = *config.model.num_moe_experts / config.dist.expert_model_parallel_size;
  REQUIRE(!step.routers.empty());
  for (const train::RouterResult& router : step.routers) {
    CAPTURE(router.layer);
    const std::set<int64_t> open = open_experts(routing, config.model, router.layer);
    REQUIRE(router.load.size() > open.size());
    for (size_t expert = 0; expert < router.load.size(); ++expert) {
      CAPTURE(expert);
      if (!open.contains(static_cast<int64_t>(expert)))
        REQUIRE(router.load[expert] == 0);
      else if (collapsed)
        REQUIRE(router.load[expert] == doctest::Approx(1.0 / static_cast<double>(open.size())));
    }
    if (collapsed) REQUIRE(*open.begin() / per_rank == *open.rbegin() / per_rank);
  }
}

}  // namespace capstan::test
