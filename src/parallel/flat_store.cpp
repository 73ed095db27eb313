#include "parallel/flat_store.hpp"

#include <algorithm>
#include <cmath>
#include <deque>

#include "base/error.hpp"
#include "base/philox.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::parallel {

// Purpose of the transfers of a bucket's parameters.
static std::string parameters_of_bucket(size_t index) {
  return "parameters of bucket " + std::to_string(index);
}

using config::ShardingStrategy;

namespace {
// The queue of gradient reductions. Nothing is reduced where no group has several ranks.
Queue reduce_queue_of(const Device& device, const StoreGroups& groups) {
  bool reduces = false;
  for (const comm::Communicator* group : {groups.dense.shard, groups.dense.replica, groups.dense.tensor,
                                          groups.expert.shard, groups.expert.replica, groups.expert.tensor,
                                          groups.kv_replicas, groups.embedding, groups.position_embedding})
    reduces = reduces || comm::ranks_of(group) > 1;
  return reduces && device.queues_work() ? Queue::communication : Queue::compute;
}
}  // namespace

FlatStore::GridSharding::GridSharding(const GridGroups& on, const Options& options)
    : groups(on),
      shards(comm::ranks_of(on.shard)),
      replicas(comm::ranks_of(on.replica)),
      shards_state(options.sharding != ShardingStrategy::no_shard && shards > 1),
      shards_gradients(shards_state && options.sharding != ShardingStrategy::optim),
      shards_parameters(shards_state && options.sharding == ShardingStrategy::optim_grads_params),
      shards_over_replicas(options.sharding != ShardingStrategy::no_shard && options.shard_over_replicas &&
                           replicas > 1) {}

FlatStore::FlatStore(Device& device, std::span<const std::unique_ptr<Parameter>> parameters,
                     const StoreGroups& groups, const Options& options)
    : device_(device),
      parameters_(parameters),
      groups_(groups),
      options_(options),
      reduce_queue_(reduce_queue_of(device, groups)),
      dense_(groups.dense, options),
      expert_(groups.expert, options),
      shards_parameters_(dense_.shards_parameters || expert_.shards_parameters) {
  layout_ = plan_buckets(
      parameters, {.bucket_elements = bucket_elements(),
                   .shards = dense_.shards * dense_.replicas,
                   .expert_shards = expert_.shards * expert_.replicas,
                   .holders = [&groups](const Parameter& parameter) -> int64_t {
                     return comm::ranks_of(groups.holders(parameter.spec()));
                   },
                   .by_block = shards_parameters_,
                   .trainable =
                       [&options](const Parameter& parameter) {
                         return options.gradients && (!options.trainable || options.trainable(parameter));
                       },
                   .matrices =
                       [&options](const Parameter& parameter) {
                         return options.matrix && options.matrix(parameter).has_value();
                       },
                   .codes =
                       [this, &options](const Parameter& parameter) {
                         return options.gather_codes && sharding_of(parameter.spec().grid()).shards_state &&
                                options.low_precision.covers(parameter);
                       },
                   .excluded = options.quantized});
  if (options.gradients && options.offload_fraction > 0 &&
      (!device.shares_host_memory() || !options.state_directory.empty()))
    host_ = std::make_unique<HostDevice>(device, kernels::cpu_table());
  block_buckets_.resize(layout_.blocks.size());
  pins_.assign(layout_.blocks.size(), 0);
  unwritten_.assign(parameters.size(), 0);
  for (const BucketPlan& plan : layout_.buckets) make_bucket(plan);
  if (host_ && !options.state_directory.empty()) make_state_file();
  if (options.quantized) make_quantized();
  if (options.low_precision.covers) make_low_precision();
  make_parameter_shards();
}

int64_t FlatStore::bucket_elements() const {
  if (options_.bucket_elements) return *options_.bucket_elements;
  if (!dense_.shards_gradients && !expert_.shards_gradients) return BucketOptions().bucket_elements;
  int64_t trained = 0;
  for (const auto& parameter : parameters_)
    if (!options_.trainable || options_.trainable(*parameter)) trained += parameter->shape().elements();
  return default_bucket_elements(trained, dense_.shards);
}

FlatRange FlatStore::slice_of(const Bucket& bucket) {
  const int64_t count = bucket.plan->elements / bucket.grid->shards;
  return {comm::rank_in(bucket.grid->groups.shard) * count, count};
}

