// The printed form of a resolution reads back as the same Config, names the origin of each field, and can be
// compared.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "base/error.hpp"
#include "base/utf8.hpp"
#include "config/core/emit.hpp"
#include "config/core/hash.hpp"
#include "config/tools/json_schema.hpp"
#include "config/tools/markdown.hpp"
#include "config/tools/show.hpp"
#include "core_support.hpp"

using namespace capstan;
using namespace capstan::config;
using namespace capstan::config::testing;

namespace {

std::string shown(const Outcome& out, ShowFormat format, const std::string& path = {}) {
  return show(test_schema(), &out.config, out, {format, path});
}

// Every field equal, absolute paths included.
void check_same(const Outcome& a, const Outcome& b) {
  for (const FieldInfo* field : test_schema().fields()) {
    CAPTURE(field->path);
    const Value x = a.value(field->path), y = b.value(field->path);
    if (field->type->kind == Type::Kind::path)
      CHECK(x.resolved == y.resolved);
    else
      CHECK(x == y);
  }
  CHECK(config_hash(test_schema(), &a.config) == config_hash(test_schema(), &b.config));
  CHECK(config_hash(test_schema(), &a.config, HashScope::full) ==
        config_hash(test_schema(), &b.config, HashScope::full));
}

const char* const kRich =
    "# rich\nextends: base\nmodel: {preset: wide, dropout: 3%, norm: rms, seq_length: 4_096, mask: 0x1F}\n"
    "train:\n  iters: 2k\n  note: 'no'\n  title: \"a: b # c\\n'd' \\\\${x} é\"\n  tags: ['1e-4', '', ' x', "
    "'null', '2026-11-21', 'a,b', '*x', '[y']\n"
    "  skip: [1, 2]\n  env: {A: '007', 'b.c d': \"${recipe.name}\"}\n  timeout: 1h30m\n  buffer: 1.5GiB\n  "
    "save: ../out\n  limit: .inf\n  modules: null\n"
    "optimizer: {lr: 1e-5, min_lr: 0.1, token: '${env:SECRET}'}\n"
    "dataset: {kind: gpt, blend: {'p/b': 0.7, 'p/a': 0.3}, sources: [{name: x, weight: 2}]}\npeft: {preset: "
    "lora, dim: 4}\n";

}  // namespace

TEST_CASE("every printed form reads back as the same configuration") {
  const Workspace w;
  for (const std::string& recipe :
       {std::string(kRich), std::string("name: x\n"), std::string("dataset: mock\npeft: dora\n"),
        std::string("train: {limit: nan, tags: [], title: \"\"}\noptimizer: {min_lr: -0.0}\n")}) {
    CAPTURE(recipe);
    const auto out = w.text(recipe);
    CAPTURE(out.all());
    REQUIRE(out.ok());
    const std::string yaml = shown(out, ShowFormat::yaml), minimal = shown(out, ShowFormat::minimal);
    const std::string stored = resolved_recipe(test_schema(), &out.config, out);
    CAPTURE(yaml);
    const auto again = w.resolve(w.write("r.yaml", yaml));
    CAPTURE(again.all());
    CHECK(again.ok());
    check_same(out, again);
    CHECK(shown(again, ShowFormat::json) == shown(out, ShowFormat::json));
    CAPTURE(minimal);
    const auto small = w.resolve(w.write("r.yaml", minimal));
    CAPTURE(small.all());
    CHECK(small.ok());
    check_same(out, small);
    const auto elsewhere = w.resolve(w.write("deep/down/r.yaml", stored));
    CHECK(elsewhere.ok());
    check_same(out, elsewhere);
  }
}

