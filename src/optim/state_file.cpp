#include "optim/state_file.hpp"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/text.hpp"

namespace capstan::optim {

StateFile::StateFile(HostDevice& host, std::filesystem::path directory, std::string name, size_t chunks,
                     bool direct)
    : host_(host),
      directory_(std::move(directory)),
      name_(std::move(name)),
      chunks_(chunks),
      slots_(std::min(chunks, kSlots)),
      direct_(direct),
      uploads_(slots_) {}

StateFile::~StateFile() {
  // An error was reported where its result was needed.
  try {
    host_.synchronize();
  } catch (...) {
  }
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

StateFile::Array StateFile::add(DType type, const std::vector<int64_t>& counts, bool scratch) {
  CAPSTAN_ASSERT(!opened_ && counts.size() == chunks_, "an array of a state file");
  StoredArray stored{.scratch = scratch};
  for (const int64_t count : counts) {
    stored.sizes.push_back(round_up(count * size_of(type), kAlignment));
    stored.offsets.push_back(bytes_);
    if (!scratch) bytes_ += stored.sizes.back();
  }
  for (size_t s = 0; s < slots_; ++s) {
    int64_t largest = 0;
    for (size_t chunk = s; chunk < chunks_; chunk += slots_) largest = std::max(largest, stored.sizes[chunk]);
    Slot& slot = stored.slots.emplace_back();
    slot.memory = Tensor::zeros(host_, {largest + kAlignment}, DType::u8);
    memory_bytes_ += slot.memory.bytes();
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(slot.memory.address()));
    slot.begin = round_up(address, kAlignment) - address;
  }
  Array array{.index = arrays_.size(), .chunks = {}};
  for (size_t chunk = 0; chunk < chunks_; ++chunk) {
    const Slot& slot = stored.slots[chunk % slots_];
    const int64_t bytes = counts[chunk] * size_of(type);
    array.chunks.push_back(slot.memory.flat_range(slot.begin, bytes, {bytes}).as_type(type));
  }
  arrays_.push_back(std::move(stored));
  return array;
}

// ---- the file ---------------------------------------------------------------------------------------------

void StateFile::fail_io(const std::string& what, int error) const {
  fail(ErrorCode::io,
       "optimizer.optimizer_offload_path `" + directory_.string() + "`: " + what + " (" + name_ +
           "): " + system_error_text(error),
       error == EIO ? "the device under this directory has a defect or was removed; choose another directory"
                    : "the directory must lie in a file system that is mounted, writable and not full");
}

void StateFile::open() {
  if (std::exchange(opened_, true) || host_.device().is_meta()) return;
  create();
  reserve();
  direct_ = direct_ && probe_direct();
  thread_ = std::thread([this] { run(); });
}

// Without a name the file ends with the process. Some file systems give it one for a moment.
void StateFile::create() {
  int fd = ::open(directory_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
    std::string path = (directory_ / "capstan-optimizer-state-XXXXXX").string();
    fd = ::mkostemp(path.data(), O_CLOEXEC);
    if (fd >= 0) ::unlink(path.c_str());
  }
  if (fd < 0) fail_io("cannot create a file for the optimizer state", errno);
  file_ = std::make_unique<FileDescriptor>(fd);
}

void StateFile::reserve() {
  struct statvfs system {};
  const bool known = ::fstatvfs(file_->get(), &system) == 0;
  const int64_t free = known ? static_cast<int64_t>(system.f_bavail * system.f_frsize) : 0;
  const auto refuse = [&] {
    fail(ErrorCode::io,
         "optimizer.optimizer_offload_path `" + directory_.string() +
             "`: no space for the optimizer state of " + name_ + ": " +
             human_bytes(static_cast<double>(bytes_)) + " needed" +
             (known ? ", " + human_bytes(static_cast<double>(free)) + " free" : ""),
         "choose a directory with more space, or a smaller optimizer.optimizer_offload_fraction");
  };
  // What does not fit is found before the file system fills up.
  if (known && free < bytes_) refuse();
  if (bytes_ == 0 || ::fallocate(file_->get(), 0, 0, bytes_) == 0) return;
  const int error = errno;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) refuse();
  // File systems that reserve nothing.
  if (error != EOPNOTSUPP) fail_io("cannot reserve space for the optimizer state", error);
  if (::ftruncate(file_->get(), bytes_) != 0) fail_io("cannot extend the file of the optimizer state", errno);
}

bool StateFile::probe_direct() {
  const int flags = ::fcntl(file_->get(), F_GETFL);
  if (bytes_ == 0 || flags < 0 || ::fcntl(file_->get(), F_SETFL, flags | O_DIRECT) != 0) return false;
  const std::unique_ptr<void, decltype(&std::free)> block(std::aligned_alloc(kAlignment, kAlignment),
                                                          &std::free);
  if (block && ::pread(file_->get(), block.get(), kAlignment, 0) == kAlignment) return true;
  if (::fcntl(file_->get(), F_SETFL, flags) != 0) fail_io("cannot change the mode of the file", errno);
  return false;
}

