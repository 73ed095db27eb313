#include "ops/tensor_parallel.hpp"

#include <algorithm>
#include <deque>
#include <optional>

#include "base/checked.hpp"
#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "ops/linear.hpp"
#include "ops/linear_weight.hpp"
#include "ops/matmul.hpp"
#include "tensor/flat_range.hpp"
#include "tensor/launch.hpp"

namespace capstan::ops {

namespace {

// The blocks of rows of a GEMM that is computed block by block, on all ranks: with sharded rows, ranges of
// each rank's rows; else of all rows.
std::vector<FlatRange> chunks_of(int64_t rows, int64_t splits) {
  std::vector<FlatRange> chunks;
  const int64_t size = ceil_div(rows, std::max<int64_t>(1, std::min(splits, rows)));
  for (int64_t begin = 0; begin < rows; begin += size)
    chunks.push_back({begin, std::min(size, rows - begin)});
  return chunks;
}

double sent(const Tensor& x, const TensorParallel& parallel, int times) {
  return times * static_cast<double>(x.bytes()) * (parallel.size() - 1) / parallel.size();
}

// Gathers the rows of a row-sharded tensor, block by block. A block is ordered by rank: [T, count, columns].
class Gather {
 public:
  Gather(StepContext& context, const Tensor& mine, const TensorParallel& parallel, std::string purpose)
      : context_(context), mine_(mine), parallel_(parallel), purpose_(std::move(purpose)) {}
  // Starts the transfer of a block.
  void start(FlatRange range) {
    CategoryScope scope(MemoryCategory::workspace);
    blocks_.push_back(
        {range,
         Tensor::empty(mine_.device(), {parallel_.size() * range.count, mine_.size(1)}, mine_.dtype()),
         {}});
    Block& block = blocks_.back();
    traced(context_, 'C', "start gather of rows", [&] {
      block.transfers = parallel_.group->channel().start(
          comm::TransferBatch(purpose_).all_gather(rows_of(mine_, range), block.all));
    });
  }
  // The oldest block whose transfer was started.
  Tensor take() {
    Block block = std::move(blocks_.front());
    blocks_.pop_front();
    traced(context_, 'C', "wait for gather of rows", [&] { block.transfers.wait(); });
    return std::move(block.all);
  }

 private:
  StepContext& context_;
  struct Block {
    FlatRange range;
    Tensor all;
    comm::PendingTransfers transfers;
  };
  Tensor mine_;
  const TensorParallel& parallel_;
  std::string purpose_;
  std::deque<Block> blocks_;
};

Tensor gathered(StepContext& context, const Tensor& mine, const TensorParallel& parallel,
                std::string purpose) {
  Gather gather(context, mine, parallel, std::move(purpose));
  gather.start({0, mine.size(0)});
  return gather.take();
}

// y = op(x) for all rows of a row-sharded x: the next block arrives while the current one is computed.
// `gemm(x_part, y_part)` works on contiguous rows.
template <class Gemm>
Tensor gemm_of_gathered(StepContext& context, const Tensor& mine, int64_t columns,
                        const TensorParallel& parallel, std::string purpose, Gemm&& gemm) {
  const int64_t here = mine.size(0);
  Tensor y = Tensor::empty(mine.device(), {here * parallel.size(), columns}, mine.dtype());
  const auto chunks = chunks_of(here, parallel.splits);
  Gather gather(context, mine, parallel, std::move(purpose));
  gather.start(chunks[0]);
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (i + 1 < chunks.size()) gather.start(chunks[i + 1]);
    const Tensor all = gather.take();
    // One block holds all rows.
    if (chunks.size() == 1)
      gemm(all, y);
    else
      traced(context, 'F', "GEMM of a chunk", [&] {
        for (int r = 0; r < parallel.size(); ++r)
          gemm(all.slice(0, r * chunks[i].count, chunks[i].count),
               y.slice(0, r * here + chunks[i].begin, chunks[i].count));
      });
  }
  return y;
}

// Gathers the rows of a row-sharded tensor, block by block, into one tensor in global order. Uses sends and
// receives, because an all-gather would store the parts of a block side by side.
class RowGather {
 public:
  RowGather(StepContext& context, const Tensor& mine, const TensorParallel& parallel, std::string purpose)
      : context_(context), mine_(mine), parallel_(parallel), purpose_(std::move(purpose)) {
    CategoryScope scope(MemoryCategory::workspace);
    all_ = Tensor::empty(mine.device(), {parallel.size() * mine.size(0), mine.size(1)}, mine.dtype());
    copy_matrix(mine, rows_of(all_, part_of(parallel.rank(), {0, mine.size(0)})));
  }
  // The rows of a block that a rank has.
  FlatRange part_of(int rank, FlatRange range) const {
    return {rank * mine_.size(0) + range.begin, range.count};
  }
  const Tensor& all() const { return all_; }
  // Starts the transfer of a block.
  void start(FlatRange range) {
    comm::TransferBatch batch(purpose_);
    const int ranks = parallel_.size();
    for (int shift = 1; shift < ranks; ++shift) {
      const int to = (parallel_.rank() + shift) % ranks, from = (parallel_.rank() + ranks - shift) % ranks;
      batch.send(rows_of(mine_, range), to).receive(rows_of(all_, part_of(from, range)), from);
    }
    traced(context_, 'C', "start gather of rows",
           [&] { blocks_.push_back(parallel_.group->channel().start(std::move(batch))); });
  }
  // Waits for the oldest block whose transfer was started.
  void wait() {
    traced(context_, 'C', "wait for gather of rows", [&] { blocks_.front().wait(); });
    blocks_.pop_front();
  }

