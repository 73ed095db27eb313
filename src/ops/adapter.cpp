#include "ops/adapter.hpp"

#include <utility>

#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {

// The columns of one group, and the rows of B that produce them.
Tensor columns_of(const Tensor& y, const ColumnSegments& segments, int64_t group) {
  const int64_t width = y.size(1) / segments.groups;
  return y.slice(1, group * width + segments.begin, segments.count);
}
Tensor rows_of(const Tensor& b, const ColumnSegments& segments, int64_t group) {
  return b.slice(0, group * segments.count, segments.count);
}

}  // namespace

Var low_rank_add(Tape& tape, Var y, const Var& h, const Parameter& b, float scale, ColumnSegments segments) {
  if (segments.count == 0) segments = {1, 0, y.size(1)};
  const int64_t rows = h.size(0), rank = h.size(1), columns = segments.groups * segments.count;
  CAPSTAN_ASSERT(y.size(0) == rows && y.value.is_contiguous() && y.size(1) % segments.groups == 0 &&
                     segments.begin + segments.count <= y.size(1) / segments.groups &&
                     b.shape() == (Shape{columns, rank}),
                 "low_rank_add: y " + y.value.text() + ", h " + h.value.text() + ", `" + b.name() + "` " +
                     b.shape().text());
  const Tensor result = y.value.unique() ? y.value : copy_of(y.value);
  {
    const auto w = tape.pin(b);
    for (int64_t g = 0; g < segments.groups; ++g)
      matmul(Transpose::no, Transpose::yes, h.value, rows_of(*w, segments, g),
             columns_of(result, segments, g), 1, scale);
  }
  y.value = Tensor();
  const Cost cost = matmul_cost(rows, columns, rank, h.dtype());
  return tape.record({.name = "low_rank_add",
                      .inputs = {Var{result, y.slot}, h},
                      .outputs = {result},
                      .parameters = {&b},
                      .cost = cost,
                      .backward_cost = cost,
                      .saved = {h.value},
                      .backward = [&b, scale, segments, cost](BackwardContext& ctx) {
                        const Tensor dy = ctx.output_gradient();
                        const Tensor& low = ctx.saved(0);
                        const Tensor dh = Tensor::empty(ctx.device(), low.shape(), low.dtype());
                        {
                          const auto w = ctx.pin(b);
                          for (int64_t g = 0; g < segments.groups; ++g)
                            matmul(Transpose::no, Transpose::no, columns_of(dy, segments, g),
                                   rows_of(*w, segments, g), dh, g > 0 ? 1.0f : 0.0f, scale);
                        }
                        ctx.weight_gradient(
                            b, cost, {dy, low},
                            [scale, segments](const Tensor& gradient, std::span<const Tensor> t) {
                              for (int64_t g = 0; g < segments.groups; ++g)
                                matmul(Transpose::yes, Transpose::no, columns_of(t[0], segments, g), t[1],
                                       rows_of(gradient, segments, g), 1, scale);
                            });
                        ctx.accumulate_gradient(1, dh);
                        ctx.accumulate_gradient(0, std::move(ctx.output_gradient()));
                      }})[0];
}

Tensor squared_row_lengths(StepContext& context, const Parameter& weight, const Parameter& a,
                           const Parameter& b, float scale, comm::Communicator* group,
                           ColumnSegments segments) {
  Device& device = context.device;
  const ParamPin w(context.store, weight), first(context.store, a), second(context.store, b);
  const int64_t out = w->size(0), in = w->size(1), rank = first->size(0);
  if (segments.count == 0) segments = {1, 0, out};
  const int64_t width = out / segments.groups;
  Tensor lengths = Tensor::empty(device, {segments.groups * segments.count});
  {
    CategoryScope scope(MemoryCategory::workspace);
    const Tensor p = Tensor::empty(device, {segments.count, rank}),
                 square = Tensor::empty(device, {rank, rank});
    matmul(Transpose::no, Transpose::yes, *first, *first, square);
    for (int64_t g = 0; g < segments.groups; ++g) {
      const Tensor rows = w->slice(0, g * width + segments.begin, segments.count);
      matmul(Transpose::no, Transpose::yes, rows, *first, p);
      const kernels::Adapter& kernel = *device.table().adapter;
      launch(device, kernel.row_lengths_workspace(rank), kernel.row_lengths, rows, p,
             rows_of(*second, segments, g), square, scale,
             lengths.slice(0, g * segments.count, segments.count), segments.count, in, rank);
    }
  }
  if (group && group->size() > 1)
    comm::all_reduce_sum_any(*group, lengths, "lengths of rows of `" + weight.name() + "`");
  return lengths;
}

namespace {

// The columns of the segments as [rows of all groups, count]; x is contiguous.
Tensor segment_columns(const Tensor& x, const ColumnSegments& segments) {
  return x.view({x.size(0) * segments.groups, x.size(1) / segments.groups})
      .slice(1, segments.begin, segments.count);
}
Tensor gathered(const Tensor& x, const ColumnSegments& segments) {
  Tensor copy = Tensor::empty(x.device(), {x.size(0), segments.groups * segments.count}, x.dtype());
  copy_matrix(segment_columns(x, segments), copy.view({x.size(0) * segments.groups, segments.count}));
  return copy;
}
void scatter(const Tensor& columns, const Tensor& x, const ColumnSegments& segments) {
  copy_matrix(columns.view({x.size(0) * segments.groups, segments.count}), segment_columns(x, segments));
}

}  // namespace

