// Parameters, gradients and main parameters in flat buckets (bucket.hpp), replicated or sharded over the
// data-parallel ranks.
//
// With S ranks in the group `shard`, R in `replica`, b elements in a bucket, P bytes an element of the
// compute type, a rank holds of a bucket that trains, in bytes:
//
//                         parameters        main params *   gradients          moments (Adam)
//   no_shard              P b               4 b             4 b                8 b
//   optim                 P b               4 b / S         4 b                8 b / S
//   optim_grads           P b               4 b / S         4 b / S  + open    8 b / S
//   optim_grads_params    P b / S + full    4 b / S         4 b / S  + open    8 b / S
//
// Parameters that are kept in 4 bits (Options::quantized, nf4_weight.hpp) are in no bucket; each is
// dequantized from its first acquire() to its last release().
//
//   *      none in fp32, and none with Options::main bf16: the model computes with the main parameters.
//   full   P b of the block that computes and, with overlap_param_gather, of the one that is prefetched.
//   open   4 b of the bucket whose weight gradients are computed and, with overlap_grad_reduce, of one that
//          is being reduced (two on the communication queue).
//   With shard_over_replicas main parameters and moments are 1 / (S R) of b.
//
// It sends, in a step of M micro-batches, G bytes an element of the gradients (4, or 2 when they are reduced
// in bf16):
//
//   no_shard 2 G b (S-1)/S · optim (G + P) b (S-1)/S · optim_grads (M G + P) b (S-1)/S
//   optim_grads_params (M G + P x gathers) b (S-1)/S, where a step gathers every bucket once for each
//   forward and each backward pass; with overlap_param_gather the last two gathered blocks are reused when
//   the next pass begins.
//   Over `replica` beside that: 2 G b/S (R-1)/R, or with shard_over_replicas (G + P) b/S (R-1)/R.
//
// Gradients are fp32 sums over micro-batches, then over ranks in rank order (comm/reduce.hpp): first those of
// partial_over_tensor and of replicated segments, then over `shard`, then `replica`, then tied ones over
// `embedding`. The optimizer divides by the token count. Every rank of a group calls the same methods in the
// same order; all methods but the views are collective.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/reduce.hpp"
#include "config/sections/common.hpp"
#include "ops/parameter.hpp"
#include "ops/tape.hpp"
#include "optim/optimizer.hpp"
#include "parallel/bucket.hpp"
#include "parallel/low_precision.hpp"
#include "parallel/nf4_weight.hpp"

namespace capstan::parallel {

// The ranks that a store works with; null or alone: none.
struct StoreGroups {
  // data-parallel ranks (dp-cp) of one instance: buckets are sharded over it.
  comm::Communicator* shard = nullptr;
  // The same rank of every instance of the optimizer (HSDP).
  comm::Communicator* replica = nullptr;
  // Gradients of ParamSpec::partial_over_tensor are summed over it.
  comm::Communicator* tensor = nullptr;
  // Ranks that share the replicated segments of a Shard: their gradients are summed.
  comm::Communicator* kv_replicas = nullptr;
  // Copies of a tied parameter on different stages: summed.
  comm::Communicator* embedding = nullptr;
  // tp-pp: sums over all parameters.
  comm::Communicator* model = nullptr;
};

class FlatStore final : public ParamStore {
 public:
  struct Options {
    DType compute = DType::f32;
    // Type of the main parameters. If it is that of `compute`, the model computes with them and there are no
    // others.
    DType main = DType::f32;
    // In which gradients are sent: f32, or bf16.
    DType reduce = DType::f32;
    // Without effect in a group of one.
    config::ShardingStrategy sharding = config::ShardingStrategy::no_shard;
    // outer_dp_sharding_strategy optim: main parameters and moments are sharded over replicas too.
    bool shard_over_replicas = false;
    // A bucket is exchanged while the backward pass goes on.
    bool overlap_grad_reduce = false;
    // Where gradients are summed over ranks. communication: all sums of up to two buckets at a time, beside
    // the compute queue; for channels that run without the host (NCCL). Only tied copies are always summed
    // on the compute queue, at the end of the step.
    Queue reduce_queue = Queue::compute;
    // Parameters are gathered while the forward pass goes on.
    bool overlap_param_gather = false;
    int64_t bucket_elements = 40'000'000;
    // Keep weight decay on query and key norms.
    bool decay_qk_norm = false;
    // False: evaluation and generation; nothing trains.
    bool gradients = true;
    // Null: all parameters.
    std::function<bool(const Parameter&)> trains;
    // Kept in 4 bits and frozen, not with optim_grads_params; null: none.
    std::function<bool(const Parameter&)> quantized;
    // Block sizes and scales of the quantized parameters.
    Nf4Options nf4;
    // Weights whose GEMMs are in 8 or 4 bits; not those kept in 4 bits.
    LowPrecisionOptions low_precision;
    // Muon: of a parameter that is updated as a matrix the rows of optim::Matrix::split, else nullopt; null:
    // none. Matrices are in buckets of their own.
    std::function<std::optional<std::vector<int64_t>>(const Parameter&)> matrix;
    // LoRA+: learning rate of ParamSpec::second_factor over the others'.
    double second_factor_lr = 1;
  };

