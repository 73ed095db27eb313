// The tape of one micro-batch: it records the operations of the forward pass (F) and runs their input
// gradients (B) and weight gradients (W). Every entry has a name, shapes, bytes, FLOPs and the tensors that
// it saves.
//
// An operation runs its forward and records itself:
//
//   Var scale(Tape& tape, const Var& x, float factor) {
//     Tensor y = Tensor::empty(tape.device(), x.shape(), x.dtype());
//     …launch the kernel…
//     return tape.record({.name = "scale", .inputs = {x}, .outputs = {y}, .cost = {.flops = …, .bytes = …},
//                         .saved = {},                                     // tensors the backward reads
//                         .backward = [factor](BackwardContext& ctx) {
//                           Tensor dx = …; launch on ctx.output_gradient();
//                           ctx.accumulate_gradient(0, dx);
//                         }})[0];
//   }
//
// Several tapes may live at once. The backward pass starts from given output gradients. Weight gradients run
// at once, or wait for run_weight_gradients() (zero-bubble schedules). recompute() runs a region without
// recording it and recomputes it in the backward pass, with side effects off and discrete choices replayed.
// drop_output() frees one output that others have saved, and recomputes it where their backward pass begins.
#pragma once

#include <any>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/activation_offload.hpp"
#include "ops/parameter.hpp"
#include "tensor/tensor.hpp"

namespace capstan {

struct Cost {
  double flops = 0;
  // Read and written.
  double bytes = 0;
  // Bytes that this rank sends to others.
  double sent_bytes = 0;
};

// One executed entry of a training step, for traces, the memory table and the memory estimate.
struct TapeEvent {
  // 'F', 'B' or 'W'; 'C': a transfer between ranks, or its start, or the wait for it.
  char phase;
  std::string name;
  // Inputs, then outputs (F); gradients (B, W).
  std::vector<Shape> shapes;
  Cost cost;
  // Kept alive from F to B, or from B to W.
  int64_t saved_bytes = 0;
  bool recomputed = false;
  // Within an operation, whose own event includes it.
  bool nested = false;
  // Host time of the call, without nested events.
  double self_seconds = 0;
  // Steady host clock at its end.
  double end_seconds = 0;
  // Timed events on the compute queue, before and after the operation; those of nested events lie between
  // them. Set on a device that queues work, for an observer that does not wait: `self_seconds` is then the
  // time of the launch alone.
  std::shared_ptr<Event> before, after;
};

class TapeObserver {
 public:
  virtual ~TapeObserver() = default;
  virtual void observe(const TapeEvent& event) = 0;
  // Whether a step waits for the end of each operation, so that the host's times are those of the kernels. A
  // step that does not wait runs as without an observer.
  virtual bool waits() const { return true; }
  // Work on another queue than the compute queue.
  virtual void queue_span(const QueueSpan& span) { static_cast<void>(span); }
  // Called before the operations of a micro-batch.
  virtual void micro_batch(int64_t index) { static_cast<void>(index); }
  // Whether values() reads them: rows that no kernel writes are 0 then.
  virtual bool reads_values() const { return false; }
  // Called before `observe` with the values: the outputs of an operation ('F', with its parameters), or the
  // gradient of one of its inputs ('B').
  virtual void values(char phase, const std::string& name, std::span<const Parameter* const> parameters,
                      std::span<const Tensor> tensors) {
    static_cast<void>(phase), static_cast<void>(name), static_cast<void>(parameters),
        static_cast<void>(tensors);
  }
};

// The device, parameters and observer that all operations of a step share.
struct StepContext {
  Device& device;
  ParamStore& store;
  TapeObserver* observer = nullptr;
  // Null: saved tensors stay on the device.
  ActivationOffload* offload = nullptr;
  // Tensors that are uploaded once and live as long as the context, by a number of the object that made them
  // (unique in the process).
  std::map<uint64_t, std::vector<Tensor>> constants = {};
};

// Observes a section of a running operation as a nested event (TapeEvent::nested), from construction to
// end(): an asynchronous transfer, or work that overlaps with it. Does nothing without an observer.
class TraceScope {
 public:
  TraceScope(Device& device, TapeObserver* observer, char phase, std::string name, Cost cost = {});
  TraceScope(const StepContext& context, char phase, std::string name)
      : TraceScope(context.device, context.observer, phase, std::move(name)) {}
  void end();

