// Rows of tokens in the order of experts, and back. Sizes are upper bounds that follow from shapes, so that
// the host need not wait for the routing; where rows are exchanged, they are the counts that it has read.
#pragma once

#include "kernels/activation.hpp"
#include "kernels/expert_permutation.hpp"
#include "ops/tape.hpp"

namespace capstan::ops {

// Which row each (token, choice) slot has.
struct ExpertPermutation {
  int64_t tokens = 0, topk = 0, experts = 0;
  // Upper bound of the number of rows, and rows of the permuted tensors.
  int64_t rows = 0;
  // i64 [1 + experts]: the number of rows, sizes().
  Tensor numbers;
  // -1: dropped, or of another rank's expert.
  Tensor row_of_slot;  // i32 [tokens * topk]
  // -1: padding.
  Tensor slot_of_row;  // i32 [rows]

  // Rows in use, i64 [1].
  Tensor rows_used() const { return numbers.flat_range(0, 1, {1}); }
  // Rows of each expert, i64 [experts]: the groups of grouped_linear().
  Tensor sizes() const { return numbers.flat_range(1, experts, {experts}); }
};

struct PermutationOptions {
  // Experts [first_expert, first_expert + experts) have rows here; slots of the others have none.
  int64_t first_expert = 0, experts = 0;
  // Capacity of an expert in slots (expert_capacity()); 0: dropless.
  int64_t capacity = 0;
  kernels::DropPolicy policy = kernels::DropPolicy::probability;
  // Each expert has `capacity` rows; those without a slot are 0.
  bool pad_to_capacity = false;
};

// Fails unless x is [rows, any] and contiguous.
void check_rows(const char* operation, const Tensor& x, int64_t rows);
// A tensor of which kernels write only the rows in use. The others are 0 where an observer reads all values.
Tensor tensor_of_rows(const StepContext& context, const Shape& shape, DType dtype);

// Megatron's capacity: ceil(tokens * topk / experts * factor).
int64_t expert_capacity(int64_t tokens, int64_t topk, int64_t experts, double factor);

// Sorts slots by expert, those of an expert by token. experts i32 [N, topk]. probabilities fp32 [N, topk], by
// which slots are dropped; undefined where they are not. In a recomputed region the permutation of the first
// pass is used again.
ExpertPermutation plan_permutation(Tape& tape, const Tensor& experts, const Tensor& probabilities,
                                   const PermutationOptions& options);
// The permutation of rows that several ranks have sent, each in the order of the experts here, to the order
// of experts (of equal ones: of ranks), with topk 1. counts i64 [ranks, experts]; rows: an upper bound of
// their sum.
ExpertPermutation regroup_permutation(Tape& tape, const Tensor& counts, int64_t rows);

// dropped fp32 [1] += the number of slots of `experts` that were dropped in their permutation.
void count_dropped(const Tensor& experts, const PermutationOptions& options,
                   const ExpertPermutation& permutation, const Tensor& dropped);

// y[rows, h]: row r is x[token of r]; padding is 0. The gradient of x is a sum over the slots of a token.
Var permute(Tape& tape, const Var& x, const ExpertPermutation& permutation);
// Probabilities fp32 [N, topk] in the order of rows, fp32 [rows, 1]; padding is 0.
Var permute_probabilities(Tape& tape, const Var& probabilities, const ExpertPermutation& permutation);
// y[N, h]: the sum of the rows x of a token, each times its probability (fp32 [N, topk]) where given. Saves
// x for the gradient of the probabilities only.
Var unpermute(Tape& tape, const Var& x, const ExpertPermutation& permutation, const Var& probabilities = {});

// y[rows, f] = act(x) of x[rows, f], or gated act(gate) * (up + up_offset) of x[rows, 2 f] = [gate, up], each
// row times weights fp32 [rows, 1] where given (the permuted probabilities). Only rows in use are computed.
Var expert_activation(Tape& tape, const Var& x, const ExpertPermutation& permutation,
                      const kernels::ActivationFunction& activation, const Var& weights = {});

}  // namespace capstan::ops