  FlatStore(Device& device, std::span<const std::unique_ptr<Parameter>> parameters, const StoreGroups& groups,
            const Options& options);
  // The compute queue waits for transfers and sums that are under way, before it reuses their memory.
  ~FlatStore() override;

  // ParamStore. With optim_grads_params acquire() gathers the block of the parameter; at most two blocks are
  // gathered.
  Tensor acquire(const Parameter& parameter) override;
  void release(const Parameter& parameter) override;
  void set_direction(PassDirection direction) override;
  const LayerScaling* scaling(const Parameter& parameter) const override {
    return low_precision_ ? low_precision_->scaling(parameter) : nullptr;
  }
  bool trains(const Parameter& parameter) const override {
    return !quantized(parameter) && bucket_of(parameter).plan->trains;
  }
  Tensor gradient(const Parameter& parameter) override;
  Tensor gradient_to_set(const Parameter& parameter, bool& fresh) override;

  // Before a step's first micro-batch; random numbers depend on `step`. Zeroes each gradient buffer unless
  // its first writer overwrites it.
  void zero_gradients(int64_t step = 0);
  // After its last: then flat_buffers() hold the sums over all ranks.
  void finish_gradients();
  // After the optimizer: distributes the new parameters to the ranks that compute with them. control: the
  // kernels::StepControl of the update, in bytes; where it skips, the scales of GEMMs in 8 bits stay as they
  // are. Undefined: the update was made.
  void after_update(const Tensor& control = {});
  // Called before and after values of parameter_shards() are set from outside.
  void before_load();
  void after_load();

  // A parameter that is kept in 4 bits is in no parameter_shards(): all ranks of `tensor` together set it,
  // from the values of their local shards (Nf4Weight::set).
  bool quantized(const Parameter& parameter) const {
    return !quantized_.empty() && quantized_[static_cast<size_t>(parameter.index())] != nullptr;
  }
  void set_quantized(const Parameter& parameter, std::span<const float> values);

  // The buffers that the optimizer of this rank updates, one for each bucket that trains.
  std::vector<optim::FlatBuffer> flat_buffers() const;
  // Index there of the buffer that a parameter's bucket is, also where other ranks own its elements; -1: it
  // does not train.
  int buffer_of(const Parameter& parameter) const {
    return quantized(parameter) ? -1 : bucket_of(parameter).buffer;
  }
  // The groups over which those buffers are divided.
  optim::Groups optimizer_groups() const {
    return {.shard = shards_state_ ? groups_.shard : nullptr,
            .replica = shards_over_replicas_ ? groups_.replica : nullptr,
            .tensor = groups_.tensor};
  }
  // Sums the numbers, fp64 or i64, that each rank has from the `counted` ranges of its buffers, on the
  // device. The same bits on every rank of `shard`, `replica` and `model`.
  void sum_over_owners(const Tensor& values);

