// The contract test of the engine, for 1, 2, 3, 4 or 6 ranks (CTest runs one, two and three): what ZeRO-3,
// zero-bubble pipelines and recomputation will lean on, all at once, equals the plain step.
//
// Model: h = tanh(x W1^T); c = h - mean of h over all rows of all ranks (a collective); y = c W2^T; loss =
// sum(y^2) / 2. Each rank has its own rows. W1 and W2 are gathered on use: a rank holds 1/size of each.
#include <doctest/doctest.h>

#include <cmath>
#include <set>

#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "ops/collectives.hpp"
#include "ops/tape.hpp"
#include "tensor/host_view.hpp"
#include "tensor/launch.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/worlds.hpp"

using namespace capstan;

namespace {

using test::world;

// Weights of 60 and 72 elements: 1, 2, 3, 4 and 6 ranks hold equal parts of them. Rows are of one rank and
// micro-batch.
constexpr int64_t kIn = 5, kHidden = 12, kOut = 6, kRows = 3;

// ---- small operations written against the public contract -------------------------------------------------

void linear_kernel(kernels::Context&, const float* x, const float* w, float* y, int64_t n, int64_t in,
                   int64_t out) {
  for (int64_t r = 0; r < n; ++r)
    for (int64_t o = 0; o < out; ++o) {
      float sum = 0;
      for (int64_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
}
void linear_input_kernel(kernels::Context&, const float* dy, const float* w, float* dx, int64_t n, int64_t in,
                         int64_t out) {
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < in; ++i) {
      float sum = 0;
      for (int64_t o = 0; o < out; ++o) sum += dy[r * out + o] * w[o * in + i];
      dx[r * in + i] = sum;
    }
}
void linear_weight_kernel(kernels::Context&, const float* x, const float* dy, float* dw, int64_t n,
                          int64_t in, int64_t out) {
  for (int64_t o = 0; o < out; ++o)
    for (int64_t i = 0; i < in; ++i) {
      float sum = 0;
      for (int64_t r = 0; r < n; ++r) sum += dy[r * out + o] * x[r * in + i];
      dw[o * in + i] += sum;
    }
}
Var linear(Tape& tape, const Var& x, const Parameter& weight) {
  const int64_t n = x.size(0), in = x.size(1), out = weight.spec().shape[0];
  Device& device = tape.device();
  const Tensor y = Tensor::empty(device, {n, out});
  {
    const ParamPin w = tape.pin(weight);
    launch(device, &linear_kernel, x.value, *w, y, n, in, out);
  }
  return tape.record({.name = "linear",
                      .inputs = {x},
                      .outputs = {y},
                      .parameters = {&weight},
                      .saved = {x.value},
                      .backward = [&weight, n, in, out](BackwardContext& ctx) {
                        const Tensor dy = ctx.output_gradient();
                        if (ctx.needs(0)) {
                          const Tensor dx = Tensor::empty(ctx.device(), {n, in});
                          const ParamPin w = ctx.pin(weight);
                          launch(ctx.device(), &linear_input_kernel, dy, *w, dx, n, in, out);
                          ctx.accumulate_gradient(0, dx);
                        }
                        ctx.weight_gradient(weight, {}, {ctx.saved(0), dy},
                                            [n, in, out](const Tensor& dw, std::span<const Tensor> t) {
                                              launch(dw.device(), &linear_weight_kernel, t[0], t[1], dw, n,
                                                     in, out);
                                            });
                      }})[0];
}

void tanh_kernel(kernels::Context&, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = std::tanh(x[i]);
}
void tanh_backward_kernel(kernels::Context&, const float* y, const float* dy, float* dx, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dx[i] = dy[i] * (1 - y[i] * y[i]);
}
Var tanh(Tape& tape, const Var& x) {
  const Tensor y = Tensor::empty(tape.device(), x.shape());
  launch(tape.device(), &tanh_kernel, x.value, y, y.elements());
  return tape.record(
      {.name = "tanh", .inputs = {x}, .outputs = {y}, .saved = {y}, .backward = [](BackwardContext& ctx) {
         const Tensor dx = Tensor::empty(ctx.device(), ctx.saved(0).shape());
         launch(ctx.device(), &tanh_backward_kernel, ctx.saved(0), ctx.output_gradient(), dx, dx.elements());
         ctx.accumulate_gradient(0, dx);
       }})[0];
}

// Column sums / count as a row, and the subtraction of a row from all rows.
void column_mean_kernel(kernels::Context&, const float* x, float* y, int64_t rows, int64_t cols,
                        float factor) {
  for (int64_t c = 0; c < cols; ++c) {
    float sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += x[r * cols + c];
    y[c] = sum * factor;
  }
}
void spread_kernel(kernels::Context&, const float* row, float* y, int64_t rows, int64_t cols, float factor) {
  for (int64_t i = 0; i < rows * cols; ++i) y[i] = row[i % cols] * factor;
}
void subtract_kernel(kernels::Context&, const float* x, const float* row, float* y, int64_t rows,
                     int64_t cols) {
  for (int64_t i = 0; i < rows * cols; ++i) y[i] = x[i] - row[i % cols];
}
Var column_mean(Tape& tape, const Var& x, int64_t rows_of_all) {
  const int64_t rows = x.size(0), cols = x.size(1);
  const float factor = 1.0f / static_cast<float>(rows_of_all);
  const Tensor y = Tensor::empty(tape.device(), {cols});
  launch(tape.device(), &column_mean_kernel, x.value, y, rows, cols, factor);
  return tape.record({.name = "column_mean",
                      .inputs = {x},
                      .outputs = {y},
                      .backward = [rows, cols, factor](BackwardContext& ctx) {
                        const Tensor dx = Tensor::empty(ctx.device(), {rows, cols});
                        launch(ctx.device(), &spread_kernel, ctx.output_gradient(), dx, rows, cols, factor);
                        ctx.accumulate_gradient(0, dx);
                      }})[0];
}
Var subtract(Tape& tape, const Var& x, const Var& row) {
  const int64_t rows = x.size(0), cols = x.size(1);
  const Tensor y = Tensor::empty(tape.device(), x.shape());
  launch(tape.device(), &subtract_kernel, x.value, row.value, y, rows, cols);
  return tape.record({.name = "subtract",
                      .inputs = {x, row},
                      .outputs = {y},
                      .backward = [rows, cols](BackwardContext& ctx) {
                        const Tensor drow = Tensor::empty(ctx.device(), {cols});
                        launch(ctx.device(), &column_mean_kernel, ctx.output_gradient(), drow, rows, cols,
                               -1.0f);
                        ctx.accumulate_gradient(1, drow);
                        ctx.accumulate_gradient(0, ctx.output_gradient());
                      }})[0];
}

// ---- a store that gathers on use and scatters ready gradients ---------------------------------------------

class GatherStore final : public ParamStore {
 public:
  GatherStore(Device& device, comm::Communicator& group, std::vector<const Parameter*> parameters,
              const std::vector<std::vector<float>>& values)
      : device_(device), group_(group), parameters_(std::move(parameters)) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const int64_t n = parameters_[i]->spec().shape.elements() / group.size();
      shards_.push_back(Tensor::from_host<float>(
          device, {n},
          std::span(values[i]).subspan(static_cast<size_t>(n * group.rank()), static_cast<size_t>(n))));
      gathered_.emplace_back();
      pins_.push_back(0);
      gradients_.push_back(Tensor::zeros(device, parameters_[i]->spec().shape));
      ready_.push_back(0);
    }
  }
  Tensor acquire(const Parameter& p) override {
    const auto i = static_cast<size_t>(p.index());
    if (pins_[i]++ == 0) {
      gathered_[i] = Tensor::empty(device_, p.spec().shape);
      HostView shard(shards_[i]), all(gathered_[i], HostView::Contents::undefined);
      group_.all_gather(shard.data(), all.data(), shards_[i].bytes());
      all.store();
      ++gathers;
    }
    return gathered_[i];
  }
  void release(const Parameter& p) override {
    const auto i = static_cast<size_t>(p.index());
    if (--pins_[i] > 0) return;
    CHECK(gathered_[i].unique());  // nothing that was saved aliases the gathered storage
    gathered_[i] = Tensor();
  }
  bool is_trainable(const Parameter&) const override { return true; }
  Tensor gradient(const Parameter& p) override { return gradients_[static_cast<size_t>(p.index())]; }
  // This rank's slice of the summed gradient, after it became ready.
  std::vector<float> reduced(size_t i) const {
    const int64_t n = gradients_[i].elements() / group_.size();
    return gradients_[i].flat_range(n * group_.rank(), n, {n}).to_host<float>();
  }
  int ready(size_t i) const { return ready_[i]; }
  int pinned() const { return pins_[0] + pins_[1]; }
  int gathers = 0;