 private:
  StepContext& context_;
  Tensor mine_, all_;
  const TensorParallel& parallel_;
  std::string purpose_;
  std::deque<comm::PendingTransfers> blocks_;
};

// Returns all rows of a row-sharded dy, and computes dx = op(dy) of each block while the next one arrives.
template <class Gemm>
Tensor gather_beside_gemms(StepContext& context, const Tensor& dy, const Tensor& dx,
                           const TensorParallel& parallel, std::string purpose, Gemm&& gemm) {
  const auto chunks = chunks_of(dy.size(0), parallel.splits);
  RowGather gather(context, dy, parallel, std::move(purpose));
  gather.start(chunks[0]);
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (i + 1 < chunks.size()) gather.start(chunks[i + 1]);
    gather.wait();
    traced(context, 'F', "GEMM of a chunk", [&] {
      for (int r = 0; r < parallel.size(); ++r) {
        const FlatRange part = gather.part_of(r, chunks[i]);
        gemm(rows_of(gather.all(), part), rows_of(dx, part));
      }
    });
  }
  return gather.all();
}

// The sum over ranks of op(x): the sum of each block overlaps with the GEMM of the next. With `sequence`, the
// result is sharded by rows.
template <class Gemm>
class ReducedGemm {
 public:
  ReducedGemm(StepContext& context, const Tensor& x, int64_t columns, const TensorParallel& parallel,
              const std::string& purpose, Gemm gemm)
      : context_(context), parallel_(parallel) {
    const int64_t rows = x.size(0), ranks = parallel.shards_rows() ? parallel.size() : 1, here = rows / ranks;
    CAPSTAN_ASSERT(rows % ranks == 0, "rows of " + x.text() + " over " + std::to_string(ranks) + " ranks");
    sum_ = Tensor::empty(x.device(), {here, columns}, x.dtype());
    for (const FlatRange range : chunks_of(here, parallel.splits)) {
      if (!parallel.shards_rows()) {
        const Tensor y = rows_of(sum_, range);
        gemm(rows_of(x, range), y);
        finish_last();
        // Rows that do not divide evenly over the ranks are summed in one call.
        if (y.elements() % parallel.size() == 0)
          traced(context, 'C', "start sum of a chunk",
                 [&] { last_.emplace(comm::Reduction::all_reduce(*parallel.group, y, purpose)); });
        else
          comm::all_reduce_sum_any(*parallel.group, y.view({y.elements()}), purpose);
        continue;
      }
      CategoryScope scope(MemoryCategory::workspace);
      const Tensor y = Tensor::empty(x.device(), {ranks * range.count, columns}, x.dtype());
      if (range.count == here)
        gemm(x, y);
      else
        traced(context, 'F', "GEMM of a chunk", [&] {
          for (int64_t r = 0; r < ranks; ++r)
            gemm(x.slice(0, r * here + range.begin, range.count), y.slice(0, r * range.count, range.count));
        });
      finish_last();
      traced(context, 'C', "start sum of a chunk", [&] {
        last_.emplace(comm::Reduction::reduce_scatter(*parallel.group, y, rows_of(sum_, range), purpose));
      });
    }
  }
  Tensor finish() {
    finish_last();
    return std::move(sum_);
  }

