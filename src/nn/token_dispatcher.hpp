// Sends tokens to the ranks of their experts, and the outputs of the experts back.
//
//   allgather  every rank gathers the tokens of all ranks over which experts are sharded, computes its own
//              experts' part of each, and the ranks sum the parts. The host never waits for the routing.
//   alltoall   every rank sends each token to the ranks of its experts only. The host reads once how many
//              rows there are, unless experts are padded to their capacity.
#pragma once

#include <memory>
#include <optional>

#include "nn/parallel.hpp"
#include "ops/expert_permutation.hpp"
#include "ops/router.hpp"

namespace capstan::nn {

// The rows of the experts of this rank.
struct ExpertInput {
  // [rows, hidden] in the order of the experts, of which order.sizes() has the numbers.
  Var rows;
  // The probability of each row, fp32 [rows, 1]; undefined unless experts weight their activations.
  Var weights;
  ops::ExpertPermutation order;
  // TokenContext::hidden_dropout_rows of the rows' tokens, i64 [rows]; undefined unless they were given.
  Tensor dropout_rows;
  // Rows in use with an equal load, for counts of FLOPs; 0: all.
  int64_t expected_rows = 0;
};

// The dispatch of the tokens of one forward pass of a layer.
class TokenDispatch {
 public:
  TokenDispatch() = default;
  virtual ~TokenDispatch() = default;
  TokenDispatch(const TokenDispatch&) = delete;
  TokenDispatch& operator=(const TokenDispatch&) = delete;

  // Waits until the rows have arrived. Called once.
  virtual ExpertInput receive(Tape& tape) = 0;
  // y [N, hidden]: for each token of this rank the sum of the outputs [rows, hidden] of its experts, which it
  // weights unless the experts do. Called once, after receive().
  virtual Var combine(Tape& tape, const Var& outputs) = 0;
};

class TokenDispatcher {
 public:
  enum class Kind : uint8_t { allgather, alltoall };
  struct Options {
    // For messages.
    int64_t layer = -1;
    // Number of experts on all ranks, and of those that a token chooses.
    int64_t experts = 0, topk = 0;
    // Capacity of an expert relative to an equal load; tokens beyond it are dropped. nullopt: dropless. The
    // load is that of the tokens that are dispatched together: with `allgather` of all ranks over which
    // experts are sharded, with `alltoall` of each rank by itself, as in Megatron.
    std::optional<double> capacity_factor;
    kernels::DropPolicy drop_policy = kernels::DropPolicy::probability;
    bool pad_to_capacity = false;
    // Experts multiply their activations by the probabilities, so that the gradient of these needs no other
    // tensor than the activations. Right without a bias after it.
    bool weights_activations = false;
  };
  TokenDispatcher() = default;
  virtual ~TokenDispatcher() = default;
  TokenDispatcher(const TokenDispatcher&) = delete;
  TokenDispatcher& operator=(const TokenDispatcher&) = delete;

  // Starts to send x [N, hidden], and dropout_rows i64 [N] where they are given. Operations between this and
  // TokenDispatch::receive() run beside the transfer, in the backward pass too. dropped: fp32 [1], to which
  // the number of dropped choices (token, expert) is added, each on one rank; undefined: not counted.
  virtual std::unique_ptr<TokenDispatch> start(Tape& tape, const Var& x, const ops::Routing& routing,
                                               const Tensor& dropout_rows = {},
                                               const Tensor& dropped = {}) const = 0;
};

// Where all experts are on every rank, tokens are sent to no other: any kind is then `allgather`.
std::unique_ptr<TokenDispatcher> make_token_dispatcher(TokenDispatcher::Kind kind, const Parallel& parallel,
                                                       const TokenDispatcher::Options& options);

}  // namespace capstan::nn
