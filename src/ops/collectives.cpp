#include "ops/collectives.hpp"

#include "comm/reduce.hpp"
#include "ops/matmul.hpp"

namespace capstan::ops {

namespace {
Tensor summed_copy(const Tensor& x, comm::Communicator& group, std::string_view purpose) {
  Tensor y = copy_of(x);
  comm::all_reduce_sum_any(group, y.view({y.elements()}), purpose);
  return y;
}
// Bytes that one rank sends: two exchanges of (size - 1) / size of the tensor.
Cost cost_of(const Var& x, const comm::Communicator& group) {
  return {.sent_bytes = 2.0 * static_cast<double>(x.value.bytes()) * (group.size() - 1) / group.size()};
}
}  // namespace

Var all_reduce(Tape& tape, const Var& x, comm::Communicator& group, const std::string& purpose) {
  if (group.is_single()) return x;
  return tape.record({.name = "all_reduce_" + group.name(),
                      .inputs = {x},
                      .outputs = {summed_copy(x.value, group, purpose)},
                      .cost = cost_of(x, group),
                      .backward_cost = cost_of(x, group),
                      .backward = [&group, purpose](BackwardContext& ctx) {
                        ctx.accumulate_gradient(
                            0, summed_copy(ctx.output_gradient(), group, "gradients of " + purpose));
                      }})[0];
}

}  // namespace capstan::ops
