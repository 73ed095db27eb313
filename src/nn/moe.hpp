#pragma once

#include <memory>
#include <optional>

#include "nn/mlp.hpp"
#include "nn/token_dispatcher.hpp"
#include "ops/router.hpp"

namespace capstan::nn {

// Mixture of experts: the router chooses topk experts for each token, whose outputs are summed with the
// router's probabilities; a shared expert adds its output for every token. Parameters:
//   router.weight [experts, hidden]
//   router.bias [experts]
//   router.expert_bias [experts], a buffer, with Options::expert_bias
//   experts.linear_fc1.weight [experts, ffn or 2 ffn, hidden], gated: the gate's rows, then those of up
//   experts.linear_fc2.weight [experts, hidden, ffn]
//   experts.linear_fc1.bias [experts, ffn or 2 ffn], experts.linear_fc2.bias [experts, hidden]
//   adapters of experts.linear_fc1 and experts.linear_fc2 (nn/adapter.hpp)
//   shared_experts: an Mlp; shared_experts.gate_weight [1, hidden]
// With sequence parallelism each tensor-parallel rank routes its own rows. Where experts, or parts of their
// width, lie on other ranks, a TokenDispatcher sends the tokens there.
class Moe final : public FeedForward {
 public:
  // A load-balancing loss, its weight, and over which tokens it balances the load.
  struct BalanceLoss {
    enum class Scope : uint8_t { micro_batch, sequence, global_batch };
    Scope scope = Scope::micro_batch;
    double coefficient = 0;
  };
  struct Options {
    int64_t hidden = 0, experts = 0, ffn = 0;
    // Biases of the router and of the experts, as in Megatron.
    bool bias = false;
    kernels::ActivationFunction activation{.kind = kernels::ActivationKind::gelu, .gated = false};
    ops::RouterOptions router;
    // Logits and scores in fp64; false: in fp32.
    bool router_in_fp64 = false;
    // Adds the buffer `router.expert_bias` to the scores for the choice of experts only. The training step
    // updates it.
    bool expert_bias = false;
    // Noise by which the router's input is multiplied in training; 0: none.
    double input_jitter = 0;
    // The router's losses, with Megatron's coefficients. All are means over the tokens of a micro-batch, of
    // which padding is none; a training step adds their mean over its micro-batches, weighted with the number
    // of their loss tokens. The loss over the global batch is coefficient * experts * sum over e of f[e]
    // P[e], P the mean of the micro-batch's probabilities, f the fractions of the choices of all ranks in
    // this micro-batch and the step's earlier ones. (Megatron's is that divided by the data-parallel size.)
    // At most one loss for each scope.
    std::vector<BalanceLoss> balance;
    double z_coefficient = 0;
    TokenDispatcher::Kind dispatcher = TokenDispatcher::Kind::alltoall;
    // See TokenDispatcher::Options.
    std::optional<double> capacity_factor;
    kernels::DropPolicy drop_policy = kernels::DropPolicy::probability;
    bool pad_to_capacity = false;
    // Width of the shared expert; 0: none.
    int64_t shared_ffn = 0;
    // Multiplies its output by sigmoid(x gate_weight^T).
    bool shared_gate = false;
    // Computes the shared expert while tokens are transferred to the ranks of the other experts. The terms of
    // the input's gradient are then summed in another order.
    bool overlap_shared = false;
    // Saves only the input of the activation in the experts, or of the shared expert.
    bool recompute_activation = false, recompute_shared = false;
    Init init, output_init;
  };
  Moe(ParamList& parameters, const ModulePath& path, const Options& options);

  Var forward(Tape& tape, const Var& x, const TokenContext& context) const override;
  bool adds_losses() const override { return !options_.balance.empty() || options_.z_coefficient > 0; }
  const char* name() const override { return "moe"; }

 private:
  ops::Routing route(Tape& tape, const Var& x, const TokenContext& context) const;
  // Attaches the losses to the probabilities and adds them to the statistics.
  void add_losses(Tape& tape, const Var& logits, const TokenContext& context, ops::Routing& routing) const;
  // How often the tokens of each segment chose an expert, summed over the ranks of sequence parallelism and
  // of `group` (null: one).
  Tensor count_choices(Tape& tape, const Tensor& experts, const kernels::TokenSegments& segments,
                       comm::Communicator* group) const;
  // Counts the choices as those of a further micro-batch. Returns how many choices of the global batch so
  // far, on all ranks, fell on each expert.
  Tensor load_of_batch(Tape& tape, const Tensor& experts, const TokenContext& context) const;
  // One for each of Options::balance.
  std::vector<Var> balance_losses(Tape& tape, const Var& logits, const Tensor& experts,
                                  const TokenContext& context) const;
  // The outputs of this rank's experts.
  Var run_experts(Tape& tape, const ExpertInput& input, const TokenContext& context) const;
  // The row indices by which adapters of experts drop elements; undefined where they drop none.
  Tensor dropout_rows(const TokenContext& context) const;
  Var run_shared_expert(Tape& tape, const Var& x, const TokenContext& context) const;
  Var shared_output(Tape& tape, const Var& x, const TokenContext& context) const;

  Options options_;
  Parallel parallel_;
  int64_t layer_;
  const Parameter* router_;
  // Null: none.
  const Parameter* router_bias_ = nullptr;
  const Parameter *fc1_, *fc2_;
  // Null: no bias of the experts.
  const Parameter* expert_bias_ = nullptr;
  // Null: none.
  const Parameter *fc1_bias_ = nullptr, *fc2_bias_ = nullptr;
  // One of the ranks that share an expert's width adds the bias of fc2 to their sum.
  bool adds_fc2_bias_ = true;
  std::optional<Adapter> fc1_adapter_, fc2_adapter_;
  // Dropout probability of the adapters of experts; 0 without them.
  double adapter_dropout_ = 0;
  std::unique_ptr<TokenDispatcher> dispatcher_;
  std::optional<Mlp> shared_;
  // Null: none.
  const Parameter* shared_gate_ = nullptr;
};

}  // namespace capstan::nn
