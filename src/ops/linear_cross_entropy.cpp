#include "ops/linear_cross_entropy.hpp"

#include <algorithm>

#include "base/checked.hpp"
#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

CrossEntropyResult linear_cross_entropy(Tape& tape, const Var& x, const Parameter& weight,
                                        const Tensor& labels, const Tensor& weights, int64_t vocab,
                                        const TensorParallel& parallel, float softcap) {
  Device& device = tape.device();
  const kernels::Table& table = device.table();
  ParamStore& store = tape.context().store;
  const int64_t rows = x.size(0), hidden = x.size(1);
  CAPSTAN_ASSERT(x.value.is_contiguous() && labels.elements() == rows && weights.elements() == rows,
                 "linear_cross_entropy: x " + x.value.text() + ", labels " + labels.text() + ", weights " +
                     weights.text());
  const auto w = tape.pin(weight);
  CAPSTAN_ASSERT(w->rank() == 2 && w->size(1) == hidden,
                 "linear_cross_entropy: `" + weight.name() + "` is " + w->text());
  const int64_t columns = w->size(0), first = parallel.rank() * columns;  // with padding
  const int64_t true_columns = std::clamp<int64_t>(vocab - first, 0, columns);

  const bool differentiates = tape.recording();
  const bool trains = differentiates && store.trains(weight), needs_dx = differentiates && x.needs_gradient();
  bool uninitialized = false;
  const Tensor gradient = !trains    ? Tensor()
                          : rows > 0 ? store.gradient_for_write(weight, uninitialized)
                                     : store.gradient(weight);
  const Tensor dx = needs_dx ? Tensor::empty(device, x.shape(), x.dtype()) : Tensor();
  const Tensor per_token = Tensor::empty(device, {rows});
  {
    CategoryScope scope(MemoryCategory::workspace);
    const bool backward = trains || needs_dx;
    const int64_t chunk = std::min(rows, table.cross_entropy->chunk_rows(rows, columns, x.dtype(), backward));
    const Tensor logit_buffer =
        Tensor::empty(device, {chunk, columns}, table.cross_entropy->logits_type(x.dtype()));
    CAPSTAN_ASSERT(logit_buffer.dtype() == DType::f32 || logit_buffer.dtype() == x.dtype(),
                   "linear_cross_entropy: logits " + logit_buffer.text() + " of " + x.value.text());
    // The GEMMs of the backward pass need operands of one type: bf16 gradients overwrite fp32 logits in the
    // first half of their rows.
    const bool narrows = backward && logit_buffer.dtype() != x.dtype();
    const Tensor dlogit_buffer =
        narrows ? logit_buffer.as_type(x.dtype()).slice(1, 0, columns) : logit_buffer;
    const Tensor row_max = Tensor::empty(device, {chunk}), sums = Tensor::empty(device, {2, chunk});
    for (int64_t begin = 0; begin < rows; begin += chunk) {
      const int64_t count = std::min(chunk, rows - begin);
      const Tensor x_here = x.value.slice(0, begin, count), logits = logit_buffer.slice(0, 0, count);
      const Tensor labels_here = labels.flat_range(begin, count, {count}),
                   weights_here = weights.flat_range(begin, count, {count}),
                   losses = per_token.flat_range(begin, count, {count});
      const Tensor dlogits = backward ? dlogit_buffer.slice(0, 0, count) : Tensor();
      const int64_t dlogits_stride = dlogit_buffer.stride(0);
      matmul(Transpose::no, Transpose::yes, x_here, *w, logits);
      if (parallel.alone()) {
        launch(device, table.cross_entropy->full, logits, labels_here, weights_here, count, true_columns,
               columns, softcap, losses, dlogits, dlogits_stride);
      } else {
        if (softcap > 0) launch(device, table.cross_entropy->softcap, logits, softcap, logits.elements());
        const Tensor sum_exp = sums.flat_range(0, count, {count}),
                     target = sums.flat_range(count, count, {count});
        launch(device, table.cross_entropy->row_max, logits, count, true_columns, columns, row_max);
        comm::all_reduce_max(*parallel.group, row_max.flat_range(0, count, {count}));
        launch(device, table.cross_entropy->row_sums, logits, labels_here, row_max, count, true_columns,
               columns, first, sum_exp, target);
        comm::all_reduce_sum_any(*parallel.group, sums.flat_range(0, 2 * count, {2 * count}));
        launch(device, table.cross_entropy->loss, row_max, sum_exp, target, count, losses);
        if (backward)
          launch(device, table.cross_entropy->backward, logits, labels_here, row_max, sum_exp, weights_here,
                 count, true_columns, columns, first, softcap, dlogits, dlogits_stride);
      }
      if (needs_dx) matmul(Transpose::no, Transpose::no, dlogits, *w, dx.slice(0, begin, count));
      if (trains)
        matmul(Transpose::yes, Transpose::no, dlogits, x_here, gradient,
               uninitialized && begin == 0 ? 0.0f : 1.0f);
    }
  }
  CrossEntropyResult result;
  result.per_token = per_token;
  result.exact_sum = Tensor::empty(device, {1}, DType::f64);
  launch(device, table.elementwise->weighted_sum_workspace(rows), table.elementwise->weighted_sum, per_token,
         weights, rows, result.exact_sum, false);
  const Tensor sum = Tensor::empty(device, {1});
  matmul(Transpose::no, Transpose::no, per_token.view({1, rows}), weights.view({rows, 1}), sum.view({1, 1}));

  const double gemms = 1.0 + (needs_dx ? 1 : 0) + (trains ? 1 : 0);
  Cost cost = matmul_cost(rows, columns, hidden, x.dtype());
  cost.flops *= gemms;
  cost.bytes *= gemms;
  if (!parallel.alone())  // gathers maxima, sums two numbers
    cost.sent = 4.0 * static_cast<double>(rows) * (parallel.size() - 1) * (1 + 4.0 / parallel.size());
  result.sum =
      tape.record({.name = "linear_cross_entropy",
                   .inputs = {x},
                   .outputs = {sum},
                   .parameters = {&weight},
                   .cost = cost,
                   .saved = {dx},
                   .backward = [&weight](BackwardStep& step) {
                     if (step.needs(0)) step.accumulate_gradient(0, step.saved(0));
                     // Computed in the forward pass; only counted here.
                     step.weight_gradient(weight, {}, {}, [](const Tensor&, std::span<const Tensor>) {});
                   }})[0];
  return result;
}

