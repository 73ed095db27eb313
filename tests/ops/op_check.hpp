// Holds an operation to a scalar reference: values in double, gradients by complex step
// (tests/kernels/reference.hpp). Each case runs plain, on inputs that nothing else holds (which it may
// overwrite), with delayed weight gradients and inside a recomputed region: the same bits always. Parameters
// are taken away when the operation releases them, gradient buffers begin with something in them, and inputs
// that are held elsewhere must stay as they are.
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "nn/param_list.hpp"
#include "ops/bias_dropout_add.hpp"
#include "tests/kernels/support.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/simple_store.hpp"

namespace capstan::test {

using reference::Complex;
using reference::Vec;
using testing::kTypes;
template <class S>
using Lists = std::vector<Vec<S>>;
using Handles = std::vector<const Parameter*>;
using Vars = std::vector<Var>;

// How far an operation's values and gradients may be from those in double.
inline double tolerance(DType type) {
  return type == DType::f32 ? 2e-5 : type == DType::bf16 ? 3e-2 : 4e-3;
}

struct Value {
  Shape shape;
  Vec<double> values;
};
inline Value random_value(Shape shape, uint64_t seed, double scale = 1) {
  return {shape, testing::random_values(shape.elements(), seed, scale)};
}

// Rounds values to the type that the operation reads, and returns them as doubles.
inline Vec<double> rounded(const Vec<double>& values, DType type) {
  Vec<double> result;
  for (const double v : values) {
    const auto f = static_cast<float>(v);
    result.push_back(static_cast<double>(type == DType::bf16  ? static_cast<float>(bf16(f))
                                         : type == DType::f16 ? static_cast<float>(f16(f))
                                                              : f));
  }
  return result;
}
inline Tensor upload(Device& device, const Value& value, DType type) {
  std::vector<float> floats(value.values.begin(), value.values.end());
  if (type == DType::f32) return Tensor::from_host<float>(device, value.shape, floats);
  if (type == DType::f16)
    return Tensor::from_host<f16>(device, value.shape, std::vector<f16>(floats.begin(), floats.end()));
  return Tensor::from_host<bf16>(device, value.shape, std::vector<bf16>(floats.begin(), floats.end()));
}
inline Vec<double> as_doubles(const Tensor& tensor) {
  const auto floats = tensor.to_floats();
  return {floats.begin(), floats.end()};
}

struct OpCase {
  std::vector<Value> inputs, parameters;
  DType type = DType::f32;
  double tolerance = 1e-5;
  // For each output, whether it gets a gradient; empty: all do.
  std::vector<bool> used_outputs;
  // Gradients of the outputs that replace the random ones; empty: random.
  std::vector<Vec<double>> output_gradients;
  bool recomputable = true;
};

struct OpRun {
  std::vector<Vec<double>> outputs, input_gradients, parameter_gradients;
  bool operator==(const OpRun& o) const {
    return outputs == o.outputs && input_gradients == o.input_gradients &&
           parameter_gradients == o.parameter_gradients;
  }
};

enum class Way { plain, owned, delayed, recomputed };
constexpr float kGradientBefore = 0.25f;

// op(Tape&, vector<Var> inputs, vector<const Parameter*>) -> vector<Var>.
template <class Op>
OpRun run_op(Device& device, const OpCase& c, Op&& op, Way way, const std::vector<Vec<double>>& upstream) {
  nn::ParamList list;
  for (size_t i = 0; i < c.parameters.size(); ++i)
    list.add(nn::ModulePath{"p" + std::to_string(i)}.spec("weight", c.parameters[i].shape, {}));
  const auto parameters = list.take();
  SimpleStore store(device, parameters, c.type, /*gathered=*/true);
  std::vector<const Parameter*> handles;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::vector<float> values(c.parameters[i].values.begin(), c.parameters[i].values.end());
    store.set(*parameters[i], values);
    handles.push_back(parameters[i].get());
    const Tensor gradient = store.gradient(*parameters[i]);
    launch(device, device.table().elementwise->fill, gradient, kGradientBefore, gradient.elements());
  }
  store.begin_last_micro_batch();
  StepContext context{device, store};
  Tape tape(context);
  std::vector<Var> inputs;
  for (size_t i = 0; i < c.inputs.size(); ++i)
    inputs.push_back(tape.input("x" + std::to_string(i), upload(device, c.inputs[i], c.type), true));
  std::vector<Tensor> held;
  for (Var& input : inputs)
    if (way != Way::owned) held.push_back(input.value);
    // x + nothing: a copy of its own.
    else
      input = ops::bias_dropout_add(tape, std::move(input), nullptr, {}, {});
  std::vector<Var> outputs;
  if (way == Way::recomputed)
    outputs = tape.recompute("region", inputs, [&](Tape& inner, std::span<const Var> arguments) {
      return op(inner, std::vector<Var>(arguments.begin(), arguments.end()), handles);
    });
  else
    outputs = op(tape, std::move(inputs), handles);
  OpRun run;
  std::map<std::string, Tensor> gradients;
  for (size_t i = 0; i < outputs.size(); ++i) {
    run.outputs.push_back(as_doubles(outputs[i].value));
    tape.output("y" + std::to_string(i), outputs[i]);
    if (i < upstream.size() && !upstream[i].empty())
      gradients["y" + std::to_string(i)] =
          upload(device, {outputs[i].shape(), upstream[i]}, outputs[i].dtype());
  }
  outputs.clear();
  inputs.clear();
  tape.backward(gradients, {.delay_weight_gradients = way == Way::delayed});
  if (way == Way::delayed) CHECK(store.ready.empty());
  tape.run_weight_gradients();
  for (size_t i = 0; i < held.size(); ++i) CHECK(as_doubles(held[i]) == c.inputs[i].values);
  CHECK(store.pins == 0);
  CHECK(store.ready.size() == parameters.size());
  for (size_t i = 0; i < c.inputs.size(); ++i)
    run.input_gradients.push_back(as_doubles(tape.input_gradient("x" + std::to_string(i))));
  for (const Parameter* p : handles) run.parameter_gradients.push_back(as_doubles(store.gradient(*p)));
  return run;
}

