// NCCL's library is opened by the first call of load(), and not linked: a machine with one GPU needs none.
// dlopen looks in LD_LIBRARY_PATH, in the directory where the build found the library (the object's run
// path), and in the system's directories.
#include "tensor/cuda/communicator.hpp"

#include <dlfcn.h>
#include <nccl.h>

#include <cstdio>
#include <cstring>
#include <new>
#include <string>

#include "tensor/cuda/runtime.hpp"

namespace capstan::cuda {

struct OpenCommunicator {
  ncclComm_t handle = nullptr;
};

namespace {

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));

constexpr const char* kLibrary = "libnccl.so.2";
// The first version whose communicators that do not block are complete.
constexpr int kOldestVersion = NCCL_VERSION(2, 18, 1);

#define CAPSTAN_NCCL_FUNCTIONS(DO) \
  DO(GetVersion)                   \
  DO(GetErrorString)               \
  DO(GetLastError)                 \
  DO(GetUniqueId)                  \
  DO(CommInitRankConfig)           \
  DO(CommGetAsyncError)            \
  DO(CommFinalize)                 \
  DO(CommDestroy)                  \
  DO(CommAbort)                    \
  DO(GroupStart)                   \
  DO(GroupEnd)                     \
  DO(Send)                         \
  DO(Recv)                         \
  DO(AllGather)

