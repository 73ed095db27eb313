#include "ops/attention.hpp"

#include <algorithm>

#include "kernels/table.hpp"
#include "ops/norm_parameters.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

AttentionOptions::AttentionOptions(const kernels::QkvLayout& qkv)
    : layout(qkv),
      shape{.groups = qkv.groups,
            .heads_per_group = qkv.heads_per_group,
            .qk_dim = qkv.head_dim,
            .v_dim = qkv.head_dim} {}

Tensor packed_rows(Device& device, const Shape& rows, DType type, const kernels::QkvLayout& layout,
                   const kernels::AttentionShape& shape) {
  const bool gaps = shape.qk_dim < layout.head_dim || shape.v_dim < layout.head_dim;
  return gaps ? Tensor::zeros(device, rows, type) : Tensor::empty(device, rows, type);
}

double attention_flops(const AttentionOptions& o, int64_t seq) {
  const double all = static_cast<double>(seq) / (o.shape.causal ? 2 : 1),
               seen = o.shape.window > 0 ? std::min(static_cast<double>(o.shape.window), all) : all;
  return 2.0 *
         static_cast<double>((o.shape.qk_dim + o.shape.v_dim) * o.layout.heads() * o.shape.batch *
                             o.shape.seq) *
         seen;
}

std::vector<const Parameter*> AttentionOptions::parameters() const {
  std::vector<const Parameter*> all = transform.parameters();
  if (sink.logits) all.push_back(sink.logits);
  return all;
}

namespace {

// The elements of a parameter with one for each head, of the heads of the shape.
Tensor of_heads(const Tensor& x, const kernels::AttentionShape& shape, int64_t first_head) {
  return x.defined() ? x.flat_range(first_head, shape.heads(), {shape.heads()}) : x;
}

}  // namespace

void AttentionSink::apply(StepContext& context, const kernels::AttentionShape& shape, int64_t first_head,
                          const Heads& out, const Tensor& lse) const {
  if (!present) return;
  const ParamPin pinned(context.store, logits);
  launch(context.device, context.device.table().attention_sink->forward, shape,
         of_heads(*pinned, shape, first_head), out, lse);
}

void AttentionSink::backward(BackwardContext& ctx, const kernels::AttentionShape& shape, int64_t first_head,
                             const Heads& out, const Tensor& lse, const Heads& dout) const {
  if (!logits) return;
  const Tensor partial = partial_for(ctx.device(), ctx.context().store, logits, logits->shape().elements());
  if (partial.defined()) {
    const auto pinned = ctx.pin(logits);
    launch(ctx.device(), ctx.device().table().attention_sink->backward, shape,
           of_heads(*pinned, shape, first_head), out, lse, dout, of_heads(partial, shape, first_head));
  }
  accumulate_parameter_gradient(ctx, logits, partial);
}

namespace {

void check_rows(const Tensor& qkv, const AttentionOptions& options) {
  const int64_t rows = qkv.size(0);
  CAPSTAN_ASSERT(qkv.is_contiguous() && rows == options.shape.batch * options.shape.seq &&
                     qkv.size(1) == options.layout.row(),
                 "attention: qkv " + qkv.text());
  options.transform.check(qkv, options.layout);
  CAPSTAN_ASSERT(!options.sink.logits || options.sink.logits->shape() == Shape{options.layout.heads()},
                 "attention: sinks " + options.sink.logits->shape().text());
}

// The heads of packed QKV with transformed queries and keys in new memory; values stay in qkv.
QkvHeads transformed_apart(StepContext& context, const Tensor& qkv, const AttentionOptions& options) {
  const kernels::QkvLayout& layout = options.layout;
  CategoryScope scope(MemoryCategory::workspace);
  const int64_t d = layout.head_dim, q_size = qkv.size(0) * layout.heads() * d,
                k_size = qkv.size(0) * layout.groups * d;
  const Tensor both = Tensor::empty(context.device, {q_size + k_size}, qkv.dtype());
  const QkvHeads from = packed_heads(qkv, layout);
  QkvHeads to{
      contiguous_heads(both.flat_range(0, q_size, {q_size}), layout.groups, layout.heads_per_group, d),
      contiguous_heads(both.flat_range(q_size, k_size, {k_size}), layout.groups, 1, d), from.v};
  options.transform.apply(context, layout, from, to);
  return to;
}

// The heads that attention reads; transformed in place if `in_place`.
QkvHeads transformed(StepContext& context, const Tensor& qkv, const AttentionOptions& options,
                     bool in_place) {
  if (!in_place) return transformed_apart(context, qkv, options);
  QkvHeads heads = packed_heads(qkv, options.layout);
  if (!options.transform.is_identity()) options.transform.apply(context, options.layout, heads, heads);
  return heads;
}

}  // namespace

bool transforms_in_place(const Tensor& qkv, const QueryKeyTransform& transform) {
  return transform.is_identity() || (!transform.normalizes() && qkv.unique());
}

