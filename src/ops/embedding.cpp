#include "ops/embedding.hpp"

#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {
// Weight gradient of a table: tensors are {dy, ids}.
BackwardContext::WeightFunction scatter_rows(int64_t first_row) {
  return [first_row](const Tensor& gradient, std::span<const Tensor> t) {
    Device& device = gradient.device();
    const kernels::Embedding& kernel = *device.table().embedding;
    const int64_t rows = t[0].size(0), cols = t[0].size(1), rows_here = gradient.size(0);
    launch(device, kernel.backward_workspace(rows, cols, rows_here), kernel.backward, t[0], t[1], gradient,
           rows, cols, first_row, rows_here);
  };
}
}  // namespace

Var embedding(Tape& tape, const Tensor& ids, const Parameter& table, const Parameter* position_table,
              const Tensor& positions, int64_t first_row) {
  Device& device = tape.device();
  const int64_t rows = ids.elements();
  CAPSTAN_ASSERT(!position_table || (positions.defined() && positions.elements() == rows),
                 "embedding: positions " + positions.text() + " for ids " + ids.text());
  const auto t = tape.pin(table);
  CAPSTAN_ASSERT(t->rank() == 2, "embedding: `" + table.name() + "` is " + t->text());
  const int64_t cols = t->size(1), table_rows = t->size(0);
  const Tensor y = Tensor::empty(device, {rows, cols}, t->dtype());
  Record record{.name = "embedding", .parameters = {&table}};
  if (position_table) {
    const auto p = tape.pin(*position_table);
    launch(device, device.table().embedding->forward, *t, ids, *p, positions, y, rows, cols, first_row,
           table_rows);
    record.parameters.push_back(position_table);
  } else {
    launch(device, device.table().embedding->forward, *t, ids, Tensor(), Tensor(), y, rows, cols, first_row,
           table_rows);
  }
  record.outputs = {y};
  const Cost cost{0, static_cast<double>(2 * y.bytes())};
  record.cost = cost;
  record.saved = {ids};
  if (position_table) record.saved.push_back(positions);
  record.backward = [&table, position_table, first_row, cost](BackwardContext& ctx) {
    const Tensor dy = std::move(ctx.output_gradient());
    ctx.weight_gradient(table, cost, {dy, ctx.saved(0)}, scatter_rows(first_row));
    if (position_table) ctx.weight_gradient(*position_table, cost, {dy, ctx.saved(1)}, scatter_rows(0));
  };
  return tape.record(std::move(record))[0];
}

}  // namespace capstan::ops
