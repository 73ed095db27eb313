// Parameters, gradients and main parameters in flat buckets (bucket.hpp), replicated (no_shard) or sharded
// over the data-parallel ranks: optim (ZeRO-1), optim_grads (ZeRO-2), optim_grads_params (ZeRO-3).
//
// Each bucket holds parameters of one grid (ops/shard.hpp), and is sharded and reduced over the groups of
// that grid: dense parameters over dp-cp, expert parameters over the ranks that hold the same experts. S and
// R are the numbers of ranks of the groups `shard` and `replica`, P is the bytes per element of the compute
// type, A that of the gradients (Options::main_grads: 4, or 2 in bf16). Bytes that one rank holds for a
// trainable bucket of b elements:
//
//                         parameters          main parameters *   gradients          moments (Adam) **
//   no_shard              P b                 4 b                 A b                8 b
//   optim                 P b                 4 b / S             A b                8 b / S
//   optim_grads           P b                 4 b / S             A b / S + wgrad    8 b / S
//   optim_grads_params    P b / S + gathered  4 b / S             A b / S + wgrad    8 b / S
//
//   *         Zero if Options::main equals Options::compute: the model computes with the main parameters.
//             With Options::offload_fraction, this fraction of the main parameters and moments lies in host
//             memory instead: 4 bytes (or P) and 8 bytes per element, and P more if Options::main differs
//             from Options::compute, for the updated parameters that are copied back to the device. With
//             Options::state_directory they lie in a file, and three chunks of them in host memory.
//   **        In fp32; optimizer.hpp has the bytes of the other types.
//   gathered  P b while the bucket's block is gathered: the block that is computed and, with
//             overlap_param_gather, the one that is prefetched.
//   wgrad     4 b while weight gradients of the bucket are computed and, with overlap_grad_reduce, while they
//             are reduced: kPendingReductions buckets at a time where they are reduced on the communication
//             queue, else one. With gradients in bf16 also in the first two rows, while they are computed.
//   With shard_over_replicas main parameters and moments take 1 / (S R) of those without sharding.
//
// With gather_codes the ranks gather the codes of weights whose GEMMs are in 8 bits: P = 1 in `gathered`, in
// the parameters of optim and optim_grads, which hold P b / S in the compute type in addition, and in the
// bytes sent below; with optim_grads_params b / S codes are added.
//
// Parameters that are kept in 4 bits (Options::quantized, nf4_weight.hpp) are in no bucket; each is
// dequantized at its first acquire() and dropped at its last release(). Buffers (ParamSpec::buffer) are in no
// bucket either: every rank holds them in fp32.
//
// G is the bytes per element of the gradients that are sent (4, or 2 when they are reduced in bf16; gradients
// in bf16 are sent as they are: 2 in the first two rows and over `replica`), M the micro-batches of a step.
// Bytes that one rank sends per bucket and step over `shard`:
//
//   no_shard            2 G b (S-1)/S
//   optim               (G + P) b (S-1)/S
//   optim_grads         (M G + P) b (S-1)/S
//   optim_grads_params  (M G + g P) b (S-1)/S
//
// g is the number of all-gathers of the bucket in the step: one for each forward and each backward pass that
// uses it, without those of blocks that are still gathered when the next pass begins (the last block of a
// pass, with overlap_param_gather its last two).
// Over `replica`, in addition: 2 G b/S (R-1)/R, or with shard_over_replicas (G + P) b/S (R-1)/R.
//
// Gradients are fp32 sums over micro-batches and, in rank order (comm/reduce.hpp), over ranks: the elements
// of partial_over_tensor parameters over `tensor`, those of replicated segments over `kv_replicas`, then all
// elements over `shard` and `replica`, then tied parameters over the stages that hold them. With optim_grads
// and optim_grads_params the gradients of each micro-batch are reduced over `tensor`, `kv_replicas` and
// `shard` before they are added. The optimizer divides by the token count.
//
// Tokens are sent to the ranks of the experts that they are routed to. The gradient of an expert on such a
// rank is therefore a sum over tokens of all ranks that hold other experts, and has the same factor as the
// gradients of dense parameters: the sum over `shard` and `replica` is that over all tokens.
//
// Gradients in bf16 (Options::main_grads) are fp32 sums that are rounded to nearest where they are stored.
// The weight gradients of a micro-batch are summed in the fp32 buffer `wgrad`; adding them to the sum over
// micro-batches rounds once. After the last micro-batch, each sum over the ranks of a group adds the rounded
// parts in rank order and rounds once. no_shard and optim thus have the same bits, and so have optim_grads
// and optim_grads_params, which add the fp32 sums over `shard` of each micro-batch.
//
// Where the device runs its queues at the same time (Device::queues_work), all of this runs on the
// communication queue, whatever carries the tensors; the compute queue waits for the sums at the end of the
// step. On the CPU, where a call returns when its work is done, it runs on the compute queue.
//
// Every rank of a group calls the non-const methods in the same order. These start collectives: acquire()
// with optim_grads_params, note_weight_gradient() of ParamStore (reduces a bucket after its last weight
// gradient), zero_gradients() and finish_gradients(), after_update(), after_load(), set_quantized() (over
// `tensor`) and all_reduce_statistics(). set_direction() and release() determine which blocks acquire()
// gathers.
#pragma once

