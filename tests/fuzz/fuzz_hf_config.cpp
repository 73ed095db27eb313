// config.json of every family, and the index of sharded weights. An accepted file is written again as
// the same model.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "formats/hf_config.hpp"
#include "formats/hf_directory.hpp"
#include "formats/model_section.hpp"
#include "named_error.hpp"

using namespace capstan;
using namespace capstan::formats;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  fuzz::expect_named_error([&] { parse_index(input, "index"); });
  fuzz::expect_named_error([&] {
    const HfModel read = read_hf_config(input, "config");
    const HfConfig made = write_hf_config(read.model, DType::f32);
    if (!differences(read.model, read_hf_config(made.text, "made").model).empty()) std::abort();
  });
  return 0;
}
