// Any bytes as a configuration of another trainer: never a crash, never slow; what comes out is a recipe that
// reads as YAML, and every diagnostic and list can be printed. The first byte chooses the format, `9` leaves
// it to be recognized.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/utf8.hpp"
#include "config/core/tree.hpp"
#include "importers/import.hpp"
#include "named_error.hpp"

using namespace capstan;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  importers::Options options;
  const auto formats = importers::known_formats();
  const auto choice = static_cast<size_t>(input[0] - '0');
  if (choice < formats.size()) options.format = formats[choice].format;
  fuzz::expect_no_internal_error([&] {
    const importers::Imported imported =
        importers::import_recipe(std::string(input.substr(1)), "input", options);
    config::render(imported.resolution.diagnostics, imported.resolution.sources);
    for (const importers::OmittedKey& omitted : imported.omitted)
      if (first_invalid_utf8(omitted.key + omitted.value + omitted.reason)) std::abort();
    const std::vector<config::Source> sources = {
        {config::Source::Kind::file, "recipe", imported.recipe, "/"}};
    std::vector<config::Diagnostic> problems;
    if (!config::parse_yaml(0, sources, problems) || config::count(problems, config::Level::error) > 0 ||
        imported.resolution.malformed) {
      std::fputs((imported.recipe + config::render(problems, sources)).c_str(), stderr);
      std::abort();
    }
  });
  return 0;
}