#include <deque>
#include <functional>
#include <map>
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
#include "optim/state_file.hpp"
#include "parallel/bucket.hpp"
#include "parallel/low_precision.hpp"
#include "parallel/nf4_weight.hpp"
#include "tensor/host_device.hpp"

namespace capstan::parallel {

// The process groups of the parameters of one grid. A group that is null or of size 1: no communication over
// it.
struct GridGroups {
  // The ranks of one optimizer instance that hold the same parts of the model: data-parallel ranks (dp-cp),
  // or expert data-parallel ranks. Gradients are reduced over them, and buckets are sharded over them.
  comm::Communicator* shard = nullptr;
  // HSDP: the ranks with the same index in `shard`, one of each optimizer instance. Gradients are reduced
  // over them.
  comm::Communicator* replica = nullptr;
  // Tensor-parallel, or expert tensor-parallel ranks. Gradients of ParamSpec::partial_over_tensor parameters
  // are summed over them.
  comm::Communicator* tensor = nullptr;
  // The ranks that hold all parameters of the grid together (tp-pp, or etp-ep-pp). Statistics over all
  // parameters are summed over them.
  comm::Communicator* model = nullptr;
};

// The process groups of a store.
struct StoreGroups {
  GridGroups dense;
  // All null if the model has no expert parameters.
  GridGroups expert;
  // Tensor-parallel ranks that hold the same key and value heads, the replicated segments of a Shard. The
  // gradients of these segments are summed over them.
  comm::Communicator* kv_replicas = nullptr;
  // The pipeline stages with a table of word or of position embeddings. Gradients of tied parameters are
  // summed over them.
  comm::Communicator *embedding = nullptr, *position_embedding = nullptr;

  const GridGroups& of(const Parameter& parameter) const {
    return parameter.spec().grid() == ParameterGrid::expert ? expert : dense;
  }
  // The stages that hold a tied parameter.
  comm::Communicator* holders(const ParamSpec& spec) const {
    return spec.holders == ParamSpec::Holders::position_embedding ? position_embedding : embedding;
  }
};

class FlatStore final : public ParamStore {
 public:
  // Largest number of buckets whose reductions are under way on the communication queue: while one is summed,
  // a second is sent, and a third waits to be sent. Each holds the buffer that it receives, with sharded
  // gradients the gradients of its bucket, and a copy of these if they are sent in another type.
  static constexpr size_t kPendingReductions = 3;
  // Largest number of buckets whose updated slices are under way over `replica` before the first of them is
  // gathered over `shard`, where transfers through host memory hold buffers of it.
  static constexpr size_t kPendingReplicaGathers = 3;