// The functions of the library; all of them are null where it cannot be used.
struct NcclLibrary {
#define CAPSTAN_NCCL_MEMBER(name) decltype(&nccl##name) name = nullptr;
  CAPSTAN_NCCL_FUNCTIONS(CAPSTAN_NCCL_MEMBER)
#undef CAPSTAN_NCCL_MEMBER
  int version = 0;
  // Why it cannot be used.
  std::string reason;
};

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// Sets the functions; returns the name of one that the library lacks, null where it has all.
const char* find_functions(void* object, NcclLibrary& library) {
#define CAPSTAN_NCCL_FIND(name)                                                           \
  library.name = reinterpret_cast<decltype(library.name)>(::dlsym(object, "nccl" #name)); \
  if (!library.name) return "nccl" #name;
  CAPSTAN_NCCL_FUNCTIONS(CAPSTAN_NCCL_FIND)
#undef CAPSTAN_NCCL_FIND
  return nullptr;
}

NcclLibrary open_nccl() {
  NcclLibrary library;
  void* const object = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!object) {
    const char* const text = ::dlerror();
    return {.reason = std::string("NCCL cannot be opened: ") + (text ? text : kLibrary)};
  }
  if (const char* const missing = find_functions(object, library))
    return {.reason = std::string("the NCCL library has no function `") + missing + "`"};
  if (const ncclResult_t result = library.GetVersion(&library.version); result != ncclSuccess)
    return {.reason = std::string("ncclGetVersion: ") + library.GetErrorString(result)};
  if (library.version < kOldestVersion)
    return {.reason = "the NCCL library is of version " + version_text(library.version) +
                      ", and the backend needs " + version_text(kOldestVersion) + " or newer"};
  return library;
}
const NcclLibrary& nccl() {
  static const NcclLibrary library = open_nccl();
  return library;
}

thread_local char status_text[1024];

Status status_of(ncclResult_t result, const char* call, ncclComm_t handle) {
  if (result == ncclSuccess) return {};
  if (result == ncclInProgress) return {StatusCode::not_ready, nullptr};
  const char* const detail = nccl().GetLastError(handle);
  std::snprintf(status_text, sizeof status_text, "%s: %s (%d)%s%s", call, nccl().GetErrorString(result),
                static_cast<int>(result), detail && *detail ? ": " : "", detail ? detail : "");
  return {StatusCode::failed, status_text};
}
#define CAPSTAN_NCCL(handle, function, ...) status_of(nccl().function(__VA_ARGS__), "nccl" #function, handle)

Status load(int32_t* version) {
  *version = nccl().version;
  if (nccl().reason.empty()) return {};
  return {StatusCode::unavailable, nccl().reason.c_str()};
}

Status get_unique_id(UniqueId* id) {
  ncclUniqueId made;
  const Status status = CAPSTAN_NCCL(nullptr, GetUniqueId, &made);
  if (status.ok()) std::memcpy(id->bytes, made.internal, sizeof id->bytes);
  return status;
}

Status init_rank(OpenDevice* device, int32_t ranks, const UniqueId* id, int32_t rank,
                 OpenCommunicator** communicator) {
  // The communicator belongs to the device that is current now.
  if (const Status status = use_device(device); !status.ok()) return status;
  auto* const opened = new (std::nothrow) OpenCommunicator;
  if (!opened) return {StatusCode::out_of_memory, "no memory of the host"};
  ncclUniqueId given;
  std::memcpy(given.internal, id->bytes, sizeof given.internal);
  // No call waits for other ranks: a rank that has failed would keep the caller forever.
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const Status status =
      CAPSTAN_NCCL(nullptr, CommInitRankConfig, &opened->handle, ranks, given, rank, &config);
  if (status.code != StatusCode::failed) {
    *communicator = opened;
    return status;
  }
  if (opened->handle) (void)nccl().CommAbort(opened->handle);
  delete opened;
  return status;
}

// ---- transfers

cudaStream_t stream_of_transfer(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

Status group_start() {
  return CAPSTAN_NCCL(nullptr, GroupStart);
}
Status group_end() {
  return CAPSTAN_NCCL(nullptr, GroupEnd);
}
Status send(OpenCommunicator* communicator, const void* data, int64_t bytes, int32_t peer, void* stream) {
  return CAPSTAN_NCCL(communicator->handle, Send, data, static_cast<size_t>(bytes), ncclChar, peer,
                      communicator->handle, stream_of_transfer(stream));
}
Status receive(OpenCommunicator* communicator, void* data, int64_t bytes, int32_t peer, void* stream) {
  return CAPSTAN_NCCL(communicator->handle, Recv, data, static_cast<size_t>(bytes), ncclChar, peer,
                      communicator->handle, stream_of_transfer(stream));
}
Status all_gather(OpenCommunicator* communicator, const void* mine, void* all, int64_t bytes_per_rank,
                  void* stream) {
  return CAPSTAN_NCCL(communicator->handle, AllGather, mine, all, static_cast<size_t>(bytes_per_rank),
                      ncclChar, communicator->handle, stream_of_transfer(stream));
}

// ---- state and end

Status get_async_error(OpenCommunicator* communicator) {
  ncclResult_t state = ncclSuccess;
  const Status asked = CAPSTAN_NCCL(communicator->handle, CommGetAsyncError, communicator->handle, &state);
  return asked.ok() ? status_of(state, "ncclCommGetAsyncError", communicator->handle) : asked;
}
Status finalize(OpenCommunicator* communicator) {
  return CAPSTAN_NCCL(communicator->handle, CommFinalize, communicator->handle);
}
Status destroy(OpenCommunicator* communicator) {
  const Status status = CAPSTAN_NCCL(nullptr, CommDestroy, communicator->handle);
  delete communicator;
  return status;
}
Status abort(OpenCommunicator* communicator) {
  const Status status = CAPSTAN_NCCL(nullptr, CommAbort, communicator->handle);
  delete communicator;
  return status;
}

}  // namespace

const Communicator& nccl_communicator() {
  static constexpr Communicator communicator{.load = load,
                                             .get_unique_id = get_unique_id,
                                             .init_rank = init_rank,
                                             .group_start = group_start,
                                             .group_end = group_end,
                                             .send = send,
                                             .receive = receive,
                                             .all_gather = all_gather,
                                             .get_async_error = get_async_error,
                                             .finalize = finalize,
                                             .destroy = destroy,
                                             .abort = abort};
  return communicator;
}

}  // namespace capstan::cuda
