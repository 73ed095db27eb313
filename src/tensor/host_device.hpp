// The host beside a device, for work that is moved from the device to the CPU: tensors in the device's pinned
// host memory, and the CPU's kernels on them. The kernels run in the order of their launches, on a queue that
// the device has for them.
//
//   device to host   | download 0 | download 1 |
//   host kernels                  | kernels 0  | kernels 1 |
//   host to device                             | upload 0  | upload 1 |
//
// Events order the queues; the host waits only in copies between a tensor and memory that is not one. The
// memory counts as the device's host memory. Beside the meta device nothing runs, but memory, copies and
// launches are counted.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensor/tensor.hpp"

namespace capstan {

class HostDevice final : public Device {
 public:
  // table: the CPU's kernels. `device` outlives this object. If its memory is the host's, copies are copies
  // within it, and all work is done on return.
  HostDevice(Device& device, const kernels::Table& table);
  // Waits for the work of the queues. All tensors of the device must have been freed.
  ~HostDevice() override;

  // Downloads started from now on run after the present work of the device's compute queue.
  void follow_device();
  // Starts a copy from a tensor of the device. Kernels that are launched after wait_for_downloads() read it.
  // name: of the copy in traces. after: an event of record() that the copy waits for; null: none.
  void start_download(const Tensor& from, const Tensor& to, const std::string& name,
                      const Event* after = nullptr);
  void wait_for_downloads();
  // Starts a copy to a tensor of the device, after the kernels launched so far. These have waited for the
  // work of the compute queue that uses the tensor. Work launched on the device after finish_uploads() reads
  // it. name: of the copy in traces.
  void start_upload(const Tensor& from, const Tensor& to, const std::string& name);
  void finish_uploads();

  Device& device() const { return device_; }
  // The queue of the kernels, for traces.
  Queue queue() const { return queue_; }

  DeviceType type() const override { return device_.is_meta() ? DeviceType::meta : DeviceType::cpu; }
  bool shares_host_memory() const override { return true; }
  void synchronize() override;
  void zero(std::byte* data, int64_t bytes) override;
  void copy(std::byte* to, const std::byte* from, int64_t bytes) override;
  void copy_to_device(std::byte* to, const void* from_host, int64_t bytes) override;
  void copy_to_host(void* to_host, const std::byte* from, int64_t bytes) override;
  // Run on the queue of the kernels; `queue` is ignored.
  void start_copy_to_device(std::byte* to, const void* from_host, int64_t bytes, Queue queue) override;
  void start_copy_to_host(void* to_host, const std::byte* from, int64_t bytes, Queue queue) override;
  std::unique_ptr<Event> record(Queue) override { return device_.record(queue_); }
  std::unique_ptr<Event> record_time(Queue) override { return device_.record_time(queue_); }
  bool queues_work() const override { return device_.queues_work(); }
  std::string queue_name(Queue) const override { return device_.queue_name(queue_); }
  void wait_for(Queue, const Event& event) override { device_.wait_for(queue_, event); }
  void declare_access(Queue, const ByteRows& memory, bool writes, const std::string& by) override {
    device_.declare_access(queue_, memory, writes, by);
  }
  void declare_host_access(const ByteRows& memory, bool writes) override {
    device_.declare_host_access(memory, writes);
  }
  std::byte* host_address(std::byte* address) override { return device_.is_meta() ? nullptr : address; }
  void enqueue(Queue, std::function<void()> work) override { device_.enqueue(queue_, std::move(work)); }

 protected:
  // Beside the meta device there are no threads. The kernels of updates have no workspace for each thread, so
  // that estimates do not depend on their number.
  int workers() const override { return host_threads_ ? host_threads_->size() : 1; }
  bool grow(Pool, int64_t, int64_t) override { return true; }
  void shrink(Pool pool, int64_t end, int64_t bytes) override;
  std::byte* place(Pool pool, int64_t offset, int64_t size) override;
  void retire(std::byte* data, int64_t size) override;

 private:
  using SizeAndCategory = std::pair<int64_t, MemoryCategory>;
  void free_kept_blocks();

  Device& device_;
  const Queue queue_;
  // Pinned blocks in use, and those that are kept for the next of their size and category: work of the queue
  // may still use them.
  std::unordered_map<std::byte*, SizeAndCategory> blocks_;
  std::map<SizeAndCategory, std::vector<std::byte*>> kept_;
};

}  // namespace capstan
