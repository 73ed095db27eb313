#include "ops/latent_qkv.hpp"

#include "kernels/table.hpp"
#include "ops/attention.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

std::array<Var, 2> split_columns(Tape& tape, const Var& x, int64_t width) {
  const int64_t rows = x.size(0), columns = x.size(1), rest = columns - width;
  CAPSTAN_ASSERT(x.value.is_contiguous() && width > 0 && rest > 0,
                 "split_columns: " + std::to_string(width) + " columns of " + x.value.text());
  Device& device = tape.device();
  const Tensor first = Tensor::empty(device, {rows, width}, x.dtype()),
               second = Tensor::empty(device, {rows, rest}, x.dtype());
  copy_matrix(x.value.slice(1, 0, width), first);
  copy_matrix(x.value.slice(1, width, rest), second);
  const Cost cost{0, 2.0 * static_cast<double>(x.value.bytes())};
  std::vector<Var> parts =
      tape.record({.name = "split_columns",
                   .inputs = {x},
                   .outputs = {first, second},
                   .cost = cost,
                   .backward_cost = cost,
                   .backward = [rows, width, rest, type = x.dtype()](BackwardContext& ctx) {
                     const Tensor &from_first = ctx.output_gradient(0), &from_second = ctx.output_gradient(1);
                     const bool both = from_first.defined() && from_second.defined();
                     const Shape shape{rows, width + rest};
                     const Tensor dx = both ? Tensor::empty(ctx.device(), shape, type)
                                            : Tensor::zeros(ctx.device(), shape, type);
                     if (from_first.defined()) copy_matrix(from_first, dx.slice(1, 0, width));
                     if (from_second.defined()) copy_matrix(from_second, dx.slice(1, width, rest));
                     ctx.accumulate_gradient(0, dx);
                   }});
  return {std::move(parts[0]), std::move(parts[1])};
}

namespace {

// Heads that begin at an element of a contiguous tensor.
Heads heads_from(const Tensor& x, int64_t first, const kernels::HeadStrides& strides) {
  const int64_t rest = x.elements() - first;
  return {x.flat_range(first, rest, {rest}), strides};
}

// A matrix with a row for each head of each token.
Tensor by_head(const Tensor& x, int64_t heads) {
  return x.view({x.size(0) * heads, x.size(1) / heads});
}

// The parts of queries and keys with RoPE, as the arguments of the kernel, which takes a query and a key for
// each group.
struct RotatedParts {
  Heads q, k;
};
RotatedParts of_packed(const Tensor& packed, const LatentHeads& h) {
  const kernels::QkvLayout layout = h.layout();
  return {heads_from(packed, h.nope_dim, layout.strides()),
          heads_from(packed, layout.key(0) + h.nope_dim, layout.strides())};
}
Heads of_queries(const Tensor& q, const LatentHeads& h) {
  return heads_from(q, h.nope_dim, {h.heads * h.qk_dim(), h.qk_dim(), h.qk_dim()});
}
kernels::RopeShape rope_shape(const LatentHeads& h, int64_t rows) {
  return {.rows = rows,
          .groups = h.heads,
          .heads_per_group = 1,
          .head_dim = h.rope_dim,
          .rotary_dim = h.rope_dim,
          .interleaved = true};
}

// The parts that are copied as they are: queries and keys without RoPE, and values. `back`: from packed QKV.
void copy_plain_queries(const Tensor& q, const Tensor& packed, const LatentHeads& h, bool back) {
  const Tensor here = by_head(q, h.heads).slice(1, 0, h.nope_dim),
               there = by_head(packed, h.heads).slice(1, 0, h.nope_dim);
  back ? copy_matrix(there, here) : copy_matrix(here, there);
}
void copy_plain_keys_values(const Tensor& kv, const Tensor& packed, const LatentHeads& h, bool back) {
  const Tensor from = by_head(kv, h.heads), to = by_head(packed, h.heads);
  const auto copy = [&](int64_t column, int64_t packed_column, int64_t width) {
    const Tensor here = from.slice(1, column, width), there = to.slice(1, packed_column, width);
    back ? copy_matrix(there, here) : copy_matrix(here, there);
  };
  copy(0, h.layout().key(0), h.nope_dim);
  copy(h.nope_dim, h.layout().value(0), h.value_dim);
}

// The gradients of q, and of k_rope for each head, [heads, N, rope_dim].
struct RotatedGradients {
  Tensor dq, of_heads;
};
RotatedGradients rotate_back(Device& device, const Tensor& d_packed, const LatentHeads& h,
                             const RopeTable& table, const Tensor& positions) {
  const int64_t rows = d_packed.size(0);
  const Tensor dq = Tensor::empty(device, {rows, h.heads * h.qk_dim()}, d_packed.dtype());
  CategoryScope scope(MemoryCategory::workspace);
  const Tensor of_heads = Tensor::empty(device, {h.heads, rows, h.rope_dim}, d_packed.dtype());
  const RotatedParts from = of_packed(d_packed, h);
  const kernels::RopeShape shape = rope_shape(h, rows);
  const kernels::Rope& kernel = *device.table().rope;
  launch(device, kernel.backward_workspace(shape, false), kernel.backward, shape, from.q, from.k, Heads(),
         Heads(), arguments::RopeAngles{table.cos, table.sin, positions}, arguments::QkNormWeights(),
         of_queries(dq, h), heads_from(of_heads, 0, {h.rope_dim, rows * h.rope_dim, 0}),
         arguments::QkNormGradients());
  return {dq, of_heads};
}

}  // namespace

