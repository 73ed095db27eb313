#include "ops/rope.hpp"

#include "kernels/table.hpp"
#include "ops/norm_parameters.hpp"

namespace capstan::ops {

namespace {
class QkNormPins {
 public:
  QkNormPins(ParamStore& store, const QkNormParameters& p)
      : q_gamma_(store, p.q_gamma),
        q_beta_(store, p.q_beta),
        k_gamma_(store, p.k_gamma),
        k_beta_(store, p.k_beta) {}
  arguments::QkNormWeights weights() const { return {*q_gamma_, *q_beta_, *k_gamma_, *k_beta_}; }

 private:
  ParamPin q_gamma_, q_beta_, k_gamma_, k_beta_;
};
}  // namespace

std::vector<const Parameter*> QueryKeyTransform::parameters() const {
  std::vector<const Parameter*> result;
  for (const Parameter* p : {norm.q_gamma, norm.q_beta, norm.k_gamma, norm.k_beta})
    if (p) result.push_back(p);
  return result;
}

void QueryKeyTransform::check(const Tensor& qkv, const kernels::QkvLayout& layout) const {
  CAPSTAN_ASSERT(
      !rotates() || (positions.elements() == qkv.size(0) && table.rotary_dim() <= layout.head_dim),
      "rope: qkv " + qkv.text() + ", positions " + positions.text() + ", table " + table.cos.text());
  for (const Parameter* p : parameters())
    CAPSTAN_ASSERT(p->shape().elements() == layout.head_dim,
                   "qk_norm: `" + p->name() + "` is not one of heads of " + std::to_string(layout.head_dim));
}

kernels::RopeShape QueryKeyTransform::shape(const kernels::QkvLayout& layout, int64_t rows) const {
  using kernels::QkNorm;
  return {.rows = rows,
          .groups = layout.groups,
          .heads_per_group = layout.heads_per_group,
          .head_dim = layout.head_dim,
          .rotary_dim = table.rotary_dim(),
          .interleaved = interleaved,
          .norm = !normalizes()      ? QkNorm::none
                  : norm_options.rms ? QkNorm::rms
                                     : QkNorm::layer,
          .gamma_offset = norm_options.gamma_offset,
          .eps = norm_options.epsilon};
}

void QueryKeyTransform::apply(StepContext& context, const kernels::QkvLayout& layout, const QkvHeads& from,
                              const QkvHeads& to) const {
  const int64_t rows = from.q.first.elements() / layout.row();
  const QkNormPins pins(context.store, norm);
  launch(context.device, context.device.table().rope->forward, shape(layout, rows), from.q, from.k,
         arguments::RopeAngles{table.cos, table.sin, positions}, pins.weights(), to.q, to.k);
}

void QueryKeyTransform::backward(BackwardContext& ctx, const kernels::QkvLayout& layout, const Tensor& qkv,
                                 const Tensor& dqkv) const {
  if (is_identity()) return;
  Device& device = ctx.device();
  ParamStore& store = ctx.context().store;
  const auto gradient_of = [&](const Parameter* p) { return partial_for(device, store, p, layout.head_dim); };
  const arguments::QkNormGradients gradients{gradient_of(norm.q_gamma), gradient_of(norm.q_beta),
                                             gradient_of(norm.k_gamma), gradient_of(norm.k_beta)};
  const kernels::RopeShape rope = shape(layout, dqkv.size(0));
  const kernels::Rope& kernel = *device.table().rope;
  {
    const QkvHeads d = packed_heads(dqkv, layout), x = normalizes() ? packed_heads(qkv, layout) : QkvHeads();
    const QkNormPins pins(store, norm);
    launch(device, kernel.backward_workspace(rope, gradients.defined()), kernel.backward, rope, d.q, d.k, x.q,
           x.k, arguments::RopeAngles{table.cos, table.sin, positions}, pins.weights(), d.q, d.k, gradients);
  }
  accumulate_parameter_gradient(ctx, norm.q_gamma, gradients.q_gamma);
  accumulate_parameter_gradient(ctx, norm.q_beta, gradients.q_beta);
  accumulate_parameter_gradient(ctx, norm.k_gamma, gradients.k_gamma);
  accumulate_parameter_gradient(ctx, norm.k_beta, gradients.k_beta);
}

Cost QueryKeyTransform::cost(const kernels::QkvLayout& layout, int64_t qkv_bytes) const {
  if (is_identity()) return {};
  const auto per_group = static_cast<double>(layout.heads_per_group);
  return {0, 2.0 * static_cast<double>(qkv_bytes) * (per_group + 1) / (per_group + 2)};
}
Cost QueryKeyTransform::backward_cost(const kernels::QkvLayout& layout, int64_t qkv_bytes) const {
  return {0, cost(layout, qkv_bytes).bytes * (normalizes() ? 2.5 : 1.0)};
}

}  // namespace capstan::ops
