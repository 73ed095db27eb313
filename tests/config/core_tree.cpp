// YAML as written by people and by attackers: every pitfall has its own message, no input is slow or large.
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <ctime>
#include <locale>

#include "base/error.hpp"
#include "config/core/prescan.hpp"
#include "config/core/tree.hpp"
#include "core_support.hpp"

using namespace capstan;
using namespace capstan::config;
using namespace capstan::config::testing;

namespace {

struct Parsed {
  std::vector<config::Source> sources;
  std::vector<Diagnostic> diagnostics;
  std::optional<Node> tree;
  std::string message() const { return diagnostics.empty() ? "" : diagnostics[0].message; }
  std::string where() const {
    return diagnostics.empty() ? "" : location_text(diagnostics[0].location, sources);
  }
  std::string help() const {
    return diagnostics.empty() || diagnostics[0].helps.empty() ? "" : diagnostics[0].helps[0];
  }
};
Parsed parse_text(std::string text) {
  Parsed parsed;
  parsed.sources.push_back({config::Source::Kind::file, "r.yaml", normalized(std::move(text)), "/"});
  parsed.tree = parse_yaml(0, parsed.sources, parsed.diagnostics);
  return parsed;
}

std::string repeated(const std::string& piece, size_t bytes) {
  std::string out;
  while (out.size() < bytes) out += piece;
  return out;
}

}  // namespace

TEST_CASE("the tree keeps the text and the place of every key and value") {
  const auto parsed = parse_text("# c\na:\n  b: 1e-4   # x\n  'c d': \"q\\\"x\"\né: [x, yy]\n");
  REQUIRE(parsed.tree);
  const Node& a = *parsed.tree->find("a");
  CHECK(a.find("b")->text == "1e-4");
  CHECK_FALSE(a.find("b")->quoted);
  CHECK(a.find("b")->location.line == 3);
  CHECK(a.find("b")->location.column == 6);
  CHECK(a.find("b")->location.length == 4);
  CHECK(a.key_locations[0].column == 3);
  CHECK(a.key_locations[1].length == 5);
  CHECK(a.find("c d")->quoted);
  CHECK(a.find("c d")->text == "q\"x");
  CHECK(a.find("c d")->location.length == 6);
  const Node& list = *parsed.tree->find("é");
  CHECK(list.location.column == 4);  // characters, not bytes
  CHECK(list.items[1].location.column == 8);
  CHECK(list.items[1].location.length == 2);
}

TEST_CASE("null is written, nothing is not null") {
  const auto parsed = parse_text(
      "a: null\nb: ~\nc:\nd: [null, ~, ]\ne: {x: , y: Null}\nf:   # nothing\ng:\n- 1\nh:\n  null\ni: &x "
      "null\nnull2: 1\nj:");
  REQUIRE(parsed.tree);
  CHECK(parsed.diagnostics.empty());
  const Node& t = *parsed.tree;
  CHECK_FALSE(t.find("a")->empty);
  CHECK_FALSE(t.find("b")->empty);
  CHECK(t.find("c")->empty);
  CHECK(t.find("c")->location.line == 3);
  CHECK_FALSE(t.find("d")->items[0].empty);
  CHECK_FALSE(t.find("d")->items[1].empty);
  CHECK(t.find("e")->find("x")->empty);
  CHECK_FALSE(t.find("e")->find("y")->empty);
  CHECK(t.find("f")->empty);
  CHECK(t.find("g")->kind == Node::Kind::list);
  CHECK_FALSE(t.find("h")->empty);
  CHECK_FALSE(t.find("i")->empty);
  CHECK(t.find("j")->empty);
  // A missing value whose neighbor happens to be spelled `null`.
  const auto tricky = parse_text("a:\nnull: 3\n");
  REQUIRE(tricky.diagnostics.size() == 1);
  CHECK(tricky.message() == "a key must be plain text, not null");
  CHECK(tricky.tree->find("a")->empty);
}

TEST_CASE("aliases are copied, with both places") {
  const auto parsed = parse_text("a: &x {k: 1}\nb: *x\n");
  REQUIRE(parsed.tree);
  const Node& b = *parsed.tree->find("b");
  CHECK(b.find("k")->text == "1");
  CHECK(b.location.line == 2);
  CHECK(b.location.column == 4);
  CHECK(b.anchor.line == 1);
}