  struct Options {
    // Type of the parameters that the model computes with.
    DType compute = DType::f32;
    // Type of the main parameters, which the optimizer updates. If it equals `compute`, the model computes
    // with the main parameters, and there is no second array.
    DType main = DType::f32;
    // Type in which fp32 gradients are sent: f32, or a 16-bit type.
    DType reduce = DType::f32;
    // Type of the gradients, the sums over micro-batches: f32, or bf16, which only Adam reads.
    DType main_grads = DType::f32;
    // Sharding over `shard`. No effect on the buckets of a grid whose `shard` has one rank.
    config::ShardingStrategy sharding = config::ShardingStrategy::no_shard;
    // outer_dp_sharding_strategy optim: shards main parameters and moments over `replica` too. No effect with
    // no_shard.
    bool shard_over_replicas = false;
    // Overlaps the reduction of a bucket's gradients with the backward pass.
    bool overlap_grad_reduce = false;
    // Ranks gather weights that train and whose GEMMs are in 8 bits as codes, with the same numbers as if
    // they were gathered in the compute type and quantized. Needs a scaling recipe with one scale for a
    // tensor. No effect with no_shard.
    bool gather_codes = false;
    // Overlaps all-gathers of parameters with computation: of the next block (optim_grads_params), or of the
    // updated buckets with the forward pass.
    bool overlap_param_gather = false;
    // A bucket is full when it has this number of elements. nullopt: default_bucket_elements() with sharded
    // gradients, else that of BucketOptions.
    std::optional<int64_t> bucket_elements;
    // Applies weight decay to the norm weights of queries and keys.
    bool decay_qk_norm = false;
    // False: no parameter is trainable (evaluation and generation).
    bool gradients = true;
    // The trainable parameters; null: all.
    std::function<bool(const Parameter&)> trainable;
    // The parameters that are frozen and kept in 4 bits, not with optim_grads_params nor of experts; null:
    // none.
    std::function<bool(const Parameter&)> quantized;
    // Block sizes and scales of the quantized parameters.
    Nf4Options nf4;
    // Weights whose GEMMs run in 8 or 4 bits; not those kept in 4 bits, nor expert parameters.
    LowPrecisionOptions low_precision;
    // Muon: returns optim::Matrix::split of a parameter that is updated as a matrix, an expert parameter as
    // one matrix for each expert; nullopt for other parameters; null: no matrices. Matrices are in buckets of
    // their own.
    std::function<std::optional<std::vector<int64_t>>(const Parameter&)> matrix;
    // LoRA+: ratio of the learning rate of B (ParamSpec::is_lora_b) to that of the other parameters.
    double lora_b_lr_ratio = 1;
    // Fraction of the elements that this rank updates in each bucket, the last ones, whose main parameters
    // and moments are kept in host memory and updated by the CPU. Does not apply to matrices, and without
    // state_directory has no effect on a device whose memory is the host's.
    double offload_fraction = 0;
    // Keeps what is offloaded in a file in this directory (optim::StateFile), in chunks of at most
    // chunk_elements elements and the padding of their bucket; empty: in host memory.
    std::string state_directory;
    int64_t chunk_elements = 4'194'304;
    // The user of the file in messages, such as "rank 3".
    std::string state_owner = "rank 0";
  };

  FlatStore(Device& device, std::span<const std::unique_ptr<Parameter>> parameters, const StoreGroups& groups,
            const Options& options);
  // The compute queue waits for pending reductions before it reuses their memory.
  ~FlatStore() override;

