// ParamSpec describes a parameter before it is allocated, Parameter is the handle that operations hold, and
// ParamStore resolves the handle to memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/low_precision.hpp"
#include "ops/shard.hpp"
#include "tensor/tensor.hpp"

namespace capstan {

// Layout-independent initialization: element i of the global tensor depends on (seed, name, i) only.
struct Init {
  enum class Kind : uint8_t { zeros, ones, normal, uniform } kind = Kind::zeros;
  // Normal: mean 0; uniform: between -std and std.
  double std = 0;
};

struct ParamSpec {
  // Megatron's dotted name, unique: "decoder.layers.0.self_attention.linear_qkv.weight".
  std::string name;
  // Global, vocabulary padded.
  Shape shape;
  Init init;
  Sharding sharding;
  // Replicated over the tensor-parallel ranks (an expert parameter: over the expert tensor-parallel ranks),
  // while each rank's gradient covers only its rows or heads: the ranks sum it.
  bool partial_over_tensor = false;
  // Biases and one-dimensional parameters, also those of several experts together.
  bool no_weight_decay = false;
  // A buffer in PyTorch's sense: a value in fp32, unsharded, that is saved and loaded with the parameters but
  // has no gradient and is not updated by the optimizer (Moe's bias of the experts).
  bool buffer = false;
  // The weight of a linear layer or of a layer of experts, whose GEMMs may be in 8 or 4 bits.
  bool linear = false;
  // Parameter of an adapter. With `peft`, only adapter parameters are trained.
  bool adapter = false;
  // The matrix B of a LoRA adapter; LoRA+ trains it with its own learning rate.
  bool is_lora_b = false;
  // DoRA magnitude: the name of the weight W; the initial values are the row norms of W + s B A. Empty for
  // other parameters.
  std::string row_norms_of;
  // Global layer index; -1: outside the layers.
  int layer = -1;
  // Unit of prefetch and release: "embedding", "layer 0", "head".
  std::string block;
  // Names of further uses: a tied embedding names the output layer.
  std::vector<std::string> other_uses;
  // A tied parameter whose uses are on different pipeline stages is in the parameter lists of all of them,
  // which sum its gradients. The `owner` counts it in the gradient norm and writes it to checkpoints.
  enum class Tied : uint8_t { no, owner, copy } tied = Tied::no;
  // The stages that hold a tied parameter: the group of this name (comm::Mesh).
  enum class Holders : uint8_t { embedding, position_embedding } holders = Holders::embedding;

  // Expert parameters have the experts as dimension 0, sharded over ShardingAxis::expert. Tokens are sent to
  // the experts' ranks, so that the gradient is summed only over the ranks that hold the same experts.
  ParameterGrid grid() const { return sharding.grid(); }
};

// A handle whose address is stable while the model lives. `index`: its index in the model's parameter list.
class Parameter {
 public:
  Parameter(ParamSpec spec, int index, const ShardRanks& ranks = {})
      : spec_(std::move(spec)),
        index_(index),
        shard_(shard_of(spec_.name, spec_.shape, spec_.sharding, ranks)) {}
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;
  const ParamSpec& spec() const { return spec_; }
  const std::string& name() const { return spec_.name; }
  int index() const { return index_; }
  const Shard& shard() const { return shard_; }
  // Shape of the local shard.
  const Shape& shape() const { return shard_.shape; }

 private:
  ParamSpec spec_;
  int index_;
  Shard shard_;
};

// For each Parameter::index(), the number of uses on one tape (recomputed regions included) whose weight
// gradients are still to be computed.
using PendingUses = std::vector<int>;

// Resolves parameters to tensors and owns their gradient buffers. Implementations may gather, cast or
// dequantize in acquire() and drop the result in release(): an operation never keeps the tensor.
class ParamStore {
 public:
  virtual ~ParamStore() = default;