Var magnitude(Tape& tape, Var u, const Parameter& weight, const Parameter& a, const Parameter& b,
              const Parameter& m, float scale, comm::Communicator* group, ColumnSegments segments) {
  Device& device = tape.device();
  const int64_t rows = u.size(0), columns = m.shape().elements();
  const bool all = segments.count == 0;
  const Tensor lengths = squared_row_lengths(tape.context(), weight, a, b, scale, group, segments);
  CAPSTAN_ASSERT(lengths.elements() == columns && u.value.is_contiguous() && (!all || u.size(1) == columns),
                 "magnitude: u " + u.value.text() + ", `" + m.name() + "` " + m.shape().text());
  const Tensor before = all ? u.value : gathered(u.value, segments);
  const Tensor after = Tensor::empty(device, before.shape(), before.dtype());
  {
    const auto factors = tape.pin(m);
    const kernels::Adapter& kernel = *device.table().adapter;
    launch(device, kernel.scale_columns_workspace(columns), kernel.scale_columns, before, *factors, lengths,
           after, rows, columns);
  }
  Tensor result = after;
  if (!all) {
    result = u.value.unique() ? u.value : copy_of(u.value);
    scatter(after, result, segments);
  }
  u.value = Tensor();
  const int64_t in = weight.shape()[1], rank = a.shape()[0];
  const double bytes = 2 * static_cast<double>(before.bytes()) * (all ? 1 : 3);
  Cost cost = matmul_cost(columns, rank, in, before.dtype());
  cost.bytes += bytes;
  if (group && group->size() > 1)
    cost.sent_bytes = 2 * static_cast<double>(lengths.bytes()) * (group->size() - 1) / group->size();
  return tape.record({.name = "magnitude",
                      .inputs = {Var{result, u.slot}},
                      .outputs = {result},
                      // Not weight, a and b: row norms are constants here.
                      .parameters = {&m},
                      .cost = cost,
                      .backward_cost = {0, bytes},
                      .saved = {before, lengths},
                      .backward = [&m, rows, columns, all, segments](BackwardContext& ctx) {
                        Tensor dy = std::move(ctx.output_gradient());
                        const Tensor &kept = ctx.saved(0), &squared = ctx.saved(1);
                        Tensor part = all ? std::exchange(dy, {}) : gathered(dy, segments);
                        ctx.weight_gradient(
                            m, {0, 2 * static_cast<double>(kept.bytes())}, {part, kept, squared},
                            [rows, columns](const Tensor& gradient, std::span<const Tensor> t) {
                              Device& dev = gradient.device();
                              const kernels::Adapter& kernel = *dev.table().adapter;
                              launch(dev, kernel.magnitude_gradient_workspace(), kernel.magnitude_gradient,
                                     t[0], t[1], t[2], gradient, rows, columns);
                            });
                        if (!ctx.needs(0)) return;
                        const auto factors = ctx.pin(m);
                        const auto scaled = [&](const Tensor& from, const Tensor& to) {
                          const kernels::Adapter& kernel = *ctx.device().table().adapter;
                          launch(ctx.device(), kernel.scale_columns_workspace(columns), kernel.scale_columns,
                                 from, *factors, squared, to, rows, columns);
                        };
                        if (all) {
                          const Tensor du = reuse_or_empty(part);
                          scaled(part, du);
                          part = Tensor();
                          ctx.accumulate_gradient(0, du);
                          return;
                        }
                        const Tensor du = dy.unique() ? dy : copy_of(dy);
                        const Tensor changed = reuse_or_empty(part);
                        scaled(part, changed);
                        scatter(changed, du, segments);
                        dy = Tensor();
                        ctx.accumulate_gradient(0, du);
                      }})[0];
}

Var dropout_columns(Tape& tape, Var x, const Dropout& dropout, int64_t first_column) {
  if (dropout.p == 0) return x;
  const int64_t rows = x.size(0), columns = x.size(1);
  const auto drop = [=, p = dropout.p, key = dropout.key, dropout_rows = dropout.dropout_rows](
                        const Tensor& from, const Tensor& to) {
    Device& device = from.device();
    launch(device, device.table().elementwise->dropout, from, to, rows, columns, first_column, p, key,
           dropout_rows);
  };
  const Tensor y = Tensor::empty(tape.device(), x.shape(), x.dtype());
  drop(x.value, y);
  const Cost cost{0, 2.0 * static_cast<double>(y.bytes())};
  return tape.record({.name = "dropout_columns",
                      .inputs = {std::move(x)},
                      .outputs = {y},
                      .cost = cost,
                      .backward_cost = cost,
                      .backward = [drop](BackwardContext& ctx) {
                        Tensor dy = std::move(ctx.output_gradient());
                        const Tensor dx = reuse_or_empty(dy);
                        drop(dy, dx);
                        dy = Tensor();
                        ctx.accumulate_gradient(0, dx);
                      }})[0];
}

}  // namespace capstan::ops