 private:
  Device& device_;
  TapeObserver* observer_;
  TapeEvent event_;
};

// Runs `work` as a nested event.
template <class Work>
void traced(const StepContext& context, char phase, std::string name, Work&& work) {
  TraceScope scope(context, phase, std::move(name));
  work();
  scope.end();
}

// A value on a tape. slot < 0: no gradient flows to it.
struct Var {
  Tensor value;
  int slot = -1;
  // The value for the GEMMs of the linear layer that reads it, from the launch that computed it; null: none.
  std::shared_ptr<ops::QuantizedInput> quantized = nullptr;
  const Shape& shape() const { return value.shape(); }
  int64_t size(int dim) const { return value.size(dim); }
  DType dtype() const { return value.dtype(); }
  bool needs_gradient() const { return slot >= 0; }
};

class Tape;

// Argument of a backward function: its tensors and the operations that it may call, like `ctx` of a PyTorch
// autograd function.
class BackwardContext {
 public:
  // Gradient of the i-th output; undefined when nothing depends on that output. The backward function may
  // overwrite the tensor if `Tensor::unique()` holds.
  Tensor& output_gradient(size_t i = 0) { return output_gradients_[i]; }
  const Tensor& saved(size_t i) const { return saved_[i]; }
  bool needs(size_t input) const;
  // Adds to the input's gradient.
  void accumulate_gradient(size_t input, Tensor gradient);

  // Schedules a weight gradient: `run` adds into `gradient` (fp32, the parameter's shape) and reads
  // `tensors`.
  using WeightFunction = std::function<void(const Tensor& gradient, std::span<const Tensor> tensors)>;
  void weight_gradient(const Parameter& parameter, Cost cost, std::vector<Tensor> tensors,
                       WeightFunction run);
  // Schedules the weight gradient dy^T x; the first one of a training step overwrites the gradient buffer.
  // Either both operands have scales or neither. With scales they are given transposed: x^T [in, N] and
  // dy^T [out, N].
  void weight_gradient_gemm(const Parameter& parameter, Cost cost, GemmOperand x, GemmOperand dy);

  StepContext& context();
  Device& device() { return context().device; }
  ParamPin pin(const Parameter& parameter) { return pin(&parameter); }
  ParamPin pin(const Parameter* parameter) { return ParamPin(context().store, parameter); }

 private:
  friend class Tape;
  BackwardContext(Tape& tape, size_t entry) : tape_(tape), entry_(entry) {}
  Tape& tape_;
  size_t entry_;
  std::vector<Tensor> output_gradients_, saved_;
};

struct Record {
  std::string name;
  std::vector<Var> inputs;
  std::vector<Tensor> outputs;
  // Parameters used by this operation. Its backward must call weight_gradient exactly once for each
  // trainable one.
  std::vector<const Parameter*> parameters;
  // Forward.
  Cost cost;
  // Input gradients only.
  Cost backward_cost;
  std::vector<Tensor> saved;
  std::function<void(BackwardContext&)> backward;
  // Computes the last output again from the saved tensors, for drop_output(). Null: it cannot be dropped.
  std::function<Tensor(StepContext&, std::span<const Tensor> saved)> recompute_output = nullptr;
};

class Tape {
 public:
  enum class Mode : uint8_t {
    // Records.
    train,
    // Records nothing and counts nothing.
    inference,
  };
  explicit Tape(StepContext& context, Mode mode = Mode::train);
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  StepContext& context() { return context_; }
  Device& device() { return context_.device; }
  ParamPin pin(const Parameter& parameter) { return pin(&parameter); }
  ParamPin pin(const Parameter* parameter) { return ParamPin(context_.store, parameter); }
  bool recording() const { return mode_ == Mode::train && !suspended_; }
  // False while a region is recomputed: metrics and counts must not be registered twice.
  bool side_effects() const { return !repeated_; }

  // Named inputs and outputs of the micro-batch.
  Var input(const std::string& name, Tensor value, bool needs_gradient = false);
  void output(const std::string& name, const Var& value) { outputs_[name] = value; }
  const Var& output(const std::string& name) const;
  // Frees the value of an output that its receiver holds: backward() needs its place alone.
  void release_output(const std::string& name) { outputs_.at(name).value = Tensor(); }
  // Gradient of a named input, after backward().
  const Tensor& input_gradient(const std::string& name) const;
  // The same, which the tape then drops.
  Tensor take_input_gradient(const std::string& name);

  std::vector<Var> record(Record record);

