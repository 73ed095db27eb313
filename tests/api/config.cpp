// Recipes through the public header.
#include "capstan/config.hpp"

#include <doctest/doctest.h>

#include <functional>

using capstan::Config;
using capstan::Error;
using capstan::ErrorCode;

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

ErrorCode code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::internal;
}

}  // namespace

TEST_CASE("values by path, as text, JSON and YAML") {
  const Config config =
      Config::resolve("quickstart", {"optimizer.lr=1e-3", "dataset=mock", "tokenizer=none"}, 2);
  REQUIRE(config.ok());
  CHECK(config.value("name") == "quickstart");
  CHECK(config.value("model.num_layers") == "4");
  CHECK(config.value("optimizer.lr") == "0.001");
  CHECK(config.value("model.gated_linear_unit") == "true");
  CHECK(config.value("peft") == "null");
  CHECK(config.value("dist.world_size") == "2");
  CHECK(config.value("dist.data_parallel_size") == "2");
  CHECK(config.json("model.hidden_size") == "256\n");
  CHECK(config.json("name") == "\"quickstart\"\n");
  CHECK(contains(config.json(), "\"hidden_size\": 256"));
  CHECK(contains(config.yaml("optimizer"), "lr: 0.001"));
  CHECK(contains(config.yaml(), "\nmodel:\n"));

  // A copy outlives its original and has the same values.
  const Config copy = config;
  CHECK(copy.yaml() == config.yaml());
}

TEST_CASE("mistakes are reported with their location, all at once, as text and as JSON") {
  const Config config =
      Config::resolve("quickstart", {"dataset=mock", "model.hiden_size=3", "optimizer.lr=fast"});
  CHECK(!config.ok());
  const std::string text = config.diagnostics();
  CHECK(contains(text, "<cli>:2"));
  CHECK(contains(text, "unknown key `model.hiden_size`"));
  CHECK(contains(text, "`model.hidden_size`"));
  CHECK(contains(text, "<cli>:3"));
  CHECK(contains(text, "`fast` is not a number"));
  const std::string json = config.diagnostics_json();
  CHECK(json.starts_with("["));
  CHECK(contains(json, "C0102"));
  CHECK(contains(json, "\"range\""));
  CHECK(code_of([&] { config.yaml(); }) == ErrorCode::config);
  CHECK(code_of([&] { config.value("model.num_layers"); }) == ErrorCode::config);

  const Config alone = Config::resolve("quickstart");
  CHECK(alone.ok());
  CHECK(alone.diagnostics().empty());
}

TEST_CASE("unreadable and missing files are errors with a code and a help text") {
  CHECK(code_of([] { Config::resolve("no/such/recipe.yaml"); }) == ErrorCode::not_found);
  CHECK(code_of([] { Config::resolve("quikstart"); }) == ErrorCode::not_found);
  const Config config = Config::resolve("quickstart");
  try {
    config.value("model.num_layer");
    FAIL("a path that names nothing has a value");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::usage);
    CHECK(contains(error.what(), "model.num_layers"));
  }
}