void FlatStore::make_bucket(const BucketPlan& plan) {
  const GridSharding& grid = sharding_of(plan.grid);
  Bucket bucket;
  bucket.plan = &plan;
  bucket.grid = &grid;
  const FlatRange mine = slice_of(bucket), all{0, plan.elements};
  bucket.held = grid.shards_parameters || plan.codes ? mine : all;
  bucket.owned = plan.trainable && grid.shards_state ? mine : bucket.held;
  if (plan.trainable && grid.shards_over_replicas) {
    const int64_t count = bucket.owned.count / grid.replicas;
    bucket.owned = {bucket.owned.begin + comm::rank_in(grid.groups.replica) * count, count};
  }
  {
    CategoryScope scope(MemoryCategory::parameters);
    bucket.values = Tensor::zeros(device_, {bucket.held.count}, options_.compute);
    if (plan.codes)
      bucket.codes = Tensor::zeros(device_, {grid.shards_parameters ? mine.count : all.count},
                                   options_.low_precision.format.forward);
  }
  if (host_ && plan.trainable) add_offloaded(bucket);
  make_main_parameters(bucket);
  if (plan.trainable) {
    CategoryScope scope(MemoryCategory::gradients);
    bucket.sum =
        Tensor::zeros(device_, {grid.shards_gradients ? mine.count : all.count}, options_.main_grads);
    if (!has_wgrad_buffer(bucket)) bucket.gradients = bucket.sum;
    bucket.buffer = buffers_;
    buffers_ += (kept(bucket).count > 0 ? 1 : 0) + static_cast<int>(bucket.offloaded.size());
    for (size_t i = 0; i < plan.parameters.size(); ++i) {
      const Parameter& parameter = *plan.parameters[i];
      if (parameter.spec().partial_over_tensor)
        bucket.partial.push_back({plan.begins[i], parameter.shape().elements()});
      for (size_t r = 0; r < parameter.shard().segments.size(); ++r)
        if (parameter.shard().segments[r].replicas > 1)
          for (const FlatRange& range : elements_of_segment(parameter.shard(), r))
            bucket.replicated.push_back({plan.begins[i] + range.begin, range.count});
    }
    bucket.waiting = static_cast<int>(plan.parameters.size());
  }
  block_buckets_[plan.block].push_back(buckets_.size());
  buckets_.push_back(std::move(bucket));
}

void FlatStore::make_main_parameters(Bucket& bucket) {
  const FlatRange on_device = kept(bucket);
  CategoryScope scope(MemoryCategory::main_parameters);
  if (on_device.count > 0) {
    if (!has_main_params())
      bucket.main = values_of(bucket, on_device);
    else if (bucket.plan->trainable)
      bucket.main = Tensor::zeros(device_, {on_device.count}, options_.main);
  }
  if (!options_.state_directory.empty()) return;
  for (Offloaded& part : bucket.offloaded) {
    part.main = Tensor::zeros(*host_, {part.elements.count}, options_.main);
    if (!has_main_params()) continue;
    CategoryScope parameters(MemoryCategory::parameters);
    part.model = Tensor::zeros(*host_, {part.elements.count}, options_.compute);
  }
}

// Parts begin at the beginning of a block of fp8 moments, so that they have the same scales as without
// offload. In host memory there is one part.
void FlatStore::add_offloaded(Bucket& bucket) const {
  const int64_t count = bucket.owned.count;
  const auto ranges = update_ranges(bucket, bucket.owned);
  // End of the last parameter; padding follows it.
  int64_t end = 0;
  for (const kernels::UpdateRange& range : ranges) end = std::max(end, range.begin + range.count);
  // The position itself, or the beginning of the block in which it lies.
  const auto block_begin = [&](int64_t position) {
    for (const kernels::UpdateRange& range : ranges)
      if (range.begin < position && position < range.begin + range.count)
        return range.begin + (position - range.begin) / kernels::kMomentBlock * kernels::kMomentBlock;
    return position;
  };
  int64_t begin = block_begin(count - std::llround(options_.offload_fraction * static_cast<double>(count)));
  const int64_t most = options_.state_directory.empty() ? count : options_.chunk_elements;
  CAPSTAN_ASSERT(most >= std::min(count, kernels::kMomentBlock), "chunks smaller than a block of moments");
  while (begin < end) {
    const int64_t next = begin + most < end ? block_begin(begin + most) : count;
    bucket.offloaded.push_back({.elements = {bucket.owned.begin + begin, next - begin}});
    begin = next;
  }
}

