// The key reference agrees with the importers: every target exists, and every value that a golden import
// takes goes to a field that the reference names for its key.
#include "importers/key_reference.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/file.hpp"
#include "config/core/field.hpp"
#include "support/paths.hpp"

using namespace capstan;
using namespace capstan::importers;

TEST_CASE(
    "each target of the key reference is a field or a preset of a section; each other key has a reason") {
  for (const Format format : referenced_formats()) {
    size_t taken = 0;
    for (const KeyReference& one : key_reference(format)) {
      CAPTURE(one.key);
      CHECK(one.targets.empty() != one.reason.empty());
      for (const std::string& target : one.targets) {
        CAPTURE(target);
        const size_t blank = target.find(" (preset)");
        if (blank == std::string::npos)
          CHECK(config::schema().find_field(target) != nullptr);
        else
          CHECK(config::schema().find_section(target.substr(0, blank)) != nullptr);
      }
      taken += !one.targets.empty();
    }
    CHECK(taken > 20);
  }
}

TEST_CASE("golden imports take each key to a field that the reference names") {
  const std::string directory = std::string(capstan::test::kSourceDirectory) + "/tests/importers/golden/";
  std::set<std::string> seen;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".recipe.yaml") || name.ends_with(".lists.txt")) continue;
    const Imported imported = import_recipe(read_file(entry.path().string()), name);
    const auto listed = referenced_formats();
    if (std::find(listed.begin(), listed.end(), imported.format) == listed.end()) continue;
    const auto keys = key_reference(imported.format);
    for (const ImportedKey& taken : imported.taken) {
      CAPTURE(name);
      CAPTURE(taken.key);
      CAPTURE(taken.path);
      // The table's own key, or the section that it stands for: `datasets` for datasets.0.path.
      const auto known = std::find_if(keys.begin(), keys.end(), [&](const KeyReference& one) {
        return taken.key == one.key || taken.key.starts_with(std::string(one.key) + ".");
      });
      if (known == keys.end()) {
        CHECK(imported.format == Format::megatron);  // an option with the name of a field
        continue;
      }
      CHECK(std::find(known->targets.begin(), known->targets.end(), taken.path) != known->targets.end());
      seen.insert(taken.key);
    }
  }
  CHECK(seen.size() > 60);
}
