// The record beside an indexed dataset, from a stranger; what is read is written and read again.
#include <cstdint>
#include <string>
#include <string_view>

#include "data/dataset_meta.hpp"
#include "named_error.hpp"

using namespace capstan;
using namespace capstan::data;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 65536) return 0;
  fuzz::expect_no_internal_error([&] {
    const DatasetMeta meta = parse_meta({reinterpret_cast<const char*>(data), size}, "d.meta.json");
    parse_meta(to_json(meta), "again");
    to_text(meta.tokenizer);
  });
  return 0;
}
