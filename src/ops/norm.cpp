#include "ops/norm.hpp"

#include <algorithm>

#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {

// The backward kernel also computes the gradients of gamma and beta (it accumulates, so they start at zero);
// the W step adds them to the gradient buffers.
Tensor partial_for(Device& device, const ParamStore& store, const Parameter* parameter, int64_t cols) {
  return parameter && store.trains(*parameter) ? Tensor::zeros(device, {cols}) : Tensor();
}
void hand_over(BackwardStep& step, const Parameter* parameter, const Tensor& partial) {
  if (!parameter) return;
  std::vector<Tensor> tensors;
  if (partial.defined()) tensors.push_back(partial);
  step.weight_gradient(*parameter, {}, std::move(tensors),
                       [](const Tensor& gradient, std::span<const Tensor> t) {
                         if (!t.empty()) add_into(t[0], gradient);
                       });
}
Tensor pinned(Tape& tape, const Parameter* parameter, std::vector<std::unique_ptr<ParamPin>>& pins) {
  if (!parameter) return {};
  pins.push_back(std::unique_ptr<ParamPin>(new ParamPin(tape.context().store, *parameter)));
  return **pins.back();
}

void norm_backward(BackwardStep& step, const Parameter& gamma, const Parameter* beta,
                   const NormOptions& options, const kernels::NormRows& layout, bool adds) {
  Tensor dsum = std::move(step.output_gradient(0));
  const Tensor dy = std::move(step.output_gradient(1));
  Device& dev = step.device();
  // Only the sum is used.
  if (!dy.defined()) {
    hand_over(step, &gamma, {});
    hand_over(step, beta, {});
    if (adds) step.give(1, dsum);
    step.give(0, std::move(dsum));
    return;
  }
  const ParamStore& store = step.context().store;
  const Tensor dgamma = partial_for(dev, store, &gamma, layout.cols),
               dbeta = partial_for(dev, store, beta, layout.cols);
  Tensor dx;
  if (dsum.defined())
    dx = dsum.unique() ? dsum : copy_of(dsum);
  else
    dx = reuse_or_empty(dy);
  {
    const auto g = step.pin(gamma);
    const kernels::Norm& kernel = *dev.table().norm;
    launch(dev, kernel.backward_workspace(layout, dgamma.defined() || dbeta.defined()), kernel.backward,
           options.rms, layout, dy, step.saved(0), *g, options.gamma_offset, step.saved(1), step.saved(2), dx,
           dsum.defined(), dgamma, dbeta);
  }
  dsum = Tensor();
  hand_over(step, &gamma, dgamma);
  hand_over(step, beta, dbeta);
  if (adds) step.give(1, dx);
  step.give(0, std::move(dx));
}

}  // namespace

NormResult norm(Tape& tape, Var x, const Var& residual, const Parameter& gamma, const Parameter* beta,
                NormOptions options) {
  Device& device = tape.device();
  const int64_t rows = x.size(0), cols = x.size(1);
  const bool adds = residual.value.defined();
  CAPSTAN_ASSERT(x.value.is_contiguous() && (!adds || residual.shape() == x.shape()),
                 "norm: x " + x.value.text());
  Record record{
      .name = adds ? "residual_norm" : "norm", .inputs = {{Tensor(), x.slot}}, .parameters = {&gamma}};
  if (adds) record.inputs.push_back(residual);
  if (beta) record.parameters.push_back(beta);

  const Tensor sum = adds ? reuse_or_empty(x.value) : x.value;
  const Tensor y = Tensor::empty(device, x.shape(), x.dtype());
  const Tensor mean = options.rms ? Tensor() : Tensor::empty(device, {rows});
  const Tensor rstd = Tensor::empty(device, {rows});
  const kernels::NormRows layout{rows, cols, 1, 0, cols};
  {
    const auto g = tape.pin(gamma);
    std::vector<std::unique_ptr<ParamPin>> pins;
    const Tensor b = pinned(tape, beta, pins);
    CAPSTAN_ASSERT(g->elements() == cols,
                   "norm: `" + gamma.name() + "` is " + g->text() + ", x is " + x.value.text());
    const kernels::Norm& kernel = *device.table().norm;
    launch(device, kernel.forward_workspace(layout), kernel.forward, options.rms, layout, x.value,
           residual.value, adds ? sum : Tensor(), *g, options.gamma_offset, b, options.epsilon, y, mean,
           rstd);
  }
  record.inputs[0].value = x.value;
  x.value = Tensor();
  record.outputs = {sum, y};
  record.saved = {sum, mean, rstd};
  const auto bytes = static_cast<double>(sum.bytes());
  record.cost = {0, bytes * (adds ? 4 : 2)};
  record.backward_cost = {0, bytes * 4};
  record.backward = [&gamma, beta, options, layout, adds](BackwardStep& step) {
    norm_backward(step, gamma, beta, options, layout, adds);
  };
  std::vector<Var> results = tape.record(std::move(record));
  return {std::move(results[0]), std::move(results[1])};
}

