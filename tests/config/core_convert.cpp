// Values by field type: every row of the table of accepted and refused texts, from a file and from the
// command line.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "config/core/convert.hpp"
#include "config/core/external.hpp"
#include "core_support.hpp"

using namespace capstan;
using namespace capstan::config;
using namespace capstan::config::testing;

namespace {

// The value as YAML, or "code: message | help".
std::string in_file(const std::string& path, const std::string& text) {
  static const Workspace w;
  const auto out = w.text(path + ": " + text + "\n");
  for (const auto& d : out.diagnostics)
    if (d.level == Level::error)
      return d.code + ": " + d.message + (d.helps.empty() ? "" : " | " + d.helps[0]);
  return out.text(path);
}
std::string on_cli(const std::string& path, const std::string& text) {
  const auto out = with_override(path + "=" + text);
  for (const auto& d : out.diagnostics)
    if (d.level == Level::error)
      return d.code + ": " + d.message + (d.helps.empty() ? "" : " | " + d.helps[0]);
  return out.text(path);
}

struct Row {
  // expected: the value, or parts of the message separated by `&`.
  const char *path, *text, *expected;
};

void check(const Row& row) {
  CAPTURE(std::string(row.path));
  CAPTURE(std::string(row.text));
  const std::string expected = row.expected;
  for (const bool cli : {false, true}) {
    const std::string got = cli ? on_cli(row.path, row.text) : in_file(row.path, row.text);
    CAPTURE(cli);
    if (!expected.starts_with("C0")) {
      CHECK(got == expected);
      continue;
    }
    size_t begin = 0;
    while (begin <= expected.size()) {
      const size_t end = std::min(expected.find('&', begin), expected.size());
      CAPTURE(got);
      CHECK(got.find(expected.substr(begin, end - begin)) != std::string::npos);
      begin = end + 1;
    }
  }
}

}  // namespace

TEST_CASE("booleans: true and false, nothing else") {
  for (const Row& row : {Row{"train.verbose", "true", "true"},
                         {"train.verbose", "False", "false"},
                         {"train.verbose", "TRUE", "true"},
                         {"train.verbose", "yes", "C0201&is not a boolean&write true"},
                         {"train.verbose", "NO", "C0201&write false"},
                         {"train.verbose", "on", "C0201&write true"},
                         {"train.verbose", "off", "C0201&write false"},
                         {"train.verbose", "y", "C0201&write true"},
                         {"train.verbose", "n", "C0201&write false"},
                         {"train.verbose", "1", "C0201&write true"},
                         {"train.verbose", "0", "C0201&write false"},
                         {"train.verbose", "maybe", "C0201&write true or false"},
                         {"train.verbose", "'true'", "C0204&remove the quotes"},
                         {"train.verbose", "null", "C0205&cannot be null"}})
    check(row);
}

