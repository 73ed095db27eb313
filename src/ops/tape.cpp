#include "ops/tape.hpp"

#include <algorithm>
#include <utility>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "kernels/table.hpp"
#include "ops/matmul.hpp"
#include "tensor/launch.hpp"

namespace capstan {

namespace {
// The end of the work so far, by the host's clock. An observer that waits gets the time of the kernels and
// not of their launch; for others the compute queue has an event.
double end_of_work(Device& device, const TapeObserver& observer, std::shared_ptr<Event>& event) {
  if (observer.waits())
    device.synchronize();
  else if (device.queues_work())
    event = device.record_time(Queue::compute);
  return steady_seconds();
}
std::vector<Shape> shapes_of(std::span<const Tensor> tensors) {
  std::vector<Shape> shapes;
  for (const Tensor& t : tensors)
    if (t.defined()) shapes.push_back(t.shape());
  return shapes;
}
int64_t bytes_of(std::span<const Tensor> tensors) {
  int64_t total = 0;
  for (const Tensor& t : tensors)
    if (t.defined()) total += t.bytes();
  return total;
}
}  // namespace

// ---- parameters -------------------------------------------------------------------------------------------

void ParamStore::begin_step(int parameters) {
  outstanding_.assign(static_cast<size_t>(parameters), 0);
  last_micro_batch_ = false;
}
void ParamStore::note_use(const Parameter& parameter, PendingUses& tape) {
  const auto index = static_cast<size_t>(parameter.index());
  if (outstanding_.size() <= index) outstanding_.resize(index + 1, 0);
  if (tape.size() <= index) tape.resize(index + 1, 0);
  ++outstanding_[index];
  ++tape[index];
}
void ParamStore::note_weight_gradient(const Parameter& parameter, PendingUses& tape) {
  const auto index = static_cast<size_t>(parameter.index());
  CAPSTAN_ASSERT(index < tape.size() && tape[index] > 0,
                 "a weight gradient of `" + parameter.name() + "` without a use");
  if (--tape[index] == 0) tape_gradient_done(parameter, tape);
  if (--outstanding_[index] == 0 && last_micro_batch_) gradient_ready(parameter);
}

TraceScope::TraceScope(Device& device, TapeObserver* observer, char phase, std::string name, Cost cost)
    : device_(device), observer_(observer) {
  if (!observer) return;
  event_ = {.phase = phase, .name = std::move(name), .cost = cost, .nested = true};
  event_.end_seconds = end_of_work(device, *observer, event_.before);
}
void TraceScope::end() {
  if (!observer_) return;
  const double started = event_.end_seconds;
  event_.end_seconds = end_of_work(device_, *observer_, event_.after);
  event_.self_seconds = event_.end_seconds - started;
  observer_->observe(event_);
}

// ---- backward functions -----------------------------------------------------------------------------------

StepContext& BackwardContext::context() {
  return tape_.context_;
}
bool BackwardContext::needs(size_t input) const {
  return tape_.entries_[entry_].input_slots[input] >= 0;
}
void BackwardContext::accumulate_gradient(size_t input, Tensor gradient) {
  const int slot = tape_.entries_[entry_].input_slots[input];
  if (slot < 0) return;
  if (auto* observer = tape_.context_.observer)
    observer->values('B', tape_.entries_[entry_].name, {}, std::span(&gradient, 1));
  tape_.accumulate(slot, std::move(gradient));
}
void BackwardContext::weight_gradient(const Parameter& parameter, Cost cost, std::vector<Tensor> tensors,
                                      WeightFunction run) {
  tape_.add_weight_gradient(
      {&parameter, tape_.entries_[entry_].name, cost, std::move(tensors), std::move(run)});
}
void BackwardContext::weight_gradient_gemm(const Parameter& parameter, Cost cost, GemmOperand x,
                                           GemmOperand dy) {
  CAPSTAN_ASSERT(x.has_scales() == dy.has_scales(),
                 "weight gradient of " + x.values.text() + " and " + dy.values.text());
  tape_.add_weight_gradient({&parameter,
                             tape_.entries_[entry_].name,
                             cost,
                             {x.values, dy.values},
                             nullptr,
                             std::move(x),
                             std::move(dy)});
}

// ---- the tape ---------------------------------------------------------------------------------------------

Tape::Tape(StepContext& context, Mode mode) : context_(context), mode_(mode) {
  last_ = moment_of(context);
  context.store.set_direction(ParamStore::PassDirection::forward);
}

Var Tape::input(const std::string& name, Tensor value, bool needs_gradient) {
  Var var{std::move(value), -1};
  if (needs_gradient && recording()) {
    var.slot = static_cast<int>(gradients_.size());
    gradients_.emplace_back();
  }
  inputs_[name] = var.slot;
  return var;
}

const Var& Tape::output(const std::string& name) const {
  const auto found = outputs_.find(name);
  CAPSTAN_ASSERT(found != outputs_.end(), "the tape has no output `" + name + "`");
  return found->second;
}

const Tensor& Tape::input_gradient(const std::string& name) const {
  const auto found = input_gradients_.find(name);
  CAPSTAN_ASSERT(found != input_gradients_.end(), "the tape has no gradient of an input `" + name + "`");
  return found->second;
}

Tensor Tape::take_input_gradient(const std::string& name) {
  Tensor gradient = input_gradient(name);
  input_gradients_.erase(name);
  return gradient;
}

Tape::Moment Tape::moment_of(const StepContext& context) {
  Moment moment;
  if (context.observer) moment.seconds = end_of_work(context.device, *context.observer, moment.event);
  return moment;
}
// started: passed by value, because the argument may be last_, which this function overwrites.
void Tape::note(TapeEvent event, Moment started, double nested_seconds) {
  // A region's gradients are computed once.
  event.recomputed |= repeated_ && event.phase == 'F';
  event.before = started.event;
  last_ = moment_of(context_);
  event.after = last_.event;
  event.self_seconds = last_.seconds - started.seconds - nested_seconds;
  event.end_seconds = last_.seconds;
  context_.observer->observe(event);
  // Excludes the observer's time.
  last_.seconds = steady_seconds();
}

std::vector<Var> Tape::record(Record record) {
  // The kernels of the operation are queued, so that it ends here.
  if (device().has_ranges()) device().mark(record.name);
  std::vector<Var> results;
  bool trainable = false;
  for (const Parameter* parameter : record.parameters) {
    if (!context_.store.is_trainable(*parameter)) continue;
    trainable = true;
    // The first pass of a recomputed region counts its uses, so that no gradient becomes ready before the
    // region is recomputed; the second pass must not count them again.
    if (mode_ == Mode::train && !repeated_) context_.store.note_use(*parameter, *uses_left_);
  }
  if (context_.observer) {
    context_.observer->values('F', record.name, record.parameters, record.outputs);
    TapeEvent event{'F', record.name, {}, record.cost, bytes_of(record.saved)};
    for (const Var& input : record.inputs) event.shapes.push_back(input.shape());
    for (const Tensor& output : record.outputs) event.shapes.push_back(output.shape());
    note(std::move(event), last_, 0);
  }
  bool needed = trainable;
  for (const Var& input : record.inputs) needed |= input.needs_gradient();
  const bool keep = recording() && needed;
  Entry entry;
  for (Tensor& output : record.outputs) {
    Var var{std::move(output), -1};
    if (keep) {
      var.slot = static_cast<int>(gradients_.size());
      gradients_.emplace_back();
      entry.output_slots.push_back(var.slot);
      entry.output_shapes.push_back(var.shape());
      entry.output_dtypes.push_back(var.dtype());
    }
    results.push_back(std::move(var));
  }
  if (keep) {
    for (const Var& input : record.inputs) entry.input_slots.push_back(input.slot);
    entry.name = std::move(record.name);
    entry.backward_cost = record.backward_cost;
    entry.saved = std::move(record.saved);
    entry.backward = std::move(record.backward);
    entry.recompute_output = std::move(record.recompute_output);
    entry.cost = record.cost;
    entries_.push_back(std::move(entry));
  }
  return results;
}

void Tape::accumulate(int slot, Tensor gradient) {
  Tensor& sum = gradients_[static_cast<size_t>(slot)];
  if (!sum.defined()) {
    sum = std::move(gradient);
    return;
  }
  CAPSTAN_ASSERT(sum.shape().elements() == gradient.shape().elements(),
                 "gradients of different shapes for one value");
  // Do not overwrite the first tensor where another holder shares it.
  Tensor target = sum.unique() ? sum : Tensor::empty(sum.device(), sum.shape(), sum.dtype());
  launch(sum.device(), sum.device().table().elementwise->add, sum, gradient, target, sum.elements());
  sum = target;
}

void Tape::add_weight_gradient(WeightGradient work) {
  if (!context_.store.is_trainable(*work.parameter)) return;
  if (delay_weight_gradients_)
    weight_gradients_.push_back(std::move(work));
  else
    run_weight_gradient(work);
}

void Tape::run_weight_gradient(WeightGradient& work) {
  const RangeScope range(device(), [&] { return work.name + " weight gradient"; });
  const Moment started = moment_of(context_);
  if (work.run) {
    work.run(context_.store.gradient(*work.parameter), work.tensors);
  } else {
    run_weight_gradient_gemm(work);
  }
  if (context_.observer) {
    note({'W', work.name, shapes_of(work.tensors), work.cost, bytes_of(work.tensors)}, started, 0);
    inner_seconds_ += last_.seconds - started.seconds;
  }
  work.tensors.clear();
  work.x = work.dy = {};
  context_.store.note_weight_gradient(*work.parameter, *uses_left_);
}

void Tape::run_weight_gradient_gemm(const WeightGradient& work) {
  bool uninitialized;
  const Tensor gradient = context_.store.gradient_for_write(*work.parameter, uninitialized);
  const float beta = uninitialized ? 0.0f : 1.0f;
  if (work.x.has_scales())
    ops::scaled_matmul(work.dy, work.x, gradient, beta);
  else
    ops::matmul(ops::Transpose::yes, ops::Transpose::no, work.dy.values, work.x.values, gradient, beta);
}

void Tape::run_weight_gradients() {
  const GraphScope graph(device(), "weight gradients");
  for (WeightGradient& work : weight_gradients_) run_weight_gradient(work);
  weight_gradients_.clear();
}

void Tape::backward(const std::map<std::string, Tensor>& output_gradients, BackwardOptions options) {
  for (const auto& [name, gradient] : output_gradients) {
    const Var& var = output(name);
    CAPSTAN_ASSERT(var.needs_gradient(), "no parameter that is trained affects output `" + name + "`");
    accumulate(var.slot, gradient);
  }
  outputs_.clear();
  run_backward(options);
  for (const auto& [name, slot] : inputs_)
    if (slot >= 0) input_gradients_[name] = gradients_[static_cast<size_t>(slot)];
  inputs_.clear();
  gradients_.clear();
}

void Tape::run_backward(BackwardOptions options) {
  delay_weight_gradients_ = options.delay_weight_gradients;
  context_.store.set_direction(ParamStore::PassDirection::backward);
  std::optional<GraphScope> graph;
  while (!entries_.empty()) {
    while (!layers_.empty() && layers_.back().entries == entries_.size()) {
      graph.reset();
      enter_last_layer();
      graph.emplace(device(), "layer backward");
    }
    const size_t index = entries_.size() - 1;
    Entry& entry = entries_[index];
    restore_dropped(entry);
    const RangeScope range(device(), [&] { return entry.name + " backward"; });
    BackwardContext ctx(*this, index);
    bool reached = false;
    for (const int slot : entry.output_slots) {
      ctx.output_gradients_.push_back(std::move(gradients_[static_cast<size_t>(slot)]));
      reached |= ctx.output_gradients_.back().defined();
    }
    ctx.saved_ = std::move(entry.saved);
    const Moment started = moment_of(context_);
    TapeEvent event;
    if (context_.observer)
      event = {'B', entry.name, shapes_of(ctx.output_gradients_), entry.backward_cost, bytes_of(ctx.saved_)};
    // An unused output has a zero gradient; the operation still runs, so that its weight gradients are
    // counted.
    if (!reached)
      for (size_t i = 0; i < entry.output_slots.size(); ++i)
        ctx.output_gradients_[i] = Tensor::zeros(device(), entry.output_shapes[i], entry.output_dtypes[i]);
    inner_seconds_ = 0;
    entry.backward(ctx);
    // Nested events (weight gradients, a recomputed region) were observed separately.
    if (context_.observer) note(std::move(event), started, inner_seconds_);
    entries_.pop_back();
  }
}

// ---- offload ----------------------------------------------------------------------------------------------

void Tape::end_layer(const std::string& name, bool offloads) {
  if (!recording()) return;
  const size_t begin = layers_.empty() ? 0 : layers_.back().entries;
  layers_.push_back({entries_.size(), nullptr});
  if (!context_.offload) return;
  if (!offloads || begin == entries_.size()) return context_.offload->free_copied();
  ActivationOffload::SavedTensors saved;
  for (size_t i = begin; i < entries_.size(); ++i) saved.push_back(std::move(entries_[i].saved));
  layers_.back().offloaded = context_.offload->start_offload(name, std::move(saved));
}

void Tape::enter_last_layer() {
  const LayerEnd layer = std::move(layers_.back());
  layers_.pop_back();
  if (!context_.offload) return;
  // The copies of another micro-batch's layer overlap with the first layer of this backward pass.
  if (std::exchange(in_layer_, true)) context_.offload->free_copied();
  if (layer.offloaded) {
    auto saved = context_.offload->take(*layer.offloaded);
    const size_t begin = layer.entries - saved.size();
    for (size_t i = 0; i < saved.size(); ++i) entries_[begin + i].saved = std::move(saved[i]);
  }
  if (!layers_.empty() && layers_.back().offloaded) context_.offload->start_fetch(*layers_.back().offloaded);
}

// ---- recomputation ----------------------------------------------------------------------------------------

std::vector<Var> Tape::recompute(const std::string& name, std::vector<Var> inputs, Body body) {
  // Inference, or inside of a region that is recomputed later.
  if (!recording()) return body(*this, inputs);

  // A nested region replays its section of the outer region's choices.
  const auto choices = choices_ ? choices_ : std::make_shared<std::vector<std::any>>();
  const size_t first_choice = next_choice_;
  std::vector<Tensor> outputs, saved;
  std::vector<bool> needs;
  {
    Tape first(context_, mode_);
    first.suspended_ = true;
    first.repeated_ = repeated_;
    first.uses_left_ = uses_left_;
    first.choices_ = choices;
    first.next_choice_ = first_choice;
    std::vector<Var> plain;
    plain.reserve(inputs.size());
    for (const Var& input : inputs) plain.push_back({input.value, -1});
    for (Var& output : body(first, plain)) outputs.push_back(std::move(output.value));
    next_choice_ = first.next_choice_;
    // The next operation's time excludes the region.
    if (context_.observer) last_ = first.last_;
  }
  for (const Var& input : inputs) {
    saved.push_back(input.value);
    needs.push_back(input.needs_gradient());
  }
  // A region is always recorded, because its outputs may depend on trained parameters.
  Entry entry;
  std::vector<Var> results;
  for (Tensor& output : outputs) {
    Var var{std::move(output), static_cast<int>(gradients_.size())};
    gradients_.emplace_back();
    entry.output_slots.push_back(var.slot);
    entry.output_shapes.push_back(var.shape());
    entry.output_dtypes.push_back(var.dtype());
    results.push_back(std::move(var));
  }
  for (const Var& input : inputs) entry.input_slots.push_back(input.slot);
  entry.name = name;
  entry.saved = std::move(saved);
  entry.backward = [this, choices, first_choice, needs, body = std::move(body)](BackwardContext& ctx) {
    const Moment started = moment_of(context_);
    Tape again(context_, Mode::train);
    again.repeated_ = true;
    again.uses_left_ = uses_left_;
    again.choices_ = choices;
    again.next_choice_ = first_choice;
    std::vector<Var> arguments;
    for (size_t i = 0; i < needs.size(); ++i)
      arguments.push_back(again.input("input " + std::to_string(i), ctx.saved(i), needs[i]));
    const std::vector<Var> values = body(again, arguments);
    for (size_t i = 0; i < values.size(); ++i) {
      Tensor& gradient = ctx.output_gradient(i);
      if (gradient.defined() && values[i].needs_gradient())
        again.accumulate(values[i].slot, std::move(gradient));
    }
    again.run_backward({.delay_weight_gradients = delay_weight_gradients_});
    for (size_t i = 0; i < needs.size(); ++i) {
      if (!needs[i]) continue;
      Tensor& gradient = again.gradients_[static_cast<size_t>(arguments[i].slot)];
      if (gradient.defined()) ctx.accumulate_gradient(i, std::move(gradient));
    }
    // Observed by the inner tape.
    if (context_.observer) inner_seconds_ += steady_seconds() - started.seconds;
    // Delayed weight gradients outlive the inner tape and keep their own tensors.
    for (WeightGradient& work : again.weight_gradients_) weight_gradients_.push_back(std::move(work));
  };
  entries_.push_back(std::move(entry));
  return results;
}

void Tape::drop_output(const Var& y) {
  if (!recording() || !y.needs_gradient()) return;
  const auto owner = std::find_if(entries_.rbegin(), entries_.rend(), [&](const Entry& entry) {
    return !entry.output_slots.empty() && entry.output_slots.back() == y.slot;
  });
  CAPSTAN_ASSERT(owner != entries_.rend() && owner->recompute_output, "an output that cannot be dropped");
  const auto producer = static_cast<size_t>(entries_.rend() - owner) - 1;
  for (size_t reader = producer + 1; reader < entries_.size(); ++reader) {
    Entry& entry = entries_[reader];
    for (size_t i = 0; i < entry.saved.size(); ++i) {
      Tensor& saved = entry.saved[i];
      if (!saved.defined() || saved.bytes() == 0 || saved.address() != y.value.address() ||
          saved.bytes() != y.value.bytes() || saved.dtype() != y.dtype())
        continue;
      entry.dropped.push_back({producer, i, saved.shape()});
      saved = Tensor();
      ++entries_[producer].missing;
    }
  }
}

void Tape::restore_dropped(Entry& entry) {
  for (const Entry::Dropped& dropped : entry.dropped) {
    Entry& producer = entries_[dropped.producer];
    if (!producer.recomputed.defined()) {
      const Moment started = moment_of(context_);
      producer.recomputed = producer.recompute_output(context_, producer.saved);
      if (context_.observer) {
        TapeEvent event{'F', producer.name, {producer.recomputed.shape()}, producer.cost};
        event.recomputed = true;
        note(std::move(event), started, 0);
      }
    }
    entry.saved[dropped.index] = producer.recomputed.view(dropped.shape);
    if (--producer.missing == 0) producer.recomputed = Tensor();
  }
}

}  // namespace capstan
