// The interface of the CUDA backend: structs of functions that the shared object libcapstan_cuda.so exports
// by one symbol. Plain data and functions, free of CUDA's headers; no exception crosses it. CudaDevice uses
// these functions alone, so that tests replace the backend.
#pragma once

#include <cstdint>

namespace capstan::kernels {
struct Table;
}

namespace capstan::cuda {

enum class StatusCode : int32_t {
  ok,
  // Result of query_event: the work before the event has not run yet.
  not_ready,
  out_of_memory,
  // No driver, or no device that this process sees.
  unavailable,
  failed,
};

// Result of a function of the backend.
struct Status {
  StatusCode code = StatusCode::ok;
  // Why, with the function of CUDA that reported it, unless the code is ok or not_ready. Valid until the next
  // call of this thread.
  const char* text = nullptr;
  bool ok() const { return code == StatusCode::ok; }
};

// Properties of a device that can be read before it is opened.
struct DeviceFacts {
  char name[256] = {};
  // "0000:3b:00.0": the same for two processes that see one device under different indices.
  char pci_address[32] = {};
  // Compute capability: 9 and 0 for sm_90.
  int32_t major = 0, minor = 0;
  int32_t multiprocessors = 0;
  int64_t memory = 0;  // bytes
};

// An opened device; only the backend knows what is in it. Streams and events are CUDA's own handles, as void*
// (Context::stream).
struct OpenDevice;

// What a call of launch_graph did.
struct GraphLaunch {
  // Number of kernels, fills, copies and calls of the host.
  int64_t nodes = 0;
  // False: an executable graph was updated.
  bool instantiated = false;
};

enum class CopyDirection : int32_t { host_to_device, device_to_host, on_device };

// Functions that take a device may be called from every thread. Addresses of host memory that this process
// allocates by allocate_pinned are valid on the device as well.
struct Runtime {
  // ---- devices

  // unavailable where there is no driver, or none that is new enough, or no device.
  Status (*count_devices)(int32_t* count);
  Status (*describe_device)(int32_t index, DeviceFacts* facts);
  // Makes the device current for the calling thread, whose kernels then run on it.
  Status (*open_device)(int32_t index, OpenDevice** device);
  // Called after all streams, events and memory of the device are released.
  Status (*close_device)(OpenDevice* device);
  // The first error of a kernel launch since the last call.
  Status (*last_error)(OpenDevice* device);

  // ---- streams

  // high_priority: its work begins before that of other streams. Streams do not wait for each other.
  Status (*create_stream)(OpenDevice* device, bool high_priority, void** stream);
  Status (*destroy_stream)(OpenDevice* device, void* stream);
  Status (*wait_stream)(OpenDevice* device, void* stream);
  // Calls function(argument) in the order of the stream, on a thread of the driver. It must not call the
  // backend, and is not called after an error of the stream.
  Status (*call_host)(OpenDevice* device, void* stream, void (*function)(void*), void* argument);

  // ---- events

  Status (*create_event)(OpenDevice* device, bool timed, void** event);
  Status (*destroy_event)(OpenDevice* device, void* event);
  Status (*record_event)(OpenDevice* device, void* event, void* stream);
  // not_ready until it is done.
  Status (*query_event)(OpenDevice* device, void* event);
  Status (*wait_event)(OpenDevice* device, void* event);
  // Work that is queued on the stream from now on runs after the last recording of the event.
  Status (*stream_wait_event)(OpenDevice* device, void* stream, void* event);
  // Time between two timed events that are done; `seconds` has the precision of fp32.
  Status (*elapsed)(OpenDevice* device, void* from, void* to, double* seconds);

  // ---- graphs

  // From now on the kernels, fills, copies on the device and calls of the host that are queued on the stream
  // are collected. Until launch_graph, events and waits of the stream are errors, and so are its copies from
  // and to host memory. Other streams and the memory functions work as ever.
  Status (*begin_graph)(OpenDevice* device, void* stream);
  // Queues the collected work on the stream, as one graph. It updates the executable graph of the last call
  // with this name and the same kinds of work, if there is one. `launch` is set also where it fails: nothing
  // is collected any more.
  Status (*launch_graph)(OpenDevice* device, void* stream, const char* name, GraphLaunch* launch);

  // ---- memory