  // With optim_grads_params acquire() gathers the block of the parameter. Two blocks at most are gathered at
  // a time.
  Tensor acquire(const Parameter& parameter) override;
  void release(const Parameter& parameter) override;
  void set_direction(PassDirection direction) override;
  const LayerScaling* scaling(const Parameter& parameter) const override {
    return low_precision_ ? low_precision_->scaling(parameter) : nullptr;
  }
  bool is_trainable(const Parameter& parameter) const override {
    return in_bucket(parameter) && bucket_of(parameter).plan->trainable;
  }
  Tensor gradient(const Parameter& parameter) override;
  Tensor gradient_for_write(const Parameter& parameter, bool& uninitialized) override;

  // Call before the first micro-batch of a step. Zeroes each gradient buffer unless its first writer
  // overwrites it. `step` selects the random numbers of stochastic rounding.
  void zero_gradients(int64_t step = 0);
  // Call after the last micro-batch of a step. Completes the reductions: the gradients of flat_buffers() are
  // then the sums over all ranks.
  void finish_gradients();
  // Call after the optimizer step. All-gathers the updated parameters, and updates the scaling factors of
  // GEMMs in 8 and 4 bits. control: the kernels::StepControl of the step, in bytes. If it skips the update,
  // the scaling factors of delayed scaling keep their values. Undefined: the update was not skipped.
  void after_update(const Tensor& control = {});
  // Call before and after the values of parameter_shards() are set, for example from a checkpoint.
  void before_load();
  void after_load();

  // Whether a parameter is kept in 4 bits. Such a parameter is not in parameter_shards(): all ranks of
  // `tensor` call set_quantized() with the values of their local shards (Nf4Weight::set).
  bool quantized(const Parameter& parameter) const {
    return !quantized_.empty() && quantized_[static_cast<size_t>(parameter.index())] != nullptr;
  }
  void set_quantized(const Parameter& parameter, std::span<const float> values);

  // The buffers that the optimizer of this rank updates: one for each trainable bucket, and one for each part
  // of it that is offloaded.
  std::vector<optim::FlatBuffer> flat_buffers() const;
  // The reduced gradients of flat_buffers() with their ranges, one buffer for each trainable bucket. Their
  // sums do not depend on what is offloaded.
  std::vector<optim::FlatBuffer> gradient_buffers() const;
  // Index in flat_buffers() of the first buffer of the bucket that holds the parameter, even if other ranks
  // own its elements; -1: the parameter is frozen.
  int buffer_of(const Parameter& parameter) const {
    return in_bucket(parameter) ? bucket_of(parameter).buffer : -1;
  }
  // Whether a rank of this world has expert parameters: statistics then have two parts.
  bool has_expert_grid() const {
    return groups_.expert.model || std::ranges::any_of(layout_.buckets, [](const BucketPlan& plan) {
             return plan.grid == ParameterGrid::expert;
           });
  }
  // All-reduces partial sums, fp64 or i64, that each rank computed over its elements of a grid with
  // UpdateRange::counted, in place on the device. The sums are bitwise identical on all ranks of `shard`,
  // `replica` and `model`.
  void all_reduce_statistics(const Tensor& values, ParameterGrid grid);