// ref(vector<Vec<S>> inputs, vector<Vec<S>> parameters) -> vector<Vec<S>> outputs, for S double and Complex.
template <class Op, class Ref>
void check_op(const std::string& name, OpCase c, Op&& op, Ref&& ref) {
  CAPTURE(name);
  for (Value& value : c.inputs) value.values = rounded(value.values, c.type);
  for (Value& value : c.parameters) value.values = rounded(value.values, c.type);
  std::vector<Vec<double>> x, p;
  for (const Value& value : c.inputs) x.push_back(value.values);
  for (const Value& value : c.parameters) p.push_back(value.values);

  const std::vector<Vec<double>> expected = ref(x, p);
  std::vector<Vec<double>> upstream(expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!c.used_outputs.empty() && !c.used_outputs[i]) continue;
    upstream[i] =
        i < c.output_gradients.size()
            ? c.output_gradients[i]
            : rounded(testing::random_values(static_cast<int64_t>(expected[i].size()), 900 + i), c.type);
  }
  const auto loss = [&](const auto& xs, const auto& ps) {
    using S = typename std::decay_t<decltype(xs[0])>::value_type;
    const std::vector<Vec<S>> ys = ref(xs, ps);
    S total{};
    for (size_t i = 0; i < ys.size(); ++i)
      if (!upstream[i].empty()) total += reference::contract(ys[i], upstream[i]);
    return total;
  };
  std::vector<Vec<Complex>> cx, cp;
  for (const auto& v : x) cx.push_back(reference::convert<Complex>(v));
  for (const auto& v : p) cp.push_back(reference::convert<Complex>(v));
  std::vector<Vec<double>> dx, dp;
  for (size_t i = 0; i < x.size(); ++i)
    dx.push_back(reference::complex_step(x[i], [&](const Vec<Complex>& v) {
      auto all = cx;
      all[i] = v;
      return loss(all, cp);
    }));
  for (size_t i = 0; i < p.size(); ++i)
    for (double& d : dp.emplace_back(reference::complex_step(p[i], [&](const Vec<Complex>& v) {
           auto all = cp;
           all[i] = v;
           return loss(cx, all);
         })))
      d += kGradientBefore;

  FirstResults<OpRun> firsts;
  on_every_device([&](Device& device) {
    const OpRun plain = run_op(device, c, op, Way::plain, upstream);
    if (!firsts.of(device)) {
      firsts.of(device) = plain;
      for (size_t i = 0; i < expected.size(); ++i) {
        CAPTURE(i);
        CHECK(testing::error(plain.outputs[i], expected[i]) < c.tolerance);
      }
      for (size_t i = 0; i < dx.size(); ++i) {
        CAPTURE(i);
        CHECK(testing::error(plain.input_gradients[i], dx[i]) < c.tolerance);
      }
      for (size_t i = 0; i < dp.size(); ++i) {
        CAPTURE(i);
        CHECK(testing::error(plain.parameter_gradients[i], dp[i]) < c.tolerance);
      }
    }
    const OpRun& first = *firsts.of(device);
    CHECK((plain == first));  // any number of threads
    CHECK((run_op(device, c, op, Way::owned, upstream) == first));
    CHECK((run_op(device, c, op, Way::delayed, upstream) == first));
    if (c.recomputable) CHECK((run_op(device, c, op, Way::recomputed, upstream) == first));
  });
}

}  // namespace capstan::test