namespace {

// Query and key heads inside packed QKV as rows of the norm kernel; first: elements before the first of them.
struct HeadRows {
  kernels::NormRows rows;
  int64_t first;
};
HeadRows query_rows(kernels::QkvLayout q, int64_t tokens) {
  return {
      {tokens * q.heads(), q.head_dim, q.heads_per_group, q.head_dim, (q.heads_per_group + 2) * q.head_dim},
      0};
}
HeadRows key_rows(kernels::QkvLayout q, int64_t tokens) {
  return {{tokens * q.groups, q.head_dim, 1, 0, (q.heads_per_group + 2) * q.head_dim}, q.key(0)};
}
Tensor from(const Tensor& packed, int64_t first) {
  return packed.flat_range(first, packed.elements() - first, {packed.elements() - first});
}

}  // namespace

Var qk_norm(Tape& tape, const Var& qkv, kernels::QkvLayout layout, const QkNormParameters& parameters,
            NormOptions options) {
  Device& device = tape.device();
  const int64_t tokens = qkv.size(0);
  CAPSTAN_ASSERT(qkv.value.is_contiguous() && qkv.size(1) == layout.row(),
                 "qk_norm: qkv " + qkv.value.text());
  Record record{.name = "qk_norm", .inputs = {qkv}};
  const Tensor y = Tensor::empty(device, qkv.shape(), qkv.dtype());
  record.saved = {qkv.value};
  const auto normalize = [&](HeadRows heads, const Parameter& gamma, const Parameter* beta) {
    std::vector<std::unique_ptr<ParamPin>> pins;
    const Tensor g = pinned(tape, &gamma, pins), b = pinned(tape, beta, pins);
    CAPSTAN_ASSERT(g.elements() == layout.head_dim, "qk_norm: `" + gamma.name() + "` is " + g.text());
    const Tensor mean = options.rms ? Tensor() : Tensor::empty(device, {heads.rows.rows});
    const Tensor rstd = Tensor::empty(device, {heads.rows.rows});
    const kernels::Norm& kernel = *device.table().norm;
    launch(device, kernel.forward_workspace(heads.rows), kernel.forward, options.rms, heads.rows,
           from(qkv.value, heads.first), Tensor(), Tensor(), g, options.gamma_offset, b, options.epsilon,
           from(y, heads.first), mean, rstd);
    record.saved.push_back(mean);
    record.saved.push_back(rstd);
    record.parameters.push_back(&gamma);
    if (beta) record.parameters.push_back(beta);
  };
  normalize(query_rows(layout, tokens), *parameters.q_gamma, parameters.q_beta);
  normalize(key_rows(layout, tokens), *parameters.k_gamma, parameters.k_beta);
  const int64_t stride = (layout.heads_per_group + 2) * layout.head_dim;
  launch(device, device.table().elementwise->copy_rows, from(qkv.value, layout.value(0)), stride,
         from(y, layout.value(0)), stride, tokens * layout.groups, layout.head_dim);
  record.outputs = {y};
  record.cost = {0, 2.0 * static_cast<double>(y.bytes())};
  record.backward_cost = {0, 3.0 * static_cast<double>(y.bytes())};
  record.backward = [layout, parameters, options, tokens](BackwardStep& step) {
    Tensor dy = std::move(step.output_gradient());
    Device& dev = step.device();
    // Copies the gradients of the values.
    const Tensor dx = dy.unique() ? dy : copy_of(dy);
    dy = Tensor();
    const auto back = [&](HeadRows heads, const Parameter& gamma, const Parameter* beta, size_t saved) {
      const ParamStore& store = step.context().store;
      const Tensor dgamma = partial_for(dev, store, &gamma, layout.head_dim);
      const Tensor dbeta = partial_for(dev, store, beta, layout.head_dim);
      {
        const auto g = step.pin(gamma);
        const Tensor d = from(dx, heads.first);
        const kernels::Norm& kernel = *dev.table().norm;
        launch(dev, kernel.backward_workspace(heads.rows, dgamma.defined() || dbeta.defined()),
               kernel.backward, options.rms, heads.rows, d, from(step.saved(0), heads.first), *g,
               options.gamma_offset, step.saved(saved), step.saved(saved + 1), d, false, dgamma, dbeta);
      }
      hand_over(step, &gamma, dgamma);
      hand_over(step, beta, dbeta);
    };
    back(query_rows(layout, tokens), *parameters.q_gamma, parameters.q_beta, 1);
    back(key_rows(layout, tokens), *parameters.k_gamma, parameters.k_beta, 3);
    step.give(0, dx);
  };
  return tape.record(std::move(record))[0];
}