  // The shard of a parameter that this rank holds between steps, and that is initialized, checked, saved and
  // loaded. A parameter has several of them if parts of its shard are offloaded.
  struct ParameterShard {
    const Parameter* parameter;
    // Elements of the local shard (Parameter::shape(), row-major).
    FlatRange range;
    // The memory of values(); of a shard in a file, that of its chunk while it is loaded.
    Tensor memory;
    // The part of `range` that this rank writes to a checkpoint; of replicated segments (Shard) only those
    // that it owns.
    FlatRange write;
    // Index in flat_buffers(); -1: frozen, or a buffer of the model.
    int buffer = -1;
    // Offset of the shard in that buffer, in elements.
    int64_t begin = 0;
    // Main parameters in a file, as this chunk; null: in memory.
    optim::StateFile* file = nullptr;
    size_t chunk = 0;
    // Main parameters [range.count]; of a frozen parameter, which has none, the values in the compute type;
    // of a buffer its values in fp32. Those in a file are read, and the tensor is valid until the values of
    // another shard are asked for.
    Tensor values() const {
      if (file) file->load(chunk, optim::FlatBuffer::kMainArray);
      return memory;
    }
    // Call after values() were changed.
    void set_changed() const {
      if (file) file->set_changed(chunk, optim::FlatBuffer::kMainArray);
    }
  };
  // The shards in the order of the model's parameters.
  const std::vector<ParameterShard>& parameter_shards() const { return parameter_shards_; }
  // The elements `range` of the parameter, as a view [range.count]. buffers: one tensor for each of
  // flat_buffers(), of the same shape (optimizer state). `range` lies in `shard.range`.
  static Tensor range_of(const ParameterShard& shard, const FlatRange& range,
                         const std::vector<Tensor>& buffers);
  // Null: all main parameters and moments lie in memory.
  optim::StateFile* state_file() const { return state_file_.get(); }
  // Null: all GEMMs run in the compute type.
  const LowPrecisionWeights* low_precision() const { return low_precision_.get(); }
  Device& device() const { return device_; }
  std::span<const std::unique_ptr<Parameter>> parameters() const { return parameters_; }
  const StoreGroups& groups() const { return groups_; }
  // Whether only some of the parameters are trained.
  bool has_frozen_parameters() const { return options_.gradients && options_.trainable != nullptr; }
  // Number of elements of all parameters of this rank, without padding.
  int64_t elements() const { return layout_.elements; }

  // The observer receives the starts and waits of collectives as events of phase 'C', for example "start
  // reduce bucket 0" and "wait gather layer 3". Null: no observer.
  void observe(TapeObserver* observer) { observer_ = observer; }
  // The callback receives the gradients of a bucket before they are reduced over ranks [bucket elements]:
  // with sharded gradients those of each micro-batch in fp32, else the sums in Options::main_grads. Null: no
  // callback.
  void on_local_gradients(std::function<void(const Tensor&)> watch) { watch_ = std::move(watch); }

 protected:
  GemmOperand acquire_operand(const Parameter& parameter, WeightRole role) override;
  void tape_gradient_done(const Parameter& parameter, const PendingUses& left) override;
  void gradient_ready(const Parameter& parameter) override;

