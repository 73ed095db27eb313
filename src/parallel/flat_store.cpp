#include "parallel/flat_store.hpp"

#include "base/checked.hpp"
#include "comm/reduce.hpp"
#include "kernels/table.hpp"
#include "tensor/launch.hpp"

namespace capstan::parallel {

namespace {
constexpr int64_t kAlignment = 64;  // elements: a cache line of any type, and an even cut over ranks
}

FlatStore::FlatStore(Device& device, std::span<const std::unique_ptr<Parameter>> parameters,
                     comm::Communicator& data_parallel, const Options& options)
    : device_(device), data_parallel_(data_parallel), options_(options) {
  placements_.resize(parameters.size());
  for (size_t i = parameters.size(); i-- > 0;) {
    const Parameter& parameter = *parameters[i];
    CAPSTAN_ASSERT(parameter.index() == static_cast<int>(i),
                   "parameters are indexed by their place in the list");
    const int64_t count = parameter.shape().elements();
    if (buckets_.empty() || buckets_.back().elements >= options.bucket_elements) buckets_.emplace_back();
    Bucket& bucket = buckets_.back();
    placements_[i] = {&parameter, buckets_.size() - 1, bucket.elements};
    bucket.elements += round_up(count, kAlignment);
    bucket.parameters.push_back(&parameter);
    elements_ += count;
  }
  const bool copies = options.compute != DType::f32;
  for (Bucket& bucket : buckets_) {
    bucket.elements = round_up(bucket.elements, kAlignment * data_parallel.size());
    if (!copies || options.gradients) {
      OwnerScope scope(copies ? MemoryOwner::main_parameters : MemoryOwner::parameters);
      bucket.main = Tensor::zeros(device, {bucket.elements});
    }
    if (copies) {
      OwnerScope scope(MemoryOwner::parameters);
      bucket.model = Tensor::zeros(device, {bucket.elements}, options.compute);
    }
    if (options.gradients) {
      OwnerScope scope(MemoryOwner::gradients);
      bucket.gradients = Tensor::zeros(device, {bucket.elements});
    }
  }
}

Tensor FlatStore::view(const Tensor& flat, const Parameter& parameter) const {
  const Shape& shape = parameter.shape();
  return flat.flat_range(placement(parameter).begin, shape.elements(), shape);
}
Tensor FlatStore::acquire(const Parameter& parameter) {
  const Bucket& bucket = buckets_[placement(parameter).bucket];
  return view(bucket.model.defined() ? bucket.model : bucket.main, parameter);
}
Tensor FlatStore::gradient(const Parameter& parameter) {
  return view(buckets_[placement(parameter).bucket].gradients, parameter);
}
Tensor FlatStore::main(const Parameter& parameter) const {
  const Tensor& flat = buckets_[placement(parameter).bucket].main;
  return flat.defined() ? view(flat, parameter) : Tensor();
}
Tensor FlatStore::part(const Parameter& parameter, const std::vector<Tensor>& buckets) const {
  return view(buckets[placement(parameter).bucket], parameter);
}

void FlatStore::zero_gradients() {
  for (Bucket& bucket : buckets_)
    launch(device_, device_.table().elementwise->fill, bucket.gradients, 0.0f, bucket.elements);
}

void FlatStore::reduce_gradients() {
  for (Bucket& bucket : buckets_) comm::all_reduce_sum(data_parallel_, bucket.gradients);
}

void FlatStore::refresh_model() {
  for (Bucket& bucket : buckets_)
    if (bucket.model.defined())
      launch(device_, device_.table().elementwise->cast, bucket.main, bucket.model, bucket.elements);
}

std::vector<optim::FlatBuffer> FlatStore::flat_buffers() const {
  std::vector<optim::FlatBuffer> buffers;
  for (const Bucket& bucket : buckets_) {
    optim::FlatBuffer buffer{bucket.main, bucket.gradients, bucket.model, {}};
    for (const Parameter* parameter : bucket.parameters) {
      const ParamSpec& spec = parameter->spec();
      optim::FlatBuffer::Range range{
          placement(*parameter).begin, parameter->shape().elements(), !spec.no_weight_decay,
          spec.name.ends_with("word_embeddings.weight") || spec.name.ends_with("output_layer.weight")};
      const bool qk_norm = spec.name.find(".q_layernorm.") != std::string::npos ||
                           spec.name.find(".k_layernorm.") != std::string::npos;
      if (options_.decay_qk_norm && qk_norm) range.weight_decay = true;
      buffer.ranges.push_back(range);
    }
    buffers.push_back(std::move(buffer));
  }
  return buffers;
}

}  // namespace capstan::parallel