Var norm_across_heads(Tape& tape, const Var& qkv, kernels::QkvLayout layout, HeadCounts all,
                      const Parameter& query_gamma, const Parameter& key_gamma, NormOptions options,
                      const TensorParallel& parallel) {
  Device& device = tape.device();
  CAPSTAN_ASSERT(options.rms, "norm_across_heads: RMSNorm only");
  CAPSTAN_ASSERT(qkv.value.is_contiguous() && qkv.size(1) == layout.row(),
                 "norm_across_heads: qkv " + qkv.value.text());
  kernels::HeadNormShape shape;
  shape.qkv = layout;
  shape.rows = qkv.size(0);
  shape.query_cols = all.heads * layout.head_dim;
  shape.key_cols = all.groups * layout.head_dim;
  shape.gamma_offset = options.gamma_offset;
  shape.eps = options.epsilon;
  // Ranks that hold the same keys.
  const int64_t sharers = std::max<int64_t>(1, parallel.size() / all.groups);
  shape.counts_keys = parallel.rank() % sharers == 0;
  const auto over_ranks = [parallel](const Tensor& sums) {
    if (!parallel.alone()) comm::all_reduce_sum_any(*parallel.group, sums.view({sums.elements()}));
  };

  const Tensor squares = Tensor::empty(device, {shape.rows, 2});
  launch(device, device.table().head_norm->squares, shape, qkv.value, squares);
  over_ranks(squares);
  const Tensor y = Tensor::empty(device, qkv.shape(), qkv.dtype());
  {
    const auto q = tape.pin(query_gamma), k = tape.pin(key_gamma);
    CAPSTAN_ASSERT(
        q->elements() == layout.heads() * layout.head_dim && k->elements() == layout.groups * layout.head_dim,
        "norm_across_heads: `" + query_gamma.name() + "` is " + q->text() + ", `" + key_gamma.name() +
            "` is " + k->text());
    const kernels::HeadNorm& kernel = *device.table().head_norm;
    launch(device, kernel.forward_workspace(shape), kernel.forward, shape, qkv.value, squares, *q, *k, y);
  }
  const auto bytes = static_cast<double>(y.bytes());
  const double sent = 2.0 * static_cast<double>(squares.bytes()) * (parallel.size() - 1) / parallel.size();
  return tape.record(
      {.name = "norm_across_heads",
       .inputs = {qkv},
       .outputs = {y},
       .parameters = {&query_gamma, &key_gamma},
       .cost = {0, 3 * bytes, sent},
       .backward_cost = {0, 5 * bytes, sent},
       .saved = {qkv.value, squares},
       .backward = [shape, over_ranks, &query_gamma, &key_gamma](BackwardStep& step) {
         Tensor dy = std::move(step.output_gradient());
         Device& dev = step.device();
         const kernels::HeadNorm& kernel = *dev.table().head_norm;
         const Tensor &x = step.saved(0), &sums = step.saved(1);
         const Tensor dx = reuse_or_empty(dy), dots = Tensor::empty(dev, {shape.rows, 2});
         const ParamStore& store = step.context().store;
         const Tensor dquery = partial_for(dev, store, &query_gamma, query_gamma.shape().elements()),
                      dkey = partial_for(dev, store, &key_gamma, key_gamma.shape().elements());
         {
           const auto q = step.pin(query_gamma), k = step.pin(key_gamma);
           launch(dev, kernel.dots_workspace(shape), kernel.dots, shape, dy, x, sums, *q, *k, dots);
           over_ranks(dots);
           launch(dev, kernel.backward_workspace(shape, dquery.defined() || dkey.defined()), kernel.backward,
                  shape, dy, x, sums, dots, *q, *k, dx, dquery, dkey);
         }
         dy = Tensor();
         hand_over(step, &query_gamma, dquery);
         hand_over(step, &key_gamma, dkey);
         step.give(0, dx);
       }})[0];
}

}  // namespace capstan::ops
