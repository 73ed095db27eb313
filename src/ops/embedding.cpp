#include "ops/embedding.hpp"

#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {
// Weight gradient of a table: tensors are {dy, ids}.
BackwardStep::WeightFunction scatter_rows(int64_t first_row) {
  return [first_row](const Tensor& gradient, std::span<const Tensor> t) {
    Device& device = gradient.device();
    launch(device, device.table().embedding->backward, t[0], t[1], gradient, t[0].size(0), t[0].size(1),
           first_row, gradient.size(0));
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
  record.backward = [&table, position_table, first_row, cost](BackwardStep& step) {
    const Tensor dy = std::move(step.output_gradient());
    step.weight_gradient(table, cost, {dy, step.saved(0)}, scatter_rows(first_row));
    if (position_table) step.weight_gradient(*position_table, cost, {dy, step.saved(1)}, scatter_rows(0));
  };
  return tape.record(std::move(record))[0];
}

}  // namespace capstan::ops
