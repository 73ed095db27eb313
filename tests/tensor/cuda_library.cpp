// Finding the CUDA backend, and the reasons for which there is none.
#include "tensor/cuda_library.hpp"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "support/paths.hpp"

using namespace capstan;
namespace fs = std::filesystem;

namespace {
const fs::path kBuild = test::kBinaryDirectory;
bool contains_text(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
}  // namespace

TEST_CASE("cuda library: the reason names where it was looked for, and how it is built") {
  const cuda::Library library =
      cuda::open_library({"/nowhere/libcapstan_cuda.so", "/elsewhere/libcapstan_cuda.so"});
  CHECK(!library.backend);
  CHECK(!library.found);
  CHECK(library.reason ==
        "this build has no CUDA backend, which would be `/nowhere/libcapstan_cuda.so` or "
        "`/elsewhere/libcapstan_cuda.so`");
  CHECK(contains_text(library.help, "cmake --preset cuda"));
  const auto paths = cuda::library_paths();
  REQUIRE(paths.size() == 2);
  CHECK(paths[0] == kBuild.parent_path() / "lib/capstan/libcapstan_cuda.so");
  CHECK(paths[1] == kBuild / "libcapstan_cuda.so");
  ::setenv("CAPSTAN_CUDA_BACKEND", "/opt/backend.so", 1);
  CHECK(cuda::library_paths() == std::vector<fs::path>{"/opt/backend.so"});
  ::unsetenv("CAPSTAN_CUDA_BACKEND");
}

TEST_CASE("cuda library: a file that cannot be opened, a library without the symbol, another version") {
  const fs::path text = fs::temp_directory_path() / ("no-library-" + std::to_string(::getpid()) + ".so");
  std::ofstream(text) << "text";
  const cuda::Library damaged = cuda::open_library({text});
  fs::remove(text);
  CHECK(damaged.found);
  CHECK(!damaged.backend);
  CHECK(contains_text(damaged.reason, "cannot be opened: "));
  CHECK(contains_text(damaged.reason, text.string()));

  const cuda::Library other = cuda::open_library({"/nowhere/first.so", CAPSTAN_OTHER_CUDA_BACKEND});
  CHECK(other.found);
  CHECK(!other.backend);
  CHECK(
      contains_text(other.reason, "belongs to another version of the program (interface another, expected "));
}

TEST_CASE("cuda library: the object of this build opens without a driver and says that there is none") {
#if CAPSTAN_TEST_CUDA
  const cuda::Library& library = cuda::library();
  REQUIRE_MESSAGE(library.backend, library.reason);
  REQUIRE(library.backend->runtime);
  if (const cuda::Communicator* const nccl = library.backend->communicator) {
    int32_t version = 0;
    const cuda::Status loaded = nccl->load(&version);
    if (loaded.ok()) {
      CHECK(version >= 21801);
      // NCCL needs no GPU for them.
      cuda::UniqueId first, second;
      CHECK(nccl->get_unique_id(&first).ok());
      CHECK(nccl->get_unique_id(&second).ok());
      CHECK(std::memcmp(first.bytes, second.bytes, sizeof first.bytes) != 0);
    } else {
      CHECK(loaded.code == cuda::StatusCode::unavailable);
      CHECK(contains_text(loaded.text, "NCCL"));
    }
  }
  int32_t count = -1;
  const cuda::Status status = library.backend->runtime->count_devices(&count);
  if (fs::exists("/dev/nvidiactl")) {
    MESSAGE("a driver is present: " << count << " devices");
  } else {
    CHECK(status.code == cuda::StatusCode::unavailable);
    CHECK(count == 0);
    CHECK(std::string(status.text).starts_with("no NVIDIA driver is installed (cudaGetDeviceCount: "));
    cuda::DeviceFacts facts;
    const cuda::Status described = library.backend->runtime->describe_device(0, &facts);
    CHECK(described.code == cuda::StatusCode::failed);
    CHECK(contains_text(described.text, "cudaGetDeviceProperties: "));
    cuda::OpenDevice* device = nullptr;
    CHECK(!library.backend->runtime->open_device(0, &device).ok());
    CHECK(!device);
  }
#else
  CHECK(!cuda::library().backend);
#endif
}