void FlatStore::make_state_file() {
  std::vector<Offloaded*> parts;
  std::vector<int64_t> counts;
  for (Bucket& bucket : buckets_)
    for (Offloaded& part : bucket.offloaded) {
      part.chunk = parts.size();
      parts.push_back(&part);
      counts.push_back(part.elements.count);
    }
  if (parts.empty()) return;
  state_file_ = std::make_unique<optim::StateFile>(*host_, options_.state_directory, options_.state_owner,
                                                   parts.size());
  optim::StateFile::Array main, model;
  {
    CategoryScope scope(MemoryCategory::main_parameters);
    main = state_file_->add(options_.main, counts);
    CAPSTAN_ASSERT(main.index == optim::FlatBuffer::kMainArray, "main parameters are the first array");
  }
  if (has_main_params()) {
    CategoryScope scope(MemoryCategory::parameters);
    model = state_file_->add(options_.compute, counts, true);
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i]->main = main.chunks[i];
    if (has_main_params()) parts[i]->model = model.chunks[i];
  }
}

void FlatStore::make_quantized() {
  CAPSTAN_ASSERT(!shards_parameters_,
                 "parameters in 4 bits sharded over data-parallel ranks, which the rules refuse");
  CategoryScope scope(MemoryCategory::parameters);
  const Tensor map = options_.nf4.two_stage ? nf4_scale_map(device_) : Tensor();
  quantized_.resize(parameters_.size());
  for (const auto& parameter : parameters_)
    if (options_.quantized(*parameter))
      quantized_[static_cast<size_t>(parameter->index())] =
          std::make_unique<Quantized>(Quantized{Nf4Weight(device_, *parameter, options_.nf4, map), {}, 0});
}

void FlatStore::make_low_precision() {
  if (std::none_of(parameters_.begin(), parameters_.end(),
                   [&](const auto& parameter) { return options_.low_precision.covers(*parameter); }))
    return;
  const bool of_tensor = LowPrecisionWeights::has_codes_of_shards(options_.low_precision.format.recipe);
  for (const auto& parameter : parameters_)
    CAPSTAN_ASSERT(
        of_tensor || !options_.low_precision.covers(*parameter) ||
            parameter->spec().grid() == ParameterGrid::dense,
        "the weights of experts `" + parameter->name() + "` with scales of blocks, which the rules refuse");
  CAPSTAN_ASSERT(!options_.gather_codes || !dense_.shards_state || of_tensor,
                 "weights with scales of blocks gathered as codes, which the rules refuse");
  low_precision_ = std::make_unique<LowPrecisionWeights>(
      device_, parameters_, std::vector{groups_.dense.tensor, groups_.dense.shard, groups_.dense.replica},
      options_.low_precision);
}

void FlatStore::set_quantized(const Parameter& parameter, std::span<const float> values) {
  CAPSTAN_ASSERT(quantized(parameter), "`" + parameter.name() + "` is not kept in 4 bits");
  quantized_[static_cast<size_t>(parameter.index())]->kept.set(values, groups_.of(parameter).tensor);
}

void FlatStore::make_parameter_shards() {
  for (const auto& parameter : parameters_) {
    if (quantized(*parameter)) continue;
    if (parameter->spec().buffer) {
      add_model_buffer(*parameter);
      continue;
    }
    const auto& [index, position] = layout_.positions[static_cast<size_t>(parameter->index())];
    const int64_t begin = position;
    const Bucket& bucket = buckets_[index];
    const FlatRange owned = intersection({begin, parameter->shape().elements()}, bucket.owned);
    if (owned.count == 0) continue;
    const FlatRange write = written_by_this_rank(*parameter, &bucket, {owned.begin - begin, owned.count});
    int buffer = bucket.buffer;
    const auto add = [&](const FlatRange& part, const Tensor& main, optim::StateFile* file, size_t chunk) {
      const FlatRange elements = intersection(owned, part);
      if (elements.count > 0) {
        ParameterShard shard{parameter.get(), {elements.begin - begin, elements.count}, {}, {}, buffer, 0};
        shard.begin = elements.begin - part.begin;
        shard.memory = (main.defined() ? main : values_of(bucket, part))
                           .flat_range(shard.begin, elements.count, {elements.count});
        shard.write = intersection(write, shard.range);
        shard.file = file, shard.chunk = chunk;
        parameter_shards_.push_back(std::move(shard));
      }
      if (buffer >= 0) ++buffer;
    };
    if (kept(bucket).count > 0) add(kept(bucket), bucket.main, nullptr, 0);
    for (const Offloaded& part : bucket.offloaded)
      add(part.elements, part.main, state_file_.get(), part.chunk);
  }
}