 private:
  void finish_last() {
    if (last_) traced(context_, 'C', "wait for sum of a chunk", [&] { last_->finish(); });
    last_.reset();
  }
  StepContext& context_;
  const TensorParallel& parallel_;
  Tensor sum_;
  std::optional<comm::Reduction> last_;
};

// LinearWeight::multiply of one block of rows. Where it is all `rows`, keeps it for the weight gradient.
void multiply_keeping_all(const LinearWeight& w, const Tensor& from, const Tensor& to, int64_t rows,
                          GemmOperand& kept) {
  const bool all = from.size(0) == rows;
  GemmOperand operand = w.multiply(from, to, all);
  if (all) kept = std::move(operand);
}

void check_gemm(const char* name, const Parameter& weight, const Tensor& x) {
  const Shape& w = weight.shape();
  CAPSTAN_ASSERT(x.rank() == 2 && x.is_contiguous() && w.rank() == 2 && w[1] == x.size(1),
                 std::string(name) + ": `" + weight.name() + "` is " + w.text() + ", x is " + x.text());
}

}  // namespace

Tensor local_rows(const Tensor& x, const TensorParallel& parallel) {
  if (!parallel.shards_rows() || !x.defined()) return x;
  const int64_t rows = x.size(0) / parallel.size();
  return x.slice(0, parallel.rank() * rows, rows);
}

Var column_linear(Tape& tape, const Var& x, const Parameter& weight, const Parameter* bias,
                  const TensorParallel& parallel) {
  if (parallel.is_single()) return linear(tape, x, weight, bias);
  const int64_t rows = x.size(0) * (parallel.shards_rows() ? parallel.size() : 1);
  Record record{.name = "column_linear", .inputs = {x}, .parameters = {&weight}};
  check_gemm("column_linear", weight, x.value);
  const bool trainable = tape.context().store.is_trainable(weight);
  Tensor y;
  // Sharded rows are saved as they are, and gathered again in the backward pass.
  GemmOperand kept = x.value;
  {
    const LinearWeight w(tape, weight);
    const auto b = tape.pin(bias);
    CAPSTAN_ASSERT(!bias || b->elements() == w.outputs(),
                   "column_linear: `" + bias->name() + "` is " + b->text());
    if (parallel.shards_rows()) {
      y = gemm_of_gathered(tape.context(), x.value, w.outputs(), parallel, "input of " + weight.name(),
                           [&](const Tensor& from, const Tensor& to) { w.multiply(from, to, false, *b); });
    } else {
      y = Tensor::empty(tape.device(), {rows, w.outputs()}, x.dtype());
      kept = w.multiply(x.value, y, trainable, *b, x.quantized.get());
    }
  }
  const int64_t out = y.size(1), in = x.size(1);
  if (bias) record.parameters.push_back(bias);
  record.outputs = {y};
  if (trainable) record.saved = saved_tensors(kept);
  const Cost cost = matmul_cost(rows, out, in, x.dtype());
  record.cost = record.backward_cost = cost;
  if (parallel.shards_rows()) record.cost.sent_bytes = sent(x.value, parallel, parallel.size());
  // Bytes sent for the local rows.
  const double full = sent(x.value, parallel, 1);
  record.backward_cost.sent_bytes =
      parallel.shards_rows() ? (trainable ? 2 : 1) * full * parallel.size() : 2 * full;
  record.backward = [&weight, bias, trainable, cost, parallel, layout = kept.layout](BackwardContext& ctx) {
    const Tensor dy = std::move(ctx.output_gradient());
    // The gather of x overlaps with dx, and the sum of dx overlaps with the weight gradients.
    std::optional<Gather> gather;
    if (trainable && parallel.shards_rows()) {
      gather.emplace(ctx.context(), ctx.saved(0), parallel, "input again of " + weight.name());
      gather->start({0, ctx.saved(0).size(0)});
    }
    const LinearWeight w(ctx, weight);
    GemmOperand dy_of_weight;
    const auto gemm = [&](const Tensor& from, const Tensor& to) {
      multiply_keeping_all(w, from, to, trainable ? dy.size(0) : 0, dy_of_weight);
    };
    std::optional<ReducedGemm<decltype(gemm)>> dx;
    if (ctx.needs(0))
      dx.emplace(ctx.context(), dy, w.inputs(), parallel, "input gradient of " + weight.name(), gemm);
    if (trainable) {
      StepContext& context = ctx.context();
      GemmOperand x_all = gather
                              ? weight_gradient_operand(context, weight, LayerTensor::input, gather->take())
                              : saved_operand(ctx, layout, dy.size(0));
      if (!dy_of_weight.values.defined())
        dy_of_weight = weight_gradient_operand(context, weight, LayerTensor::output_gradient, dy);
      ctx.weight_gradient_gemm(weight, cost, std::move(x_all), std::move(dy_of_weight));
    }
    if (bias)
      ctx.weight_gradient(
          *bias, {0, static_cast<double>(dy.bytes())}, {dy},
          [](const Tensor& gradient, std::span<const Tensor> t) { add_column_sum(t[0], gradient); });
    if (dx) ctx.accumulate_gradient(0, dx->finish());
  };
  return tape.record(std::move(record))[0];
}

