// The order of tokens by expert. A slot is a (token, choice) pair: slot t * topk + k is the k-th expert of
// token t. A row is a slot in the order of experts; the rows of an expert are in the order of their tokens.
#pragma once

#include <algorithm>

#include "base/division.hpp"
#include "tensor/kernel_context.hpp"

namespace capstan::kernels {

// Which slots of an expert are dropped beyond its capacity: those with the lowest probabilities (of equal
// ones the later), or the last ones.
enum class DropPolicy : uint8_t { probability, position };

struct PermutationShape {
  int64_t tokens = 0, topk = 0;
  // Experts [first, first + experts) have rows; slots of the others have none.
  int64_t first = 0, experts = 0;
  // Largest number of slots of an expert that are kept; 0: all.
  int64_t capacity = 0;
  DropPolicy policy = DropPolicy::probability;
  // Each expert has `capacity` rows.
  bool pad = false;

  constexpr int64_t slots() const { return tokens * topk; }
  constexpr bool drops_by_probability() const { return capacity > 0 && policy == DropPolicy::probability; }
  // Index of an expert among those with rows; -1: it has none.
  constexpr int64_t index_of(int64_t expert) const {
    return expert >= first && expert < first + experts ? expert - first : -1;
  }
  // How many of `count` slots of an expert are kept, and the rows that it has for them.
  constexpr int64_t kept_of(int64_t count) const {
    return capacity > 0 && count > capacity ? capacity : count;
  }
  constexpr int64_t rows_of(int64_t count) const { return pad ? capacity : kept_of(count); }
  // Upper bound of the number of rows. A token chooses an expert once at most.
  constexpr int64_t rows() const {
    const int64_t most = tokens * std::min(topk, experts);
    if (capacity <= 0) return most;
    return pad ? experts * capacity : std::min(most, experts * capacity);
  }
};

// Rows that sum_rows adds to one another first, so that long sums stay exact.
constexpr int64_t kSumRows = 512;

// The result of `plan` and `regroup`. numbers i64 [1 + experts]: the number of rows, and the rows of each
// expert. row_of_slot i32 [slots]: -1 without a row. slot_of_row i32 [rows()]: -1 for padding and beyond the
// number of rows.
struct ExpertPermutation {
  // experts i32 [slots]. probabilities fp32 [slots]: where the policy needs them; else they may be null.
  void (*plan)(Context&, PermutationShape, const int32_t* experts, const float* probabilities,
               int64_t* numbers, int32_t* row_of_slot, int32_t* slot_of_row);
  WorkspaceSize (*plan_workspace)(PermutationShape);
  // Slots that lie in chunks [ranks, experts] of counts i64 [ranks, experts] slots, as several ranks send
  // them: the rows are in chunks [experts, ranks]. Slots beyond the sum of counts have no row. rows: the
  // number of slots and upper bound of the number of rows.
  void (*regroup)(Context&, const int64_t* counts, int64_t ranks, int64_t experts, int64_t rows,
                  int64_t* numbers, int32_t* row_of_slot, int32_t* slot_of_row);
  // *dropped += the number of slots whose expert has rows and that have none: those beyond the capacity.
  void (*count_dropped)(Context&, PermutationShape, const int32_t* experts, const int32_t* row_of_slot,
                        float* dropped);
  // y[r] = x[slot_of_row[r] / topk], times weights[slot] where given; 0 without a slot. x [tokens, cols],
  // weights fp32 [slots], y [rows, cols]. Without weights finite values keep their bits, subnormal ones too.
  void (*permute)(Context&, In x, const int32_t* slot_of_row, const float* weights, Out y, int64_t rows,
                  int64_t topk, int64_t cols);
  // y[t] = the sum over k of x[row_of_slot[t * topk + k]], times weights[slot] where given, in fp32 and in
  // the order of k; slots without a row count 0. x [rows, cols], y [tokens, cols].
  void (*unpermute)(Context&, In x, const int32_t* row_of_slot, const float* weights, Out y, int64_t tokens,
                    int64_t topk, int64_t cols);
  // dweights[slot] = dy[slot / topk] · x[row_of_slot[slot]], 0 without a row: the gradient of the weights of
  // unpermute. fp32 [slots].
  void (*unpermute_backward_weights)(Context&, In dy, In x, const int32_t* row_of_slot, float* dweights,
                                     int64_t tokens, int64_t topk, int64_t cols);
  // sums[e] += the sum of the rows of expert e in x [rows, cols], of which sizes[e] follow those of the
  // experts before: bias gradients. sums fp32 [experts, cols].
  void (*sum_rows)(Context&, In x, const int64_t* sizes, int64_t experts, int64_t cols, float* sums);
  // Sets the rows of x [rows, cols] behind those of all experts to 0.
  void (*clear_unused)(Context&, Out x, const int64_t* sizes, int64_t experts, int64_t rows, int64_t cols);
};

}  // namespace capstan::kernels