void FlatStore::add_model_buffer(const Parameter& parameter) {
  CAPSTAN_ASSERT(parameter.spec().sharding.dims().empty(),
                 "the buffer `" + parameter.name() + "` is sharded");
  CategoryScope scope(MemoryCategory::parameters);
  const int64_t elements = parameter.shape().elements();
  const Tensor values = model_buffers_[parameter.index()] = Tensor::zeros(device_, parameter.shape());
  ParameterShard shard{.parameter = &parameter, .range = {0, elements}, .memory = values.view({elements})};
  shard.write = written_by_this_rank(parameter, nullptr, shard.range);
  parameter_shards_.push_back(std::move(shard));
}

// The ranks that hold the same elements share the work of writing them.
FlatRange FlatStore::written_by_this_rank(const Parameter& parameter, const Bucket* bucket,
                                          const FlatRange& owned) const {
  if (parameter.spec().tied == ParamSpec::Tied::copy) return {owned.begin, 0};
  const GridSharding& grid = bucket ? *bucket->grid : dense_;
  const bool trainable = bucket && bucket->plan->trainable;
  int64_t replicas = 1, replica = 0;
  const auto add_replica_group = [&](const comm::Communicator* group) {
    replicas *= comm::ranks_of(group);
    replica = replica * comm::ranks_of(group) + comm::rank_in(group);
  };
  if (!bucket || !(trainable ? grid.shards_state : grid.shards_parameters))
    add_replica_group(grid.groups.shard);
  if (!(trainable && grid.shards_over_replicas)) add_replica_group(grid.groups.replica);
  if (!parameter.spec().sharding.over_tensor_ranks()) add_replica_group(grid.groups.tensor);
  return replica_slice(owned, replica, replicas, parameter.index());
}

Tensor FlatStore::range_of(const ParameterShard& shard, const FlatRange& range,
                           const std::vector<Tensor>& buffers) {
  return buffers[static_cast<size_t>(shard.buffer)].flat_range(shard.begin + range.begin - shard.range.begin,
                                                               range.count, {range.count});
}

void FlatStore::trace_start(const std::string& what, int64_t bytes) const {
  const Cost cost{.sent_bytes = static_cast<double>(bytes)};
  TraceScope(device_, observer_, 'C', "start " + what, cost).end();
}
TraceScope FlatStore::trace_wait(const std::string& what) const {
  return {device_, observer_, 'C', "wait " + what};
}

// ---- views ------------------------------------------------------------------------------------------------

Tensor FlatStore::view(const Tensor& flat, const Parameter& parameter) const {
  const Shape& shape = parameter.shape();
  return flat.flat_range(layout_.positions[static_cast<size_t>(parameter.index())].begin, shape.elements(),
                         shape);
}
Tensor FlatStore::values_of(const Bucket& bucket, const FlatRange& elements) const {
  return bucket.values.flat_range(elements.begin - bucket.held.begin, elements.count, {elements.count});
}
Tensor FlatStore::owned_values(const Parameter& parameter) const {
  const auto& [index, begin] = layout_.positions[static_cast<size_t>(parameter.index())];
  const Bucket& bucket = buckets_[index];
  const FlatRange owned = intersection({begin, parameter.shape().elements()}, bucket.owned);
  if (owned.count == 0) return {};
  return values_of(bucket, owned);
}
Tensor FlatStore::slice_gradients(const Bucket& bucket) const {
  if (bucket.grid->shards_gradients || !bucket.grid->shards_state) return bucket.sum;
  const FlatRange mine = slice_of(bucket);
  return bucket.sum.flat_range(mine.begin, mine.count, {mine.count});
}
Tensor FlatStore::gradients_of(const Bucket& bucket, const FlatRange& elements) const {
  const int64_t begin = bucket.grid->shards_state ? slice_of(bucket).begin : 0;
  return slice_gradients(bucket).flat_range(elements.begin - begin, elements.count, {elements.count});
}

std::vector<kernels::UpdateRange> FlatStore::update_ranges(const Bucket& bucket,
                                                           const FlatRange& elements) const {
  std::vector<kernels::UpdateRange> ranges;
  for (size_t i = 0; i < bucket.plan->parameters.size(); ++i) add_ranges(bucket, i, elements, ranges);
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return ranges;
}

