// Compares imports of each format byte by byte with golden files: the recipe, and the lists of assumed values
// and omitted keys. After an intended change, CAPSTAN_WRITE_GOLDEN=1 test_import rewrites the golden files;
// review the difference.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/actions.hpp"
#include "base/file.hpp"
#include "importers/import.hpp"
#include "support/paths.hpp"

using namespace capstan;
using namespace capstan::importers;

namespace {

const std::string kDirectory = std::string(capstan::test::kSourceDirectory) + "/tests/importers/golden/";

Imported imported(const std::string& name) {
  return import_recipe(read_file(kDirectory + name), name, {});
}

// Every list in full, one line each.
std::string lists(const Imported& result) {
  std::string text = "format: " + std::string(info_of(result.format).name) + "\n";
  for (const ImportedKey& one : result.taken)
    text += "taken " + std::to_string(one.location.line) + ":" + std::to_string(one.location.column) + " " +
            one.key + " -> " + one.path + ": " + one.value + "\n";
  for (const AssumedValue& one : result.assumed)
    text += "assumed " + one.path + ": " + one.value + "  # " + plain_actions(one.reason) + "\n";
  for (const OmittedKey& one : result.omitted) {
    text += std::string(omission_name(one.why)) + " " + std::to_string(one.location.line) + ":" +
            std::to_string(one.location.column) + " " + one.key +
            (one.value.empty() ? "" : " = " + one.value) + "  # " + plain_actions(one.reason);
    for (const std::string& near : one.near) text += " [" + near + "?]";
    text += "\n";
  }
  text += config::render(result.resolution.diagnostics, result.resolution.sources,
                         {config::DiagnosticFormat::compact, false});
  return text;
}

void compare(const std::string& file, const std::string& text) {
  if (std::getenv("CAPSTAN_WRITE_GOLDEN")) {
    std::ofstream(kDirectory + file, std::ios::binary) << text;
    return;
  }
  CAPTURE(file);
  REQUIRE(std::filesystem::exists(kDirectory + file));
  CHECK(text == read_file(kDirectory + file));
}

}  // namespace

TEST_CASE("files of each format give the recipe and the lists that are kept beside them") {
  struct Case {
    const char* file;
    Format format;
    // True if `check` finds no error.
    bool complete;
  };
  constexpr Case cases[] = {
      {"gpt_small.sh", Format::megatron, true},
      {"gpt_large.sh", Format::megatron, true},
      {"ds_zero2.json", Format::deepspeed, true},
      {"ds_zero3_offload_auto.json", Format::deepspeed, true},
      {"run_config.yaml", Format::bridge, true},
      {"run_config_gpt.yaml", Format::bridge, false},
      {"run_config_lora.yaml", Format::bridge, true},
      {"tune_full.yaml", Format::torchtune, true},
      {"tune_lora.yaml", Format::torchtune, true},
      {"tune_qdora.yaml", Format::torchtune, true},
      {"axolotl_lora.yaml", Format::axolotl, true},
      {"axolotl_qlora.yaml", Format::axolotl, true},
      {"axolotl_pretrain.yml", Format::axolotl, true},
      {"training_arguments_few.json", Format::training_arguments, true},
      {"training_arguments_full.json", Format::training_arguments, true},
  };
  for (const Case& one : cases) {
    const std::string file = one.file;
    CAPTURE(file);
    const Imported result = imported(file);
    CHECK(result.format == one.format);
    CHECK_MESSAGE(result.resolution.ok() == one.complete,
                  config::render(result.resolution.diagnostics, result.resolution.sources));
    compare(file + ".recipe.yaml", result.recipe);
    compare(file + ".lists.txt", lists(result));
  }
}

TEST_CASE("an imported recipe is complete by itself: read again it says the same") {
  for (const char* file :
       {"gpt_small.sh", "gpt_large.sh", "run_config.yaml", "run_config_lora.yaml", "axolotl_pretrain.yml",
        "axolotl_lora.yaml", "axolotl_qlora.yaml", "tune_full.yaml", "tune_lora.yaml", "tune_qdora.yaml"}) {
    CAPTURE(file);
    const Imported result = imported(file);
    const auto path =
        std::filesystem::temp_directory_path() / (std::string("capstan-import-") + file + ".yaml");
    write_file_durably(path, result.recipe);
    config::Request request;
    request.recipe = path.string();
    const config::Resolution again = config::resolve(request);
    std::filesystem::remove(path);
    CHECK_MESSAGE(again.ok(), config::render(again.diagnostics, again.sources));
    CHECK(again.config.model.num_layers == result.resolution.config.model.num_layers);
    CHECK(again.config.optimizer.lr == result.resolution.config.optimizer.lr);
    CHECK(again.config.train.global_batch_size == result.resolution.config.train.global_batch_size);
  }
}
