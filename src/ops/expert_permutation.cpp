#include "ops/expert_permutation.hpp"

#include <cmath>
#include <limits>

#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {

const kernels::ExpertPermutation& kernels_of(Device& device) {
  return *device.table().expert_permutation;
}

// A permutation whose tensors no kernel has written yet.
ExpertPermutation new_permutation(Device& device, const char* operation, int64_t tokens, int64_t topk,
                                  int64_t experts, int64_t rows) {
  const int64_t most = std::max(tokens * topk, rows);
  CAPSTAN_ASSERT(most <= std::numeric_limits<int32_t>::max(),
                 std::string(operation) + ": " + std::to_string(most) + " rows");
  return {.tokens = tokens,
          .topk = topk,
          .experts = experts,
          .rows = rows,
          .numbers = Tensor::empty(device, {1 + experts}, DType::i64),
          .row_of_slot = Tensor::empty(device, {tokens * topk}, DType::i32),
          .slot_of_row = Tensor::empty(device, {rows}, DType::i32)};
}

kernels::PermutationShape shape_of(const Tensor& experts, const PermutationOptions& o) {
  return {.tokens = experts.size(0),
          .topk = experts.size(1),
          .first = o.first_expert,
          .experts = o.experts,
          .capacity = o.capacity,
          .policy = o.policy,
          .pad = o.pad_to_capacity};
}

double bytes_of_rows(const Tensor& rows) {
  return 2 * static_cast<double>(rows.bytes());
}

}  // namespace

void check_rows(const char* operation, const Tensor& x, int64_t rows) {
  CAPSTAN_ASSERT(x.rank() == 2 && x.is_contiguous() && x.size(0) == rows,
                 std::string(operation) + ": x " + x.text() + " for " + std::to_string(rows) + " rows");
}

Tensor tensor_of_rows(const StepContext& context, const Shape& shape, DType dtype) {
  const bool are_read = context.observer && context.observer->reads_values();
  return are_read ? Tensor::zeros(context.device, shape, dtype) : Tensor::empty(context.device, shape, dtype);
}

int64_t expert_capacity(int64_t tokens, int64_t topk, int64_t experts, double factor) {
  return static_cast<int64_t>(
      std::ceil(static_cast<double>(tokens * topk) / static_cast<double>(experts) * factor));
}

ExpertPermutation plan_permutation(Tape& tape, const Tensor& experts, const Tensor& probabilities,
                                   const PermutationOptions& o) {
  Device& device = tape.device();
  const kernels::PermutationShape shape = shape_of(experts, o);
  CAPSTAN_ASSERT(o.experts >= 1 && o.capacity >= 0 && (o.capacity > 0 || !o.pad_to_capacity) &&
                     (!probabilities.defined() || probabilities.elements() == shape.slots()),
                 "plan_permutation: experts " + experts.text() + ", " + std::to_string(o.experts) +
                     " experts, capacity " + std::to_string(o.capacity));
  CAPSTAN_ASSERT(probabilities.defined() || !shape.drops_by_probability(),
                 "plan_permutation: no probabilities by which slots are dropped");
  return tape.choice([&] {
    ExpertPermutation p =
        new_permutation(device, "plan_permutation", shape.tokens, shape.topk, o.experts, shape.rows());
    launch(device, kernels_of(device).plan_workspace(shape), kernels_of(device).plan, shape, experts,
           probabilities, p.numbers, p.row_of_slot, p.slot_of_row);
    return p;
  });
}

void count_dropped(const Tensor& experts, const PermutationOptions& o, const ExpertPermutation& permutation,
                   const Tensor& dropped) {
  Device& device = experts.device();
  launch(device, kernels_of(device).count_dropped, shape_of(experts, o), experts, permutation.row_of_slot,
         dropped);
}

ExpertPermutation regroup_permutation(Tape& tape, const Tensor& counts, int64_t rows) {
  Device& device = tape.device();
  CAPSTAN_ASSERT(counts.rank() == 2 && counts.is_contiguous(),
                 "regroup_permutation: counts " + counts.text());
  const int64_t ranks = counts.size(0), experts = counts.size(1);
  return tape.choice([&] {
    ExpertPermutation p = new_permutation(device, "regroup_permutation", rows, 1, experts, rows);
    launch(device, kernels_of(device).regroup, counts, ranks, experts, rows, p.numbers, p.row_of_slot,
           p.slot_of_row);
    return p;
  });
}

namespace {

// x [tokens * topk / per_token, cols] in the order of rows, where per_token slots have the same row of x.
Var permute_rows(Tape& tape, const char* name, const Var& x, const ExpertPermutation& p, int64_t per_token,
                 int64_t cols) {
  Device& device = tape.device();
  const Tensor y = Tensor::empty(device, {p.rows, cols}, x.dtype());
  launch(device, kernels_of(device).permute, x.value, p.slot_of_row, Tensor(), y, p.rows, per_token, cols);
  const Cost cost{0, bytes_of_rows(y)};
  return tape.record({.name = name,
                      .inputs = {x},
                      .outputs = {y},
                      .cost = cost,
                      .backward_cost = cost,
                      .saved = {p.row_of_slot},
                      .backward = [shape = x.shape(), per_token, cols](BackwardContext& ctx) {
                        Device& dev = ctx.device();
                        const Tensor& dy = ctx.output_gradient();
                        const Tensor dx = Tensor::empty(dev, shape, dy.dtype());
                        launch(dev, kernels_of(dev).unpermute, dy, ctx.saved(0), Tensor(), dx,
                               ctx.saved(0).elements() / per_token, per_token, cols);
                        ctx.accumulate_gradient(0, dx);
                      }})[0];
}

}  // namespace