TEST_CASE("integers") {
  for (const Row& row : {Row{"train.iters", "42", "42"},
                         {"train.iters", "1_000_000", "1000000"},
                         {"train.iters", "+5", "5"},
                         {"train.iters", "4k", "4000"},
                         {"train.iters", "1.5M", "1500000"},
                         {"train.iters", "1e6", "1000000"},
                         {"train.iters", "2B", "2000000000"},
                         {"train.iters", "2G", "2000000000"},
                         {"train.iters", "1T", "1000000000000"},
                         {"train.iters", "4Ki", "4096"},
                         {"train.iters", "1.5Ki", "1536"},
                         {"train.iters", "2Mi", "2097152"},
                         {"train.iters", "1Gi", "1073741824"},
                         {"train.iters", "1500e-2", "15"},
                         {"train.iters", "0.5k", "500"},
                         {"train.iters", "1.0", "1"},
                         {"dataset.seed", "4k", "4000"},
                         {"dataset.seed", "-3", "-3"},
                         {"dataset.seed", "0", "0"},
                         {"dataset.seed", "-9223372036854775808", "-9223372036854775808"},
                         {"dataset.seed", "9223372036854775807", "9223372036854775807"},
                         {"train.iters", "017", "C0201&leading zero&write 17"},
                         {"train.iters", "08", "C0201&leading zero&write 8"},
                         {"dataset.seed", "-007", "C0201&leading zero&write -7"},
                         {"train.iters", "1.5", "C0201&is not an integer"},
                         {"train.iters", "0.0005k", "C0201&is not an integer"},
                         {"train.iters", "1e-3", "C0201&is not an integer"},
                         {"dataset.seed", "9223372036854775808",
                          "C0201&does not fit 64 bits&-9223372036854775808 to 9223372036854775807"},
                         {"train.iters", "10T0", "C0201&is not an integer"},
                         {"train.iters", "1e300", "C0201&does not fit 64 bits"},
                         {"train.iters", "99999999999T", "C0201&does not fit 64 bits"},
                         {"train.iters", "10KB", "C0201&bytes in a count field"},
                         {"train.iters", "10kB", "C0201&bytes in a count field"},
                         {"train.iters", "4K", "C0201&suffix `K`&4k is 4000"},
                         {"train.iters", "4m", "C0201&a million is `M`"},
                         {"train.iters", "4 k", "C0201&blank before its suffix&write 4k"},
                         {"train.iters", "0o17", "C0201&is octal&write 15"},
                         {"train.iters", "0x1F", "C0201&is hexadecimal&write 31"},
                         {"train.iters", "0b11", "C0201&is binary&write 3"},
                         {"model.mask", "0x1F", "31"},
                         {"model.mask", "-0x1f", "-31"},
                         {"model.mask", "0x", "C0201&is not an integer"},
                         {"train.iters", "1__0", "C0201&is not an integer"},
                         {"train.iters", "1_", "C0201&is not an integer"},
                         {"train.iters", "_1", "C0201&is not an integer"},
                         {"train.iters", "12:30:45", "C0201&is not an integer"},
                         {"train.iters", "ten", "C0201&is not an integer"},
                         {"train.iters", "\"5\"", "C0204&remove the quotes: 5"},
                         {"train.iters", "~", "C0205"},
                         {"train.iters", "true", "C0201&is not an integer"},
                         {"train.iters", "3%", "C0201&percentage"},
                         {"train.iters", "0", "C0202&must be at least 1"},
                         {"train.iters", "-4", "C0202&must be at least 1"},
                         {"train.iters", "[1]", "C0206&takes an integer at least 1, not a list"},
                         {"train.iters", "{a: 1}", "C0206&not a mapping"},
                         {"model.topk", "3", "C0202&one of 1, 2, 4"},
                         {"model.experts", "null", "null"},
                         {"model.experts", "8", "8"},
                         {"train.iters", "nan", "C0201"},
                         {"train.iters", "inf", "C0201"}})
    check(row);
  CHECK(on_cli("train.iters", "1,5")
            .find("for a trial of each value: `capstan sweep plan RECIPE train.iters=1,5`") !=
        std::string::npos);
  CHECK(in_file("train.iters", "1,000").find("grouped with `_`") != std::string::npos);
}

TEST_CASE("a length in tokens takes no suffix, and both readings are offered") {
  for (const Row& row : {Row{"model.seq_length", "4096", "4096"},
                         {"model.seq_length", "4_096", "4096"},
                         {"model.seq_length", "4k", "C0201&write 4000 or 4096"},
                         {"model.seq_length", "4Ki", "C0201&write 4000 or 4096"},
                         {"model.seq_length", "128k", "C0201&write 128000 or 131072"},
                         {"model.seq_length", "1M", "C0201&write 1000000 or 1048576"}})
    check(row);
}