 protected:
  void gradient_ready(const Parameter& p) override {
    ++ready_[static_cast<size_t>(p.index())];
    comm::reduce_scatter_sum(
        group_, gradients_[static_cast<size_t>(p.index())].view({p.spec().shape.elements()}), "");
  }

 private:
  Device& device_;
  comm::Communicator& group_;
  std::vector<const Parameter*> parameters_;
  std::vector<Tensor> shards_, gathered_, gradients_;
  std::vector<int> pins_, ready_;
};

std::vector<float> numbers(size_t count, uint64_t stream) {
  std::vector<float> values(count);
  const auto key = philox_key(11, purpose::test, stream);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(0.5 * normal_at(key, i));
  return values;
}

// The plain step in double over the rows of all ranks and micro-batches: {dW1, dW2, dx}.
struct Plain {
  std::vector<double> dw1 = std::vector<double>(kHidden * kIn), dw2 = std::vector<double>(kOut * kHidden), dx;
  double loss = 0;
};
Plain plain_step(const std::vector<float>& w1, const std::vector<float>& w2, const std::vector<float>& x) {
  Plain result;
  const int64_t rows = static_cast<int64_t>(x.size()) / kIn;
  const auto at = [](const auto& v, int64_t i) { return static_cast<double>(v[static_cast<size_t>(i)]); };
  std::vector<double> h(static_cast<size_t>(rows * kHidden)), mean(kHidden), dc(h.size()), dmean(kHidden);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < kHidden; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < kIn; ++i) sum += at(x, r * kIn + i) * at(w1, j * kIn + i);
      h[static_cast<size_t>(r * kHidden + j)] = std::tanh(sum);
      mean[static_cast<size_t>(j)] += std::tanh(sum) / static_cast<double>(rows);
    }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < kOut; ++o) {
      double y = 0;
      for (int64_t j = 0; j < kHidden; ++j)
        y += (at(h, r * kHidden + j) - at(mean, j)) * at(w2, o * kHidden + j);
      result.loss += 0.5 * y * y;
      for (int64_t j = 0; j < kHidden; ++j) {
        result.dw2[static_cast<size_t>(o * kHidden + j)] += y * (at(h, r * kHidden + j) - at(mean, j));
        dc[static_cast<size_t>(r * kHidden + j)] += y * at(w2, o * kHidden + j);
      }
    }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < kHidden; ++j)
      dmean[static_cast<size_t>(j)] += at(dc, r * kHidden + j) / static_cast<double>(rows);
  result.dx.resize(x.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < kHidden; ++j) {
      const double hv = at(h, r * kHidden + j), d = (at(dc, r * kHidden + j) - at(dmean, j)) * (1 - hv * hv);
      for (int64_t i = 0; i < kIn; ++i) {
        result.dw1[static_cast<size_t>(j * kIn + i)] += d * at(x, r * kIn + i);
        result.dx[static_cast<size_t>(r * kIn + i)] += d * at(w1, j * kIn + i);
      }
    }
  return result;
}

}  // namespace

