// An indexed dataset from a stranger: two bytes give the length of the .idx part, the rest is the .bin file.
// A dataset that opens is inspected, read and put in both orders.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>

#include "data/inspect.hpp"
#include "data/sample_order.hpp"
#include "named_error.hpp"

using namespace capstan;
using namespace capstan::data;

namespace {

const std::string& prefix() {
  static const std::string path = [] {
    const auto directory = (std::filesystem::exists("/dev/shm") ? std::filesystem::path("/dev/shm")
                                                                : std::filesystem::temp_directory_path()) /
                           ("capstan-fuzz-indexed-" + std::to_string(::getpid()));
    std::filesystem::create_directories(directory);
    return (directory / "d").string();
  }();
  return path;
}

void write(const char* ending, std::string_view bytes) {
  std::ofstream(prefix() + ending, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2 || size > 4096) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 2, size - 2);
  const size_t index = std::min<size_t>(rest.size(), data[0] | data[1] << 8);
  write(".idx", rest.substr(0, index));
  write(".bin", rest.substr(index));
  fuzz::expect_no_internal_error([] {
    InspectOptions options;
    options.scan_tokens = true;
    to_json_report(inspect(prefix(), options));
  });
  fuzz::expect_no_internal_error([] {
    to_text_report(inspect(prefix()));
    const auto dataset = std::make_shared<IndexedDataset>(prefix(), 1000);
    const SequenceRange range{dataset, 0, dataset->sequences()};
    std::vector<int32_t> text(4);
    fuzz::expect_no_internal_error([&] {
      const CapstanOrder order(range, 3, 1);
      for (const int64_t sample : {int64_t{0}, order.epoch_samples() - 1, 5 * order.epoch_samples()})
        order.read(sample, text);
    });
    fuzz::expect_no_internal_error([&] {
      const MegatronOrder order(range, 3, 1, 50);
      for (int64_t sample = 0; sample < order.samples(); sample += 7) order.read(sample, text);
    });
  });
  return 0;
}