 private:
  // How the buckets of a grid are sharded.
  struct GridSharding {
    GridSharding(const GridGroups& groups, const Options& options);
    GridGroups groups;
    // S and R: numbers of ranks of `shard` and of `replica`.
    int64_t shards, replicas;
    // Whether optimizer state, gradients and parameters are sharded over `shard`.
    bool shards_state, shards_gradients, shards_parameters;
    // Whether main parameters and moments are sharded over `replica` too.
    bool shards_over_replicas;
  };
  // A part of a bucket whose main parameters and moments lie in host memory, or in a file.
  struct Offloaded {
    FlatRange elements;
    // In host memory: main parameters [elements.count], and what returns to Bucket::values if it has another
    // type.
    Tensor main, model;
    // Index in state_file_.
    size_t chunk = 0;
  };
  struct Bucket {
    const BucketPlan* plan;
    const GridSharding* grid;
    // Index in flat_buffers().
    int buffer = -1;
    // The elements of the bucket that `values` holds: all, or with optim_grads_params or codes this rank's
    // slice.
    FlatRange held;
    // The elements of the bucket whose main parameters and moments this rank holds.
    FlatRange owned;
    // Compute type [held.count].
    Tensor values;
    // The last elements of `owned`, in order.
    std::vector<Offloaded> offloaded;
    // Main parameters of the other elements of `owned`; a view of `values` if the model computes with them.
    // Undefined: there are none.
    Tensor main;
    // BucketPlan::codes: with optim_grads_params those of this rank's slice, else of all elements.
    Tensor codes;
    // optim_grads_params: the gathered parameters, compute type or codes [elements]; undefined while not
    // gathered.
    Tensor full;
    // Weight gradients are added to this tensor, fp32 [elements]. It is `sum`, or with has_wgrad_buffer() the
    // buffer of its own that is defined only while the weight gradients of a micro-batch are computed.
    Tensor gradients;
    // The gradients, in Options::main_grads: [elements], or sharded this rank's slice of the sums over
    // `shard`, [elements / S].
    Tensor sum;
    // The elements whose gradients are summed over `tensor`, and those over `kv_replicas`.
    std::vector<FlatRange> partial, replicated;
    // Number of parameters whose gradients are not ready yet in this step.
    int waiting = 0;
    // The reduction of this step was started; of sharded gradients, that over `replica`.
    bool reduced = false;
    // With has_wgrad_buffer(): `sum` holds gradients of this step.
    bool summed = false;
    // Pending all-gather over `replica` into this rank's slice of `values` or `codes`.
    std::optional<comm::PendingTransfers> replica_gather;
    // Pending all-gather over `shard` into `values`, `codes` or `full`.
    std::optional<comm::PendingTransfers> gather;
    // Pending all-gather of the reduced gradients.
    std::optional<comm::PendingTransfers> gradient_gather;
    // The buffer of `gradient_gather`: `sum`, or a tensor of sent_type().
    Tensor in_flight;
  };
  // A parameter that is kept in 4 bits.
  struct Quantized {
    Nf4Weight kept;
    // The dequantized values while the parameter is acquired, else undefined.
    Tensor full;
    // Number of acquire() calls without release().
    int pins = 0;
  };
  // A reduction of the gradients of a bucket that was started and is not finished.
  struct PendingReduction {
    size_t bucket;
    // The gradients to reduce over `shard`, [elements]: Bucket::sum, or sharded the fp32 ones of a
    // micro-batch. Undefined if that is done, and only sums over `replica` or `embedding` remain.
    Tensor gradients;
    // The buffer that is sent over `shard`, and this rank's slice of its sum, in sent_type().
    Tensor in_flight, sum;
    // The reduce-scatter over `shard`.
    std::optional<comm::Reduction> over_shard;
    // Sharded gradients: no micro-batch of this step adds to the bucket any more.
    bool last = false;
    // Further reductions on the communication queue, and their buffers, which are kept until the compute
    // queue waits for `complete`.
    std::vector<comm::Reduction> reductions;
    std::vector<Tensor> buffers;
    // Recorded on the communication queue after all reductions of the bucket. Null: start_sums() was not
    // called yet, or finish_oldest_reduction() runs the remaining ones on the compute queue.
    std::unique_ptr<Event> complete;
  };
  bool in_bucket(const Parameter& parameter) const {
    return layout_.positions[static_cast<size_t>(parameter.index())].bucket != BucketLayout::kNoBucket;
  }
  Bucket& bucket_of(const Parameter& parameter) {
    return buckets_[layout_.positions[static_cast<size_t>(parameter.index())].bucket];
  }
  const Bucket& bucket_of(const Parameter& parameter) const {
    return buckets_[layout_.positions[static_cast<size_t>(parameter.index())].bucket];
  }
  const GridSharding& sharding_of(ParameterGrid grid) const {
    return grid == ParameterGrid::expert ? expert_ : dense_;
  }
  Tensor view(const Tensor& flat, const Parameter& parameter) const;
  // Options::bucket_elements, or its default.
  int64_t bucket_elements() const;
  // The elements of a bucket that belong to this rank of `shard` (1 / S of them).
  static FlatRange slice_of(const Bucket& bucket);
  // The elements of `owned` whose main parameters and moments lie on the device.
  static FlatRange kept(const Bucket& bucket) {
    const int64_t begin = bucket.owned.begin;
    if (bucket.offloaded.empty()) return bucket.owned;
    return {begin, bucket.offloaded.front().elements.begin - begin};
  }
  void add_offloaded(Bucket& bucket) const;
  // Elements of a bucket that this rank owns.
  Tensor values_of(const Bucket& bucket, const FlatRange& elements) const;
  Tensor gradients_of(const Bucket& bucket, const FlatRange& elements) const;
  // The reduced gradients of slice_of() or, without sharding, of the bucket.
  Tensor slice_gradients(const Bucket& bucket) const;
  bool has_main_params() const { return options_.main != options_.compute; }
  // Whether weight gradients of a micro-batch are computed in a buffer of their own and then added to
  // Bucket::sum.
  bool has_wgrad_buffer(const Bucket& bucket) const {
    return bucket.grid->shards_gradients || options_.main_grads != DType::f32;
  }
  // Type in which gradients are sent; those in 16 bits are sent as they are.
  DType sent_type(const Tensor& gradients) const {
    return gradients.dtype() == DType::f32 ? options_.reduce : gradients.dtype();
  }
  // The ranges of the parameters in `elements`, which this rank owns, relative to their beginning.
  std::vector<kernels::UpdateRange> update_ranges(const Bucket& bucket, const FlatRange& elements) const;
  void add_ranges(const Bucket& bucket, size_t index, const FlatRange& elements,
                  std::vector<kernels::UpdateRange>& ranges) const;
  void add_matrices(const Bucket& bucket, optim::FlatBuffer& buffer) const;
  void make_bucket(const BucketPlan& plan);
  void make_main_parameters(Bucket& bucket);
  void make_state_file();
  void make_quantized();
  void make_low_precision();
  void make_parameter_shards();
  void add_model_buffer(const Parameter& parameter);
  // The part of a parameter's elements `owned` that this rank writes to a checkpoint. bucket: null for a
  // buffer of the model.
  FlatRange written_by_this_rank(const Parameter& parameter, const Bucket* bucket,
                                 const FlatRange& owned) const;
  // Copies the main parameters in host memory to the parameters on the device.
  void upload_parameters();
  // Report to the observer the start of a collective over `shard` in which this rank sends `bytes`, and the
  // time that is spent in waiting for it.
  void trace_start(const std::string& what, int64_t bytes) const;
  // The bytes that a rank sends in a reduce-scatter or all-gather over `shard` of a tensor with `bytes`.
  static int64_t sent_over_shard(const Bucket& bucket, int64_t bytes) {
    return bytes / bucket.grid->shards * (bucket.grid->shards - 1);
  }
  TraceScope trace_wait(const std::string& what) const;

