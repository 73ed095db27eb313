#include "optim/host_updates.hpp"

#include <algorithm>
#include <string>

#include "base/error.hpp"
#include "kernels/step_control.hpp"
#include "kernels/table.hpp"
#include "optim/state_file.hpp"
#include "tensor/launch.hpp"

namespace capstan::optim {

namespace {
// Buffers of gradients, which the updates use in turn.
constexpr size_t kStaged = 2;
}  // namespace

std::unique_ptr<HostUpdates> HostUpdates::of(std::vector<FlatBuffer>& buffers) {
  for (const FlatBuffer& buffer : buffers)
    if (buffer.host) return std::unique_ptr<HostUpdates>(new HostUpdates(*buffer.host, buffers));
  return nullptr;
}

HostUpdates::HostUpdates(HostDevice& host, std::vector<FlatBuffer>& buffers) : host_(host) {
  int64_t largest = 0;
  size_t offloaded = 0;
  DType type = DType::f32;
  for (const FlatBuffer& buffer : buffers) {
    if (!buffer.host) continue;
    CAPSTAN_ASSERT(buffer.host == &host && buffer.matrices.empty(), "an offloaded buffer");
    largest = std::max(largest, buffer.main.elements());
    file_ = buffer.file;
    type = buffer.device_gradients.dtype();
    ++offloaded;
  }
  std::vector<Tensor> staged;
  {
    CategoryScope scope(MemoryCategory::gradients);
    while (staged.size() < std::min(kStaged, offloaded))
      staged.push_back(Tensor::zeros(host, {largest}, type));
  }
  size_t next = 0;
  for (FlatBuffer& buffer : buffers) {
    if (!buffer.host) continue;
    const int64_t count = buffer.main.elements();
    buffer.gradients = staged[next++ % staged.size()].flat_range(0, count, {count});
  }
  CategoryScope scope(MemoryCategory::workspace);
  control_ = Tensor::empty(host, {sizeof(kernels::StepControl)}, DType::u8);
}

void HostUpdates::begin(const Tensor& control) {
  updated_.clear();
  host_.follow_device();
  host_.start_download(control, control_, "step control");
}

void HostUpdates::run(const FlatBuffer& buffer, const std::function<void(const Tensor& control)>& update) {
  const std::string bucket = "bucket " + std::to_string(buffer.bucket);
  const size_t n = updated_.size();
  // The updates of the step before ended before the compute queue went on.
  host_.start_download(buffer.device_gradients, buffer.gradients, "gradients of " + bucket,
                       n < kStaged ? nullptr : updated_[n - kStaged].get());
  if (file_) file_->load(buffer.chunk);
  host_.wait_for_downloads();
  {
    CategoryScope scope(MemoryCategory::workspace);
    QueueScope traced(host_.device(), host_.queue());
    // An update that is skipped leaves `model` as it is, whose memory other chunks have used.
    if (file_ && buffer.model.defined())
      launch(host_, host_.table().elementwise->cast, buffer.main, buffer.model, buffer.main.elements());
    update(control_);
    traced.end("update of " + bucket);
  }
  updated_.push_back(host_.record(Queue::compute));
  host_.start_upload(buffer.model.defined() ? buffer.model : buffer.main, buffer.device_parameters,
                     "parameters of " + bucket);
  if (!file_) return;
  file_->set_changed(buffer.chunk);
  file_->start_write(buffer.chunk);
  file_->wait_for_uploads(buffer.chunk);
}

void HostUpdates::finish() {
  host_.finish_uploads();
  // The next step begins with these chunks.
  if (file_)
    for (size_t chunk = 0; chunk < std::min(file_->chunks(), StateFile::kSlots - 1); ++chunk)
      file_->start_read(chunk);
}

}  // namespace capstan::optim
