#include "ops/linear_cross_entropy.hpp"

#include <algorithm>

#include "base/checked.hpp"
#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {

// Tensors of linear_cross_entropy(), and the chunks of rows in which it computes.
struct ChunkedLoss {
  Device& device;
  const kernels::CrossEntropy& kernel;
  const TensorParallel& parallel;
  float softcap;
  Tensor x, w, labels, weights;
  // Columns of this rank: the first one, all with padding, and those of the vocabulary.
  int64_t first, columns, true_columns;
  Tensor per_token;
  // Undefined where they are not needed.
  Tensor dx, dw;
  // The first chunk overwrites dw.
  bool dw_uninitialized;

  bool backward() const { return dx.defined() || dw.defined(); }
  void run();

 private:
  // Buffers of one chunk.
  struct Buffers {
    Tensor logits, dlogits, row_max, sums;
  };
  void run_chunk(const Buffers& buffers, int64_t begin, int64_t count) const;
  void losses_over_ranks(const Buffers& buffers, int64_t begin, int64_t count, const Tensor& logits,
                         const Tensor& dlogits) const;
};

void ChunkedLoss::run() {
  CategoryScope scope(MemoryCategory::workspace);
  const int64_t rows = x.size(0);
  const int64_t chunk = std::min(rows, kernel.chunk_rows(rows, columns, x.dtype(), backward()));
  Buffers buffers;
  buffers.logits = Tensor::empty(device, {chunk, columns}, kernel.logits_type(x.dtype()));
  CAPSTAN_ASSERT(buffers.logits.dtype() == DType::f32 || buffers.logits.dtype() == x.dtype(),
                 "linear_cross_entropy: logits " + buffers.logits.text() + " of " + x.text());
  // The GEMMs of the backward pass need operands of one type: gradients in 16 bits overwrite fp32 logits in
  // the first half of their rows.
  const bool narrows = backward() && buffers.logits.dtype() != x.dtype();
  buffers.dlogits = narrows ? buffers.logits.as_type(x.dtype()).slice(1, 0, columns) : buffers.logits;
  buffers.row_max = Tensor::empty(device, {chunk});
  buffers.sums = Tensor::empty(device, {2, chunk});
  for (int64_t begin = 0; begin < rows; begin += chunk)
    run_chunk(buffers, begin, std::min(chunk, rows - begin));
}

void ChunkedLoss::run_chunk(const Buffers& buffers, int64_t begin, int64_t count) const {
  const Tensor x_here = x.slice(0, begin, count), logits = buffers.logits.slice(0, 0, count);
  const Tensor dlogits = backward() ? buffers.dlogits.slice(0, 0, count) : Tensor();
  matmul(Transpose::no, Transpose::yes, x_here, w, logits);
  if (parallel.is_single())
    launch(device, kernel.full, logits, labels.flat_range(begin, count, {count}),
           weights.flat_range(begin, count, {count}), count, true_columns, columns, softcap,
           per_token.flat_range(begin, count, {count}), dlogits, buffers.dlogits.stride(0));
  else
    losses_over_ranks(buffers, begin, count, logits, dlogits);
  if (dx.defined()) matmul(Transpose::no, Transpose::no, dlogits, w, dx.slice(0, begin, count));
  if (dw.defined())
    matmul(Transpose::yes, Transpose::no, dlogits, x_here, dw, dw_uninitialized && begin == 0 ? 0.0f : 1.0f);
}

// Each rank has some of the columns: maxima and sums of the rows are reduced over the ranks.
void ChunkedLoss::losses_over_ranks(const Buffers& buffers, int64_t begin, int64_t count,
                                    const Tensor& logits, const Tensor& dlogits) const {
  const Tensor labels_here = labels.flat_range(begin, count, {count});
  const Tensor &row_max = buffers.row_max, &sums = buffers.sums;
  if (softcap > 0) launch(device, kernel.softcap, logits, softcap, logits.elements());
  const Tensor sum_exp = sums.flat_range(0, count, {count}), target = sums.flat_range(count, count, {count});
  launch(device, kernel.row_max, logits, count, true_columns, columns, row_max);
  comm::all_reduce_max(*parallel.group, row_max.flat_range(0, count, {count}), "maxima of logits");
  launch(device, kernel.row_sums, logits, labels_here, row_max, count, true_columns, columns, first, sum_exp,
         target);
  comm::all_reduce_sum_any(*parallel.group, sums.flat_range(0, 2 * count, {2 * count}), "sums of logits");
  launch(device, kernel.loss, row_max, sum_exp, target, count, per_token.flat_range(begin, count, {count}));
  if (backward())
    launch(device, kernel.backward, logits, labels_here, row_max, sum_exp,
           weights.flat_range(begin, count, {count}), count, true_columns, columns, first, softcap, dlogits,
           buffers.dlogits.stride(0));
}

