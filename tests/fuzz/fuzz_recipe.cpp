// Any bytes as a recipe and its overrides, against the real schema: never a crash, never slow, and whatever resolves must
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

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/hash.hpp"
#include "config/resolve.hpp"
#include "config/show.hpp"

using namespace capstan;
using namespace capstan::config;

static std::string recipe_path() {
  const std::filesystem::path memory = "/dev/shm";
  const auto directory = std::filesystem::exists(memory) ? memory : std::filesystem::temp_directory_path();
  return (directory / ("capstan-fuzz-recipe-" + std::to_string(getpid()) + ".yaml")).string();
}

static Resolution resolve_bytes(std::string_view text, const std::vector<Override>& overrides) {
  static const std::string path = recipe_path();
  static const int registered = std::atexit([] { std::remove(path.c_str()); });
  (void)registered;
  std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
  Request request;
  request.recipe = path;
  request.overrides = overrides;
  request.now = 0;
  return resolve(request);
}

// Most inputs that resolve give a recipe that an earlier one gave; reading that one back shows nothing new, and is most of
// an execution's time.
static bool is_new(const std::string& recipe) {
  static std::unordered_set<size_t> known;
  if (known.size() > 1'000'000) known.clear();
  return known.insert(std::hash<std::string>()(recipe)).second;
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
  try {
    const Resolution resolution = resolve_bytes(file, overrides);
    render(resolution.diagnostics, resolution.sources);
    render(resolution.diagnostics, resolution.sources, {DiagnosticFormat::json, false});
    if (!resolution.ok()) return 0;
    const std::string shown = resolved_recipe(resolution);
    if (!is_new(shown)) return 0;
    const Resolution again = resolve_bytes(shown, {});
    if (!again.ok() || !diff(resolution, again).empty()) {
      std::fputs(render(again.diagnostics, again.sources).c_str(), stderr);
      std::fputs(render_diff(diff(resolution, again)).c_str(), stderr);
      std::abort();
    }
  } catch (const Error&) {
  }
  return 0;
}
