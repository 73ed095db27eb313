#include "tensor/cuda_library.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <string_view>
#include <system_error>

namespace capstan::cuda {

namespace fs = std::filesystem;

std::vector<fs::path> library_paths() {
  constexpr const char* kName = "libcapstan_cuda.so";
  if (const char* named = std::getenv("CAPSTAN_CUDA_BACKEND"); named && *named) return {named};
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (error) return {};
  const fs::path directory = program.parent_path();
  return {directory.parent_path() / "lib" / "capstan" / kName, directory / kName};
}

namespace {

Library missing_library(const std::vector<fs::path>& paths) {
  std::string places;
  for (const fs::path& path : paths) places += (places.empty() ? "`" : " or `") + path.string() + "`";
  return {.reason = "this build has no CUDA backend, which would be " + places,
          .help = "build it with `cmake --preset cuda` (docs/gpu.md)"};
}

Library checked_library(void* object, const std::string& name) {
  Library library{.found = true};
  library.help = "build or install the program and its CUDA backend together";
  const auto function = reinterpret_cast<BackendFunction>(::dlsym(object, kBackendSymbol));
  if (!function) {
    library.reason = "`" + name + "` is not a CUDA backend: it has no symbol `" + kBackendSymbol + "`";
    return library;
  }
  const Backend* const backend = function();
  const std::string_view interface = backend && backend->interface ? backend->interface : "unknown";
  if (interface != CAPSTAN_CUDA_INTERFACE) {
    library.reason = "the CUDA backend `" + name + "` belongs to another version of the program (interface " +
                     std::string(interface) + ", expected " CAPSTAN_CUDA_INTERFACE ")";
    return library;
  }
  return {.backend = backend, .found = true};
}

}  // namespace

Library open_library(const std::vector<fs::path>& paths) {
  for (const fs::path& path : paths) {
    std::error_code error;
    if (!fs::exists(path, error)) continue;
    if (void* const object = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))
      return checked_library(object, path.string());
    const char* const text = ::dlerror();
    return {.found = true,
            .reason = "the CUDA backend `" + path.string() +
                      "` cannot be opened: " + (text ? text : "unknown error"),
            .help = "install the libraries of CUDA that it names, or build it again (docs/gpu.md)"};
  }
  return missing_library(paths);
}

const Library& library() {
  static const Library opened = open_library(library_paths());
  return opened;
}

}  // namespace capstan::cuda
