#include "ops/norm.hpp"

#include <algorithm>

#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "ops/linear_weight.hpp"
#include "ops/matmul.hpp"
#include "ops/norm_parameters.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {

void norm_backward(BackwardContext& ctx, const Parameter& gamma, const Parameter* beta,
                   const NormOptions& options, const kernels::NormRows& layout, bool adds) {
  Tensor dsum = std::move(ctx.output_gradient(0));
  const Tensor dy = std::move(ctx.output_gradient(1));
  Device& dev = ctx.device();
  // No gradient reaches the normalized output; only the sum is used.
  if (!dy.defined()) {
    accumulate_parameter_gradient(ctx, &gamma, {});
    accumulate_parameter_gradient(ctx, beta, {});
    if (adds) ctx.accumulate_gradient(1, dsum);
    ctx.accumulate_gradient(0, std::move(dsum));
    return;
  }
  const ParamStore& store = ctx.context().store;
  const Tensor dgamma = partial_for(dev, store, &gamma, layout.cols),
               dbeta = partial_for(dev, store, beta, layout.cols);
  Tensor dx;
  if (dsum.defined())
    dx = dsum.unique() ? dsum : copy_of(dsum);
  else
    dx = reuse_or_empty(dy);
  {
    const auto g = ctx.pin(gamma);
    const kernels::Norm& kernel = *dev.table().norm;
    launch(dev, kernel.backward_workspace(layout, dgamma.defined() || dbeta.defined()), kernel.backward,
           options.rms, layout, dy, ctx.saved(0), *g, options.gamma_offset, ctx.saved(1), ctx.saved(2), dx,
           dsum.defined(), dgamma, dbeta);
  }
  dsum = Tensor();
  accumulate_parameter_gradient(ctx, &gamma, dgamma);
  accumulate_parameter_gradient(ctx, beta, dbeta);
  if (adds) ctx.accumulate_gradient(1, dx);
  ctx.accumulate_gradient(0, std::move(dx));
}

}  // namespace

namespace {

// The normalized rows of a sum, with the statistics that are saved beside it computed again.
Tensor normalize_again(StepContext& context, const Tensor& sum, const Parameter& gamma, const Parameter* beta,
                       const NormOptions& options, const kernels::NormRows& layout) {
  Device& device = context.device;
  const Tensor y = Tensor::empty(device, sum.shape(), sum.dtype()),
               mean = options.rms ? Tensor() : Tensor::empty(device, {layout.rows}),
               rstd = Tensor::empty(device, {layout.rows});
  const ParamPin g(context.store, &gamma), b(context.store, beta);
  const kernels::Norm& kernel = *device.table().norm;
  launch(device, kernel.forward_workspace(layout), kernel.forward, options.rms, layout, sum, Tensor(),
         Tensor(), *g, options.gamma_offset, *b, options.epsilon, y, mean, rstd, QuantizedOutputTensors());
  return y;
}

}  // namespace

NormResult norm(Tape& tape, Var x, const Var& residual, const Parameter& gamma, const Parameter* beta,
                NormOptions options, const Parameter* reader) {
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
  std::shared_ptr<QuantizedInput> quantized = prepare_linear_input(tape, reader, rows);
  {
    const auto g = tape.pin(gamma), b = tape.pin(beta);
    CAPSTAN_ASSERT(g->elements() == cols,
                   "norm: `" + gamma.name() + "` is " + g->text() + ", x is " + x.value.text());
    const kernels::Norm& kernel = *device.table().norm;
    launch(device, kernel.forward_workspace(layout), kernel.forward, options.rms, layout, x.value,
           residual.value, adds ? sum : Tensor(), *g, options.gamma_offset, *b, options.epsilon, y, mean,
           rstd, quantized ? quantized->output : QuantizedOutputTensors());
  }
  record.inputs[0].value = x.value;
  x.value = Tensor();
  record.outputs = {sum, y};
  record.saved = {sum, mean, rstd};
  const auto bytes = static_cast<double>(sum.bytes());
  record.cost = {0, bytes * (adds ? 4 : 2)};
  record.backward_cost = {0, bytes * 4};
  record.backward = [&gamma, beta, options, layout, adds](BackwardContext& ctx) {
    norm_backward(ctx, gamma, beta, options, layout, adds);
  };
  record.recompute_output = [&gamma, beta, options, layout](StepContext& context,
                                                            std::span<const Tensor> saved) {
    return normalize_again(context, saved[0], gamma, beta, options, layout);
  };
  std::vector<Var> results = tape.record(std::move(record));
  results[1].quantized = std::move(quantized);
  return {std::move(results[0]), std::move(results[1])};
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
  const auto over_ranks = [parallel, &query_gamma](const Tensor& sums, const char* what) {
    if (!parallel.is_single())
      comm::all_reduce_sum_any(*parallel.group, sums.view({sums.elements()}), what + query_gamma.name());
  };

  const Tensor squares = Tensor::empty(device, {shape.rows, 2});
  launch(device, device.table().head_norm->squares, shape, qkv.value, squares);
  over_ranks(squares, "squares of ");
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
       .backward = [shape, over_ranks, &query_gamma, &key_gamma](BackwardContext& ctx) {
         Tensor dy = std::move(ctx.output_gradient());
         Device& dev = ctx.device();
         const kernels::HeadNorm& kernel = *dev.table().head_norm;
         const Tensor &x = ctx.saved(0), &sums = ctx.saved(1);
         const Tensor dx = reuse_or_empty(dy), dots = Tensor::empty(dev, {shape.rows, 2});
         const ParamStore& store = ctx.context().store;
         const Tensor dquery = partial_for(dev, store, &query_gamma, query_gamma.shape().elements()),
                      dkey = partial_for(dev, store, &key_gamma, key_gamma.shape().elements());
         {
           const auto q = ctx.pin(query_gamma), k = ctx.pin(key_gamma);
           launch(dev, kernel.dots_workspace(shape), kernel.dots, shape, dy, x, sums, *q, *k, dots);
           over_ranks(dots, "dot products of ");
           launch(dev, kernel.backward_workspace(shape, dquery.defined() || dkey.defined()), kernel.backward,
                  shape, dy, x, sums, dots, *q, *k, dx, dquery, dkey);
         }
         dy = Tensor();
         accumulate_parameter_gradient(ctx, &query_gamma, dquery);
         accumulate_parameter_gradient(ctx, &key_gamma, dkey);
         ctx.accumulate_gradient(0, dx);
       }})[0];
}

}  // namespace capstan::ops