TEST_CASE_TEMPLATE(
    "gather on use, delayed weight gradients, a recomputed region with a collective and two live tapes equal "
    "the plain step",
    D, EVERY_DEVICE) {
  comm::Communicator& group = world().communicator();
  const auto device = D::make(1);
  const Parameter p1({.name = "w1", .shape = {kHidden, kIn}}, 0),
      p2({.name = "w2", .shape = {kOut, kHidden}}, 1);
  const auto w1 = numbers(kHidden * kIn, 1), w2 = numbers(kOut * kHidden, 2);

  const int64_t rows_of_all = kRows * group.size();
  std::vector<Plain> expected;
  // Inputs of all ranks, by micro-batch.
  std::vector<std::vector<float>> inputs;
  for (uint64_t micro = 0; micro < 2; ++micro) {
    inputs.push_back(numbers(static_cast<size_t>(rows_of_all * kIn), 10 + micro));
    expected.push_back(plain_step(w1, w2, inputs.back()));
  }

  for (const bool recompute : {false, true})
    for (const bool delay : {false, true}) {
      CAPTURE(recompute);
      CAPTURE(delay);
      GatherStore store(*device, group, {&p1, &p2}, {w1, w2});
      store.begin_step(2);
      StepContext context{*device, store};
      Tape first(context), second(context);
      const auto forward = [&](Tape& tape, size_t micro) {
        const auto mine = std::span<const float>(inputs[micro])
                              .subspan(static_cast<size_t>(kRows * kIn * group.rank()), kRows * kIn);
        const Var x = tape.input("x", Tensor::from_host<float>(*device, {kRows, kIn}, mine), true);
        const Tape::Body layer = [&](Tape& t, std::span<const Var> in) -> std::vector<Var> {
          const Var h = tanh(t, linear(t, in[0], p1));
          return {subtract(t, h, ops::all_reduce(t, column_mean(t, h, rows_of_all), group, "means"))};
        };
        const Var c =
            recompute ? tape.recompute("layer 1", {x}, layer)[0] : layer(tape, std::vector<Var>{x})[0];
        tape.output("y", linear(tape, c, p2));
        return tape.output("y").value;
      };
      const Tensor y0 = forward(first, 0), y1 = forward(second, 1);
      CHECK(store.pinned() == 0);
      double loss = 0;
      for (const Tensor& y : {y0, y1})
        for (const float v : y.to_host<float>())
          loss += 0.5 * static_cast<double>(v) * static_cast<double>(v);
      CHECK(comm::all_reduce(group, loss) ==
            doctest::Approx(expected[0].loss + expected[1].loss).epsilon(1e-6));

      // dloss/dy = y. The second tape's backward is the last of this step.
      first.backward({{"y", y0}}, {.delay_weight_gradients = delay});
      CHECK(store.ready(0) == 0);
      store.begin_last_micro_batch();
      second.backward({{"y", y1}}, {.delay_weight_gradients = delay});
      if (delay) {
        CHECK(first.pending_weight_gradients() == 2);
        CHECK(store.ready(0) + store.ready(1) == 0);
        // In another order than backward ran.
        second.run_weight_gradients();
        CHECK(store.ready(0) + store.ready(1) == 0);
        first.run_weight_gradients();
      }
      CHECK(store.ready(0) == 1);
      CHECK(store.ready(1) == 1);
      CHECK(store.pinned() == 0);

      const auto compare = [&](const std::vector<float>& got, const std::vector<double>& a,
                               const std::vector<double>& b) {
        const size_t n = got.size(), offset = n * static_cast<size_t>(group.rank());
        for (size_t i = 0; i < n; ++i)
          CHECK(static_cast<double>(got[i]) == doctest::Approx(a[offset + i] + b[offset + i]).epsilon(2e-5));
      };
      compare(store.reduced(0), expected[0].dw1, expected[1].dw1);
      compare(store.reduced(1), expected[0].dw2, expected[1].dw2);
      const auto dx = second.input_gradient("x").to_host<float>();
      for (size_t i = 0; i < dx.size(); ++i)
        CHECK(static_cast<double>(dx[i]) ==
              doctest::Approx(expected[1].dx[static_cast<size_t>(kRows * kIn * group.rank()) + i])
                  .epsilon(2e-5));
    }
}

