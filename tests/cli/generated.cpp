// The files generated from the tables, docs/reference/ and the manual pages, are up to date and well formed.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>

#include "process.hpp"
#include "support/paths.hpp"
#include "support/tools.hpp"

using namespace capstan::test;
namespace fs = std::filesystem;

TEST_CASE("docs/reference is what `schema --docs` writes (else: scripts/docs.sh)") {
  ScratchDirectory scratch;
  REQUIRE(run({"schema", "--docs", scratch.path()}).code == 0);
  const std::string committed = std::string(capstan::test::kSourceDirectory) + "/docs/reference/";
  size_t files = 0, known = 0;
  for (const auto& entry : fs::directory_iterator(scratch.path())) {
    const std::string name = entry.path().filename().string();
    CAPTURE(name);
    CHECK(read_text(committed + name) == read_text(entry.path().string()));
    ++files;
  }
  for (const auto& entry : fs::directory_iterator(committed)) known += entry.path().extension() == ".md";
  CHECK(files == known);
  CHECK(files == 21);  // 17 sections, the list, rules, recipes, cluster files
  CHECK(run({"schema", "optimizer", "--docs", scratch.path()}).code == 2);
}

TEST_CASE("docs/coming-from.md is what `recipe import --keys` writes (else: scripts/docs.sh)") {
  const Finished page = run({"recipe", "import", "--keys"});
  REQUIRE(page.code == 0);
  CHECK(page.out == read_text(std::string(capstan::test::kSourceDirectory) + "/docs/coming-from.md"));
}

TEST_CASE("the links of docs/reference lead somewhere") {
  const fs::path root = fs::path(capstan::test::kSourceDirectory) / "docs/reference";
  const std::string rules = read_text((root / "rules.md").string());
  size_t links = 0;
  for (const auto& entry : fs::directory_iterator(root)) {
    const std::string text = read_text(entry.path().string());
    for (size_t at = text.find("]("); at != std::string::npos; at = text.find("](", at + 1), ++links) {
      const std::string target = text.substr(at + 2, text.find(')', at) - at - 2);
      CAPTURE(target);
      CHECK(fs::exists(root / target.substr(0, target.find('#'))));
      if (const size_t anchor = target.find("#r"); anchor != std::string::npos) {
        const std::string code = "R" + target.substr(anchor + 2, 4);
        CHECK(contains(rules, "\n## " + code + " " + target.substr(anchor + 7) + "\n"));
      }
    }
  }
  CHECK(links > 100);
}

TEST_CASE("manual pages: one for each command, and roff has nothing against them") {
  ScratchDirectory scratch;
  REQUIRE(run({"help", "--man", scratch.path()}).code == 0);
  CHECK(fs::exists(scratch.file("man1/capstan.1")));
  CHECK(fs::exists(scratch.file("man1/capstan-train.1")));
  CHECK(fs::exists(scratch.file("man1/capstan-recipe-fix.1")));
  CHECK(contains(read_text(scratch.file("man5/capstan-recipe.5")), "optimizer.lr"));
  const bool groff = require_tool("groff");
  for (const char* directory : {"man1", "man5"})
    for (const auto& entry : fs::directory_iterator(scratch.file(directory))) {
      const std::string file = entry.path().string(), text = read_text(file);
      CAPTURE(file);
      CHECK(text.starts_with(".TH CAPSTAN"));
      CHECK(contains(text, ".SH NAME\n"));
      CHECK(contains(text, ".SH SEE ALSO\n"));
      if (!groff) continue;
      const std::string said = scratch.file("said");
      REQUIRE(std::system(("groff -k -man -Tutf8 -ww -z " + file + " >" + said + " 2>&1").c_str()) == 0);
      CHECK(read_text(said).empty());
    }
}
