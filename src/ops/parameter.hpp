// What a parameter is before it exists (ParamSpec), the handle that operations hold (Parameter) and who resolves it to
// memory (ParamStore).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/shard.hpp"
#include "tensor/tensor.hpp"

namespace capstan {

// Layout-independent initialization: element i of the global tensor depends on (seed, name, i) only.
struct Init {
  enum class Kind : uint8_t { zeros, ones, normal, uniform } kind = Kind::zeros;
  double std = 0;  // normal: mean 0; uniform: between -std and std
};

struct ParamSpec {
  std::string name;  // Megatron's dotted name, unique: "decoder.layers.0.self_attention.linear_qkv.weight"
  Shape shape;       // global, vocabulary padded
  Init init;
  Sharding sharding;
  // Held alike by all tensor-parallel ranks, while each rank's gradient covers only its rows or heads: it is to be summed.
  bool partial_over_tensor = false;
  bool no_weight_decay = false;     // biases and one-dimensional parameters
  bool adapter = false;             // of an adapter: with `peft` these train, the others do not
  bool second_factor = false;       // an adapter's B: LoRA+ gives it a learning rate of its own
  std::string row_lengths_of;       // DoRA's magnitude: begins as the lengths of the rows of that parameter
  int layer = -1;                   // global layer index; -1: outside the layers
  std::string block;                // unit of prefetch and release: "embedding", "layer 0", "head"
  std::vector<std::string> places;  // where else it is used (a tied embedding names the output layer here)
  // A tied parameter whose places are on different pipeline stages is in the list of both; its gradients are summed over them.
  // The owner counts it in the norm and writes it.
  enum class Tied : uint8_t { no, owner, copy } tied = Tied::no;
};

// A handle. Its address is stable while the model lives; index is its place in the model's list.
class Parameter {
 public:
  Parameter(ParamSpec spec, int index, int tensor_rank = 0, int tensor_size = 1)
      : spec_(std::move(spec)),
        index_(index),
        shard_(shard_of(spec_.name, spec_.shape, spec_.sharding, tensor_rank, tensor_size)) {}
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;
  const ParamSpec& spec() const { return spec_; }
  const std::string& name() const { return spec_.name; }
  int index() const { return index_; }
  const Shard& shard() const { return shard_; }
  const Shape& shape() const { return shard_.shape; }  // of this rank's part

 private:
  ParamSpec spec_;
  int index_;
  Shard shard_;
};

// Uses of parameters on one tape, with the regions that it runs again, whose weight gradients have not run yet; by
// Parameter::index().
using UsesLeft = std::vector<int>;

// Resolves parameters for one tape step and owns where their gradients go. Implementations may gather, cast, dequantize
// or unpack in acquire() and drop the result in release(): an operation never keeps the tensor.
class ParamStore {
 public:
  virtual ~ParamStore() = default;

  // The local shard in the compute type, contiguous, valid until the matching release(). Calls nest.
  virtual Tensor acquire(const Parameter& parameter) = 0;
  virtual void release(const Parameter& parameter) = 0;
  // By the tape: which way through the model's list parameters are acquired from now on. A region that runs again goes
  // forward within the backward pass.
  enum class PassDirection : uint8_t { forward, backward };
  virtual void set_direction(PassDirection) {}

  virtual bool trains(const Parameter& parameter) const = 0;
  // fp32, shape of the local shard; weight gradients are accumulated straight into it.
  virtual Tensor gradient(const Parameter& parameter) = 0;
  // The same for who would rather set the whole of it than add to zeros. `fresh`: nothing was added yet and what it holds is
  // undefined; it must be set.
  virtual Tensor gradient_to_set(const Parameter& parameter, bool& fresh) {
    fresh = false;
    return gradient(parameter);
  }

  // Micro-batch accounting. A gradient is ready when, in the last micro-batch, the last weight gradient of all uses of the
  // parameter has been accumulated; gradient_ready() is then called once.
  void begin_step(int parameters);
  void begin_last_micro_batch() { last_micro_batch_ = true; }
  // By the tape, once for each use in a forward pass, and after the use's weight gradient.
  void note_use(const Parameter& parameter, UsesLeft& tape);
  void note_weight_gradient(const Parameter& parameter, UsesLeft& tape);

 protected:
  // The last weight gradient of this parameter on one tape has been accumulated, in whichever micro-batch; `left` is what the
  // tape still has to do. Nobody holds a gradient tensor at that moment. Before gradient_ready().
  virtual void tape_gradient_done(const Parameter&, const UsesLeft& left) { static_cast<void>(left); }
  virtual void gradient_ready(const Parameter&) {}

 private:
  std::vector<int> outstanding_;
  bool last_micro_batch_ = false;
};

// A parameter resolved for the duration of one operation.
class ParamPin {
 public:
  ParamPin(ParamStore& store, const Parameter& parameter)
      : store_(store), parameter_(parameter), tensor_(store.acquire(parameter)) {}
  ~ParamPin() {
    tensor_ = Tensor();
    store_.release(parameter_);
  }
  ParamPin(const ParamPin&) = delete;
  ParamPin& operator=(const ParamPin&) = delete;
  const Tensor& operator*() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }

 private:
  ParamStore& store_;
  const Parameter& parameter_;
  Tensor tensor_;
};

}  // namespace capstan
