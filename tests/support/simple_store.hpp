// The simplest ParamStore, for tests: every parameter unsharded on one device, in the compute type, with an
// fp32 main copy, an fp32 gradient and Adam's moments.
#pragma once

#include <limits>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "kernels/table.hpp"
#include "ops/parameter.hpp"
#include "tensor/launch.hpp"
#include "tests/support/shards.hpp"
#include "tests/support/step_control.hpp"

namespace capstan::test {

class SimpleStore : public ParamStore {
 public:
  // gathered: acquire() hands out a copy that turns into NaNs at release(), so that an operation which keeps
  // it is found.
  explicit SimpleStore(Device& device, DType compute = DType::f32, bool gathered = false)
      : device_(device), compute_(compute), gathered_(gathered) {}
  SimpleStore(Device& device, std::span<const std::unique_ptr<Parameter>> parameters,
              DType compute = DType::f32, bool gathered = false)
      : SimpleStore(device, compute, gathered) {
    for (const auto& parameter : parameters) add(*parameter);
    begin();
  }

  void add(const Parameter& parameter) {
    CAPSTAN_ASSERT(parameter.index() == static_cast<int>(slots_.size()), "parameters in their order");
    Slot slot;
    {
      CategoryScope scope(MemoryCategory::gradients);
      slot.gradient = Tensor::zeros(device_, parameter.shape());
    }
    CategoryScope scope(MemoryCategory::parameters);
    slot.main = Tensor::zeros(device_, parameter.shape());
    slot.model = compute_ == DType::f32 || parameter.spec().buffer
                     ? slot.main
                     : Tensor::zeros(device_, parameter.shape(), compute_);
    slots_.push_back(slot);
  }
  void set(const Parameter& parameter, std::span<const float> values) {
    Slot& slot = at(parameter);
    slot.main.copy_from_host_bytes(std::as_bytes(values));
    if (slot.model.dtype() != DType::f32)
      launch(device_, device_.table().elementwise->cast, slot.main, slot.model, slot.main.elements());
  }
  void initialize(std::span<const std::unique_ptr<Parameter>> parameters, uint64_t seed) {
    for (const auto& parameter : parameters)
      set(*parameter, shard_of(*parameter, initial_values(parameter->spec(), seed)));
  }
  void freeze(const Parameter& parameter) { frozen_.insert(parameter.index()); }
  // Begins a step: use counts and gradients are zero.
  void begin() {
    begin_step(static_cast<int>(slots_.size()));
    ready.clear();
    for (Slot& slot : slots_) device_.zero(slot.gradient.address(), slot.gradient.bytes());
  }
  void adam(const Parameter& parameter, kernels::AdamStep step, float gradient_factor) {
    Slot& slot = at(parameter);
    if (!slot.m.defined()) {
      const kernels::UpdateRange range{.count = slot.main.elements()};
      slot.range = Tensor::empty(device_, {sizeof range}, DType::u8);
      slot.range.copy_from_host_bytes(std::as_bytes(std::span(&range, 1)));
      slot.m = Tensor::zeros(device_, slot.main.shape());
      slot.v = Tensor::zeros(device_, slot.main.shape());
    }
    const kernels::Optimizers& kernel = *device_.table().optimizers;
    launch(device_, kernel.update_workspace(1), kernel.adam, step, step_control(device_, gradient_factor),
           slot.range, 1, slot.gradient, slot.main, slot.m, Tensor(), slot.v, Tensor(),
           compute_ == DType::f32 ? Tensor() : slot.model);
  }
  const Tensor& main(const Parameter& parameter) { return at(parameter).main; }

  Tensor acquire(const Parameter& parameter) override {
    Slot& slot = at(parameter);
    ++pins;
    if (!gathered_) return slot.model;
    if (slot.pins++ == 0) {
      CategoryScope scope(MemoryCategory::workspace);
      slot.gathered = Tensor::empty(device_, slot.model.shape(), slot.model.dtype());
      launch(device_, device_.table().elementwise->cast, slot.model, slot.gathered, slot.model.elements());
    }
    return slot.gathered;
  }
  void release(const Parameter& parameter) override {
    Slot& slot = at(parameter);
    --pins;
    if (!gathered_ || --slot.pins > 0) return;
    CAPSTAN_ASSERT(slot.gathered.unique(), "an operation keeps the gathered `" + parameter.name() + "`");
    launch(device_, device_.table().elementwise->fill, slot.gathered, std::numeric_limits<float>::quiet_NaN(),
           slot.gathered.elements());
    slot.gathered = Tensor();
  }
  bool is_trainable(const Parameter& parameter) const override {
    return !parameter.spec().buffer && !frozen_.count(parameter.index());
  }
  Tensor gradient(const Parameter& parameter) override { return at(parameter).gradient; }

  // Number of calls of acquire() without release().
  int pins = 0;
  // Gradients in the order in which they became ready.
  std::vector<std::string> ready;

 protected:
  void gradient_ready(const Parameter& parameter) override { ready.push_back(parameter.name()); }

 private:
  struct Slot {
    Tensor main, model, gradient, m, v, gathered, range;
    int pins = 0;
  };
  Slot& at(const Parameter& parameter) { return slots_.at(static_cast<size_t>(parameter.index())); }

  Device& device_;
  DType compute_;
  bool gathered_;
  std::vector<Slot> slots_;
  std::set<int> frozen_;
};

}  // namespace capstan::test