TEST_CASE_TEMPLATE("choices are made once and replayed, side effects happen once, also in nested regions", D,
                   EVERY_DEVICE) {
  const auto device = D::make(1);
  const Parameter p1({.name = "w1", .shape = {kHidden, kIn}}, 0),
      p2({.name = "w2", .shape = {kOut, kHidden}}, 1);
  const auto self = comm::make_self_communicator("self");
  GatherStore store(*device, *self, {&p1, &p2}, {numbers(kHidden * kIn, 1), numbers(kOut * kHidden, 2)});
  store.begin_step(2);
  store.begin_last_micro_batch();
  StepContext context{*device, store};
  Tape tape(context);
  int made = 0, effects = 0;
  std::vector<float> seen;
  const Var x =
      tape.input("x", Tensor::from_host<float>(*device, {kRows, kIn}, numbers(kRows * kIn, 3)), true);
  const auto choose = [&](Tape& t) {
    const Tensor c = t.choice([&] {
      return Tensor::from_host<float>(*device, {1}, std::vector<float>{static_cast<float>(++made)});
    });
    seen.push_back(c.to_host<float>()[0]);
    if (t.side_effects()) ++effects;
  };
  const Var y = tape.recompute("outer", {x}, [&](Tape& outer, std::span<const Var> in) -> std::vector<Var> {
    choose(outer);
    const Var h = linear(outer, in[0], p1);
    const Var z =
        outer.recompute("inner", {h}, [&](Tape& inner, std::span<const Var> arguments) -> std::vector<Var> {
          choose(inner);
          return {linear(inner, tanh(inner, arguments[0]), p2)};
        })[0];
    choose(outer);
    return {z};
  })[0];
  tape.output("y", y);
  CHECK(seen == std::vector<float>{1, 2, 3});
  tape.backward({{"y", y.value}});
  CHECK(made == 3);
  CHECK(effects == 3);
  // The outer region again (1, 2, 3 with the inner one's first pass), then the inner one for its gradient
  // (2).
  CHECK(seen == std::vector<float>{1, 2, 3, 1, 2, 3, 2});
  CHECK(store.ready(0) == 1);
  CHECK(store.ready(1) == 1);
}

