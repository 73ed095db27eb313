#include "support/fake_cuda.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <string_view>
#include <utility>

namespace capstan::test {

namespace {

using cuda::OpenDevice;
using cuda::Runtime;
using cuda::Status;
using cuda::StatusCode;

FakeCuda state;

thread_local char status_text[128];
Status failed(const char* function, const char* why, StatusCode code) {
  std::snprintf(status_text, sizeof status_text, "fake_%s: %s", function, why);
  return {code, status_text};
}

// Counts the resource that a function takes or releases.
void count(std::string_view function) {
  struct Change {
    const char* function;
    int64_t FakeCuda::*count;
    int64_t by;
  };
  static constexpr Change changes[] = {
      {"open_device", &FakeCuda::open_devices, 1}, {"close_device", &FakeCuda::open_devices, -1},
      {"create_stream", &FakeCuda::streams, 1},    {"destroy_stream", &FakeCuda::streams, -1},
      {"create_event", &FakeCuda::events, 1},      {"destroy_event", &FakeCuda::events, -1},
      {"reserve_range", &FakeCuda::ranges, 1},     {"release_range", &FakeCuda::ranges, -1},
      {"allocate_pinned", &FakeCuda::pinned, 1},   {"free_pinned", &FakeCuda::pinned, -1},
      {"map_memory", &FakeCuda::maps, 1},          {"unmap_memory", &FakeCuda::unmaps, 1}};
  for (const Change& change : changes)
    if (function == change.function) state.*change.count += change.by;
}

// The name of a function, as a template argument.
template <size_t kSize>
struct Name {
  char text[kSize];
  constexpr Name(const char (&name)[kSize]) { std::copy_n(name, kSize, text); }  // NOLINT: from a literal
};

// A function of the simulated runtime that fails where a test asks for it.
template <Name kName, auto kMember>
struct Planned;
template <Name kName, class... P, Status (*Runtime::*kMember)(P...)>
struct Planned<kName, kMember> {
  static Status run(P... arguments) {
    if (state.failing == kName.text) return failed(kName.text, "planted error", state.code);
    const Status status = (cuda::simulated_runtime().*kMember)(arguments...);
    if (status.ok()) count(kName.text);
    return status;
  }
};
#define PLANNED(function) Planned<#function, &Runtime::function>::run

void choose_gpu() {
  cuda::set_simulated_gpu({.memory = state.memory, .patient = state.patient});
}
Status count_devices(int32_t* devices) {
  const Status status = PLANNED(count_devices)(devices);
  if (status.ok()) *devices = state.devices;
  return status;
}
Status describe_device(int32_t index, cuda::DeviceFacts* facts) {
  choose_gpu();
  const Status status = PLANNED(describe_device)(index, facts);
  if (!status.ok()) return status;
  if (index < 0 || index >= state.devices)
    return failed("describe_device", "no such device", StatusCode::failed);
  std::snprintf(facts->name, sizeof facts->name, "fake GPU");
  facts->major = state.capability / 10, facts->minor = state.capability % 10;
  return status;
}
Status open_device(int32_t index, OpenDevice** device) {
  choose_gpu();
  return PLANNED(open_device)(index, device);
}
Status last_error(OpenDevice* device) {
  if (state.launch_error.empty()) return PLANNED(last_error)(device);
  return failed("last_error", std::exchange(state.launch_error, "").c_str(), StatusCode::failed);
}
Status map_memory(OpenDevice* device, void* address, int64_t bytes) {
  const Status status = PLANNED(map_memory)(device, address, bytes);
  if (status.ok()) state.mapped += bytes;
  return status;
}
Status unmap_memory(OpenDevice* device, void* address, int64_t bytes) {
  const Status status = PLANNED(unmap_memory)(device, address, bytes);
  if (status.ok()) state.mapped -= bytes;
  return status;
}

// Nothing is collected any more, also where it fails.
Status launch_graph(OpenDevice* device, void* stream, const char* name, cuda::GraphLaunch* launch) {
  const Status status = cuda::simulated_runtime().launch_graph(device, stream, name, launch);
  return state.failing == "launch_graph" ? failed("launch_graph", "planted error", state.code) : status;
}

constexpr Runtime kFakeRuntime{.count_devices = count_devices,
                               .describe_device = describe_device,
                               .open_device = open_device,
                               .close_device = PLANNED(close_device),
                               .last_error = last_error,
                               .create_stream = PLANNED(create_stream),
                               .destroy_stream = PLANNED(destroy_stream),
                               .wait_stream = PLANNED(wait_stream),
                               .call_host = PLANNED(call_host),
                               .create_event = PLANNED(create_event),
                               .destroy_event = PLANNED(destroy_event),
                               .record_event = PLANNED(record_event),
                               .query_event = PLANNED(query_event),
                               .wait_event = PLANNED(wait_event),
                               .stream_wait_event = PLANNED(stream_wait_event),
                               .elapsed = PLANNED(elapsed),
                               .begin_graph = PLANNED(begin_graph),
                               .launch_graph = launch_graph,
                               .reserve_range = PLANNED(reserve_range),
                               .release_range = PLANNED(release_range),
                               .map_memory = map_memory,
                               .unmap_memory = unmap_memory,
                               .allocate_pinned = PLANNED(allocate_pinned),
                               .free_pinned = PLANNED(free_pinned),
                               .copy = PLANNED(copy),
                               .zero = PLANNED(zero)};

struct HostCall {
  std::function<void()> kernel;
};
void run_host_call(void* argument) {
  std::unique_ptr<HostCall>(static_cast<HostCall*>(argument))->kernel();
}

}  // namespace

FakeCuda& fake_cuda() {
  return state;
}
FakeCuda& reset_fake_cuda() {
  return state = {};
}
const cuda::Backend& fake_backend() {
  static constexpr cuda::Backend backend{.interface = "fake", .runtime = &kFakeRuntime};
  return backend;
}
void fake_launch(void* stream, std::function<void()> kernel) {
  auto call = std::make_unique<HostCall>(HostCall{std::move(kernel)});
  (void)cuda::simulated_runtime().call_host(nullptr, stream, run_host_call, call.release());
}

}  // namespace capstan::test