Var attention(Tape& tape, Var qkv, const AttentionOptions& options) {
  Device& device = tape.device();
  const kernels::QkvLayout& layout = options.layout;
  check_rows(qkv.value, options);
  const int64_t rows = qkv.size(0);
  CAPSTAN_ASSERT(!options.documents.start.defined() || options.documents.start.elements() == rows,
                 "attention: document starts " + options.documents.start.text());
  CAPSTAN_ASSERT(options.shape.dropout == 0 ||
                     (options.dropout_rows.defined() && options.dropout_rows.elements() == rows),
                 "attention: dropout needs the dropout row indices, got " + options.dropout_rows.text());
  const Tensor out = Tensor::empty(device, {rows, layout.heads() * options.shape.v_dim}, qkv.dtype());
  const Tensor lse = Tensor::empty(device, {options.shape.batch, layout.heads(), options.shape.seq});
  const kernels::AttentionShape shape = options.shape;
  const Tensor dropout_rows = options.shape.dropout > 0 ? options.dropout_rows : Tensor();
  const bool in_place = transforms_in_place(qkv.value, options.transform);
  {
    const QkvHeads x = transformed(tape.context(), qkv.value, options, in_place);
    const kernels::Attention& kernel = *device.table().attention;
    launch(device, kernel.forward_workspace(shape, qkv.dtype(), options.documents.count()), kernel.forward,
           shape, x.q, x.k, x.v, options.documents, dropout_rows,
           output_heads(out, layout, options.shape.v_dim), lse);
    options.sink.apply(tape.context(), shape, 0, output_heads(out, layout, shape.v_dim), lse);
  }

  const double flops = attention_flops(options, options.shape.seq);
  const auto bytes = static_cast<double>(qkv.value.bytes() + out.bytes());
  const double before = options.transform.cost(layout, qkv.value.bytes()).bytes,
               after = options.transform.backward_cost(layout, qkv.value.bytes()).bytes;
  const Tensor saved = qkv.value;
  return tape.record(
      {.name = "attention",
       .inputs = {std::move(qkv)},
       .outputs = {out},
       .parameters = options.parameters(),
       .cost = {flops, bytes + before},
       .backward_cost = {2 * flops, 2 * bytes + after},
       .saved = {saved, out, lse},
       .backward = [options, shape, dropout_rows, in_place](BackwardContext& ctx) {
         Device& dev = ctx.device();
         const Tensor& saved_qkv = ctx.saved(0);
         const Tensor dqkv = packed_rows(dev, saved_qkv.shape(), saved_qkv.dtype(), options.layout, shape);
         {
           const QkvHeads x = in_place ? packed_heads(saved_qkv, options.layout)
                                       : transformed_apart(ctx.context(), saved_qkv, options),
                          dx = packed_heads(dqkv, options.layout);
           const kernels::Attention& kernel = *dev.table().attention;
           launch(dev, kernel.backward_workspace(shape, saved_qkv.dtype(), options.documents.count()),
                  kernel.backward, shape, x.q, x.k, x.v,
                  output_heads(ctx.saved(1), options.layout, shape.v_dim), ctx.saved(2),
                  output_heads(ctx.output_gradient(), options.layout, shape.v_dim), options.documents,
                  dropout_rows, dx.q, dx.k, dx.v);
         }
         options.transform.backward(ctx, options.layout, saved_qkv, dqkv);
         options.sink.backward(ctx, shape, 0, output_heads(ctx.saved(1), options.layout, shape.v_dim),
                               ctx.saved(2),
                               output_heads(ctx.output_gradient(), options.layout, shape.v_dim));
         ctx.accumulate_gradient(0, dqkv);
       }})[0];
}

LayerKvCache LayerKvCache::empty(Device& device, const kernels::AttentionShape& shape, int64_t capacity,
                                 DType type) {
  return {Tensor::empty(device, {shape.batch, shape.groups, capacity, shape.qk_dim}, type),
          Tensor::empty(device, {shape.batch, shape.groups, capacity, shape.v_dim}, type)};
}

Var attention_decode(Tape& tape, Var qkv, const AttentionOptions& options, const LayerKvCache& cache,
                     const Tensor& past) {
  CAPSTAN_ASSERT(!tape.recording(), "attention_decode: a step of generation has no gradient");
  Device& device = tape.device();
  const kernels::QkvLayout& layout = options.layout;
  check_rows(qkv.value, options);
  const int64_t rows = qkv.size(0), capacity = cache.k.size(2);
  CAPSTAN_ASSERT(
      options.shape.seq <= capacity &&
          cache.k.shape() == (Shape{options.shape.batch, layout.groups, capacity, options.shape.qk_dim}) &&
          cache.v.shape() == (Shape{options.shape.batch, layout.groups, capacity, options.shape.v_dim}) &&
          cache.k.dtype() == qkv.dtype() && cache.v.dtype() == qkv.dtype(),
      "attention_decode: qkv " + qkv.value.text() + ", cache " + cache.k.text());
  const Tensor out = Tensor::empty(device, {rows, layout.heads() * options.shape.v_dim}, qkv.dtype());
  kernels::AttentionShape shape = options.shape;
  shape.dropout = 0;
  const QkvHeads x =
      transformed(tape.context(), qkv.value, options, transforms_in_place(qkv.value, options.transform));
  const kernels::Attention& kernel = *device.table().attention;
  const Heads heads = output_heads(out, layout, shape.v_dim);
  Tensor lse;
  if (options.sink.present) lse = Tensor::empty(device, {shape.batch, layout.heads(), shape.seq});
  launch(device, kernel.decode_workspace(shape, qkv.dtype(), capacity), kernel.decode, shape, x.q, x.k, x.v,
         cache.k, cache.v, past, capacity, heads, lse);
  options.sink.apply(tape.context(), shape, 0, heads, lse);
  return tape.record({.name = "attention_decode", .inputs = {std::move(qkv)}, .outputs = {out}})[0];
}

}  // namespace capstan::ops