TEST_CASE_TEMPLATE(
    "a dropped output is computed again, once, where the backward pass of its last reader begins", D,
    EVERY_DEVICE) {
  const auto device = D::make(2);
  const Parameter w1({.name = "w1", .shape = {kHidden, kIn}}, 0),
      w2({.name = "w2", .shape = {kHidden, kIn}}, 1);
  const auto self = comm::make_self_communicator("self");
  const auto run = [&](bool drops, bool delayed) {
    GatherStore store(*device, *self, {&w1, &w2}, {numbers(kHidden * kIn, 1), numbers(kHidden * kIn, 2)});
    store.begin_step(2);
    store.begin_last_micro_batch();
    StepContext context{*device, store};
    Tape tape(context);
    const auto tanh_of = [](const Tensor& x) {
      const Tensor y = Tensor::empty(x.device(), x.shape());
      launch(x.device(), &tanh_kernel, x, y, y.elements());
      return y;
    };
    int computed = 0;
    const Var x =
        tape.input("x", Tensor::from_host<float>(*device, {kRows, kIn}, numbers(kRows * kIn, 3)), true);
    Var h = tape.record({.name = "tanh",
                         .inputs = {x},
                         .outputs = {tanh_of(x.value)},
                         .saved = {x.value},
                         .backward =
                             [&](BackwardContext& ctx) {
                               const Tensor dx = Tensor::empty(ctx.device(), ctx.saved(0).shape());
                               launch(ctx.device(), &tanh_backward_kernel, tanh_of(ctx.saved(0)),
                                      ctx.output_gradient(), dx, dx.elements());
                               ctx.accumulate_gradient(0, dx);
                             },
                         .recompute_output =
                             [&](StepContext&, std::span<const Tensor> saved) {
                               ++computed;
                               return tanh_of(saved[0]);
                             }})[0];
    tape.output("a", linear(tape, h, w1));
    tape.output("b", linear(tape, h, w2));
    if (drops) tape.drop_output(h);
    const Tensor kept = std::exchange(h, {}).value;
    // Two readers have saved it, or nobody.
    CHECK(kept.unique() == drops);
    // The backward pass needs no value of an output.
    const Tensor sent = tape.output("a").value;
    tape.release_output("a");
    CHECK(sent.unique());
    const auto ones = [&] {
      return Tensor::from_host<float>(*device, {kRows, kHidden}, numbers(kRows * kHidden, 4));
    };
    tape.backward({{"a", ones()}, {"b", ones()}}, {.delay_weight_gradients = delayed});
    tape.run_weight_gradients();
    CHECK(computed == (drops ? 1 : 0));
    return std::vector{tape.input_gradient("x").template to_host<float>(),
                       store.gradient(w1).template to_host<float>(),
                       store.gradient(w2).template to_host<float>()};
  };
  for (const bool delayed : {false, true}) CHECK((run(true, delayed) == run(false, delayed)));
}

TEST_CASE_TEMPLATE(
    "what nothing depends on gets a zero gradient and still accounts for its parameters; inference records "
    "nothing",
    D, EVERY_DEVICE) {
  const auto device = D::make(1);
  const Parameter p1({.name = "w1", .shape = {kHidden, kIn}}, 0),
      p2({.name = "w2", .shape = {kOut, kHidden}}, 1);
  const auto self = comm::make_self_communicator("self");
  GatherStore store(*device, *self, {&p1, &p2}, {numbers(kHidden * kIn, 1), numbers(kOut * kHidden, 2)});
  store.begin_step(2);
  store.begin_last_micro_batch();
  StepContext context{*device, store};
  {
    Tape tape(context);
    const Var x = tape.input("x", Tensor::from_host<float>(*device, {kRows, kIn}, numbers(kRows * kIn, 3)));
    const Var h = tanh(tape, linear(tape, x, p1));
    linear(tape, h, p2);  // used by nothing
    tape.output("h", h);
    tape.backward({{"h", h.value}});
    CHECK(store.ready(0) == 1);
    CHECK(store.ready(1) == 1);
  }
  store.begin_step(2);
  Tape inference(context, Tape::Mode::inference);
  const Var x =
      inference.input("x", Tensor::from_host<float>(*device, {kRows, kIn}, numbers(kRows * kIn, 3)));
  CHECK(!linear(inference, x, p1).needs_gradient());
}
