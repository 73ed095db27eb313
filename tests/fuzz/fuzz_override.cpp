// Overrides as a shell hands them over: one per line of the input, on top of a named recipe. Parsing, conversion and the
// complaints about them must end in a Resolution or an Error, whatever the words are.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/resolve.hpp"
#include "config/show.hpp"

using namespace capstan;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 4096) return 0;  // a command line; many words are the same work again
  const std::string text(reinterpret_cast<const char*>(data), size);
  config::Request request;
  request.recipe = "quickstart";
  for (const auto line : split(text, '\n')) {
    if (line.empty() || line.find('\0') != std::string_view::npos) continue;
    // Files are another target's business: a word must not read the disk here.
    if (line.find_first_of("@/") != std::string_view::npos) continue;
    request.overrides.push_back(config::Override::token(std::string(line)));
  }
  try {
    const config::Resolution resolution = config::resolve(request);
    config::render(resolution.diagnostics, resolution.sources);
    if (resolution.ok()) {
      // What is shown reads back as the same recipe.
      const std::string shown = config::resolved_recipe(resolution);
      if (shown.empty()) std::abort();
    }
  } catch (const Error&) {
  }
  return 0;
}
