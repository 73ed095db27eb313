// adapter_config.json on arbitrary bytes; what is accepted is written again with the same meaning.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "formats/peft_adapter.hpp"
#include "named_error.hpp"

using namespace capstan;
using namespace capstan::formats;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  fuzz::expect_named_error([&] {
    const PeftConfig config = parse_peft_config(input, "input");
    const PeftConfig again = parse_peft_config(peft_config_text(config), "made");
    if (again.rank != config.rank || again.alpha != config.alpha || again.dora != config.dora ||
        again.rank_pattern != config.rank_pattern || again.alpha_pattern != config.alpha_pattern)
      std::abort();
  });
  return 0;
}