  // flat_store.cpp: parameters
  // The parameters whose values have changed.
  enum class Changed : uint8_t { trained, all };
  void gather_parameters(Changed changed, bool wait);
  void measure_weights(Changed changed);
  // Encodes the elements that this rank owns.
  void encode_owned(const Bucket& bucket);
  // The values or codes of the bucket's parameters, gathered until the matching release().
  const Tensor& gathered(const Parameter& parameter);
  // The owned elements of a parameter, compute type; undefined: none.
  Tensor owned_values(const Parameter& parameter) const;
  // This rank's slice of what is gathered of a bucket: of `values` or `codes`.
  Tensor gathered_slice(const Bucket& bucket) const;
  void start_replica_gather(size_t index);
  // Starts the all-gather of a bucket over `shard` after that over `replica`.
  void start_shard_gather(size_t bucket);
  // The queue after which this rank's slice is complete: communication while the gather over `replica` is
  // pending, which then waits for it and for the present work of the compute queue.
  Queue follow_replica_gather(Bucket& bucket);
  // The compute queue waits for the bucket's pending gathers.
  void finish_gather(size_t bucket);
  void gather_block(int block);
  void start_gather(int block);
  void release_block(int block);

  // gradients.cpp
  PendingReduction& add_pending(size_t bucket);
  // Not sharded, with has_wgrad_buffer(): adds the weight gradients of a micro-batch to Bucket::sum.
  void add_micro_batch(Bucket& bucket);
  // Not sharded: completes Bucket::sum, with zeros where no weight gradient was computed.
  void complete_sum(Bucket& bucket);
  void start_reduce(size_t bucket);
  void start_reduce_scatter(PendingReduction& pending);
  // Adds the sum over `shard` to Bucket::sum, or without sharded gradients stores it there.
  void add_sum(const PendingReduction& pending);
  void start_sums(PendingReduction& pending);
  void finish_oldest_reduction();
  void finish_reductions();
  // Queues all that remains of the pending reductions: on the compute queue, finishes them.
  void start_pending_sums();
  // Marks a reduction of which all is queued.
  void end_reduction(PendingReduction& pending);
  void finish_bucket(PendingReduction& pending);
  void reduce_over_replicas();
  // Sums the gradients of tied parameters over their holders, after all other sums of them. Only after the
  // last backward pass: the last stage has these gradients long before the first stage, which waits for what
  // the last stage still has to send.
  void reduce_tied();
  // Reduces a slice of the gradients over `replica`, in place.
  void sum_over_replicas(PendingReduction& pending, const Tensor& slice);
  void start_gradient_all_gather(size_t bucket);
  void finish_gradient_all_gather(size_t bucket);
  void cast(const Tensor& from, const Tensor& to, Queue queue);
  void all_reduce_ranges(comm::Communicator* group, PendingReduction& pending,
                         const std::vector<FlatRange>& ranges);
  // Allocates a buffer that later work of the reduce queue may use, kept until `pending` is finished.
  Tensor reduce_buffer(PendingReduction& pending, int64_t elements, DType type);
  // Completes the reduction for later work of the reduce queue: finishes it on the compute queue, else keeps
  // it in `pending`.
  void add_reduction(PendingReduction& pending, comm::Reduction reduction);
  // Makes later work of the reduce queue wait for the present work of the compute queue.
  void follow_compute();