TEST_CASE("byte order mark and CRLF do not move places") {
  const auto parsed = parse_text(
      "\xEF\xBB\xBF"
      "a: 1\r\nb:\r\n  c: 2\r\n");
  REQUIRE(parsed.tree);
  CHECK(parsed.diagnostics.empty());
  CHECK(parsed.tree->find("b")->find("c")->text == "2");
  CHECK(parsed.tree->find("b")->find("c")->location.line == 3);
  CHECK(parsed.tree->find("a")->location.column == 4);
}

TEST_CASE("syntax errors: own words, exact place, a way out") {
  struct Row {
    const char *text, *where, *message, *help;
  };
  const Row rows[] = {
      {"a: 1\na: 2\n", "r.yaml:2:1", "duplicate key `a`", ""},
      {"x: {k: 1, k: 2}\n", "r.yaml:1:11", "duplicate key `k`", ""},
      {"d: &d {k: 1}\na:\n  <<: *d\n", "r.yaml:3:3", "merge keys (`<<`) are not accepted", "extends"},
      {"a: &x [*x]\n", "r.yaml:1:8", "the alias `*x` contains itself", ""},
      {"m: [*.linear_qkv]\n", "r.yaml:1:5", "the alias `*.linear_qkv` has no anchor",
       "needs quotes: \"*.linear_qkv\""},
      {"m: *nope\n", "r.yaml:1:4", "the alias `*nope` has no anchor", "quotes"},
      {"a: 1\n\tb: 2\n", "r.yaml:2:1", "tab used for indentation", "indent with spaces"},
      {"a:\n  \tb: 2\n", "r.yaml:2:3", "tab used for indentation", "indent with spaces"},
      {"a: |\n\tx\n", "r.yaml:2:1", "tab used for indentation", "indent with spaces"},
      {"a: x\n\ty\n", "r.yaml:2:1", "tab used for indentation", "indent with spaces"},
      {"lr:1e-4\n", "r.yaml:1:1", "missing space after `:`", "write `"},
      {"lr:1e-4\nwd: 3\n", "r.yaml:1:1", "missing space after `:`", "write `lr: 1e-4`"},
      {"o:\n  a: 1\n  lr:1e-4\n  wd: 3\n", "r.yaml:3:3", "missing space after `:`", "write `lr: 1e-4`"},
      {"a: [x, y\nb: 1\n", "r.yaml:1:4", "the list is not closed: `]` is missing", ""},
      {"a: {x: 1\nb: [1]\n", "r.yaml:1:4", "the mapping is not closed: `}` is missing", ""},
      {"{\"a\":", "r.yaml:1:1", "the mapping is not closed: `}` is missing", ""},
      {"a: @x\n", "r.yaml:1:4", "a value cannot start with `@`", "quotes"},
      {"a: `x`\n", "r.yaml:1:4", "a value cannot start with ``", "quotes"},
      {"a: ]\n", "r.yaml:1:4", "`]` closes nothing", ""},
      {"a: 'x\n", "r.yaml:1:4", "the quote `'` is never closed", ""},
      {"a: \"x\n", "r.yaml:1:4", "the quote `\"` is never closed", ""},
      {"a: b: c\n", "r.yaml:1:5", "a `:` is not allowed here", "quotes"},
      {"a: 1\n---\nb: 2\n", "r.yaml:2:1", "more than one document", "extends"},
      {" a: 1\nb: 2\n", "r.yaml:2:1", "text after the end of the document", "indentation"},
      {"\"a\" \"b\"\n", "r.yaml:1:5", "text after the end of the document", ""},
      {"a: 1\nb\n", "r.yaml:2:1", "missing `:` after `b`", ""},
      {"? [a]\n: b\n", "r.yaml:1:3", "a key must be plain text, not a list", ""},
      {"{a: 1}: b\n", "r.yaml:1:1", "a key must be plain text, not a mapping", ""},
      {"~: 1\n", "r.yaml:1:1", "a key must be plain text, not null", ""},
      {"a: !!python/object:os.system x\n", "r.yaml:1:4",
       "the tag `!!python/object:os.system` is not accepted", "type from the field"},
      {"a: !x 1\n", "r.yaml:1:4", "the tag `!x` is not accepted", ""},
      {"a: !x {b: 1}\n", "r.yaml:1:4", "the tag `!x` is not accepted", ""},
      {"", "r.yaml:1:1", "empty recipe", "recipe ls"},
      {"# only a comment\n", "r.yaml:1:1", "empty recipe", ""},
      {"---\n", "r.yaml:1:1", "empty recipe", ""},
      {"null\n", "r.yaml:1:1", "empty recipe", ""},
      {"- a\n", "r.yaml:1:1", "a recipe is a mapping of sections, not a list", ""},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 12\n", "r.yaml:1:1",
       "`r.yaml` is a Git LFS pointer: the file itself has not been downloaded",
       "in its repository: git lfs pull; or hf download ORG/NAME --local-dir DIR"},
      {"hello\n", "r.yaml:1:1", "a recipe is a mapping of sections, not a single value", ""},
      {"a: \xFF\n", "r.yaml:1:4", "invalid UTF-8 at byte 3", "UTF-8"},
      {"ä: \xC3\n", "r.yaml:1:4", "invalid UTF-8 at byte 4", "UTF-8"},
      {"a: \"x\\N\"\n", "r.yaml:1:4", "an escape that does not give valid text", "uXXXX"},
      {"a: \"\\${x}\"\n", "r.yaml:1:5", "unknown escape character: $", "in double quotes write"},
      {"a: \x01\n", "r.yaml:1:4", "control character U+0001", "escape"},
      {"a: \x04 b\n", "r.yaml:1:4", "control character U+0004", "escape"},
  };
  for (const auto& row : rows) {
    CAPTURE(row.text);
    const auto parsed = parse_text(row.text);
    REQUIRE_FALSE(parsed.diagnostics.empty());
    CHECK(parsed.message().find(row.message) == 0);
    CHECK(parsed.where() == row.where);
    CHECK(parsed.help().find(row.help) != std::string::npos);
  }
  CHECK(parse_text(std::string("a: b\0c\n", 7)).message() == "control character U+0000");
}