Var row_linear(Tape& tape, const Var& x, const Parameter& weight, const TensorParallel& parallel) {
  if (parallel.is_single()) return linear(tape, x, weight);
  const int64_t rows = x.size(0), in = x.size(1);
  Record record{.name = "row_linear", .inputs = {x}, .parameters = {&weight}};
  check_gemm("row_linear", weight, x.value);
  const bool trainable = tape.context().store.is_trainable(weight);
  GemmOperand kept;
  {
    const LinearWeight w(tape, weight);
    const auto gemm = [&](const Tensor& from, const Tensor& to) {
      multiply_keeping_all(w, from, to, trainable ? rows : 0, kept);
    };
    record.outputs = {ReducedGemm<decltype(gemm)>(tape.context(), x.value, w.outputs(), parallel,
                                                  "output of " + weight.name(), gemm)
                          .finish()};
  }
  const Tensor& y = record.outputs[0];
  if (trainable && !kept.values.defined())
    kept = tape.recording() ? weight_gradient_operand(tape.context(), weight, LayerTensor::input, x.value)
                            : GemmOperand(x.value);
  if (trainable) record.saved = saved_tensors(kept);
  const Cost cost = matmul_cost(rows, y.size(1), in, x.dtype());
  record.cost = record.backward_cost = cost;
  record.cost.sent_bytes = sent(y, parallel, parallel.shards_rows() ? parallel.size() : 2);
  if (parallel.shards_rows()) record.backward_cost.sent_bytes = sent(y, parallel, parallel.size());
  record.backward = [&weight, trainable, cost, parallel, in, layout = kept.layout](BackwardContext& ctx) {
    Tensor dy = std::move(ctx.output_gradient());
    GemmOperand dy_of_weight;
    {
      const LinearWeight w(ctx, weight);
      const auto gemm = [&](const Tensor& from, const Tensor& to) { w.multiply(from, to); };
      // Both GEMMs need all rows of dy; gather them once. The codes of all rows serve both.
      const bool gathers = trainable && parallel.shards_rows();
      const std::string purpose = "output gradient of " + weight.name();
      const bool in_chunks = chunks_of(dy.size(0), parallel.splits).size() > 1;
      if (gathers && in_chunks && ctx.needs(0) && !ctx.context().store.scaling(weight)) {
        const Tensor dx = Tensor::empty(ctx.device(), {dy.size(0) * parallel.size(), in}, dy.dtype());
        dy = gather_beside_gemms(ctx.context(), dy, dx, parallel, purpose, gemm);
        ctx.accumulate_gradient(0, dx);
      } else if (ctx.needs(0) && (trainable || !parallel.shards_rows())) {
        if (gathers) dy = gathered(ctx.context(), dy, parallel, purpose);
        const Tensor dx = Tensor::empty(ctx.device(), {dy.size(0), in}, dy.dtype());
        dy_of_weight = w.multiply(dy, dx, trainable);
        ctx.accumulate_gradient(0, dx);
      } else if (ctx.needs(0)) {
        ctx.accumulate_gradient(0, gemm_of_gathered(ctx.context(), dy, in, parallel, purpose, gemm));
      } else if (gathers) {
        dy = gathered(ctx.context(), dy, parallel, purpose);
      }
    }
    if (!trainable) return;
    if (!dy_of_weight.values.defined())
      dy_of_weight = weight_gradient_operand(ctx.context(), weight, LayerTensor::output_gradient, dy);
    ctx.weight_gradient_gemm(weight, cost, saved_operand(ctx, layout, dy.size(0)), std::move(dy_of_weight));
  };
  return tape.record(std::move(record))[0];
}