// The GEMMs, and the reductions over tensor-parallel ranks.
Cost cost_of_loss(const ChunkedLoss& loss) {
  const int64_t rows = loss.x.size(0);
  const double gemms = 1.0 + (loss.dx.defined() ? 1 : 0) + (loss.dw.defined() ? 1 : 0);
  Cost cost = matmul_cost(rows, loss.columns, loss.x.size(1), loss.x.dtype());
  cost.flops *= gemms;
  cost.bytes *= gemms;
  // Gathers maxima and sums two numbers of each row.
  if (const int ranks = loss.parallel.size(); ranks > 1)
    cost.sent_bytes = 4.0 * static_cast<double>(rows) * (ranks - 1) * (1 + 4.0 / ranks);
  return cost;
}

}  // namespace

CrossEntropyResult linear_cross_entropy(Tape& tape, const Var& x, const Parameter& weight,
                                        const Tensor& labels, const Tensor& weights, int64_t vocab,
                                        const TensorParallel& parallel, float softcap) {
  Device& device = tape.device();
  const kernels::Table& table = device.table();
  ParamStore& store = tape.context().store;
  const int64_t rows = x.size(0);
  CAPSTAN_ASSERT(x.value.is_contiguous() && labels.elements() == rows && weights.elements() == rows,
                 "linear_cross_entropy: x must be contiguous, with a label and a weight for each row: x " +
                     x.value.text() + ", labels " + labels.text() + ", weights " + weights.text());
  const auto w = tape.pin(weight);
  CAPSTAN_ASSERT(w->rank() == 2 && w->size(1) == x.size(1),
                 "linear_cross_entropy: `" + weight.name() + "` is " + w->text());
  const int64_t columns = w->size(0), first = parallel.rank() * columns;

  const bool differentiates = tape.recording();
  const bool needs_dw = differentiates && store.is_trainable(weight),
             needs_dx = differentiates && x.needs_gradient();
  bool uninitialized = false;
  const Tensor gradient = !needs_dw  ? Tensor()
                          : rows > 0 ? store.gradient_for_write(weight, uninitialized)
                                     : store.gradient(weight);
  const Tensor dx = needs_dx ? Tensor::empty(device, x.shape(), x.dtype()) : Tensor();
  CrossEntropyResult result;
  result.per_token = Tensor::empty(device, {rows});
  ChunkedLoss loss{.device = device,
                   .kernel = *table.cross_entropy,
                   .parallel = parallel,
                   .softcap = softcap,
                   .x = x.value,
                   .w = *w,
                   .labels = labels,
                   .weights = weights,
                   .first = first,
                   .columns = columns,
                   .true_columns = std::clamp<int64_t>(vocab - first, 0, columns),
                   .per_token = result.per_token,
                   .dx = dx,
                   .dw = gradient,
                   .dw_uninitialized = uninitialized};
  loss.run();
  result.exact_sum = Tensor::empty(device, {1}, DType::f64);
  launch(device, table.elementwise->weighted_sum_workspace(rows), table.elementwise->weighted_sum,
         result.per_token, weights, rows, result.exact_sum, false);
  const Tensor sum = Tensor::empty(device, {1});
  matmul(Transpose::no, Transpose::no, result.per_token.view({1, rows}), weights.view({rows, 1}),
         sum.view({1, 1}));
  result.sum =
      tape.record({.name = "linear_cross_entropy",
                   .inputs = {x},
                   .outputs = {sum},
                   .parameters = {&weight},
                   .cost = cost_of_loss(loss),
                   .saved = {dx},
                   .backward = [&weight](BackwardContext& ctx) {
                     if (ctx.needs(0)) ctx.accumulate_gradient(0, ctx.saved(0));
                     // Computed in the forward pass; only counted here.
                     ctx.weight_gradient(weight, {}, {}, [](const Tensor&, std::span<const Tensor>) {});
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
  if (parallel.is_single()) {
    matmul(Transpose::no, Transpose::yes, x, w->slice(0, 0, vocab), logits);
    cap(logits);
    return logits;
  }
  const Tensor mine = Tensor::empty(device, {rows, columns});
  const Tensor all = Tensor::empty(device, {parallel.size() * rows, columns});
  matmul(Transpose::no, Transpose::yes, x, *w, mine);
  cap(mine);
  parallel.group->channel().start(comm::TransferBatch("logits").all_gather(mine, all)).wait();
  for (int rank = 0; rank < parallel.size(); ++rank) {
    const int64_t first = rank * columns, count = std::clamp<int64_t>(vocab - first, 0, columns);
    if (count > 0)
      launch(device, device.table().elementwise->copy_rows, all.slice(0, rank * rows, rows), columns,
             logits.slice(1, first, count), vocab, rows, count);
  }
  return logits;
}

}  // namespace capstan::ops
