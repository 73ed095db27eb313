// Any bytes as a recipe and its overrides: never a crash, never slow, and whatever resolves must
// print a recipe that resolves to the same. Lines that start with `> ` are overrides, the rest is the file.
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <unordered_set>

#include "base/text.hpp"
#include "named_error.hpp"
#include "spaces.hpp"

using namespace capstan;
using namespace capstan::config;

static std::string recipe_path() {
  const std::filesystem::path memory = "/dev/shm";
  const auto directory = std::filesystem::exists(memory) ? memory : std::filesystem::temp_directory_path();
  return (directory / ("capstan-fuzz-recipe-" + std::to_string(getpid()) + ".yaml")).string();
}

template <class Space>
static fuzz::Answer<Space> resolve_bytes(std::string_view text, const std::vector<Override>& overrides) {
  static const std::string path = recipe_path();
  static const int registered = std::atexit([] { std::remove(path.c_str()); });
  (void)registered;
  std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
  Request request;
  request.recipe = path;
  request.overrides = overrides;
  request.now = 0;
  return fuzz::resolve<Space>(request);
}

// Most inputs that resolve give a recipe that an earlier one gave; reading that one back shows nothing new,
// and is most of an execution's time.
static bool is_new(const std::string& recipe) {
  static std::unordered_set<size_t> known;
  if (known.size() > 1'000'000) known.clear();
  return known.insert(std::hash<std::string>()(recipe)).second;
}

template <class Space>
static void check(std::string_view file, const std::vector<Override>& overrides) {
  fuzz::expect_no_internal_error([&] {
    const auto answer = resolve_bytes<Space>(file, overrides);
    render(answer.diagnostics, answer.sources);
    render(answer.diagnostics, answer.sources, {DiagnosticFormat::json, false});
    if (!answer.ok()) return;
    const std::string shown = answer.recipe();
    if (!is_new(shown)) return;
    const auto again = resolve_bytes<Space>(shown, {});
    const auto changes = answer.changes_to(again);
    if (!again.ok() || !changes.empty()) {
      std::fputs(render(again.diagnostics, again.sources).c_str(), stderr);
      std::fputs(render_diff(changes).c_str(), stderr);
      std::abort();
    }
  });
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  std::string file;
  std::vector<Override> overrides;
  for (const auto line : split(input, '\n')) {
    if (line.starts_with("> "))
      overrides.push_back(Override::token(std::string(line.substr(2))));
    else
      file.append(line).push_back('\n');
  }
  // An override must not reach files of the machine that runs this.
  for (const auto& override : overrides)
    if (override.text.find('@') != std::string::npos || override.text.find('/') != std::string::npos)
      return 0;
  check<fuzz::Small>(file, overrides);
  if (fuzz::also_shipped(data, size)) check<fuzz::Shipped>(file, overrides);
  return 0;
}