TEST_CASE("reals") {
  for (const Row& row : {Row{"optimizer.lr", "1e-4", "0.0001"},
                         {"optimizer.lr", ".5", "0.5"},
                         {"optimizer.lr", "5.", "5"},
                         {"optimizer.lr", "3", "3"},
                         {"optimizer.lr", "+1E-3", "0.001"},
                         {"optimizer.lr", "1.0e-4", "0.0001"},
                         {"optimizer.lr", "0.1", "0.1"},
                         {"optimizer.min_lr", "0", "0"},
                         {"optimizer.min_lr", "-0.0", "-0.0"},
                         {"optimizer.lr", "1_000e-3", "1"},
                         {"optimizer.lr", "1.5x", "C0201&is not a number"},
                         {"optimizer.lr", "0", "C0202&must be above 0"},
                         {"optimizer.lr", "11", "C0202&must be at most 10"},
                         {"optimizer.beta", "1", "C0202&must be below 1"},
                         {"optimizer.lr", "1e400", "C0201&does not fit a double"},
                         {"optimizer.lr", "inf", "C0201&is not finite"},
                         {"optimizer.lr", ".inf", "C0201&is not finite"},
                         {"optimizer.lr", "nan", "C0201"},
                         {"optimizer.lr", ".nan", "C0201"},
                         {"train.limit", ".inf", ".inf"},
                         {"train.limit", "inf", ".inf"},
                         {"train.limit", "-inf", "-.inf"},
                         {"train.limit", "nan", ".nan"},
                         {"train.limit", ".NaN", ".nan"},
                         {"optimizer.lr", "017", "C0201&leading zero&write 17"},
                         {"optimizer.lr", "3%", "C0201&is a percentage&write 0.03"},
                         {"optimizer.lr", "2k", "C0201&does not accept&write 2000"},
                         {"optimizer.scale", "2k", "2000"},
                         {"optimizer.scale", "4Gi", "4294967296"},
                         {"optimizer.lr", "'1e-4'", "C0204&remove the quotes"},
                         {"optimizer.lr", "0x10", "C0201&is not a number"},
                         {"optimizer.lr", "1e", "C0201&is not a number"},
                         {"optimizer.lr", "--1", "C0201&is not a number"},
                         {"optimizer.lr", "1e-4 ", "0.0001"}})
    check(row);
  CHECK(in_file("optimizer.lr", "1,5").find("write 1.5") != std::string::npos);
  const auto tiny = with_override("optimizer.min_lr=1e-400");
  CHECK(tiny.ok());
  CHECK(tiny.says("becomes 0"));
}

TEST_CASE("fractions take a percentage") {
  for (const Row& row : {Row{"model.dropout", "0.03", "0.03"},
                         {"model.dropout", "3%", "0.03"},
                         {"model.dropout", "0.1%", "0.001"},
                         {"model.dropout", "100%", "1"},
                         {"model.dropout", "3", "C0202&at most 1&write 0.03 or 3%"},
                         {"model.dropout", "150%", "C0202&at most 1"},
                         {"model.dropout", "-1%", "C0202&at least 0"}})
    check(row);
}

TEST_CASE("text is taken as written") {
  for (const Row& row : {Row{"train.title", "007", "'007'"},
                         {"train.title", "no", "'no'"},
                         {"train.title", "1e-4", "'1e-4'"},
                         {"train.title", "2026-11-21", "'2026-11-21'"},
                         {"train.title", "\"null\"", "'null'"},
                         {"train.title", "a b", "a b"},
                         {"train.title", "\"\"", "\"\""},
                         {"train.title", "~", "C0205&cannot be null&\"null\""},
                         {"train.note", "null", "null"},
                         {"train.title", "[a]", "C0206&takes text, not a list"}})
    check(row);
  CHECK(in_file("train.title", "").find("C0203: `train.title` has no value | write \"\"") == 0);
  CHECK(on_cli("train.title", "") == "\"\"");
  CHECK(on_cli("train.iters", "").find("C0203") == 0);
  CHECK(in_file("train.note", "").find("C0203: `train.note` has no value | write `null`") == 0);
  const auto none = with_override("train.note=None");
  CHECK(none.ok());
  CHECK(none.config.train.note == "None");
  REQUIRE(none.first("C0601"));
  CHECK(none.first("C0601")->name == "none_as_text");
  CHECK_FALSE(with_override("train.note='None'").first("C0601"));
  CHECK(with_override("train.load=none").first("C0601"));  // a directory called none
  CHECK_FALSE(with_override("train.load='none'").first("C0601"));
  CHECK_FALSE(with_override("train.load=null").first("C0601"));
}

TEST_CASE("enums are exact, with the nearest name offered") {
  for (const Row& row : {Row{"model.norm", "RMSNorm", "RMSNorm"},
                         {"model.norm", "rms", "RMSNorm"},
                         {"model.dtype", "torch.bfloat16", "bf16"},
                         {"model.norm", "'RMSNorm'", "RMSNorm"},
                         {"model.norm", "rmsNorm", "C0207&case-sensitive: write `RMSNorm`"},
                         {"model.norm", "LayerNrm", "C0207&did you mean `LayerNorm`?"},
                         {"model.norm", "zzz", "C0207&one of LayerNorm, RMSNorm"},
                         {"model.norm", "null", "C0205"}})
    check(row);
}