TEST_CASE("fields that may stand together are accepted") {
  for (const char* text :
       {"a: !!str 5\n", "a: !!int 5\n", "a: ! x\n", "a: |\n  [[[[\n  \tx: \"\nb: 1\n", "a: >-\n  don't {\n",
        "a: x # [ ' {\nb: don't\n", "a: 'it''s [ not open'\nb: \"\\\" [\"\n", "a: [\n\t1, 2]\n",
        "a: 1\n...\n", "%YAML 1.2\n---\na: 1\n", "- a\n", "a:\n- |\n  [[\n- 1\n",
        "a:\n  - k: |\n      {{{\n    m: 1\n", "a: \"x\\u00e9\"\n", "a: https://x.y/z:1\n"}) {
    CAPTURE(text);
    const auto parsed = parse_text(text);
    if (text[0] != '-') CHECK(parsed.diagnostics.empty());
  }
  const auto block = parse_text("a:\n- |\n  [[\n- 1\n");
  CHECK(block.tree->find("a")->items[0].quoted);
  CHECK(block.tree->find("a")->items[0].text == "[[\n");
}

TEST_CASE("several mistakes in one mapping are reported together") {
  const auto parsed = parse_text("a: 1\na: 2\nb: !x 1\n<<: 3\nc: 4\nc: 5\n");
  CHECK(parsed.diagnostics.size() == 4);
  REQUIRE(parsed.tree);
  CHECK(parsed.tree->find("c")->text == "4");
}

