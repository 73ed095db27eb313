#include "ops/norm_parameters.hpp"

#include "ops/matmul.hpp"

namespace capstan::ops {

Tensor partial_for(Device& device, const ParamStore& store, const Parameter* parameter, int64_t cols) {
  return parameter && store.is_trainable(*parameter) ? Tensor::zeros(device, {cols}) : Tensor();
}

void accumulate_parameter_gradient(BackwardContext& ctx, const Parameter* parameter, const Tensor& partial) {
  if (!parameter) return;
  std::vector<Tensor> tensors;
  if (partial.defined()) tensors.push_back(partial);
  ctx.weight_gradient(*parameter, {}, std::move(tensors),
                      [](const Tensor& gradient, std::span<const Tensor> t) {
                        if (!t.empty()) add_into(t[0], gradient);
                      });
}

}  // namespace capstan::ops