TEST_CASE("show: YAML with written texts, JSON, origins, minimal") {
  const Workspace w;
  const auto out = w.text(kRich, {"train.global_batch=4k"});
  REQUIRE(out.ok());
  const std::string yaml = shown(out, ShowFormat::yaml);
  CHECK(yaml.starts_with("schema: capstan/1\nname: r\n"));
  CHECK(yaml.find("  global_batch: 4000  # 4k\n") != std::string::npos);
  CHECK(yaml.find("  dropout: 0.03  # 3%\n") != std::string::npos);
  CHECK(yaml.find("  lr: 1.0e-05\n") != std::string::npos);
  CHECK(yaml.find("  note: 'no'\n") != std::string::npos);
  CHECK(yaml.find("token: '${env:SECRET}'") != std::string::npos);
  const std::string json = shown(out, ShowFormat::json);
  CHECK(json.find("\"norm\": \"RMSNorm\"") != std::string::npos);
  CHECK(json.find("\"buffer\": 1610612736") != std::string::npos);
  CHECK(json.find("\"title\": \"a: b # c\\n'd' ${x} é\"") != std::string::npos);
  const std::string origin = shown(out, ShowFormat::origin);
  CHECK(origin.find("# <cli>:1, written 4k\n") != std::string::npos);
  CHECK(origin.find("# preset model/wide\n") != std::string::npos);
  CHECK(origin.find("# derived: 4 * model.hidden_size\n") != std::string::npos);
  const std::string minimal = shown(out, ShowFormat::minimal);
  CHECK(minimal.find("model:\n  preset: wide\n") != std::string::npos);
  CHECK(minimal.find("num_heads") == std::string::npos);
  CHECK(minimal.find("ffn_hidden_size") == std::string::npos);
  CHECK(resolved_recipe(test_schema(), &out.config, out)
            .find("iters: 2000  # " + w.path("r.yaml") + ":5:3\n") != std::string::npos);
  CHECK(shown(w.text("name: x\n"), ShowFormat::minimal) == "schema: capstan/1\nname: x\n");
}

TEST_CASE("a minimal recipe keeps the names that it extends, and has only what differs from them") {
  const Workspace w;
  const auto minimal = [&](const Outcome& out) {
    CAPTURE(out.all());
    REQUIRE(out.ok());
    const std::string text = shown(out, ShowFormat::minimal);
    const auto again = w.resolve(w.write("again/r.yaml", text));
    CAPTURE(text);
    CAPTURE(again.all());
    CHECK(again.ok());
    for (const FieldInfo* field : test_schema().fields())
      if (field->type->kind != Type::Kind::path && field->path != "name")
        CHECK_MESSAGE(out.value(field->path) == again.value(field->path), field->path);
    return text;
  };
  const std::string four =
      "schema: capstan/1\nextends: child\nname: mine\nmodel:\n  num_heads: 2\ntrain:\n  iters: 7\n"
      "optimizer:\n  lr: 0.25\n";
  CHECK(minimal(w.text(four)) == four);
  // Values that the base already gives are left out; values of the command line are added.
  CHECK(minimal(w.text("extends: child\ntrain: {iters: 2000, global_batch: 16}\nmodel: base\n",
                       {"train.micro_batch=2", "dataset=mock"})) ==
        "schema: capstan/1\nextends: child\ntrain:\n  micro_batch: 2\ndataset: mock\n");
  // A world given with --ranks.
  const std::string file = w.write("r.yaml", "extends: base\n");
  CHECK(minimal(w.resolve(file, {}, 4)) == "schema: capstan/1\nextends: base\ndist:\n  world_size: 4\n");
  // Files that it extends are part of it, the names that they extend are not; paths are seen from the recipe.
  w.write("sub/a.yaml", "extends: base\ntrain: {save: out, iters: 3}\n");
  CHECK(minimal(w.text("extends: [sub/a.yaml]\ntrain: {iters: 4}\n")) ==
        "schema: capstan/1\nextends: base\ntrain:\n  iters: 4\n  save: sub/out\n");
  CHECK(minimal(w.text("extends: [base, sub/a.yaml, child]\n")) ==
        "schema: capstan/1\nextends: [base, child]\ntrain:\n  save: sub/out\n");
  // Back to the preset's value or the default; null for one that is derived again; an optional section on and
  // off.
  CHECK(minimal(w.text("extends: child\nunset: [train.iters]\n")) ==
        "schema: capstan/1\nextends: child\nunset: train.iters\n");
  CHECK(minimal(w.resolve("child", {"~train.iters"})) ==
        "schema: capstan/1\nextends: child\nunset: train.iters\n");
  // A recipe that is given by its name keeps that name, not those that it extends.
  CHECK(minimal(w.resolve("child")) == "schema: capstan/1\nextends: child\n");
  CHECK(minimal(w.text("extends: base\npeft: {}\n")) == "schema: capstan/1\nextends: base\npeft: {}\n");
  CHECK(minimal(w.text("extends: base\npeft: dora\n", {"peft=null"})) ==
        "schema: capstan/1\nextends: base\n");
  // A reference stays one.
  CHECK(minimal(w.text(
            "extends: base\ntrain: {title: '${recipe.name} ${train.iters}', load: '${train.save}'}\n")) ==
        "schema: capstan/1\nextends: base\ntrain:\n  title: ${recipe.name} ${train.iters}\n  load: "
        "${train.save}\n");
  // A preset's file given from another directory than the recipe's.
  w.write("sub/r.yaml", "name: x\n");
  w.write("sub/p.yaml", "hidden_size: 32\n");
  Request request;
  request.recipe = w.path("sub/r.yaml");
  request.directory = w.path("");
  for (const char* word : {"model=sub/p.yaml", "train.save=out", "train.load=/there"})
    request.overrides.push_back(Override::token(word));
  const std::string moved = shown(w.resolve(request), ShowFormat::minimal);
  CHECK(moved.find("model: p.yaml\n") != std::string::npos);
  CHECK(moved.find("  save: ../out\n  load: /there\n") != std::string::npos);
}

