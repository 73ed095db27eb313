#include "ops/activation_offload.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace capstan {

class OffloadedLayer {
 public:
  OffloadedLayer(ActivationOffload& offload, std::string name, ActivationOffload::SavedTensors saved)
      : offload_(offload), name_(std::move(name)), saved_(std::move(saved)) {
    std::unordered_map<const Storage*, size_t> known;
    for (const auto& tensors : saved_)
      for (const Tensor& tensor : tensors) add(tensor, known);
    buffer_ = offload.take_buffer(bytes_);
  }
  // After an error, tensors may be freed that were not taken.
  ~OffloadedLayer() {
    offload_.buffers_[buffer_].used = false;
    const Event* const last_use = fetched_ ? fetched_.get() : copied_.get();
    if (last_use && !blocks_.empty() && blocks_.front().storage) try {
        offload_.device_.wait_for(Queue::compute, *last_use);
      } catch (...) {
      }
  }
  OffloadedLayer(const OffloadedLayer&) = delete;
  OffloadedLayer& operator=(const OffloadedLayer&) = delete;

 private:
  friend class ActivationOffload;
  // A storage of saved tensors, which may be views of it.
  struct Block {
    // Null while the contents are only on the host.
    std::shared_ptr<Storage> storage;
    int64_t bytes;
    // Offset in the host buffer.
    int64_t offset;
  };
  static constexpr int64_t kAlignment = 512;
  static constexpr size_t kStays = SIZE_MAX;

  void add(const Tensor& tensor, std::unordered_map<const Storage*, size_t>& known) {
    const auto& storage = tensor.storage();
    if (!storage || storage->category() != MemoryCategory::activations) {
      block_of_.push_back(kStays);
      return;
    }
    const auto [found, is_new] = known.emplace(storage.get(), blocks_.size());
    block_of_.push_back(found->second);
    if (!is_new) return;
    blocks_.push_back({storage, storage->bytes(), bytes_});
    bytes_ += round_up(storage->bytes(), kAlignment);
  }
  // Calls `change` with every saved tensor that moves, and its block.
  template <class Change>
  void for_each_tensor(Change&& change) {
    size_t index = 0;
    for (auto& tensors : saved_)
      for (Tensor& tensor : tensors)
        if (const size_t block = block_of_[index++]; block != kStays) tensor = change(tensor, blocks_[block]);
  }
  void drop_device_memory() {
    for_each_tensor([](const Tensor& tensor, const Block&) { return tensor.with_storage(nullptr); });
    for (Block& block : blocks_) block.storage = nullptr;
    on_device_ = false;
  }

  ActivationOffload& offload_;
  std::string name_;
  ActivationOffload::SavedTensors saved_;
  std::vector<Block> blocks_;
  // The block of each saved tensor, or kStays.
  std::vector<size_t> block_of_;
  int64_t bytes_ = 0;
  size_t buffer_;
  // False from drop_device_memory() to start_fetch().
  bool on_device_ = true;
  // Ends of the copies. fetched_: null if the tensors never left the device.
  std::shared_ptr<Event> copied_, fetched_;
};

// An error of a queue is reported where the host waits for its results.
ActivationOffload::~ActivationOffload() {
  copying_ = nullptr;
  for (const HostBuffer& buffer : buffers_)
    for (Event* const last : {buffer.written.get(), buffer.read.get()}) try {
        if (last) last->wait();
      } catch (...) {
      }
}

// The smallest free buffer that is large enough. Otherwise the largest free one gives way to a larger one:
// layers with experts save another number of rows each time, and buffers of all sizes would gather.
size_t ActivationOffload::take_buffer(int64_t bytes) {
  const auto none = buffers_.size();
  size_t best = none, largest = none;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].used) continue;
    const int64_t size = buffers_[i].memory.bytes();
    if (size >= bytes && (best == none || size < buffers_[best].memory.bytes())) best = i;
    if (largest == none || size > buffers_[largest].memory.bytes()) largest = i;
  }
  if (best == none) {
    CategoryScope scope(MemoryCategory::activations);
    best = largest;
    if (best == none) buffers_.emplace_back();
    HostBuffer& buffer = buffers_[best];
    for (Event* const last : {buffer.written.get(), buffer.read.get()})
      if (last) last->wait();
    buffer = {};
    buffer.memory = PinnedBuffer(device_, bytes);
  }
  buffers_[best].used = true;
  return best;
}

std::shared_ptr<OffloadedLayer> ActivationOffload::start_offload(std::string name, SavedTensors saved) {
  free_copied();
  auto layer = std::make_shared<OffloadedLayer>(*this, std::move(name), std::move(saved));
  HostBuffer& buffer = buffers_[layer->buffer_];
  device_.wait_for(Queue::device_to_host, *device_.record(Queue::compute));
  QueueScope traced(device_, Queue::device_to_host);
  for (const OffloadedLayer::Block& block : layer->blocks_)
    device_.start_copy_to_host(buffer.memory.data() + block.offset, block.storage->data(), block.bytes,
                               Queue::device_to_host);
  traced.end("offload of " + layer->name_);
  layer->copied_ = buffer.written = device_.record(Queue::device_to_host);
  copying_ = layer;
  return layer;
}

void ActivationOffload::free_copied() {
  if (!copying_) return;
  device_.wait_for(Queue::compute, *copying_->copied_);
  std::exchange(copying_, nullptr)->drop_device_memory();
}

void ActivationOffload::start_fetch(OffloadedLayer& layer) {
  if (layer.on_device_) return;
  HostBuffer& buffer = buffers_[layer.buffer_];
  CategoryScope scope(MemoryCategory::activations);
  for (OffloadedLayer::Block& block : layer.blocks_)
    block.storage = std::make_shared<Storage>(device_, block.bytes, MemoryCategory::activations);
  layer.for_each_tensor([](const Tensor& tensor, const OffloadedLayer::Block& block) {
    return tensor.with_storage(block.storage);
  });
  // The memory may be that of tensors which earlier work still uses, and the compute queue has waited for the
  // copy to the host.
  device_.wait_for(Queue::host_to_device, *device_.record(Queue::compute));
  QueueScope traced(device_, Queue::host_to_device);
  for (const OffloadedLayer::Block& block : layer.blocks_)
    device_.start_copy_to_device(block.storage->data(), buffer.memory.data() + block.offset, block.bytes,
                                 Queue::host_to_device);
  traced.end("fetch of " + layer.name_);
  layer.fetched_ = buffer.read = device_.record(Queue::host_to_device);
  layer.on_device_ = true;
}

ActivationOffload::SavedTensors ActivationOffload::take(OffloadedLayer& layer) {
  start_fetch(layer);
  // The backward pass may overwrite saved tensors.
  device_.wait_for(Queue::compute, layer.fetched_ ? *layer.fetched_ : *layer.copied_);
  if (copying_.get() == &layer) copying_ = nullptr;
  for (OffloadedLayer::Block& block : layer.blocks_) block.storage = nullptr;
  return std::move(layer.saved_);
}

}  // namespace capstan