  // A range of addresses without memory. Sizes and offsets are multiples of kMappingUnit.
  Status (*reserve_range)(OpenDevice* device, int64_t bytes, void** address);
  Status (*release_range)(OpenDevice* device, void* address, int64_t bytes);
  // Maps physical memory at addresses of a range, for this device. out_of_memory leaves the addresses as they
  // were.
  Status (*map_memory)(OpenDevice* device, void* address, int64_t bytes);
  // Exactly what one call of map_memory has mapped. No work that uses it may be queued.
  Status (*unmap_memory)(OpenDevice* device, void* address, int64_t bytes);
  // Page-locked memory of the host, 64-byte aligned.
  Status (*allocate_pinned)(OpenDevice* device, int64_t bytes, void** address);
  Status (*free_pinned)(OpenDevice* device, void* address);
  // In the order of the stream. Pageable host memory is allowed, and may make the call wait.
  Status (*copy)(OpenDevice* device, void* to, const void* from, int64_t bytes, CopyDirection direction,
                 void* stream);
  Status (*zero)(OpenDevice* device, void* data, int64_t bytes, void* stream);

  // ---- ranges of the host's time, for profilers (NVTX). Null: the backend has none.

  // Begins a range of this thread, within those that have begun and not ended.
  void (*begin_range)(const char* name) = nullptr;
  void (*end_range)() = nullptr;
  // Marks a moment within the range.
  void (*mark)(const char* name) = nullptr;
};

inline constexpr int64_t kMappingUnit = int64_t{2} << 20;

// Names a communicator: made on one of its ranks, and given to all of them.
struct UniqueId {
  char bytes[128] = {};
};

// One rank's part of a communicator; only the backend knows what is in it.
struct OpenCommunicator;

// Transfers of device memory between ranks (NCCL). Counts are bytes. Each of send, receive and all_gather is
// queued on the stream; it begins after the work before it, and ends when the peers have reached it. Sends
// and receives between two ranks are matched by their order, collectives by theirs.
//
// Calls that return not_ready have begun; poll get_async_error until it is ok. Only then the work is on the
// stream, and the communicator may be used again. A communicator is used by one thread at a time.
struct Communicator {
  // The version of the library, such as 22809 for 2.28.9. The first call opens the library; unavailable where
  // it is missing or too old. The other functions need a call that was ok.
  Status (*load)(int32_t* version);
  Status (*get_unique_id)(UniqueId* id);
  // Begins to join the communicator; collective over its ranks, each of which has a device of its own.
  Status (*init_rank)(OpenDevice* device, int32_t ranks, const UniqueId* id, int32_t rank,
                      OpenCommunicator** communicator);

  // ---- transfers

  // The transfers between the two calls of a thread are one group and begin together. A transfer outside of
  // such a pair is a group by itself.
  Status (*group_start)();
  Status (*group_end)();
  Status (*send)(OpenCommunicator* communicator, const void* data, int64_t bytes, int32_t peer, void* stream);
  Status (*receive)(OpenCommunicator* communicator, void* data, int64_t bytes, int32_t peer, void* stream);
  // all: the `mine` of all ranks, by rank; `mine` may be this rank's part of it.
  Status (*all_gather)(OpenCommunicator* communicator, const void* mine, void* all, int64_t bytes_per_rank,
                       void* stream);

  // ---- state and end

  // failed: an error of the transport, which leaves the transfers under way blocked until abort.
  Status (*get_async_error)(OpenCommunicator* communicator);
  // Begins to end the transfers; collective. After it only get_async_error, destroy and abort.
  Status (*finalize)(OpenCommunicator* communicator);
  // Frees the communicator; allowed after finalize is complete.
  Status (*destroy)(OpenCommunicator* communicator);
  // Ends transfers that are under way, whose results are undefined, and destroys the communicator. May take
  // as long as the kernels need to notice.
  Status (*abort)(OpenCommunicator* communicator);
};

struct Backend {
  // The interface for which the object was compiled: a hash of this header and of those of the kernels. It
  // comes first, because the program reads the other members only if the interface is its own.
  const char* interface = nullptr;
  const Runtime* runtime = nullptr;
  // Null: the object was built without NCCL.
  const Communicator* communicator = nullptr;
  const kernels::Table* table = nullptr;
};

// The symbol, and its type.
inline constexpr const char* kBackendSymbol = "capstan_cuda_backend";
using BackendFunction = const Backend* (*)();

}  // namespace capstan::cuda