TEST_CASE("show PATH") {
  const Workspace w;
  const auto out = w.text(kRich);
  CHECK(shown(out, ShowFormat::yaml, "train.iters") == "2000\n");
  CHECK(shown(out, ShowFormat::yaml, "train.steps") == "2000\n");
  CHECK(shown(out, ShowFormat::json, "train.skip") == "[1, 2]\n");
  CHECK(shown(out, ShowFormat::yaml, "train.skip[-1]") == "2\n");
  CHECK(shown(out, ShowFormat::yaml, "train.env.A") == "'007'\n");
  CHECK(shown(out, ShowFormat::yaml, "dataset.sources[name=x].weight") == "2\n");
  CHECK(shown(out, ShowFormat::yaml, "dataset.sources[0].epochs") == "1\n");
  CHECK(shown(out, ShowFormat::yaml, "name") == "r\n");
  CHECK(shown(out, ShowFormat::yaml, "train.note") == "'no'\n");
  CHECK(shown(out, ShowFormat::yaml, "dist").starts_with("world_size: 1\n"));
  CHECK(shown(out, ShowFormat::json, "dist") ==
        "{\n  \"world_size\": 1,\n  \"tensor_parallel_size\": 1,\n  \"data_parallel_size\": 1\n}\n");
  CHECK(shown(w.text("name: x\n"), ShowFormat::yaml, "peft") == "null\n");
  CHECK(shown(out, ShowFormat::origin, "optimizer.lr").find("optimizer.lr: 1.0e-05") == 0);
  for (const char* wrong :
       {"nope", "train.nope", "train.skip[9]", "train..x", "train.iters.x", "dataset.sources[name=q]"}) {
    CAPTURE(std::string(wrong));
    CHECK_THROWS_AS(shown(out, ShowFormat::yaml, wrong), Error);
  }
  try {
    shown(out, ShowFormat::yaml, "optimizer.lrr");
  } catch (const Error& error) {
    CHECK(error.help().find("`optimizer.lr`") != std::string::npos);
  }
}

TEST_CASE("explain") {
  const Workspace w;
  const auto out = w.resolve("child", {"train.iters=5", "~train.iters", "train.iters=6"});
  REQUIRE(out.ok());
  const std::string text = explain(test_schema(), "train.steps", &out.config, &out);
  for (const char* part :
       {"train.iters\n  steps\n", "an integer at least 1", "default   100", "iterations",
        "effect    numerics (math): ", "train.steps", "train.max_steps", "6  (<cli>:3)",
        "recipes/base.yaml:4:3: 1000  (taken back)", "recipes/child.yaml:5:3: 2000  (taken back)",
        "<cli>:1: 5  (taken back)", "<cli>:3: 6\n"}) {
    CAPTURE(std::string(part));
    CAPTURE(text);
    CHECK(text.find(part) != std::string::npos);
  }
  const std::string dp = explain(test_schema(), "dist.world_size");
  CHECK(
      dp.find("derived from it\n    dist.data_parallel_size = dist.world_size / dist.tensor_parallel_size") !=
      std::string::npos);
  CHECK(explain(test_schema(), "model.norm").find("RMSNorm         root mean square  (also rms, rmsnorm)") !=
        std::string::npos);
  CHECK(explain(test_schema(), "model.num_heads").find("T0001 heads_divide: heads divide the width") !=
        std::string::npos);
  CHECK(explain(test_schema(), "model").find("hidden_size") != std::string::npos);
  CHECK(explain(test_schema(), "T0001").find("reads model.hidden_size, model.num_heads") !=
        std::string::npos);
  CHECK(explain(test_schema(), "batch_divides").find("T0002") == 0);
  CHECK(explain(test_schema(), "C0102").find("no field") != std::string::npos);
  CHECK(explain(test_schema(), "").find("optimizer") != std::string::npos);
  CHECK_THROWS_AS(explain(test_schema(), "model.nrom"), Error);
  CHECK(explain_json(test_schema(), "train.iters", &out.config, &out)
            .find("\"value\":6,\"origin\":\"<cli>:3\"") != std::string::npos);
}

