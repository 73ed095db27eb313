// Overrides as a shell hands them over: one per line of the input, on top of a named recipe. Parsing,
// conversion and the complaints about them must end in a Resolution or an Error, whatever the words are.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/text.hpp"
#include "named_error.hpp"
#include "spaces.hpp"

using namespace capstan;

template <class Space>
static void check(const config::Request& request) {
  fuzz::expect_no_internal_error([&] {
    const auto answer = fuzz::resolve<Space>(request);
    config::render(answer.diagnostics, answer.sources);
    // fuzz_recipe checks that the shown recipe reads back as the same recipe.
    if (answer.ok() && answer.recipe().empty()) std::abort();
  });
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 4096) return 0;  // a command line; many words are the same work again
  const std::string text(reinterpret_cast<const char*>(data), size);
  config::Request request;
  for (const auto line : split(text, '\n')) {
    if (line.empty() || line.find('\0') != std::string_view::npos) continue;
    // Files are another target's business: a word must not read the disk here.
    if (line.find_first_of("@/") != std::string_view::npos) continue;
    request.overrides.push_back(config::Override::token(std::string(line)));
  }
  request.recipe = "base";
  check<fuzz::Small>(request);
  request.recipe = "quickstart";
  if (fuzz::also_shipped(data, size)) check<fuzz::Shipped>(request);
  return 0;
}