Var copy_to_tensor_parallel(Tape& tape, const Var& x, const TensorParallel& parallel,
                            const std::string& purpose) {
  if (parallel.is_single()) return x;
  const bool sharded = parallel.shards_rows();
  const double one = sent(x.value, parallel, sharded ? parallel.size() : 2);
  Cost forward, backward;
  if (sharded) forward.sent_bytes = one;
  backward.sent_bytes = one;
  return tape.record(
      {.name = "copy_to_tensor_parallel",
       .inputs = {x},
       .outputs = {sharded ? gathered(tape.context(), x.value, parallel, purpose) : x.value},
       .cost = forward,
       .backward_cost = backward,
       .backward = [parallel, sharded, what = "gradients of " + purpose](BackwardContext& ctx) {
         Tensor dy = std::move(ctx.output_gradient());
         if (!sharded) {
           if (!dy.unique()) dy = copy_of(dy);
           comm::all_reduce_sum_any(*parallel.group, dy.view({dy.elements()}), what);
           return ctx.accumulate_gradient(0, std::move(dy));
         }
         const Tensor dx = Tensor::empty(dy.device(), {dy.size(0) / parallel.size(), dy.size(1)}, dy.dtype());
         comm::Reduction::reduce_scatter(*parallel.group, dy, dx, what).finish();
         ctx.accumulate_gradient(0, dx);
       }})[0];
}

Var reduce_from_tensor_parallel(Tape& tape, const Var& x, const TensorParallel& parallel,
                                const std::string& purpose) {
  if (parallel.is_single()) return x;
  const bool sharded = parallel.shards_rows();
  Cost forward, backward;
  forward.sent_bytes = sent(x.value, parallel, sharded ? 1 : 2);
  if (sharded) backward.sent_bytes = forward.sent_bytes;
  Tensor y;
  if (sharded) {
    CAPSTAN_ASSERT(x.size(0) % parallel.size() == 0,
                   "rows of " + x.value.text() + " over the tensor-parallel ranks");
    y = Tensor::empty(tape.device(), {x.size(0) / parallel.size(), x.size(1)}, x.dtype());
    comm::Reduction::reduce_scatter(*parallel.group, x.value, y, purpose).finish();
  } else {
    y = copy_of(x.value);
    comm::all_reduce_sum_any(*parallel.group, y.view({y.elements()}), purpose);
  }
  return tape.record(
      {.name = "reduce_from_tensor_parallel",
       .inputs = {x},
       .outputs = {y},
       .cost = forward,
       .backward_cost = backward,
       .backward = [parallel, sharded, what = "gradients of " + purpose](BackwardContext& ctx) {
         const Tensor& dy = ctx.output_gradient();
         ctx.accumulate_gradient(0, sharded ? gathered(ctx.context(), dy, parallel, what) : dy);
       }})[0];
}

}  // namespace capstan::ops