Var permute(Tape& tape, const Var& x, const ExpertPermutation& permutation) {
  check_rows("permute", x.value, permutation.tokens);
  return permute_rows(tape, "permute", x, permutation, permutation.topk, x.size(1));
}

Var permute_probabilities(Tape& tape, const Var& probabilities, const ExpertPermutation& permutation) {
  CAPSTAN_ASSERT(probabilities.dtype() == DType::f32 &&
                     probabilities.value.elements() == permutation.tokens * permutation.topk,
                 "permute_probabilities: " + probabilities.value.text() + " for " +
                     std::to_string(permutation.tokens) + " tokens with " + std::to_string(permutation.topk) +
                     " experts");
  return permute_rows(tape, "permute_probabilities", probabilities, permutation, 1, 1);
}

Var unpermute(Tape& tape, const Var& x, const ExpertPermutation& p, const Var& probabilities) {
  Device& device = tape.device();
  check_rows("unpermute", x.value, p.rows);
  const bool weighted = probabilities.value.defined();
  CAPSTAN_ASSERT(!weighted || (probabilities.dtype() == DType::f32 &&
                               probabilities.value.elements() == p.tokens * p.topk),
                 "unpermute: probabilities " + probabilities.value.text() + " for " +
                     std::to_string(p.tokens) + " tokens with " + std::to_string(p.topk) + " experts");
  const Tensor y = Tensor::empty(device, {p.tokens, x.size(1)}, x.dtype());
  launch(device, kernels_of(device).unpermute, x.value, p.row_of_slot, probabilities.value, y, p.tokens,
         p.topk, x.size(1));
  const Cost cost{0, bytes_of_rows(x.value)};
  Record record{.name = "unpermute",
                .inputs = {x},
                .outputs = {y},
                .cost = cost,
                .backward_cost = {0, (weighted ? 2 : 1) * cost.bytes},
                .saved = {p.slot_of_row}};
  if (weighted) {
    record.inputs.push_back(probabilities);
    record.saved.insert(record.saved.end(), {p.row_of_slot, probabilities.value});
    if (probabilities.needs_gradient()) record.saved.push_back(x.value);
  }
  record.backward = [rows = p.rows, tokens = p.tokens, topk = p.topk, weighted](BackwardContext& ctx) {
    Device& dev = ctx.device();
    const Tensor& dy = ctx.output_gradient();
    const int64_t cols = dy.size(1);
    const kernels::ExpertPermutation& kernel = kernels_of(dev);
    if (weighted && ctx.needs(1)) {
      const Tensor dweights = Tensor::empty(dev, ctx.saved(2).shape());
      launch(dev, kernel.unpermute_backward_weights, dy, ctx.saved(3), ctx.saved(1), dweights, tokens, topk,
             cols);
      ctx.accumulate_gradient(1, dweights);
    }
    if (!ctx.needs(0)) return;
    const Tensor dx = Tensor::empty(dev, {rows, cols}, dy.dtype());
    launch(dev, kernel.permute, dy, ctx.saved(0), weighted ? ctx.saved(2) : Tensor(), dx, rows, topk, cols);
    ctx.accumulate_gradient(0, dx);
  };
  return tape.record(std::move(record))[0];
}

Var expert_activation(Tape& tape, const Var& x, const ExpertPermutation& permutation,
                      const kernels::ActivationFunction& activation, const Var& weights) {
  const int64_t rows = permutation.rows, width = x.size(1);
  check_rows("expert_activation", x.value, rows);
  const bool weighted = weights.value.defined();
  CAPSTAN_ASSERT((!activation.gated || width % 2 == 0) &&
                     (!weighted || (weights.dtype() == DType::f32 && weights.value.elements() == rows)),
                 "expert_activation: x " + x.value.text());
  const int64_t cols = activation.gated ? width / 2 : width;
  const Tensor used = permutation.rows_used();
  const auto activate = [activation, rows, cols](StepContext& context, const Tensor& from,
                                                 const Tensor& count, const Tensor& by) {
    Tensor to = tensor_of_rows(context, {rows, cols}, from.dtype());
    launch(context.device, context.device.table().activation->expert_forward, activation, from, by, count, to,
           rows, cols);
    return to;
  };
  const Tensor y = activate(tape.context(), x.value, used, weights.value);
  const auto bytes = static_cast<double>(x.value.bytes() + y.bytes());
  Record record{.name = "expert_activation",
                .inputs = {x},
                .outputs = {y},
                .cost = {0, bytes},
                .backward_cost = {0, bytes + static_cast<double>(x.value.bytes())},
                .saved = {x.value, used}};
  if (weighted) {
    record.inputs.push_back(weights);
    record.saved.push_back(weights.value);
  }
  record.backward = [activation, rows, cols, weighted](BackwardContext& ctx) {
    Device& dev = ctx.device();
    const Tensor& x_saved = ctx.saved(0);
    const Tensor dx =
        x_saved.unique() ? x_saved : tensor_of_rows(ctx.context(), x_saved.shape(), x_saved.dtype());
    const Tensor dweights =
        weighted && ctx.needs(1) ? tensor_of_rows(ctx.context(), ctx.saved(2).shape(), DType::f32) : Tensor();
    launch(dev, dev.table().activation->expert_backward, activation, ctx.output_gradient(), x_saved,
           weighted ? ctx.saved(2) : Tensor(), ctx.saved(1), dx, dweights, rows, cols);
    if (dweights.defined()) ctx.accumulate_gradient(1, dweights);
    ctx.accumulate_gradient(0, dx);
  };
  record.recompute_output = [activate, weighted](StepContext& context, std::span<const Tensor> saved) {
    return activate(context, saved[0], saved[1], weighted ? saved[2] : Tensor());
  };
  return tape.record(std::move(record))[0];
}

}  // namespace capstan::ops