  // The shard of a parameter that this rank holds between steps. It is initialized, checked, saved and
  // loaded.
  struct ParameterShard {
    const Parameter* parameter;
    // Elements of the local shard (Parameter::shape(), row-major).
    FlatRange range;
    // [range.count]: main parameters, or where there are none the compute values.
    Tensor values;
    // The part of `range` that this rank writes to a checkpoint; of replicated segments (Shard) only those
    // owned.
    FlatRange write;
    // Index in flat_buffers(), -1: does not train.
    int buffer = -1;
    // Offset in that buffer, elements.
    int64_t begin = 0;
  };
  // In the order of the model's parameters.
  const std::vector<ParameterShard>& parameter_shards() const { return parameter_shards_; }
  // The elements `range` of the parameter's shard, within tensors made in the buffers' shapes (optimizer
  // state).
  static Tensor range_of(const ParameterShard& shard, const FlatRange& range,
                         const std::vector<Tensor>& buffers);
  // Null: all GEMMs are in the compute type.
  const LowPrecisionWeights* low_precision() const { return low_precision_.get(); }
  std::span<const std::unique_ptr<Parameter>> parameters() const { return parameters_; }
  const StoreGroups& groups() const { return groups_; }
  // Some parameters train and some do not.
  bool has_frozen_parameters() const { return options_.gradients && options_.trains != nullptr; }
  // Parameters of this rank's model, without padding.
  int64_t elements() const { return layout_.elements; }

  // Sees starts and waits of collectives as events 'C': "start reduce bucket 0", "wait gather layer 3". Null:
  // no observer.
  void observe(TapeObserver* observer) { observer_ = observer; }
  // Sees a bucket's gradients of this rank alone, before they are reduced. Null: no observer.
  void on_local_gradients(std::function<void(const Tensor&)> watch) { watch_ = std::move(watch); }

 protected:
  GemmOperand acquire_operand(const Parameter& parameter, WeightRole role) override;
  void tape_gradient_done(const Parameter& parameter, const PendingUses& left) override;
  void gradient_ready(const Parameter& parameter) override;

 private:
  struct Bucket {
    const BucketPlan* plan;
    // Index in flat_buffers().
    int buffer = -1;
    // Elements of `values`: all, or this rank's slice of `shard` (optim_grads_params).
    FlatRange held;
    // This rank's part of main parameters and moments.
    FlatRange owned;
    // Compute type [held.count].
    Tensor values;
    // [owned.count]; a view of `values` where there are no copies.
    Tensor main;
    // optim_grads_params: gathered.
    Tensor full;
    // fp32 [elements]; sharded gradients: while the weight gradients of a micro-batch are computed.
    Tensor gradients;
    // Sharded gradients: fp32, this rank's slice.
    Tensor sum;
    // To be summed over `tensor`, over `kv_replicas`.
    std::vector<FlatRange> partial, replicated;
    // Parameters whose gradients are not ready yet.
    int waiting = 0;
    // Its exchange of this step was started; sharded gradients: `sum` is set.
    bool reduced = false;
    // Running gather of `values` or `full`.
    std::optional<comm::Transfers> gather;
    // Running gather of the sum of the gradients.
    std::optional<comm::Transfers> gradient_gather;
    // The sent gradients, where they are not fp32.
    Tensor in_flight;
  };
  struct Quantized {
    Nf4Weight kept;
    // While it is acquired.
    Tensor full;
    int pins = 0;
  };
  // The sums of a bucket's gradients, under way.
  struct PendingReduction {
    size_t bucket;
    // fp32; undefined where only sums over `replica` are left.
    Tensor gradients;
    // The buffer that is sent over `shard`, and this rank's slice of its sum, in the type of the reduction.
    Tensor in_flight, sum;
    std::optional<comm::Reduction> over_shard;
    // Further sums on the communication queue, and their memory, until the compute queue waits for
    // `complete`.
    std::vector<comm::Reduction> reductions;
    std::vector<Tensor> buffers;
    // The communication queue has made all sums of the bucket; null: finish_reduce() makes them.
    std::unique_ptr<Event> complete;
  };
  Bucket& bucket_of(const Parameter& parameter) {
    return buckets_[layout_.positions[static_cast<size_t>(parameter.index())].bucket];
  }
  const Bucket& bucket_of(const Parameter& parameter) const {
    return buckets_[layout_.positions[static_cast<size_t>(parameter.index())].bucket];
  }
  Tensor view(const Tensor& flat, const Parameter& parameter) const;
  // The elements of a bucket that this rank of `shard` owns.
  FlatRange slice_of(const BucketPlan& plan) const;
  Tensor owned_values(const Bucket& bucket) const;
  Tensor owned_gradients(const Bucket& bucket) const;
  // The gradients that this rank of `shard` reduces.
  Tensor slice_gradients(const Bucket& bucket) const;
  bool has_main_params() const { return options_.main != options_.compute; }
  void add_ranges(const Bucket& bucket, size_t index, optim::FlatBuffer& buffer) const;
  void make_bucket(const BucketPlan& plan);
  void make_quantized();
  void make_low_precision();
  void make_parameter_shards();
  // The events that a collective over `shard` was started, on `bytes` of all its ranks together, and that it
  // was waited for since `started` on the host's clock.
  void trace_start(const std::string& what, int64_t bytes) const;
  TraceScope trace_wait(const std::string& what) const;