// The ranges of one of a bucket's parameters, one for each segment of its shard that is contiguous.
void FlatStore::add_ranges(const Bucket& bucket, size_t index, const FlatRange& elements,
                           std::vector<kernels::UpdateRange>& ranges) const {
  const Parameter& parameter = *bucket.plan->parameters[index];
  const ParamSpec& spec = parameter.spec();
  const bool qk_norm = spec.name.find(".q_layernorm.") != std::string::npos ||
                       spec.name.find(".k_layernorm.") != std::string::npos;
  kernels::UpdateRange range;
  range.weight_decay = !spec.no_weight_decay || (options_.decay_qk_norm && qk_norm);
  range.decoupled_lr =
      spec.name.ends_with("word_embeddings.weight") || spec.name.ends_with("output_layer.weight");
  if (spec.is_lora_b) range.lr_factor = options_.lora_b_lr_ratio;
  range.parameter = random_sequence_of(spec.name);
  const bool counts = spec.tied != ParamSpec::Tied::copy &&
                      (spec.sharding.over_tensor_ranks() || comm::rank_in(bucket.grid->groups.tensor) == 0);
  // Adds the elements `part` of the shard. `position` holds their position in the global parameter.
  const auto add = [&](const FlatRange& part, bool owned, kernels::UpdateRange position) {
    const int64_t begin = bucket.plan->begins[index] + part.begin;
    const FlatRange local = intersection({begin, part.count}, elements);
    if (local.count == 0) return;
    position.begin = local.begin - elements.begin, position.count = local.count;
    position.counted = counts && owned;
    (position.columns > 0 ? position.column : position.origin) += local.begin - begin;
    ranges.push_back(position);
  };
  const Shard& shard = parameter.shard();
  if (shard.segments.empty()) return add({0, parameter.shape().elements()}, true, range);
  int64_t inner = 1;
  for (int d = shard.dim + 1; d < shard.shape.rank(); ++d) inner *= shard.shape[d];
  const int64_t row = spec.shape[shard.dim] * inner;
  // Global index of the first element of the shard, without its offset in `dim`.
  const int64_t first = shard.dim > 0 ? shard.first * (spec.shape.elements() / spec.shape[0]) : 0;
  for (size_t r = 0; r < shard.segments.size(); ++r) {
    const ShardSegment& segment = shard.segments[r];
    range.origin = first + segment.global * inner;
    const bool rows = shard.segments.size() == 1 && segment.count * inner < row;
    range.columns = rows ? segment.count * inner : 0, range.row_stride = rows ? row : 0;
    if (shard.segments.size() == 1) {
      add({0, parameter.shape().elements()}, segment.owned(), range);
      continue;
    }
    for (const FlatRange& part : elements_of_segment(shard, r)) {
      add(part, segment.owned(), range);
      range.origin += row;
    }
  }
}

std::vector<optim::FlatBuffer> FlatStore::flat_buffers() const {
  std::vector<optim::FlatBuffer> buffers;
  for (size_t index = 0; index < buckets_.size(); ++index) {
    const Bucket& bucket = buckets_[index];
    if (!bucket.plan->trainable) continue;
    if (const FlatRange elements = kept(bucket); elements.count > 0) {
      optim::FlatBuffer buffer{bucket.main, gradients_of(bucket, elements), {}, {}};
      if (has_main_params()) buffer.model = values_of(bucket, elements);
      buffer.ranges = update_ranges(bucket, elements);
      if (bucket.plan->matrices) add_matrices(bucket, buffer);
      buffer.bucket = index;
      buffer.grid = bucket.plan->grid;
      buffers.push_back(std::move(buffer));
    }
    for (const Offloaded& part : bucket.offloaded) {
      optim::FlatBuffer buffer{part.main, {}, part.model, update_ranges(bucket, part.elements)};
      buffer.bucket = index;
      buffer.grid = bucket.plan->grid;
      buffer.host = host_.get();
      buffer.file = state_file_.get();
      buffer.chunk = part.chunk;
      buffer.device_gradients = gradients_of(bucket, part.elements);
      buffer.device_parameters = values_of(bucket, part.elements);
      buffers.push_back(std::move(buffer));
    }
  }
  return buffers;
}

