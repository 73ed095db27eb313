#include "tensor/cuda/runtime.hpp"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace capstan::cuda {

struct OpenDevice {
  int index = 0;
  int lowest_priority = 0, highest_priority = 0;
  // Executable graphs, by the name and the kinds of nodes.
  std::map<std::string, cudaGraphExec_t> graphs = {};
};

namespace {

thread_local char status_text[512];

Status status_of(StatusCode code, const char* call, const char* text, int number) {
  std::snprintf(status_text, sizeof status_text, "%s: %s (%d)", call, text, number);
  return {code, status_text};
}

// ---- the runtime

Status status_of(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return {};
  // Clears the error; otherwise last_error would return it too.
  (void)cudaGetLastError();
  const StatusCode code = error == cudaErrorMemoryAllocation ? StatusCode::out_of_memory : StatusCode::failed;
  return status_of(code, call, cudaGetErrorString(error), static_cast<int>(error));
}

// Calls a function of the runtime, and returns from the function that calls it if that fails.
#define CAPSTAN_CUDA(function, ...)                                              \
  do {                                                                           \
    if (const cudaError_t result = function(__VA_ARGS__); result != cudaSuccess) \
      return status_of(result, #function);                                       \
  } while (false)

}  // namespace

Status use_device(const OpenDevice* device) {
  thread_local int current = -1;
  if (current == device->index) return {};
  CAPSTAN_CUDA(cudaSetDevice, device->index);
  current = device->index;
  return {};
}

namespace {

#define CAPSTAN_USE(device)                                                    \
  do {                                                                         \
    if (const Status status = use_device(device); !status.ok()) return status; \
  } while (false)

// ---- the driver, whose library exists only where a driver is installed

struct Driver {
  PFN_cuGetErrorString_v6000 get_error_string = nullptr;
  PFN_cuMemAddressReserve_v10020 address_reserve = nullptr;
  PFN_cuMemAddressFree_v10020 address_free = nullptr;
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 get_granularity = nullptr;
};

// Set by open_device.
Driver driver;

template <class Function>
Status find(const char* name, unsigned version, Function& function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  CAPSTAN_CUDA(cudaGetDriverEntryPointByVersion, name, &address, version, cudaEnableDefault, &found);
#else
  (void)version;
  CAPSTAN_CUDA(cudaGetDriverEntryPoint, name, &address, cudaEnableDefault, &found);
#endif
  if (found != cudaDriverEntryPointSuccess || !address)
    return status_of(StatusCode::unavailable, name, "the driver does not have this function",
                     static_cast<int>(found));
  function = reinterpret_cast<Function>(address);
  return {};
}

Status find_driver_functions() {
  if (driver.get_granularity) return {};
  constexpr unsigned kFirst = 6000, kMapping = 10020;
  Status status = find("cuGetErrorString", kFirst, driver.get_error_string);
  if (status.ok()) status = find("cuMemAddressReserve", kMapping, driver.address_reserve);
  if (status.ok()) status = find("cuMemAddressFree", kMapping, driver.address_free);
  if (status.ok()) status = find("cuMemCreate", kMapping, driver.create);
  if (status.ok()) status = find("cuMemRelease", kMapping, driver.release);
  if (status.ok()) status = find("cuMemMap", kMapping, driver.map);
  if (status.ok()) status = find("cuMemUnmap", kMapping, driver.unmap);
  if (status.ok()) status = find("cuMemSetAccess", kMapping, driver.set_access);
  if (status.ok()) status = find("cuMemGetAllocationGranularity", kMapping, driver.get_granularity);
  return status;
}

Status driver_status(CUresult error, const char* call) {
  if (error == CUDA_SUCCESS) return {};
  const char* text = nullptr;
  if (driver.get_error_string(error, &text) != CUDA_SUCCESS || !text) text = "unknown error";
  const StatusCode code = error == CUDA_ERROR_OUT_OF_MEMORY ? StatusCode::out_of_memory : StatusCode::failed;
  return status_of(code, call, text, static_cast<int>(error));
}

CUmemAllocationProp physical_memory(const OpenDevice* device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device->index;
  return properties;
}

CUdeviceptr driver_address(void* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

// ---- devices

Status count_devices(int32_t* count) {
  *count = 0;
  int driver_version = 0, found = 0;
  // Before the driver starts. With its default of 8 connections, queues and groups of ranks would share some,
  // and work that shares one does not overlap.
  (void)::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  // 0 where no driver is installed.
  (void)cudaDriverGetVersion(&driver_version);
  const cudaError_t error = cudaGetDeviceCount(&found);
  if (error == cudaSuccess && found > 0) {
    *count = found;
    return {};
  }
  (void)cudaGetLastError();
  char text[256];
  const auto version = [](int number, char* to, size_t size) {
    std::snprintf(to, size, "%d.%d", number / 1000, number % 1000 / 10);
    return to;
  };
  char needed[16], given[16];
  if (driver_version == 0)
    std::snprintf(text, sizeof text, "no NVIDIA driver is installed");
  else if (error == cudaErrorInsufficientDriver)
    std::snprintf(text, sizeof text, "the NVIDIA driver supports CUDA %s, and the backend needs CUDA %s",
                  version(driver_version, given, sizeof given),
                  version(CUDART_VERSION, needed, sizeof needed));
  else if (error == cudaSuccess || error == cudaErrorNoDevice)
    std::snprintf(text, sizeof text, "the NVIDIA driver shows no GPU to this process");
  else
    std::snprintf(text, sizeof text, "the NVIDIA driver cannot be started");
  std::snprintf(status_text, sizeof status_text, "%s (cudaGetDeviceCount: %s)", text,
                cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error));
  return {StatusCode::unavailable, status_text};
}

Status describe_device(int32_t index, DeviceFacts* facts) {
  cudaDeviceProp properties{};
  CAPSTAN_CUDA(cudaGetDeviceProperties, &properties, index);
  *facts = {};
  std::snprintf(facts->name, sizeof facts->name, "%s", properties.name);
  CAPSTAN_CUDA(cudaDeviceGetPCIBusId, facts->pci_address, sizeof facts->pci_address, index);
  facts->major = properties.major, facts->minor = properties.minor;
  facts->multiprocessors = properties.multiProcessorCount;
  facts->memory = static_cast<int64_t>(properties.totalGlobalMem);
  return {};
}

Status open_device(int32_t index, OpenDevice** device) {
  OpenDevice opened{.index = index};
  CAPSTAN_USE(&opened);
  // Makes the device's context, in which the driver's functions work.
  CAPSTAN_CUDA(cudaFree, nullptr);
  if (const Status status = find_driver_functions(); !status.ok()) return status;
  CAPSTAN_CUDA(cudaDeviceGetStreamPriorityRange, &opened.lowest_priority, &opened.highest_priority);
  const CUmemAllocationProp properties = physical_memory(&opened);
  size_t granularity = 0;
  if (const Status status =
          driver_status(driver.get_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                        "cuMemGetAllocationGranularity");
      !status.ok())
    return status;
  if (granularity == 0 || kMappingUnit % static_cast<int64_t>(granularity) != 0)
    return status_of(StatusCode::failed, "cuMemGetAllocationGranularity",
                     "the device maps memory in units that do not divide 2 MiB",
                     static_cast<int>(granularity));
  *device = new (std::nothrow) OpenDevice(opened);
  return *device ? Status{} : Status{StatusCode::out_of_memory, "no memory of the host"};
}

void destroy_graphs(OpenDevice* device) {
  for (const auto& [kinds, graph] : device->graphs) (void)cudaGraphExecDestroy(graph);
  device->graphs.clear();
}

Status close_device(OpenDevice* device) {
  CAPSTAN_USE(device);
  destroy_graphs(device);
  delete device;
  return {};
}

Status last_error(OpenDevice* device) {
  CAPSTAN_USE(device);
  return status_of(cudaGetLastError(), "cudaGetLastError");
}

// ---- streams

cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

Status create_stream(OpenDevice* device, bool high_priority, void** stream) {
  CAPSTAN_USE(device);
  cudaStream_t created = nullptr;
  CAPSTAN_CUDA(cudaStreamCreateWithPriority, &created, cudaStreamNonBlocking,
               high_priority ? device->highest_priority : device->lowest_priority);
  *stream = created;
  return {};
}
Status destroy_stream(OpenDevice* device, void* stream) {
  CAPSTAN_USE(device);
  CAPSTAN_CUDA(cudaStreamDestroy, stream_of(stream));
  return {};
}
Status wait_stream(OpenDevice* device, void* stream) {
  CAPSTAN_USE(device);
  CAPSTAN_CUDA(cudaStreamSynchronize, stream_of(stream));
  return {};
}
Status call_host(OpenDevice* device, void* stream, void (*function)(void*), void* argument) {
  CAPSTAN_USE(device);
  CAPSTAN_CUDA(cudaLaunchHostFunc, stream_of(stream), function, argument);
  return {};
}

// ---- events

cudaEvent_t event_of(void* event) {
  return static_cast<cudaEvent_t>(event);
}

Status create_event(OpenDevice* device, bool timed, void** event) {
  CAPSTAN_USE(device);
  cudaEvent_t created = nullptr;
  CAPSTAN_CUDA(cudaEventCreateWithFlags, &created, timed ? cudaEventDefault : cudaEventDisableTiming);
  *event = created;
  return {};
}
Status destroy_event(OpenDevice* device, void* event) {
  CAPSTAN_USE(device);
  CAPSTAN_CUDA(cudaEventDestroy, event_of(event));
  return {};
}
Status record_event(OpenDevice* device, void* event, void* stream) {
  CAPSTAN_USE(device);
  CAPSTAN_CUDA(cudaEventRecord, event_of(event), stream_of(stream));
  return {};
}
Status query_event(OpenDevice* device, void* event) {
  CAPSTAN_USE(device);
  const cudaError_t error = cudaEventQuery(event_of(event));
  if (error == cudaErrorNotReady) {
    // Not an error, which last_error() would report.
    if (cudaPeekAtLastError() == cudaErrorNotReady) (void)cudaGetLastError();
    return {StatusCode::not_ready, nullptr};
  }
  return status_of(error, "cudaEventQuery");
}
Status wait_event(OpenDevice* device, void* event) {
  CAPSTAN_USE(device);
  CAPSTAN_CUDA(cudaEventSynchronize, event_of(event));
  return {};
}
Status stream_wait_event(OpenDevice* device, void* stream, void* event) {
  CAPSTAN_USE(device);
  CAPSTAN_CUDA(cudaStreamWaitEvent, stream_of(stream), event_of(event), 0);
  return {};
}
Status elapsed(OpenDevice* device, void* from, void* to, double* seconds) {
  CAPSTAN_USE(device);
  float milliseconds = 0;
  CAPSTAN_CUDA(cudaEventElapsedTime, &milliseconds, event_of(from), event_of(to));
  *seconds = 1e-3 * static_cast<double>(milliseconds);
  return {};
}

// ---- graphs

// A number of executable graphs that only code whose kinds of work vary without end reaches.
constexpr size_t kMaxGraphs = 256;

Status begin_graph(OpenDevice* device, void* stream) {
  CAPSTAN_USE(device);
  // Relaxed: what this thread does besides (mapping memory, loading kernels) is allowed.
  CAPSTAN_CUDA(cudaStreamBeginCapture, stream_of(stream), cudaStreamCaptureModeRelaxed);
  return {};
}

// The work of a stream is a chain: name and kinds of the nodes, in their order, and the sizes of fills and
// copies say whether an executable graph can take the parameters of another one. (An update may refuse other
// sizes: cudaGraphExecMemsetNodeSetParams.)
Status describe_graph(cudaGraph_t graph, std::string& key, int64_t& nodes) {
  size_t count = 0;
  CAPSTAN_CUDA(cudaGraphGetNodes, graph, nullptr, &count);
  std::vector<cudaGraphNode_t> found(count);
  if (count > 0) CAPSTAN_CUDA(cudaGraphGetNodes, graph, found.data(), &count);
  nodes = static_cast<int64_t>(count);
  for (const cudaGraphNode_t node : found) {
    cudaGraphNodeType type{};
    CAPSTAN_CUDA(cudaGraphNodeGetType, node, &type);
    key += static_cast<char>('a' + static_cast<int>(type));
    if (type == cudaGraphNodeTypeMemset) {
      cudaMemsetParams fill{};
      CAPSTAN_CUDA(cudaGraphMemsetNodeGetParams, node, &fill);
      key += std::to_string(fill.elementSize * fill.width) + 'x' + std::to_string(fill.height);
    } else if (type == cudaGraphNodeTypeMemcpy) {
      cudaMemcpy3DParms copy{};
      CAPSTAN_CUDA(cudaGraphMemcpyNodeGetParams, node, &copy);
      key += std::to_string(copy.extent.width) + 'x' + std::to_string(copy.extent.height);
    }
  }
  return {};
}

// An executable graph for the work of `graph`, which the device owns.
Status executable_graph(OpenDevice* device, cudaGraph_t graph, const std::string& key, GraphLaunch* launch,
                        cudaGraphExec_t& executable) {
  const auto known = device->graphs.find(key);
  if (known != device->graphs.end()) {
    executable = known->second;
    cudaGraphExecUpdateResultInfo info{};
    if (cudaGraphExecUpdate(executable, graph, &info) == cudaSuccess) return {};
    // The nodes differ in what an update cannot change. The error is not one of a launch.
    (void)cudaGetLastError();
    device->graphs.erase(known);
    CAPSTAN_CUDA(cudaGraphExecDestroy, executable);
  }
  if (device->graphs.size() >= kMaxGraphs) destroy_graphs(device);
  launch->instantiated = true;
  CAPSTAN_CUDA(cudaGraphInstantiate, &executable, graph, 0);
  device->graphs.emplace(key, executable);
  return {};
}

Status launch_graph(OpenDevice* device, void* stream, const char* name, GraphLaunch* launch) try {
  CAPSTAN_USE(device);
  cudaGraph_t graph = nullptr;
  CAPSTAN_CUDA(cudaStreamEndCapture, stream_of(stream), &graph);
  std::string key = std::string(name) + ' ';
  cudaGraphExec_t executable = nullptr;
  Status status = describe_graph(graph, key, launch->nodes);
  if (status.ok()) status = executable_graph(device, graph, key, launch, executable);
  // Updated while a launch of it runs, the executable graph changes for the launches after it only.
  if (status.ok()) status = status_of(cudaGraphLaunch(executable, stream_of(stream)), "cudaGraphLaunch");
  // The executable graph is a copy.
  (void)cudaGraphDestroy(graph);
  return status;
} catch (const std::bad_alloc&) {
  return {StatusCode::out_of_memory, "no memory of the host"};
}

// ---- memory

Status reserve_range(OpenDevice* device, int64_t bytes, void** address) {
  CAPSTAN_USE(device);
  CUdeviceptr reserved = 0;
  const Status status = driver_status(driver.address_reserve(&reserved, static_cast<size_t>(bytes), 0, 0, 0),
                                      "cuMemAddressReserve");
  *address = reinterpret_cast<void*>(reserved);
  return status;
}
Status release_range(OpenDevice* device, void* address, int64_t bytes) {
  CAPSTAN_USE(device);
  return driver_status(driver.address_free(driver_address(address), static_cast<size_t>(bytes)),
                       "cuMemAddressFree");
}

Status map_memory(OpenDevice* device, void* address, int64_t bytes) {
  CAPSTAN_USE(device);
  const auto size = static_cast<size_t>(bytes);
  const CUmemAllocationProp properties = physical_memory(device);
  CUmemGenericAllocationHandle memory = 0;
  Status status = driver_status(driver.create(&memory, size, &properties, 0), "cuMemCreate");
  if (!status.ok()) return status;
  status = driver_status(driver.map(driver_address(address), size, 0, memory, 0), "cuMemMap");
  // The mapping keeps the memory until it is unmapped.
  (void)driver.release(memory);
  if (!status.ok()) return status;
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  status = driver_status(driver.set_access(driver_address(address), size, &access, 1), "cuMemSetAccess");
  if (!status.ok()) (void)driver.unmap(driver_address(address), size);
  return status;
}
Status unmap_memory(OpenDevice* device, void* address, int64_t bytes) {
  CAPSTAN_USE(device);
  return driver_status(driver.unmap(driver_address(address), static_cast<size_t>(bytes)), "cuMemUnmap");
}

Status allocate_pinned(OpenDevice* device, int64_t bytes, void** address) {
  CAPSTAN_USE(device);
  CAPSTAN_CUDA(cudaHostAlloc, address, static_cast<size_t>(bytes),
               cudaHostAllocPortable | cudaHostAllocMapped);
  return {};
}
Status free_pinned(OpenDevice* device, void* address) {
  CAPSTAN_USE(device);
  CAPSTAN_CUDA(cudaFreeHost, address);
  return {};
}

Status copy(OpenDevice* device, void* to, const void* from, int64_t bytes, CopyDirection direction,
            void* stream) {
  CAPSTAN_USE(device);
  const cudaMemcpyKind kind = direction == CopyDirection::host_to_device   ? cudaMemcpyHostToDevice
                              : direction == CopyDirection::device_to_host ? cudaMemcpyDeviceToHost
                                                                           : cudaMemcpyDeviceToDevice;
  CAPSTAN_CUDA(cudaMemcpyAsync, to, from, static_cast<size_t>(bytes), kind, stream_of(stream));
  return {};
}
Status zero(OpenDevice* device, void* data, int64_t bytes, void* stream) {
  CAPSTAN_USE(device);
  CAPSTAN_CUDA(cudaMemsetAsync, data, 0, static_cast<size_t>(bytes), stream_of(stream));
  return {};
}

// ---- ranges: a few nanoseconds each while no profiler is attached

void begin_range(const char* name) {
  (void)nvtxRangePushA(name);
}
void end_range() {
  (void)nvtxRangePop();
}
void mark(const char* name) {
  nvtxMarkA(name);
}

}  // namespace

const Runtime& cuda_runtime() {
  static const Runtime runtime{.count_devices = count_devices,
                               .describe_device = describe_device,
                               .open_device = open_device,
                               .close_device = close_device,
                               .last_error = last_error,
                               .create_stream = create_stream,
                               .destroy_stream = destroy_stream,
                               .wait_stream = wait_stream,
                               .call_host = call_host,
                               .create_event = create_event,
                               .destroy_event = destroy_event,
                               .record_event = record_event,
                               .query_event = query_event,
                               .wait_event = wait_event,
                               .stream_wait_event = stream_wait_event,
                               .elapsed = elapsed,
                               .begin_graph = begin_graph,
                               .launch_graph = launch_graph,
                               .reserve_range = reserve_range,
                               .release_range = release_range,
                               .map_memory = map_memory,
                               .unmap_memory = unmap_memory,
                               .allocate_pinned = allocate_pinned,
                               .free_pinned = free_pinned,
                               .copy = copy,
                               .zero = zero,
                               .begin_range = begin_range,
                               .end_range = end_range,
                               .mark = mark};
  return runtime;
}

}  // namespace capstan::cuda