TEST_CASE("diff groups by effect") {
  const Workspace w;
  const auto a = w.text("optimizer: {lr: 0.5}\ntrain: {title: x}\n"),
             b = w.text("optimizer: {lr: 0.25}\ntrain: {title: y}\npeft: lora\n", {"dist.world_size=2"});
  const auto changes = diff(test_schema(), &a.config, a, &b.config, b);
  std::string paths;
  for (const auto& change : changes) paths += change.path + " ";
  CHECK(
      paths ==
      "optimizer.lr peft.scheme peft.dim peft.targets dist.world_size dist.data_parallel_size train.title ");
  CHECK(changes[0].before == "0.5");
  CHECK(changes[0].after == "0.25");
  CHECK(changes[1].before.empty());
  const std::string text = render_diff(changes);
  CHECK(text.find("numerics (math): ") == 0);
  CHECK(text.find("    + 2  (<cli>:1)") != std::string::npos);
  CHECK(diff(test_schema(), &a.config, a, &a.config, a).empty());
}

TEST_CASE("texts are quoted whenever YAML 1.1 or 1.2 would read another type") {
  for (const char* text :
       {"",     "null",  "~",    "Null", "true", "YES", "off", "y",     "N",     "1",     "-1",
        "+1",   "017",   "0x1F", "0o7",  "1e-4", "1.5", ".5",  "1_000", "12:30", "1:2:3", "2026-11-21",
        ".inf", "-.INF", ".nan", "<<",   "=",    "- a", "-",   "? a",   ": a",   "a: b",  "a #b",
        "#a",   "&a",    "*a",   "!a",   "|",    ">",   "'a",  "\"a",   "%a",    "@a",    "`a",
        "[a",   "{a",    "a ",   " a",   "a:",   "---", "nan", "inf"}) {
    CAPTURE(std::string(text));
    const std::string yaml = yaml_text(text);
    CHECK((yaml[0] == '\'' || yaml[0] == '"'));
  }
  for (const char* text : {"a", "a b", "a-b", "it's", "a:b", "x#y", "llama3-8b", "/abs/path", "hf:dir", "é"})
    CHECK(yaml_text(text) == text);
  CHECK(yaml_text("a,b", true) == "'a,b'");
  CHECK(yaml_text("a\nb") == "\"a\\nb\"");
  CHECK(yaml_text("it's: x") == "'it''s: x'");
}

TEST_CASE("any text and any double survives the round trip") {
  const Workspace w;
  std::mt19937_64 random(7);
  const std::string alphabet = "ab01 :#'\"\\${}[],&*!|>-?%@`\n\t~.e+_éΩ\x7f\u2028";
  for (int round = 0; round < 2000; ++round) {
    auto out = w.text("name: x\n");
    std::string text;
    for (size_t i = random() % 12; i > 0; --i) text += alphabet[random() % (alphabet.size() - 8)];
    if (round % 7 == 0) text += "\u2028\u0085é\x7f";
    double number = 0;
    do {
      const uint64_t bits = random();
      std::memcpy(&number, &bits, sizeof number);
    } while (!std::isfinite(number));
    out.config.train.title = text;
    out.config.train.tags = {text, "b"};
    out.config.train.env = {{text.empty() ? "k" : "k" + text, text}};
    out.config.train.limit = number;
    if (first_invalid_utf8(text)) continue;
    const std::string yaml = show(test_schema(), &out.config, out, {ShowFormat::yaml, ""});
    CAPTURE(yaml);
    const auto again = w.resolve(w.write("r.yaml", yaml));
    CAPTURE(again.all());
    REQUIRE(again.ok());
    CHECK(again.config.train.title == text);
    CHECK(again.config.train.tags[0] == text);
    CHECK(again.config.train.env == out.config.train.env);
    CHECK(again.config.train.limit == number);
  }
}