  // flat_store.cpp: parameters
  // The parameters that have new values.
  enum class Changed : uint8_t { trained, all };
  void gather_parameters(Changed changed, bool wait);
  void measure_weights(Changed changed);
  void finish_gather(size_t bucket);
  void gather_block(int block);
  void start_gather(int block);
  void release_block(int block);

  // gradients.cpp
  PendingReduction& add_pending(size_t bucket);
  void start_reduce(size_t bucket);
  void start_sum_over_shard(PendingReduction& pending);
  // Adds the sum over `shard` to the bucket's gradients.
  void add_sum(const PendingReduction& pending);
  // Finishes the oldest pending reduction.
  void finish_reduce();
  // Finishes all pending reductions.
  void finish_reductions();
  void finish_bucket(PendingReduction& pending);
  void finish_sharded_gradients();
  void sum_over_replicas(PendingReduction& pending, const Tensor& slice);
  void start_gradient_gather(Bucket& bucket);
  void finish_gradient_gather(Bucket& bucket);
  void cast(const Tensor& from, const Tensor& to, Queue queue);
  void sum_ranges(comm::Communicator* group, PendingReduction& pending, const std::vector<FlatRange>& ranges);
  // A tensor of `pending` that the reduce queue may use from now on.
  Tensor reduce_buffer(PendingReduction& pending, int64_t elements, DType type);
  // The sum is complete for later work of the reduce queue.
  void add_reduction(PendingReduction& pending, comm::Reduction reduction);
  // The reduce queue begins later work after that of the compute queue.
  void follow_compute();

  Device& device_;
  std::span<const std::unique_ptr<Parameter>> parameters_;
  // By Parameter::index(): its gradient holds nothing yet, not even zeros.
  std::vector<char> unwritten_;
  StoreGroups groups_;
  Options options_;
  // Numbers of ranks of `shard` and of `replica`.
  int64_t shards_, replicas_;
  // Over `shard`.
  bool shards_state_, shards_gradients_, shards_parameters_;
  // Main parameters and moments are sharded over `replica` too.
  bool shards_over_replicas_;
  int buffers_ = 0;
  BucketLayout layout_;
  std::vector<Bucket> buckets_;
  // By Parameter::index(); empty: none.
  std::vector<std::unique_ptr<Quantized>> quantized_;
  std::unique_ptr<LowPrecisionWeights> low_precision_;
  std::vector<ParameterShard> parameter_shards_;
  std::deque<PendingReduction> pending_reductions_;
  TapeObserver* observer_ = nullptr;
  std::function<void(const Tensor&)> watch_;

  // optim_grads_params: the block that was acquired last, and the one that is kept or gathered beside it.
  std::vector<std::vector<size_t>> block_buckets_;
  // By block.
  std::vector<int> pins_;
  int current_block_ = -1, prefetched_block_ = -1;
  PassDirection direction_ = PassDirection::forward;
  // set_direction() was called since the last block was entered.
  bool direction_changed_ = true;
};

}  // namespace capstan::parallel
