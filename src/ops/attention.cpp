#include "ops/attention.hpp"

#include <algorithm>

#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

kernels::QkvLayout qkv_layout(int64_t row, int64_t heads_per_group, int64_t head_dim) {
  const int64_t group = (heads_per_group + 2) * head_dim;
  CAPSTAN_ASSERT(group > 0 && row % group == 0, "attention: a row of " + std::to_string(row) +
                                                    " elements does not consist of full groups of " +
                                                    std::to_string(group));
  return {row / group, heads_per_group, head_dim};
}

kernels::AttentionShape attention_shape(const AttentionOptions& o) {
  kernels::AttentionShape shape;
  shape.qkv = o.layout;
  shape.batch = o.batch;
  shape.seq = o.seq;
  shape.scale = o.scale;
  shape.softcap = o.softcap;
  shape.window = o.window;
  shape.causal = o.causal;
  shape.dropout = o.dropout;
  shape.dropout_key = o.dropout_key;
  shape.head_offset = o.head_offset;
  return shape;
}

double attention_flops(const AttentionOptions& o, int64_t seq) {
  const double all = static_cast<double>(seq) / (o.causal ? 2 : 1),
               seen = o.window > 0 ? std::min(static_cast<double>(o.window), all) : all;
  return 4.0 * static_cast<double>(o.layout.head_dim * o.layout.heads() * o.batch * o.seq) * seen;
}

Var attention(Tape& tape, const Var& qkv, const AttentionOptions& options) {
  Device& device = tape.device();
  const kernels::QkvLayout& layout = options.layout;
  const int64_t rows = qkv.size(0);
  CAPSTAN_ASSERT(
      qkv.value.is_contiguous() && rows == options.batch * options.seq && qkv.size(1) == layout.row(),
      "attention: qkv " + qkv.value.text());
  CAPSTAN_ASSERT(!options.document_start.defined() || options.document_start.elements() == rows,
                 "attention: document_start " + options.document_start.text());
  CAPSTAN_ASSERT(
      options.dropout == 0 || (options.dropout_rows.defined() && options.dropout_rows.elements() == rows),
      "attention: dropout needs the rows' ids, got " + options.dropout_rows.text());
  const Tensor out = Tensor::empty(device, {rows, layout.heads() * layout.head_dim}, qkv.dtype());
  const Tensor lse = Tensor::empty(device, {options.batch, layout.heads(), options.seq});
  const kernels::AttentionShape shape = attention_shape(options);
  const Tensor dropout_rows = options.dropout > 0 ? options.dropout_rows : Tensor();
  const kernels::Attention& kernel = *device.table().attention;
  launch(device, kernel.forward_workspace(shape, qkv.dtype()), kernel.forward, shape, qkv.value,
         options.document_start, dropout_rows, out, lse);

  const double flops = attention_flops(options, options.seq);
  const auto bytes = static_cast<double>(qkv.value.bytes() + out.bytes());
  return tape.record(
      {.name = "attention",
       .inputs = {qkv},
       .outputs = {out},
       .cost = {flops, bytes},
       .backward_cost = {2 * flops, 2 * bytes},
       .saved = {qkv.value, out, lse},
       .backward = [shape, documents = options.document_start, dropout_rows](BackwardStep& step) {
         Device& dev = step.device();
         const Tensor& saved_qkv = step.saved(0);
         const Tensor dqkv = Tensor::empty(dev, saved_qkv.shape(), saved_qkv.dtype());
         const kernels::Attention& family = *dev.table().attention;
         launch(dev, family.backward_workspace(shape, saved_qkv.dtype()), family.backward, shape, saved_qkv,
                step.saved(1), step.saved(2), step.output_gradient(), documents, dropout_rows, dqkv);
         step.give(0, dqkv);
       }})[0];
}

KvCache KvCache::empty(Device& device, kernels::QkvLayout layout, int64_t batch, int64_t capacity,
                       DType type) {
  const Shape shape{batch, layout.groups, capacity, layout.head_dim};
  return {Tensor::empty(device, shape, type), Tensor::empty(device, shape, type)};
}

Var attention_decode(Tape& tape, const Var& qkv, const AttentionOptions& options, const KvCache& cache,
                     int64_t past) {
  CAPSTAN_ASSERT(!tape.recording(), "attention_decode: a step of generation has no gradient");
  Device& device = tape.device();
  const kernels::QkvLayout& layout = options.layout;
  const int64_t rows = qkv.size(0), capacity = cache.k.size(2);
  CAPSTAN_ASSERT(rows == options.batch * options.seq && qkv.size(1) == layout.row() &&
                     past + options.seq <= capacity &&
                     cache.k.shape() == (Shape{options.batch, layout.groups, capacity, layout.head_dim}) &&
                     cache.k.shape() == cache.v.shape() && cache.k.dtype() == qkv.dtype(),
                 "attention_decode: qkv " + qkv.value.text() + ", cache " + cache.k.text() + ", past " +
                     std::to_string(past));
  const Tensor out = Tensor::empty(device, {rows, layout.heads() * layout.head_dim}, qkv.dtype());
  kernels::AttentionShape shape = attention_shape(options);
  shape.dropout = 0;
  const kernels::Attention& kernel = *device.table().attention;
  launch(device, kernel.decode_workspace(shape, qkv.dtype(), cache.k.dtype(), past), kernel.decode, shape,
         qkv.value, cache.k, cache.v, past, capacity, out);
  const double flops = 4.0 * static_cast<double>(layout.head_dim * layout.heads() * rows) *
                       (static_cast<double>(past) + static_cast<double>(options.seq + 1) / 2);
  return tape.record({.name = "attention_decode", .inputs = {qkv}, .outputs = {out}, .cost = {flops, 0}})[0];
}

}  // namespace capstan::ops