  // The local shard in the compute type (a buffer: fp32), contiguous, valid until release(). Calls nest.
  virtual Tensor acquire(const Parameter& parameter) = 0;
  virtual void release(const Parameter& parameter) = 0;
  // The weight of a linear layer as a GEMM reads it, until the matching release(). Where scaling() is null:
  // the tensor of acquire(); else codes and scales of W [out, in] (forward) or of W^T [in, out]
  // (input_gradient), quantized once until the parameters change.
  virtual GemmOperand acquire_operand(const Parameter& parameter, WeightRole) { return acquire(parameter); }
  // Null: GEMMs with this weight are in the compute type.
  virtual const LayerScaling* scaling(const Parameter&) const { return nullptr; }
  // Called by the tape: the order in which it acquires parameters from now on, for prefetching. A recomputed
  // region runs forward within the backward pass.
  enum class PassDirection : uint8_t { forward, backward };
  virtual void set_direction(PassDirection) {}

  virtual bool is_trainable(const Parameter& parameter) const = 0;
  // The gradient buffer, fp32, shape of the local shard. Operations accumulate weight gradients into it.
  virtual Tensor gradient(const Parameter& parameter) = 0;
  // The gradient buffer, for an operation that can either overwrite it or accumulate into it. If
  // `uninitialized` is set, the contents are undefined: write every element, with beta = 0. Otherwise
  // accumulate, with beta = 1.
  virtual Tensor gradient_for_write(const Parameter& parameter, bool& uninitialized) {
    uninitialized = false;
    return gradient(parameter);
  }

  // Micro-batch accounting. A gradient is ready when, in the last micro-batch, the last weight gradient of
  // all uses of the parameter has been accumulated; gradient_ready() is then called once.
  void begin_step(int parameters);
  void begin_last_micro_batch() { last_micro_batch_ = true; }
  // Called by the tape: note_use() for each use in a forward pass, note_weight_gradient() after the weight
  // gradient of that use.
  void note_use(const Parameter& parameter, PendingUses& tape);
  void note_weight_gradient(const Parameter& parameter, PendingUses& tape);

 protected:
  // Called after the last weight gradient of this parameter on one tape, in every micro-batch, before
  // gradient_ready(). `left`: the uses of other parameters whose weight gradients are still to be computed.
  // No operation holds a gradient tensor then.
  virtual void tape_gradient_done(const Parameter&, const PendingUses& left) { static_cast<void>(left); }
  virtual void gradient_ready(const Parameter&) {}

 private:
  std::vector<int> outstanding_;
  bool last_micro_batch_ = false;
};

// A parameter resolved for the duration of one operation. Null: an undefined tensor.
class ParamPin {
 public:
  ParamPin(ParamStore& store, const Parameter& parameter) : ParamPin(store, &parameter) {}
  ParamPin(ParamStore& store, const Parameter* parameter)
      : store_(store), parameter_(parameter), tensor_(parameter ? store.acquire(*parameter) : Tensor()) {}
  ~ParamPin() {
    tensor_ = Tensor();
    if (parameter_) store_.release(*parameter_);
  }
  ParamPin(const ParamPin&) = delete;
  ParamPin& operator=(const ParamPin&) = delete;
  const Tensor& operator*() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }

 private:
  ParamStore& store_;
  const Parameter* parameter_;
  Tensor tensor_;
};

// The weight of a linear layer, likewise.
class OperandPin {
 public:
  OperandPin(ParamStore& store, const Parameter& parameter, WeightRole role)
      : store_(store), parameter_(parameter), operand_(store.acquire_operand(parameter, role)) {}
  ~OperandPin() {
    operand_ = GemmOperand();
    store_.release(parameter_);
  }
  OperandPin(const OperandPin&) = delete;
  OperandPin& operator=(const OperandPin&) = delete;
  const GemmOperand& operator*() const { return operand_; }
  const GemmOperand* operator->() const { return &operand_; }

 private:
  ParamStore& store_;
  const Parameter& parameter_;
  GemmOperand operand_;
};

}  // namespace capstan