void FlatStore::add_matrices(const Bucket& bucket, optim::FlatBuffer& buffer) const {
  CAPSTAN_ASSERT(bucket.offloaded.empty(), "offloaded matrices, which the rules refuse");
  for (size_t i = 0; i < bucket.plan->parameters.size(); ++i) {
    const Parameter& parameter = *bucket.plan->parameters[i];
    const ParamSpec& spec = parameter.spec();
    optim::Matrix matrix{.begin = bucket.plan->begins[i],
                         .global = spec.shape,
                         .sharding = spec.sharding,
                         .split = *options_.matrix(parameter)};
    int64_t matrices = 1;
    if (spec.grid() == ParameterGrid::expert) {
      matrices = parameter.shape()[0];
      matrix.global = {spec.shape[1], spec.shape[2]};
      matrix.sharding = {};
      if (const DimSharding* width = spec.sharding.over(ShardingAxis::expert_tensor))
        matrix.sharding = {ShardingAxis::tensor, width->dim - 1, width->blocks};
    }
    for (int64_t m = 0; m < matrices; ++m) {
      buffer.matrices.push_back(matrix);
      matrix.begin += parameter.shape().elements() / matrices;
    }
  }
  buffer.slice = slice_gradients(bucket);
  const GridSharding& grid = *bucket.grid;
  buffer.groups = {.shard = grid.shards_state ? grid.groups.shard : nullptr,
                   .replica = grid.shards_over_replicas ? grid.groups.replica : nullptr,
                   .tensor = grid.groups.tensor};
}

std::vector<optim::FlatBuffer> FlatStore::gradient_buffers() const {
  std::vector<optim::FlatBuffer> buffers;
  for (const Bucket& bucket : buckets_)
    if (bucket.plan->trainable) {
      optim::FlatBuffer buffer{
          {}, gradients_of(bucket, bucket.owned), {}, update_ranges(bucket, bucket.owned)};
      buffer.grid = bucket.plan->grid;
      buffers.push_back(std::move(buffer));
    }
  return buffers;
}

// ---- parameters -------------------------------------------------------------------------------------------

const Tensor& FlatStore::gathered(const Parameter& parameter) {
  const size_t index = layout_.positions[static_cast<size_t>(parameter.index())].bucket;
  Bucket& bucket = buckets_[index];
  if (!bucket.grid->shards_parameters) {
    finish_gather(index);
    return bucket.plan->codes ? bucket.codes : bucket.values;
  }
  const auto block = static_cast<int>(bucket.plan->block);
  ++pins_[bucket.plan->block];
  if (block != current_block_ || direction_changed_) gather_block(block);
  return bucket.full;
}

Tensor FlatStore::acquire(const Parameter& parameter) {
  if (quantized(parameter)) {
    Quantized& own = *quantized_[static_cast<size_t>(parameter.index())];
    CategoryScope scope(MemoryCategory::parameters);
    if (own.pins++ == 0) own.full = own.kept.expand(options_.compute);
    return own.full;
  }
  if (parameter.spec().buffer) return model_buffers_.at(parameter.index());
  CAPSTAN_ASSERT(!bucket_of(parameter).plan->codes,
                 "the values of `" + parameter.name() + "`, of which ranks gather codes");
  return view(gathered(parameter), parameter);
}

GemmOperand FlatStore::acquire_operand(const Parameter& parameter, WeightRole role) {
  if (!scaling(parameter)) return acquire(parameter);
  if (bucket_of(parameter).plan->codes)
    return low_precision_->operand_of_codes(parameter, role, view(gathered(parameter), parameter));
  return low_precision_->operand(parameter, role, acquire(parameter));
}

void FlatStore::release(const Parameter& parameter) {
  if (quantized(parameter)) {
    Quantized& own = *quantized_[static_cast<size_t>(parameter.index())];
    if (--own.pins > 0) return;
    CAPSTAN_ASSERT(own.full.unique(), "an operation keeps the expanded `" + parameter.name() + "`");
    own.full = Tensor();
    return;
  }
  if (parameter.spec().buffer) return;
  const Bucket& bucket = bucket_of(parameter);
  if (!bucket.grid->shards_parameters) return;
  const auto block = static_cast<int>(bucket.plan->block);
  if (--pins_[static_cast<size_t>(block)] == 0 && block != current_block_ && block != prefetched_block_)
    release_block(block);
}

void FlatStore::set_direction(PassDirection direction) {
  direction_ = direction;
  direction_changed_ = true;
}