TEST_CASE("bytes") {
  for (const Row& row : {Row{"train.buffer", "512", "512"},
                         {"train.buffer", "512B", "512"},
                         {"train.buffer", "1kB", "1000"},
                         {"train.buffer", "2MB", "2000000"},
                         {"train.buffer", "1KiB", "1KiB"},
                         {"train.buffer", "1.5GiB", "1536MiB"},
                         {"train.buffer", "\"4MiB\"", "4MiB"},
                         {"train.buffer", "1TB", "1000000000000"},
                         {"train.buffer", "1TiB", "1TiB"},
                         {"train.buffer", "10G", "C0201&ambiguous&write 10GB&10GiB"},
                         {"train.buffer", "10KB", "C0201&ambiguous&10kB&10KiB"},
                         {"train.buffer", "10k", "C0201&ambiguous"},
                         {"train.buffer", "0.3B", "C0201&integer number of bytes"},
                         {"train.buffer", "10XB", "C0201&units are"},
                         {"train.buffer", "'512'", "C0204"}})
    check(row);
}

TEST_CASE("durations") {
  for (const Row& row : {Row{"train.timeout", "30s", "30s"},
                         {"train.timeout", "500ms", "0.5s"},
                         {"train.timeout", "5m", "5m"},
                         {"train.timeout", "1.5h", "1h30m"},
                         {"train.timeout", "2d", "48h"},
                         {"train.timeout", "1h30m", "1h30m"},
                         {"train.timeout", "\"90m\"", "1h30m"},
                         {"train.timeout", "30", "C0201&has no unit&write 30s"},
                         {"train.minutes", "30", "30m"},
                         {"train.minutes", "90s", "1m30s"},
                         {"train.timeout", "10M", "C0201&minutes are `m`"},
                         {"train.timeout", "12:30:45", "C0201&write 12h30m45s"},
                         {"train.timeout", "4:30", "C0201&write 4h30m or 4m30s"},
                         {"train.timeout", "30m1h", "C0201&large to small"},
                         {"train.timeout", "1h1h", "C0201&each once"},
                         {"train.timeout", "5 minutes", "C0201"},
                         {"train.timeout", "1y", "C0201&units are ms s m h d"}})
    check(row);
}

TEST_CASE("paths are relative to who wrote them") {
  const Workspace w;
  w.write("sub/base.yaml", "train: {load: weights/a}\n");
  auto out = w.text("extends: sub/base.yaml\ntrain: {save: out/../b}\n");
  REQUIRE(out.ok());
  CHECK(out.config.train.load->text == "weights/a");
  CHECK(out.config.train.load->resolved == w.path("sub/weights/a"));
  CHECK(out.config.train.save.resolved == w.path("b"));
  out = w.text("name: x\n", {"train.save=here"});
  CHECK(out.config.train.save.resolved == (std::filesystem::current_path() / "here").string());
  CHECK(w.text("train: {save: /abs}\n").config.train.save.resolved == "/abs");
}

TEST_CASE("a scheme says what a file is, and only what follows is a path") {
  for (const std::string scheme : {"hf:", "gguf:", "peft:", ""}) {
    CAPTURE(scheme);
    const std::string name = scheme + "a/../b";
    CHECK(split_scheme(name).scheme == scheme);
    CHECK(split_scheme(name).path == "a/../b");
    CHECK(absolute_name(name, "/of") == scheme + "/of/b");
    CHECK(absolute_name(scheme + "/there", "/of") == scheme + "/there");
  }
  CHECK(split_scheme("C:x").path == "C:x");
  CHECK(is_external_model("model", "gguf:x"));
  CHECK_FALSE(is_external_model("model", "peft:x"));
  CHECK_FALSE(is_external_model("dataset", "hf:x"));
}

TEST_CASE("secrets are references") {
  const Workspace w;
  CHECK(w.text("optimizer: {token: '${env:WANDB}'}\n").config.optimizer.token.reference == "env:WANDB");
  CHECK(w.text("optimizer: {token: file:/run/secret}\n").config.optimizer.token.reference ==
        "file:/run/secret");
  CHECK(w.text("optimizer: {token: hunter2}\n").codes() == "C0208");
  CHECK(w.text("optimizer: {token: '${env:A,default}'}\n").codes() == "C0208");
}