Var latent_qkv(Tape& tape, const Var& q, const Var& kv, const Var& k_rope, const LatentHeads& h,
               const RopeTable& table, const Tensor& positions) {
  Device& device = tape.device();
  const int64_t rows = q.size(0);
  CAPSTAN_ASSERT(
      q.shape() == (Shape{rows, h.heads * h.qk_dim()}) &&
          kv.shape() == (Shape{rows, h.heads * (h.nope_dim + h.value_dim)}) &&
          k_rope.shape() == (Shape{rows, h.rope_dim}) && q.value.is_contiguous() &&
          kv.value.is_contiguous() && k_rope.value.is_contiguous(),
      "latent_qkv: q " + q.value.text() + ", kv " + kv.value.text() + ", k_rope " + k_rope.value.text());
  CAPSTAN_ASSERT(table.rotary_dim() == h.rope_dim && positions.elements() == rows,
                 "latent_qkv: positions " + positions.text() + ", table " + table.cos.text());
  const Tensor packed = packed_rows(device, {rows, h.layout().row()}, q.dtype(), h.layout(),
                                    {.qk_dim = h.qk_dim(), .v_dim = h.value_dim});
  copy_plain_queries(q.value, packed, h, false);
  copy_plain_keys_values(kv.value, packed, h, false);
  const RotatedParts to = of_packed(packed, h);
  launch(device, device.table().rope->forward, rope_shape(h, rows), of_queries(q.value, h),
         heads_from(k_rope.value, 0, {h.rope_dim, 0, 0}),
         arguments::RopeAngles{table.cos, table.sin, positions}, arguments::QkNormWeights(), to.q, to.k);

  const auto bytes = static_cast<double>(packed.bytes()),
             read = static_cast<double>(q.value.bytes() + kv.value.bytes() + k_rope.value.bytes()),
             of_heads = static_cast<double>(h.heads) * static_cast<double>(k_rope.value.bytes());
  return tape.record(
      {.name = "latent_qkv",
       .inputs = {q, kv, k_rope},
       .outputs = {packed},
       .cost = {0, bytes + read},
       .backward_cost = {0, bytes + read + 2 * of_heads},
       .backward = [h, table, positions](BackwardContext& ctx) {
         Device& dev = ctx.device();
         const Tensor& d_packed = ctx.output_gradient();
         const int64_t tokens = d_packed.size(0);
         if (ctx.needs(0) || ctx.needs(2)) {
           const RotatedGradients d = rotate_back(dev, d_packed, h, table, positions);
           if (ctx.needs(0)) {
             copy_plain_queries(d.dq, d_packed, h, true);
             ctx.accumulate_gradient(0, d.dq);
           }
           if (ctx.needs(2)) {
             const Tensor dk = Tensor::empty(dev, {tokens, h.rope_dim}, d_packed.dtype());
             launch(dev, dev.table().elementwise->sum_parts, d.of_heads, h.heads, dk, dk.elements());
             ctx.accumulate_gradient(2, dk);
           }
         }
         if (!ctx.needs(1)) return;
         const Tensor dkv =
             Tensor::empty(dev, {tokens, h.heads * (h.nope_dim + h.value_dim)}, d_packed.dtype());
         copy_plain_keys_values(dkv, d_packed, h, true);
         ctx.accumulate_gradient(1, dkv);
       }})[0];
}

}  // namespace capstan::ops