  Device& device_;
  std::span<const std::unique_ptr<Parameter>> parameters_;
  // For each parameter, by Parameter::index(): 1 if its gradient is uninitialized in this step
  // (gradient_for_write()).
  std::vector<char> unwritten_;
  StoreGroups groups_;
  Options options_;
  // Null: nothing is offloaded.
  std::unique_ptr<HostDevice> host_;
  // Null: what is offloaded lies in host memory.
  std::unique_ptr<optim::StateFile> state_file_;
  // The queue of gradient reductions.
  Queue reduce_queue_;
  GridSharding dense_, expert_;
  // Whether the parameters of any bucket are sharded over `shard`.
  bool shards_parameters_;
  int buffers_ = 0;
  BucketLayout layout_;
  std::vector<Bucket> buckets_;
  // Parameters that are kept in 4 bits, by Parameter::index(); empty: there are none.
  std::vector<std::unique_ptr<Quantized>> quantized_;
  // The buffers of the model (ParamSpec::buffer), fp32, by Parameter::index().
  std::map<int, Tensor> model_buffers_;
  std::unique_ptr<LowPrecisionWeights> low_precision_;
  std::vector<ParameterShard> parameter_shards_;
  std::deque<PendingReduction> pending_reductions_;
  TapeObserver* observer_ = nullptr;
  std::function<void(const Tensor&)> watch_;

  // For each block, its buckets, and the number of acquire() calls without release().
  std::vector<std::vector<size_t>> block_buckets_;
  std::vector<int> pins_;
  // optim_grads_params: the block of the last acquire(), and a second one that is prefetched or stays
  // gathered.
  int current_block_ = -1, prefetched_block_ = -1;
  PassDirection direction_ = PassDirection::forward;
  // set_direction() was called after the last gather_block().
  bool direction_changed_ = true;
};

}  // namespace capstan::parallel