// Gathers a block, and starts to gather the next one in the direction of the pass. At the end of the model
// the previous block stays gathered, because the opposite pass begins with it.
void FlatStore::gather_block(int block) {
  const int before = block == current_block_ ? prefetched_block_ : current_block_,
            last = static_cast<int>(pins_.size()) - 1;
  const int next = block + (direction_ == PassDirection::forward ? 1 : -1);
  const bool is_adjacent = direction_changed_ || block - before == 1 || before - block == 1;
  current_block_ = block;
  direction_changed_ = false;
  prefetched_block_ = -1;
  if (options_.overlap_param_gather)
    prefetched_block_ = is_adjacent && next >= 0 && next <= last ? next : before;
  for (int other = 0; other <= last; ++other)
    if (other != current_block_ && other != prefetched_block_ && pins_[static_cast<size_t>(other)] == 0)
      release_block(other);
  start_gather(block);
  for (const size_t bucket : block_buckets_[static_cast<size_t>(block)])
    if (buckets_[bucket].grid->shards_parameters) finish_gather(bucket);
  if (prefetched_block_ >= 0 && prefetched_block_ == next) start_gather(prefetched_block_);
}

void FlatStore::start_gather(int block) {
  int64_t bytes = 0;
  bool started = false;
  for (const size_t index : block_buckets_[static_cast<size_t>(block)]) {
    Bucket& bucket = buckets_[index];
    if (!bucket.grid->shards_parameters || bucket.full.defined()) continue;
    CategoryScope scope(MemoryCategory::parameters);
    const Tensor& mine = bucket.plan->codes ? bucket.codes : bucket.values;
    bucket.full = Tensor::empty(device_, {bucket.plan->elements}, mine.dtype());
    bucket.gather = bucket.grid->groups.shard->channel().start(
        comm::TransferBatch(parameters_of_bucket(index)).all_gather(mine, bucket.full),
        follow_replica_gather(bucket));
    bytes += sent_over_shard(bucket, bucket.full.bytes());
    started = true;
  }
  if (started) trace_start("gather " + layout_.blocks[static_cast<size_t>(block)], bytes);
}

void FlatStore::finish_gather(size_t index) {
  Bucket& bucket = buckets_[index];
  if (!bucket.replica_gather && !bucket.gather) return;
  TraceScope traced =
      trace_wait("gather " + (bucket.grid->shards_parameters ? layout_.blocks[bucket.plan->block]
                                                             : "bucket " + std::to_string(index)));
  for (auto* const gather : {&bucket.replica_gather, &bucket.gather}) {
    if (!*gather) continue;
    (*gather)->wait();
    gather->reset();
  }
  traced.end();
}

void FlatStore::release_block(int block) {
  for (const size_t index : block_buckets_[static_cast<size_t>(block)]) {
    Bucket& bucket = buckets_[index];
    if (!bucket.grid->shards_parameters) continue;
    // A block that was not gathered since the update may still be under way over `replica`.
    if (bucket.full.defined()) finish_gather(index);
    CAPSTAN_ASSERT(
        !bucket.full.defined() || bucket.full.unique(),
        "an operation keeps a gathered parameter of `" + layout_.blocks[static_cast<size_t>(block)] + "`");
    bucket.full = Tensor();
    if (low_precision_)
      for (const Parameter* parameter : bucket.plan->parameters) low_precision_->drop(*parameter);
  }
}

// Computes scales of low-precision weights from the elements that this rank has updated.
void FlatStore::measure_weights(Changed changed) {
  if (!low_precision_) return;
  low_precision_->measure_weights(
      [&](const Parameter& parameter) { return changed == Changed::all || is_trainable(parameter); },
      [&](const Parameter& parameter) { return owned_values(parameter); });
}

void FlatStore::encode_owned(const Bucket& bucket) {
  for (size_t i = 0; i < bucket.plan->parameters.size(); ++i) {
    const Parameter& parameter = *bucket.plan->parameters[i];
    const FlatRange here = intersection({bucket.plan->begins[i], parameter.shape().elements()}, bucket.owned);
    if (here.count == 0) continue;
    const int64_t begin = here.begin - (bucket.grid->shards_parameters ? bucket.held.begin : 0);
    low_precision_->encode(parameter, owned_values(parameter),
                           bucket.codes.flat_range(begin, here.count, {here.count}));
  }
}

Tensor FlatStore::gathered_slice(const Bucket& bucket) const {
  const Tensor& sent = bucket.plan->codes ? bucket.codes : bucket.values;
  if (bucket.grid->shards_parameters || !bucket.grid->shards_state) return sent;
  const FlatRange mine = slice_of(bucket);
  return sent.flat_range(mine.begin, mine.count, {mine.count});
}

