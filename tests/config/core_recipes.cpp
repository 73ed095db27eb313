// The real schema and the recipes that come with the binary: they resolve, print, read back, and are quick to
// check.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/file.hpp"
#include "config/core/hash.hpp"
#include "config/resolve/resolve.hpp"
#include "config/tools/json_schema.hpp"
#include "config/tools/show.hpp"
#include "support/paths.hpp"
#include "support/sanitized.hpp"

using namespace capstan;
using namespace capstan::config;

namespace {

// In the current directory, which the paths of embedded recipes are relative to.
Resolution resolve_yaml(const std::string& yaml) {
  Request request;
  request.recipe = "./round-trip.yaml";
  return resolve_text(yaml, request);
}

double median_ms(int rounds, const std::string& recipe, bool print) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const std::clock_t start = std::clock();
    // On a thread of its own: what an earlier resolution has parsed is not known there, as in a program just
    // started.
    std::thread([&] {
      Request request;
      request.recipe = recipe;
      const auto resolution = resolve(request);
      if (print) CHECK(show(resolution).size() > 1000);
    }).join();
    times.push_back(1000.0 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

TEST_CASE("every shipped recipe resolves, and every printed form of it reads back as the same") {
  CHECK(Library::standard().recipes().size() >= 6);
  for (const auto& entry : test::sampled(Library::standard().recipes())) {
    CAPTURE(entry.name);
    CHECK_FALSE(entry.description.empty());
    Request request;
    request.recipe = entry.name;
    const auto resolution = resolve(request);
    CAPTURE(render(resolution.diagnostics, resolution.sources));
    REQUIRE(resolution.ok());
    CHECK(resolution.config.name == entry.name);
    const std::string hash = config_hash(schema(), &resolution.config, HashScope::full);
    for (const auto& text : {show(resolution), show(resolution, {ShowFormat::minimal, ""}),
                             resolved_recipe(resolution), show(resolution, {ShowFormat::json, ""})}) {
      const auto again = resolve_yaml(text);
      CAPTURE(text);
      CAPTURE(render(again.diagnostics, again.sources));
      CHECK(again.ok());
      CAPTURE(render_diff(diff(resolution, again)));
      CHECK(diff(resolution, again).empty());
      CHECK(config_hash(schema(), &again.config, HashScope::full) == hash);
    }
  }
}

TEST_CASE("places point at the lines that set the fields, however often a shipped file was read before") {
  int locations = 0;
  for (int round = 0; round < 2; ++round)
    for (const auto& recipe : test::sampled(Library::standard().recipes())) {
      Request request;
      request.recipe = recipe.name;
      // One more source in front of the presets, so that they have other numbers than in the first round.
      if (round) request.overrides.push_back(Override::token("rng.seed=7"));
      const auto resolution = resolve(request);
      for (const auto& [path, origin] : resolution.origins) {
        if (!origin.location.known()) continue;
        const auto& source = resolution.sources.at(static_cast<size_t>(origin.location.source));
        if (source.kind != config::Source::Kind::embedded) continue;
        const std::string name = path.substr(path.rfind('.') + 1);
        INFO(recipe.name, " ", path, " ", source.name, ":", origin.location.line);
        CHECK(source.line(origin.location.line).find(name) != std::string_view::npos);
        if (origin.kind == Origin::Kind::preset) CHECK(source.name.starts_with("configs/"));
        ++locations;
      }
    }
  CHECK(locations > 500);
}

TEST_CASE("checking and showing the 405B recipe takes milliseconds") {
  const double check = median_ms(20, "llama3.1-405b", false), print = median_ms(20, "llama3.1-405b", true);
  MESSAGE("resolve: " << check << " ms, resolve and show: " << print << " ms (medians of 20)");
#if CAPSTAN_TIMED
  CHECK(check < 5);  // a process that starts, checks and ends has 20 ms
  CHECK(print < 10);
#endif
}

TEST_CASE("the JSON Schemas in schemas/ are those of this binary") {
  const std::filesystem::path directory = std::filesystem::path(capstan::test::kSourceDirectory) / "schemas";
  const auto files = schema_files(schema(), Library(library_files(), {}));
  if (std::getenv("CAPSTAN_WRITE_SCHEMAS"))
    for (const auto& [name, text] : files) std::ofstream(directory / name, std::ios::binary) << text;
  for (const auto& [name, text] : files) {
    CAPTURE(name);
    REQUIRE(std::filesystem::exists(directory / name));
    const bool fresh = read_file(directory / name) == text;
    CHECK_MESSAGE(fresh, "stale: write them with CAPSTAN_WRITE_SCHEMAS=1 and this test, or `capstan schema`");
  }
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    if (entry.path().extension() == ".json") CHECK(files.count(entry.path().filename().string()) == 1);
}

TEST_CASE("every field, section and rule explains itself") {
  Request request;
  request.recipe = "quickstart";
  const auto resolution = resolve(request);
  for (const FieldInfo* field : schema().fields()) {
    CHECK(explain(field->path, &resolution).size() > field->path.size() + field->doc.size());
    CHECK_FALSE(explain_json(schema(), field->path, &resolution.config, &resolution).empty());
  }
  for (const auto& section : schema().sections())
    if (!section.name.empty()) CHECK_FALSE(explain(section.name).empty());
  for (const auto& rule : schema().rules()) {
    CHECK_FALSE(explain(rule.code).empty());
    CHECK_FALSE(explain(rule.name).empty());
  }
}
