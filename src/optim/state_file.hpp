// Optimizer state in a file: main parameters and moments of offloaded buffers (FlatBuffer::host) lie on disk,
// and only a few chunks of them in host memory. A buffer is one chunk. Chunks follow each other through
// kSlots buffers of host memory: one chunk is read ahead and one is written back while the CPU updates a
// third.
//
//   I/O thread    | read 0 | read 1 |          | write 0, read 2 | write 1, read 3 | write 2 ...
//   host kernels           | update 0          | update 1        | update 2        |
//
// The file is working memory, never the only copy of anything: it has no name, so that no other run can open
// it, and the system removes it when the process ends, however it ends. Checkpoints contain the state, and a
// run that resumes fills a new file from them.
//
// I/O is direct (O_DIRECT) where the file system allows it, in multiples of kAlignment bytes. Reads and
// writes run in the order in which the queue of the host's kernels requests them. An error of I/O is an error
// of that queue, reported where the host waits for its results. Beside the meta device there is no file, but
// memory and bytes are counted.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/file.hpp"
#include "tensor/host_device.hpp"
#include "tensor/tensor.hpp"

namespace capstan::optim {

class StateFile {
 public:
  static constexpr int64_t kAlignment = 4096;
  // Chunks in host memory.
  static constexpr size_t kSlots = 3;

  // directory: exists. name: of the file's user in messages, such as "rank 3". direct: I/O is direct where
  // that is possible. Nothing is created before open().
  StateFile(HostDevice& host, std::filesystem::path directory, std::string name, size_t chunks,
            bool direct = true);
  // Waits for the queue of the host's kernels and for the I/O. The file is gone afterwards.
  ~StateFile();
  StateFile(const StateFile&) = delete;
  StateFile& operator=(const StateFile&) = delete;

  // An array of the state, in the memory category CategoryScope::current(). Before open().
  struct Array {
    size_t index = 0;
    // One for each chunk [counts[chunk]]. Chunks that are kSlots apart share memory; the values are those of
    // the chunk that was loaded last.
    std::vector<Tensor> chunks;
  };
  // counts: elements of each chunk. The values are zero. A `scratch` array is not stored in the file.
  Array add(DType type, const std::vector<int64_t>& counts, bool scratch = false);
  // Creates the file and reserves its space; no effect if it exists. Errors: io, which names the directory
  // and, for a lack of space, the bytes that are needed and free.
  void open();

  // Work that the queue of the host's kernels starts after load() finds the values of the chunk in the
  // tensors. Without `array`: all arrays, and the next chunk is read ahead.
  void load(size_t chunk);
  void load(size_t chunk, size_t array);
  // Reads ahead.
  void start_read(size_t chunk);
  // The work since load() has changed the values. They are written before the memory is used for another
  // chunk, or by start_write().
  void set_changed(size_t chunk);
  void set_changed(size_t chunk, size_t array);
  void start_write(size_t chunk);
  // The memory of the chunk is not used for another one before the uploads that were started until now have
  // ended.
  void wait_for_uploads(size_t chunk);

  // Size of the file.
  int64_t bytes() const { return bytes_; }
  // Size of the chunks in host memory.
  int64_t memory_bytes() const { return memory_bytes_; }
  size_t chunks() const { return chunks_; }
  const std::filesystem::path& directory() const { return directory_; }
  // After open().
  bool is_direct() const { return direct_; }

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);
  // Host memory of one chunk of an array.
  struct Slot {
    // Bytes, of which those from `begin` on are aligned.
    Tensor memory;
    int64_t begin = 0;
    // The chunk that it holds after the requests until now; kNone: none.
    size_t chunk = kNone;
    bool changed = false;
    // The last request that reads or writes the memory.
    uint64_t request = 0;
  };
  struct StoredArray {
    bool scratch;
    // Bytes of each chunk, a multiple of kAlignment, and where they lie in the file.
    std::vector<int64_t> sizes, offsets;
    std::vector<Slot> slots;
  };
  struct Request {
    bool write;
    std::byte* memory;
    int64_t bytes, offset;
  };

  Slot& slot_of(size_t chunk, size_t array) { return arrays_[array].slots[chunk % slots_]; }
  void start_read(size_t chunk, size_t array);
  void start_write(size_t chunk, size_t array);
  // The queue of the host's kernels hands the request to the I/O thread.
  void request(size_t chunk, size_t array, bool write);
  // The queue of the host's kernels waits for the last request of each of these arrays.
  void wait(size_t chunk, size_t first_array, size_t end_array);
  void create();
  void reserve();
  // Whether the file system reads and writes with O_DIRECT.
  bool probe_direct();
  [[noreturn]] void fail_io(const std::string& what, int error) const;

  // On the I/O thread.
  void run();
  void transfer(const Request& request) const;

  HostDevice& host_;
  const std::filesystem::path directory_;
  const std::string name_;
  const size_t chunks_, slots_;
  std::vector<StoredArray> arrays_;
  int64_t bytes_ = 0, memory_bytes_ = 0;
  std::unique_ptr<FileDescriptor> file_;
  bool opened_ = false, direct_;
  // For each slot, the end of the uploads from it; null: none.
  std::vector<std::unique_ptr<Event>> uploads_;
  // Number of the last request, and of the last one for which the queue of the host's kernels waits.
  uint64_t requested_ = 0, awaited_ = 0;

  // Guards the members below.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_;
  // Number of requests that have ended. After an error none is executed.
  uint64_t ended_ = 0;
  std::exception_ptr error_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace capstan::optim