void FlatStore::start_replica_gather(size_t index) {
  Bucket& bucket = buckets_[index];
  const Tensor slice = gathered_slice(bucket);
  comm::Communicator& replica = *bucket.grid->groups.replica;
  const int64_t count = slice.elements() / replica.size();
  const FlatRange mine{replica.rank() * count, count};
  bucket.replica_gather =
      replica.channel().start(comm::TransferBatch(parameters_of_bucket(index))
                                  .all_gather(slice.flat_range(mine.begin, mine.count, {mine.count}), slice));
}

Queue FlatStore::follow_replica_gather(Bucket& bucket) {
  if (!bucket.replica_gather) return Queue::compute;
  device_.wait_for(Queue::communication, *device_.record(Queue::compute));
  bucket.replica_gather->wait(Queue::communication);
  return Queue::communication;
}

void FlatStore::start_shard_gather(size_t index) {
  Bucket& bucket = buckets_[index];
  const Tensor& all = bucket.plan->codes ? bucket.codes : bucket.values;
  bucket.gather = bucket.grid->groups.shard->channel().start(
      comm::TransferBatch(parameters_of_bucket(index)).all_gather(gathered_slice(bucket), all),
      follow_replica_gather(bucket));
  trace_start("gather bucket " + std::to_string(index), sent_over_shard(bucket, all.bytes()));
}

void FlatStore::gather_parameters(Changed changed, bool wait) {
  if (shards_parameters_) {
    for (size_t block = 0; block < pins_.size(); ++block) {
      CAPSTAN_ASSERT(pins_[block] == 0, "parameters change while an operation uses them");
      release_block(static_cast<int>(block));
    }
    current_block_ = prefetched_block_ = -1;
    direction_changed_ = true;
  }
  before_load();
  measure_weights(changed);
  // Buckets that are still under way over `replica`.
  std::deque<size_t> over_replicas;
  const auto gather_oldest = [&] {
    const size_t index = over_replicas.front();
    over_replicas.pop_front();
    const GridSharding& grid = *buckets_[index].grid;
    if (grid.shards_state && !grid.shards_parameters)
      start_shard_gather(index);
    else if (auto& gather = buckets_[index].replica_gather)
      gather->wait(Queue::communication);
    if (wait) finish_gather(index);
  };
  // The forward pass uses the last bucket first.
  for (size_t index = buckets_.size(); index-- > 0;) {
    Bucket& bucket = buckets_[index];
    if (!bucket.plan->trainable) continue;
    if (bucket.plan->codes) encode_owned(bucket);
    const bool over = bucket.grid->shards_over_replicas;
    if (over) start_replica_gather(index);
    over_replicas.push_back(index);
    if (!over || over_replicas.size() == kPendingReplicaGathers) gather_oldest();
  }
  while (!over_replicas.empty()) gather_oldest();
  // A pipeline rank may have no parameters.
  if (shards_parameters_ && !wait && !block_buckets_.empty()) start_gather(0);
}

void FlatStore::after_update(const Tensor& control) {
  if (low_precision_) low_precision_->advance(control);
  gather_parameters(Changed::trained, !options_.overlap_param_gather);
}

void FlatStore::before_load() {
  for (size_t index = 0; index < buckets_.size(); ++index) finish_gather(index);
}

void FlatStore::after_load() {
  if (has_main_params())
    for (const Bucket& bucket : buckets_)
      if (bucket.main.defined()) cast(bucket.main, values_of(bucket, kept(bucket)), Queue::compute);
  if (host_) upload_parameters();
  gather_parameters(Changed::all, true);
}

void FlatStore::upload_parameters() {
  host_->wait_for(Queue::compute, *device_.record(Queue::compute));
  for (size_t index = 0; index < buckets_.size(); ++index) {
    const Bucket& bucket = buckets_[index];
    for (const Offloaded& part : bucket.offloaded) {
      if (state_file_) state_file_->load(part.chunk, optim::FlatBuffer::kMainArray);
      if (has_main_params())
        launch(*host_, host_->table().elementwise->cast, part.main, part.model, part.elements.count);
      host_->start_upload(has_main_params() ? part.model : part.main, values_of(bucket, part.elements),
                          parameters_of_bucket(index));
      if (state_file_) state_file_->wait_for_uploads(part.chunk);
    }
  }
  host_->finish_uploads();
}

}  // namespace capstan::parallel