// ---- the queue of the host's kernels ----------------------------------------------------------------------

void StateFile::request(size_t chunk, size_t array, bool write) {
  open();
  Slot& slot = slot_of(chunk, array);
  slot.request = ++requested_;
  if (host_.device().is_meta()) return;
  const Request request{.write = write,
                        .memory = slot.memory.address() + slot.begin,
                        .bytes = arrays_[array].sizes[chunk],
                        .offset = arrays_[array].offsets[chunk]};
  host_.declare_access(
      Queue::compute, {request.memory, request.bytes}, !write,
      write ? "a write of optimizer state to its file" : "a read of optimizer state from its file");
  host_.enqueue(Queue::compute, [this, request] {
    {
      const std::lock_guard lock(mutex_);
      requests_.push_back(request);
    }
    changed_.notify_all();
  });
}

void StateFile::wait(size_t chunk, size_t first_array, size_t end_array) {
  uint64_t last = 0;
  for (size_t array = first_array; array < end_array; ++array)
    last = std::max(last, slot_of(chunk, array).request);
  if (last <= awaited_ || host_.device().is_meta()) return;
  awaited_ = last;
  QueueScope traced(host_.device(), host_.queue());
  host_.enqueue(Queue::compute, [this, last] {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ >= last; });
    if (error_) std::rethrow_exception(error_);
  });
  traced.end("wait for the file of chunk " + std::to_string(chunk));
}

void StateFile::start_write(size_t chunk, size_t array) {
  Slot& slot = slot_of(chunk, array);
  if (slot.chunk != chunk || !std::exchange(slot.changed, false)) return;
  request(chunk, array, true);
}

void StateFile::start_read(size_t chunk, size_t array) {
  Slot& slot = slot_of(chunk, array);
  if (slot.chunk == chunk) return;
  if (slot.chunk != kNone) start_write(slot.chunk, array);
  if (const auto uploaded = std::move(uploads_[chunk % slots_])) host_.wait_for(Queue::compute, *uploaded);
  slot.chunk = chunk;
  if (!arrays_[array].scratch) request(chunk, array, false);
}

void StateFile::start_read(size_t chunk) {
  for (size_t array = 0; array < arrays_.size(); ++array) start_read(chunk, array);
}

void StateFile::load(size_t chunk, size_t array) {
  start_read(chunk, array);
  wait(chunk, array, array + 1);
}

void StateFile::load(size_t chunk) {
  start_read(chunk);
  if (chunk + 1 < chunks_ && slots_ > 1) start_read(chunk + 1);
  wait(chunk, 0, arrays_.size());
}

void StateFile::set_changed(size_t chunk, size_t array) {
  Slot& slot = slot_of(chunk, array);
  CAPSTAN_ASSERT(slot.chunk == chunk, "a chunk of a state file that is not in memory changes");
  slot.changed = !arrays_[array].scratch;
}

void StateFile::set_changed(size_t chunk) {
  for (size_t array = 0; array < arrays_.size(); ++array) set_changed(chunk, array);
}

void StateFile::start_write(size_t chunk) {
  for (size_t array = 0; array < arrays_.size(); ++array) start_write(chunk, array);
}

void StateFile::wait_for_uploads(size_t chunk) {
  uploads_[chunk % slots_] = host_.device().record(Queue::host_to_device);
}

// ---- the I/O thread ---------------------------------------------------------------------------------------

void StateFile::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !requests_.empty(); });
    if (requests_.empty()) return;
    const Request request = requests_.front();
    requests_.pop_front();
    if (!error_) {
      lock.unlock();
      std::exception_ptr error;
      try {
        transfer(request);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error) error_ = error;
    }
    ++ended_;
    changed_.notify_all();
  }
}

void StateFile::transfer(const Request& request) const {
  const std::string what =
      request.write ? "cannot write the optimizer state" : "cannot read the optimizer state";
  for (int64_t done = 0; done < request.bytes;) {
    const auto left = static_cast<size_t>(request.bytes - done);
    const ssize_t moved = request.write
                              ? ::pwrite(file_->get(), request.memory + done, left, request.offset + done)
                              : ::pread(file_->get(), request.memory + done, left, request.offset + done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) fail_io(what, errno);
    if (moved == 0)
      fail(ErrorCode::io,
           "optimizer.optimizer_offload_path `" + directory_.string() +
               "`: the file of the optimizer state (" + name_ + ") ends at byte " +
               std::to_string(request.offset + done) + " of " + std::to_string(bytes_),
           "another program has changed the file; resume from the last checkpoint");
    done += moved;
  }
}

}  // namespace capstan::optim