TEST_CASE("the hash is stable and depends on what it should") {
  const Workspace w;
  const auto a = w.text("optimizer: {lr: 0.5}\n");
  CHECK(canonical_form(test_schema(), &a.config, HashScope::math).find("optimizer.lr = 0.5\n") !=
        std::string::npos);
  CHECK(canonical_form(test_schema(), &a.config).find("token") == std::string::npos);
  CHECK(config_hash(test_schema(), &a.config).size() == 32);
  const auto b = w.text("optimizer: {lr: 5e-1}\ntrain: {title: other}\n");
  CHECK(config_hash(test_schema(), &a.config) == config_hash(test_schema(), &b.config));
  CHECK(config_hash(test_schema(), &a.config, HashScope::full) !=
        config_hash(test_schema(), &b.config, HashScope::full));
}

TEST_CASE("JSON Schema of the test schema") {
  const std::string text = recipe_json_schema(test_schema(), test_library());
  CHECK(text.find("\"$schema\": \"https://json-schema.org/draft/2020-12/schema\"") != std::string::npos);
  CHECK(text.find("\"x-unit\": \"iterations\"") != std::string::npos);
  CHECK(text.find("\"deprecated\": true") != std::string::npos);
  CHECK(text.find("another name of `dist.tensor_parallel_size`") != std::string::npos);
  CHECK(schema_files(test_schema(), test_library()).size() == 7);
}

TEST_CASE("diagnostics: human, compact, JSON") {
  const Workspace w;
  const auto out = w.text("# é\ntrain: {title: é, iters: x}\n");
  REQUIRE(out.diagnostics.size() == 1);
  const std::string human = render(out.diagnostics, out.sources);
  CHECK(human ==
        "error[C0201]: `x` is not an integer (`train.iters` takes an integer at least 1)\n --> " +
            w.path("r.yaml") +
            ":2:26\n  |\n2 | train: {title: é, iters: x}\n  |                          ^\n\n1 error\n");
  CHECK(render(out.diagnostics, out.sources, {DiagnosticFormat::compact, false}) ==
        w.path("r.yaml") +
            ":2:26: error[C0201]: `x` is not an integer (`train.iters` takes an integer at least 1)\n");
  const std::string json = render(out.diagnostics, out.sources, {DiagnosticFormat::json, false});
  CHECK(json.find("\"line\":2,\"column\":26,\"range\":{\"start\":{\"line\":1,\"character\":25}") !=
        std::string::npos);
  CHECK(render(out.diagnostics, out.sources, {DiagnosticFormat::human, true}).find("\033[1;31merror") == 0);
  // A long line is shown around the place; nothing that moves the terminal gets through.
  const auto wide = w.text("name: x\ntrain: {title: \"" + std::string(300, 'a') +
                           "\\u001b[2J\", iters: q, note: \"" + std::string(300, 'b') + "\"}\n");
  const std::string windowed = render(wide.diagnostics, wide.sources);
  CHECK(windowed.find("iters: q") != std::string::npos);
  CHECK(windowed.size() < 700);
  Diagnostic odd;
  odd.message = "m";
  odd.location = {0, 1, 1, 3};
  const std::vector<config::Source> sources{{config::Source::Kind::file, "f", "\x1b[31mred\u202E", "/"}};
  CHECK(render(odd, sources).find('\x1b') == std::string::npos);
}

TEST_CASE("paragraphs and list items of generated pages are broken at 110 columns") {
  const std::string word = "wörd", ten = "0123456789";
  std::string paragraph, cells = "|";
  for (int i = 0; i < 40; ++i) paragraph += (i ? " " : "") + word, cells += " " + word + " |";
  std::string line = word;
  for (int i = 1; i < 22; ++i) line += " " + word;  // 22 words of 4 and 21 blanks: 109 columns
  std::string rest = word;
  for (int i = 1; i < 18; ++i) rest += " " + word;
  CHECK(wrapped_markdown(paragraph) == line + "\n" + rest);
  // Tables, headings and code stay; items are indented.
  for (const std::string& kept :
       {cells, "# " + paragraph, "    " + paragraph, std::string("short\n\ntext\n")})
    CHECK(wrapped_markdown(kept) == kept);
  CHECK(wrapped_markdown("- " + paragraph).find("\n  " + word) != std::string::npos);
  // No line begins with a mark, and a short code span is not broken.
  std::string hundred;
  for (int i = 0; i < 10; ++i) hundred += ten;
  CHECK(wrapped_markdown(hundred + " 123456789 - a") == hundred + "\n123456789 - a");
  CHECK(wrapped_markdown(hundred + " `a b c d e f`, g") == hundred + "\n`a b c d e f`, g");
  CHECK(wrapped_markdown("`" + hundred + " " + ten + "` g") == "`" + hundred + "\n" + ten + "` g");
}
