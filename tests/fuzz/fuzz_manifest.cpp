// The manifest parser on arbitrary bytes: as they are, sealed with the right hash (so that mutations get past
// it), and as the list that a rank sends.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "checkpoint/manifest.hpp"
#include "named_error.hpp"

using namespace capstan;
using namespace capstan::checkpoint;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  fuzz::expect_named_error([&] { parse_manifest(input, "input"); });
  fuzz::expect_named_error([&] {
    const Manifest manifest = parse_manifest(append_manifest_hash(input), "input");
    // An accepted manifest can be written and read again, and its text does not change.
    const std::string text = manifest_text(manifest);
    if (manifest_text(parse_manifest(text, "rewritten")) != text) std::abort();
  });
  fuzz::expect_named_error([&] { parse_rank_manifest(input, "input"); });
  return 0;
}