TEST_CASE("hostile input: a clear error within 100 ms and 64 MiB") {
  struct Row {
    const char* name;
    std::string text;
    const char* message;
  };
  std::string bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n";
  for (int i = 1; i < 10; ++i) {
    const std::string before = "*a" + std::to_string(i - 1);
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [";
    for (int k = 0; k < 10; ++k) bomb += (k ? ", " : "") + before;
    bomb += "]\n";
  }
  std::string deep_block;
  for (int i = 0; i < 500; ++i) deep_block += std::string(static_cast<size_t>(i), ' ') + "a:\n";
  std::string keys;
  for (int i = 0; i < 200'000; ++i) keys += "k" + std::to_string(i) + ": 1\n";
  const Row rows[] = {
      {"10^10 aliases", bomb, "aliases expand"},
      {"500 flow levels", std::string(500, '['), "nested more than 64 levels deep"},
      {"a million flow levels", std::string(1'000'000, '['), "nested more than 64 levels deep"},
      {"braces", repeated("{a: ", 1'000'000), "nested more than 64 levels deep"},
      {"500 block levels", deep_block, "nested more than 64 levels deep"},
      {"dashes", repeated("- ", 1'000'000), "nested more than 64 levels deep"},
      {"question marks", repeated("? ", 1'000'000), ""},
      {"colons", repeated(": ", 1'000'000), ""},
      {"a long flow list", "a: [" + repeated("1,", 1'000'000) + "]", "more than 10000 values"},
      {"a flow list over many lines", "a: [" + repeated("1,\n ", 4'000'000) + "]", "more than 10000 values"},
      {"too many keys", keys, "more than 10000 values"},
      {"too many documents", repeated("--- a\n", 4'000'000), "more than one document"},
      {"a line of 2 MiB", "a: " + std::string(2 << 20, 'x'), "a line of more than 1 MiB"},
      {"anchors", "a: " + repeated("&a ", 1'000'000), ""},
      {"tags", "a: " + repeated("!a ", 1'000'000), ""},
      {"an alias name of 100 kB", "a: *" + std::string(100'000, 'x'), "the alias"},
      {"a key of 100 kB", std::string(100'000, 'k') + ": 1", ""},
      {"NUL bytes", std::string(4 << 20, '\0'), "control character U+0000"},
      {"invalid UTF-8 at the end", repeated("a b ", 4'000'000) + "\xFF", "invalid UTF-8"},
  };
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const long before = usage.ru_maxrss;
  for (const auto& row : rows) {
    CAPTURE(std::string(row.name));

    // Processor time, which other programs on the machine do not change.
    const std::clock_t start = std::clock();
    const auto parsed = parse_text(row.text);
    const double ms = 1000.0 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    REQUIRE_FALSE(parsed.diagnostics.empty());
    CAPTURE(parsed.message());
    CHECK(parsed.message().find(row.message) != std::string::npos);
#if CAPSTAN_TIMED
    CHECK(ms < 200);  // 100 ms on a desktop core; small cloud cores and shared caches get twice that
#else
    (void)ms;
#endif
  }
#if CAPSTAN_TIMED
  getrusage(RUSAGE_SELF, &usage);
  CHECK(usage.ru_maxrss - before < 64 * 1024);  // KiB
#else
  (void)before;
#endif
}

TEST_CASE("a value of a megabyte is read") {
  const auto parsed =
      parse_text("a: " + std::string(1'000'000, 'x') + "\nb: \"" + repeated("y ", 500'000) + "\"\n");
  REQUIRE(parsed.tree);
  CHECK(parsed.tree->find("a")->text.size() == 1'000'000);
}

TEST_CASE("files that are none") {
  const Workspace w;
  const auto code = [&](const std::string& file) {
    try {
      w.resolve(file);
    } catch (const Error& error) {
      return std::string(name_of(error.code())) + ": " + error.message();
    }
    return std::string("read");
  };
  std::filesystem::create_directories(w.path("dir.yaml"));
  CHECK(code(w.path("dir.yaml")).find("not_found: ") == 0);
  CHECK(code(w.path("missing.yaml")).find("not_found: ") == 0);
  CHECK(code("/dev/zero.yaml").find("not_found") == 0);
  const std::string sparse = w.write("sparse.yaml", "");
  REQUIRE(truncate(sparse.c_str(), 1LL << 30) == 0);
  const std::clock_t start = std::clock();
  CHECK(code(sparse).find("format: ") == 0);
  CHECK(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC < 0.1);
  CHECK(code("").find("usage: ") == 0);
  CHECK(code("no such recipe").find("not_found: ") == 0);
  CHECK(code("bas").find("not_found: ") == 0);
}

TEST_CASE("the global locale changes nothing") {
  const std::locale before = std::locale();
  struct Comma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
  };
  std::locale::global(std::locale(before, new Comma));
  const Workspace w;
  const auto out = w.text("optimizer: {lr: 0.25}\ntrain: {iters: 1_000_000}\n");
  std::locale::global(before);
  CHECK(out.ok());
  CHECK(out.config.optimizer.lr == 0.25);
  CHECK(out.config.train.iters == 1'000'000);
}

TEST_CASE("the comment at the top of a recipe") {
  CHECK(leading_comment("# yaml-language-server: $schema=x\n# One.\n# Two.\n\n# three\na: 1\n") ==
        "One. Two.");
  CHECK(leading_comment("a: 1\n# no\n") == "");
  CHECK(leading_comment("\n\n#One\n#\n# not this\n") == "One");
}