TEST_CASE("lists, maps and records") {
  const Workspace w;
  auto out = w.text(
      "train: {skip: [1, 2k], tags: [], env: {A: 1, B: x}}\ndataset: {blend: {b: 2, a: 1}, sources: [{name: "
      "x}, {name: y, weight: 3}]}\n");
  REQUIRE(out.ok());
  CHECK(out.config.train.skip == std::vector<int64_t>{1, 2000});
  CHECK(out.config.train.tags.empty());
  CHECK(out.config.train.env == std::vector<std::pair<std::string, std::string>>{{"A", "1"}, {"B", "x"}});
  CHECK(out.config.dataset.blend[0].first == "b");
  CHECK(out.config.dataset.sources[1].weight == 3);
  CHECK(out.config.dataset.sources[0].epochs == 1);
  CHECK(w.text("train: {skip: 7}\n").config.train.skip == std::vector<int64_t>{7});
  CHECK(w.text("train: {tags: a}\n").says("write [a]; to append an item: tags+: [a]"));
  CHECK(w.text("train: {env: [a]}\n").codes() == "C0206");
  // Python's expressions, quoted or not, as a file or an override has them.
  for (const char* expression : {"'[0]*1+[2]*3'", "([0]*1+[2]*3)", "\"[0, 2]+([2])*2\""})
    CHECK(w.text("train.skip: " + std::string(expression) + "\n").says("write [0, 2, 2, 2]"));
  CHECK(on_cli("train.skip", "[0]*1+[2]*3").find("write the list in full: [0, 2, 2, 2]") !=
        std::string::npos);
  CHECK(on_cli("train.skip", "[0]*a").find("in full") == std::string::npos);
  CHECK(w.text("train: {skip: [1, x, 3.5]}\n").codes() == "C0201 C0201");
  CHECK(w.text("train: {skip: [1, [2]]}\n").codes() == "C0206");
  CHECK(w.text("train: {modules: null}\n").ok());
  CHECK(w.text("train: {tags: null}\n").codes() == "C0205");
  CHECK(w.text("train: {tags: }\n").says("write [] for an empty list"));
  CHECK(w.text("dataset: {sources: [{weight: 1}]}\n").codes() == "C0210");
  CHECK(w.text("dataset: {sources: [{name: x, wieght: 1}]}\n").says("similar name exists: `weight`"));
  CHECK(w.text("dataset: {sources: [{name: x}, {name: x}]}\n").says("two items with name `x`"));
  CHECK(w.text("dataset: {sources: [{name: x, weight: 0}]}\n").codes() == "C0202");
}

TEST_CASE("number texts without a schema") {
  TextProblem problem;
  CHECK(integer_from_text("9007199254740993", NumberForm::plain, problem) == 9007199254740993);
  CHECK(integer_from_text("9223372036854775.807k", NumberForm::plain, problem) ==
        std::numeric_limits<int64_t>::max());
  CHECK_FALSE(integer_from_text("9223372036854775.808k", NumberForm::plain, problem));
  CHECK(integer_from_text("8388607Ti", NumberForm::count, problem) == 8388607LL << 40);
  CHECK_FALSE(integer_from_text("8388608Ti", NumberForm::count, problem));
  CHECK(integer_from_text("0.0009765625Ki", NumberForm::count, problem) == 1);
  CHECK_FALSE(integer_from_text(std::string(100, '9'), NumberForm::plain, problem));
  CHECK(integer_from_text("1" + std::string(30, '0') + "e-30", NumberForm::plain, problem) == 1);
  CHECK_FALSE(integer_from_text("1e999999999999999999999", NumberForm::plain, problem));
  CHECK_FALSE(integer_from_text("", NumberForm::plain, problem));
  CHECK_FALSE(integer_from_text("-", NumberForm::plain, problem));
  CHECK_FALSE(bytes_from_text("9000000TiB", problem));
  CHECK(duration_from_text("1d2h3m4s5ms", "", problem) == doctest::Approx(93784.005));
  CHECK_FALSE(duration_from_text("1e400s", "", problem));
}