Tensor head_logits(Tape& tape, const Tensor& x, const Parameter& weight, int64_t vocab,
                   const TensorParallel& parallel, float softcap) {
  const auto w = tape.pin(weight);
  const int64_t rows = x.size(0), columns = w->size(0);
  CAPSTAN_ASSERT(w->rank() == 2 && w->size(1) == x.size(1) && vocab <= columns * parallel.size(),
                 "head_logits: `" + weight.name() + "` is " + w->text() + ", x is " + x.text());
  Device& device = tape.device();
  Tensor logits = Tensor::empty(device, {rows, vocab});
  const auto cap = [&](const Tensor& t) {
    if (softcap > 0) launch(device, device.table().cross_entropy->softcap, t, softcap, t.elements());
  };
  if (parallel.alone()) {
    matmul(Transpose::no, Transpose::yes, x, w->slice(0, 0, vocab), logits);
    cap(logits);
    return logits;
  }
  const Tensor mine = Tensor::empty(device, {rows, columns});
  const Tensor all = Tensor::empty(device, {parallel.size() * rows, columns});
  matmul(Transpose::no, Transpose::yes, x, *w, mine);
  cap(mine);
  parallel.group->channel().start(comm::Batch().all_gather(mine, all)).wait();
  for (int rank = 0; rank < parallel.size(); ++rank) {
    const int64_t first = rank * columns, count = std::clamp<int64_t>(vocab - first, 0, columns);
    if (count > 0)
      launch(device, device.table().elementwise->copy_rows, all.slice(0, rank * rows, rows), columns,
             logits.slice(1, first, count), vocab, rows, count);
  }
  return logits;
}

}  // namespace capstan::ops