  using Body = std::function<std::vector<Var>(Tape&, std::span<const Var>)>;
  // Runs `body` without recording it, and again (recorded) when its gradient is needed. `body` must depend on
  // its arguments, parameters and captured constants only.
  std::vector<Var> recompute(const std::string& name, std::vector<Var> inputs, Body body);
  // Call it when the operations that read `y` have run: those that saved it compute it again in their
  // backward pass, from what the operation before them saved (Record::recompute_output). The memory is free
  // when the caller's Vars are gone. Has no effect on a `y` without a gradient, or that none of them saved.
  void drop_output(const Var& y);
  // Ends a layer, or a region of layers: the operations recorded since the end of the one before. offloads:
  // its saved tensors are moved to host memory (StepContext::offload) and fetched one layer ahead of the
  // backward pass. name: "layer 3", for traces.
  void end_layer(const std::string& name, bool offloads);
  // A discrete choice (routing, a split), of any copyable type: computed in the first pass, replayed when the
  // region is recomputed. `compute` makes no other choice.
  template <class Compute>
  auto choice(const Compute& compute) {
    using Choice = decltype(compute());
    if (!choices_) return compute();
    if (!repeated_) return std::any_cast<Choice>(choices_->emplace_back(compute()));
    return std::any_cast<Choice>(choices_->at(next_choice_++));
  }

  // Runs the backward pass, last operation first, from gradients of outputs by name (undefined: zero). With
  // delay_weight_gradients, weight gradients wait for run_weight_gradients(). Drops entries and saved tensors
  // as it uses them.
  struct BackwardOptions {
    bool delay_weight_gradients = false;
  };
  void backward(const std::map<std::string, Tensor>& output_gradients, BackwardOptions options);
  void backward(const std::map<std::string, Tensor>& output_gradients) {
    backward(output_gradients, BackwardOptions());
  }
  void run_weight_gradients();
  size_t pending_weight_gradients() const { return weight_gradients_.size(); }

 private:
  friend class BackwardContext;
  struct Entry {
    std::string name;
    std::vector<int> input_slots, output_slots;
    std::vector<Shape> output_shapes;
    std::vector<DType> output_dtypes;
    Cost backward_cost;
    std::vector<Tensor> saved;
    std::function<void(BackwardContext&)> backward;
    std::function<Tensor(StepContext&, std::span<const Tensor> saved)> recompute_output;
    // Cost of recompute_output.
    Cost cost;
    // Saved tensors that were dropped: entry whose output it is, index in `saved`, shape there.
    struct Dropped {
      size_t producer, index;
      Shape shape;
    };
    std::vector<Dropped> dropped;
    // Of an entry whose output was dropped: the recomputed output, and the number of saved tensors that do
    // not have it yet.
    Tensor recomputed;
    size_t missing = 0;
  };
  // The weight gradient (W) of one use of a parameter, apart from the input gradients (B) of its operation.
  struct WeightGradient {
    const Parameter* parameter;
    std::string name;
    Cost cost;
    std::vector<Tensor> tensors;
    // Null: a weight_gradient_gemm() of x and dy.
    BackwardContext::WeightFunction run;
    GemmOperand x, dy;
  };
  // The end of a layer, where its backward pass begins.
  struct LayerEnd {
    // Number of entries on the tape.
    size_t entries;
    // Null: its saved tensors are in the entries.
    std::shared_ptr<OffloadedLayer> offloaded;
  };
  void accumulate(int slot, Tensor gradient);
  // Puts the saved tensors of the last layer back into its entries, and starts to fetch those of the layer
  // before it.
  void enter_last_layer();
  void run_backward(BackwardOptions options);
  // Puts the dropped tensors of an entry back into it.
  void restore_dropped(Entry& entry);
  void add_weight_gradient(WeightGradient work);
  void run_weight_gradient(WeightGradient& work);
  void run_weight_gradient_gemm(const WeightGradient& work);
  // A moment of an observed step: the end of the work so far.
  struct Moment {
    // Host clock.
    double seconds = 0;
    std::shared_ptr<Event> event;
  };
  static Moment moment_of(const StepContext& context);
  void note(TapeEvent event, Moment started, double nested_seconds);

  StepContext& context_;
  Mode mode_;
  // True in the first pass of a recomputed region.
  bool suspended_ = false;
  // True while a region is recomputed.
  bool repeated_ = false;
  bool delay_weight_gradients_ = false;
  std::vector<Entry> entries_;
  std::vector<LayerEnd> layers_;
  // True after the backward pass has reached the last layer.
  bool in_layer_ = false;
  // Gradient of each slot.
  std::vector<Tensor> gradients_;
  std::vector<WeightGradient> weight_gradients_;
  // Shared with recomputed regions.
  std::shared_ptr<PendingUses> uses_left_ = std::make_shared<PendingUses>();
  // Slots of the inputs.
  std::map<std::string, int> inputs_;
  std::map<std::string, Var> outputs_;
  std::map<std::string, Tensor> input_gradients_;
  // The choices of the outermost recomputed region.
  std::shared_ptr<std::vector<std::any>> choices_;
  // The next of choices_ while the region is recomputed.
  size_t next_choice_ = 0;
  // The end of the last observed event.
  Moment last_;
  // Nested events of the running backward function.
  double inner_seconds_ = 0;
};

}  // namespace capstan
