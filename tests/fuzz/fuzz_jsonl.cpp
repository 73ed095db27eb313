// Text to prepare from a stranger. The first byte selects its name and how it is split: bits 0-2 the
// name, bits 3-4 the documents of plain text, bit 5 what happens to bad records, bit 6 small limits.
#include <pthread.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "data/prepare.hpp"
#include "named_error.hpp"

using namespace capstan;
using namespace capstan::data;

// Each execution starts threads, and the sanitizer clears what it keeps of their stacks: with small ones a
// fifth faster.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 512 << 10);
  return pthread_setattr_default_np(&attributes);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string directory = [] {
    const auto path = (std::filesystem::exists("/dev/shm") ? std::filesystem::path("/dev/shm")
                                                           : std::filesystem::temp_directory_path()) /
                      ("capstan-fuzz-jsonl-" + std::to_string(::getpid()));
    std::filesystem::create_directories(path);
    return path.string();
  }();
  static ThreadPool pool(1);
  if (size < 1) return 0;
  constexpr const char* kNames[] = {"a.jsonl",    "a.json",   "a.txt",     "a.jsonl.gz",
                                    "a.json.zst", "a.txt.gz", "a.txt.zst", "a"};
  const int choice = data[0];
  const std::string input = directory + "/" + kNames[choice & 7];
  std::ofstream(input, std::ios::binary)
      .write(reinterpret_cast<const char*>(data) + 1, static_cast<std::streamsize>(size - 1));

  PrepareOptions options;
  options.inputs = {input};
  options.output_prefix = directory + "/out";
  options.vocab_size = 256;
  options.json_keys = {"text", "t"};
  if ((choice & 7) == 2 || (choice & 7) >= 5) options.json_keys = {"text"};
  options.records.split = static_cast<TextSplit>((choice >> 3) & 3);
  options.on_bad_line = choice & 32 ? OnBadLine::skip : OnBadLine::fail;
  options.records.limits = {1 << 16, 100};
  if (choice & 64) options.records.max_record_bytes = 20;
  fuzz::expect_no_internal_error([&] {
    int64_t bytes = 0;
    const auto result = prepare(
        options,
        [&](std::string_view text, std::vector<int32_t>& ids) {
          bytes += static_cast<int64_t>(text.size());
          for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
        },
        pool);
    int64_t tokens = 0;
    for (const auto& key : result.keys) {
      tokens += key.tokens;
      if (key.documents + result.skipped != result.records) std::abort();
      const IndexedDataset dataset(key.prefix, 256);
      if (dataset.documents() != key.documents || dataset.tokens() != key.tokens) std::abort();
    }
    if (tokens != bytes) std::abort();
  });
  return 0;
}
