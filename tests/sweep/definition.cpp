// Sweep files and their command-line form: what they mean, and what is said about wrong ones.
#include "sweep/definition.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "sweep/points.hpp"
#include "sweep/sobol.hpp"
#include "sweep/values.hpp"

using namespace capstan;
using namespace capstan::sweep;

namespace {

const std::string kHead = "schema: capstan-sweep/1\nname: t\nbase: quickstart\n";

ParsedDefinition read(const std::string& text) {
  return read_definition_text(kHead + text, "/tmp", "s.yaml");
}
std::string errors_of(const std::string& text) {
  std::string all;
  const ParsedDefinition reading = read(text);
  for (const auto& diagnostic : reading.diagnostics) {
    all += config::location_text(diagnostic.location, reading.sources) + ": " + diagnostic.message + "\n";
    for (const auto& help : diagnostic.helps) all += "  " + help + "\n";
  }
  return all;
}
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
std::vector<std::string> texts(const Points& points) {
  std::vector<std::string> out;
  for (const Values& point : points.points) {
    std::vector<std::string> parts;
    for (const auto& [path, value] : point) parts.push_back(path.substr(path.rfind('.') + 1) + "=" + value);
    out.push_back(join(parts, " "));
  }
  return out;
}
ParsedDefinition words(std::vector<std::string> given, std::optional<int64_t> trials = {}) {
  SweepOverrides line;
  line.recipe = "quickstart";
  for (std::string& word : given) line.overrides.push_back(config::Override::token(std::move(word)));
  line.trials = trials;
  return definition_from_overrides(line);
}

}  // namespace

TEST_CASE("a field of one value or more takes ranges, and lists of lists") {
  const ParsedDefinition range = read("axes: {model.moe_aux_loss_coeff: {log: [1e-3, 1e-1], n: 3}}\n");
  INFO(config::render(range.diagnostics, range.sources));
  REQUIRE(range.ok());
  CHECK(range.definition.axes[0].values == std::vector<std::string>{"0.001", "0.01", "0.1"});
  const ParsedDefinition lists = read("axes: {model.moe_aux_loss_coeff: [[0.01, 0.001], 0.02]}\n");
  REQUIRE(lists.ok());
  CHECK(lists.definition.axes[0].values == std::vector<std::string>{"[0.01, 0.001]", "0.02"});
}

TEST_CASE("every key of a sweep file is read") {
  const ParsedDefinition reading = read(R"(set: [train.train_iters=20, dataset=mock]
axes:
  optimizer.lr: {log: [1e-4, 1e-3], n: 4}
  optimizer.weight_decay: [0, 0.1]
  mixed_precision: [fp32, bf16_mixed]
link:
  - {model.num_layers: 2, model.hidden_size: 64}
  - {model.num_layers: 4, model.hidden_size: 32}
exclude: [{optimizer.lr: ">8e-4", mixed_precision: bf16_mixed}]
seeds: [1, 2, 3]
metric: {name: val/loss, goal: min, at: mean(last 100)}
stop: {asha: {steps: [200, 600], keep: 1/4}, nan: false, worse_than: 20.0}
limits: {gpu_hours: 400, per_trial: 2h, retries: 1}
resources: {ranks: 2, threads: 3}
)");
  INFO(config::render(reading.diagnostics, reading.sources));
  REQUIRE(reading.ok());
  const Definition& d = reading.definition;
  CHECK(d.base == "quickstart");
  REQUIRE(d.axes.size() == 3);
  CHECK(d.axes[0].kind == AxisKind::log);
  CHECK(d.axes[0].values == std::vector<std::string>{"0.0001", "0.000215443", "0.000464159", "0.001"});
  CHECK(d.axes[2].kind == AxisKind::preset);
  CHECK(d.link.size() == 2);
  CHECK(d.seeds == std::vector<int64_t>{1, 2, 3});
  CHECK(d.metric.at == "mean(last 100)");
  CHECK(d.metric.window == 100);
  CHECK(d.stop.asha.steps == std::vector<int64_t>{200, 600});
  CHECK(d.stop.asha.keep == 0.25);
  CHECK(!d.stop.nan);
  CHECK(d.stop.worse_than == 20.0);
  CHECK(d.limits.per_trial == config::Duration{7200});
  CHECK(d.limits.device_hours == 400);
  CHECK(d.limits.retries == 1);
  CHECK(d.resources.ranks == 2);
  // 4 × 2 × 2 × 2 without those of bf16 at 1e-3.
  const Points points = points_of(d);
  CHECK(points.points.size() == 28);
  CHECK(points.excluded == 4);
  CHECK(texts(points)[0] == "lr=0.0001 weight_decay=0 mixed_precision=fp32 num_layers=2 hidden_size=64");

  SUBCASE("written out it reads back as the same") {
    const ParsedDefinition again = read_definition_text(to_yaml(d), "/tmp", "again.yaml");
    INFO(to_yaml(d), config::render(again.diagnostics, again.sources));
    REQUIRE(again.ok());
    CHECK(to_yaml(again.definition) == to_yaml(d));
    CHECK(texts(points_of(again.definition)) == texts(points));
    CHECK(again.definition.axes[0].kind == AxisKind::log);
    CHECK(again.definition.stop.asha.keep == 0.25);
  }
}

TEST_CASE("short forms, quotes and null in a sweep file") {
  const ParsedDefinition reading = read(
      "axes: {optimizer.lr: {linear: [1, 2], n: \"3\"}}\nmetric: val/loss\nseeds: [\"4\"]\nset: null\n"
      "stop: {asha: {steps: [5], keep: 3/4}}\nlimits: {per_trial: \"90s\"}\nresources: {gpus: \"2\"}");
  INFO(config::render(reading.diagnostics, reading.sources));
  REQUIRE(reading.ok());
  const Definition& d = reading.definition;
  CHECK(d.axes[0].values == std::vector<std::string>{"1", "1.5", "2"});
  CHECK(d.metric.name == "val/loss");
  CHECK(d.metric.named);
  CHECK(d.seeds == std::vector<int64_t>{4});
  CHECK(d.stop.asha.keep == 0.75);
  CHECK(d.limits.per_trial == config::Duration{90});
  CHECK(d.resources.ranks == 2);
  CHECK(read_definition_text(to_yaml(d), "/tmp", "again.yaml").definition.metric.named);
  // A metric that the definition does not name is not written: planning chooses it again.
  CHECK(to_yaml(read("axes: {optimizer.lr: [1, 2]}").definition).find("metric") == std::string::npos);
}

TEST_CASE("all errors of a sweep file are reported at once, with locations") {
  const std::string all = errors_of(R"(axis: {}
axes:
  optimizer.lrr: [1e-4]
  optimizer.weight_decay: 0.1
  optimizer.lr: {log: [1e-3, 1e-4], n: 4}
seeds: [1, 1]
metric: {name: loss, goal: less}
stop: {asha: {steps: [20, 10], keep: 3}, nan: maybe}
)");
  INFO(all);
  CHECK(contains(all, "s.yaml:4:1: unknown key `axis`"));
  CHECK(contains(all, "did you mean `axes`"));
  CHECK(contains(all, "s.yaml:6:3:"));
  CHECK(contains(all, "optimizer.lr"));
  CHECK(contains(all, "s.yaml:7:27: the axis `optimizer.weight_decay` takes a list of values"));
  CHECK(contains(all, "the first bound is not below the second"));
  CHECK(contains(all, "the seed 1 occurs twice"));
  CHECK(contains(all, "`less` is not a value of `metric.goal`"));
  CHECK(contains(all, "the steps of `stop.asha` must ascend"));
  CHECK(contains(all, "`stop.asha.keep` is 3: it must be below 1"));
  CHECK(contains(all, "`maybe` is not a boolean"));
}

TEST_CASE("a metric that no run writes is perhaps misspelled") {
  const auto warning = [](const std::string& metric) {
    const ParsedDefinition reading = read("axes: {optimizer.lr: [1e-3, 1e-2]}\nmetric: " + metric);
    CHECK(reading.ok());
    CHECK(reading.diagnostics.size() <= 1);
    if (reading.diagnostics.empty()) return std::string();
    return reading.diagnostics[0].message + "; " + reading.diagnostics[0].helps.at(0);
  };
  CHECK(warning("val/los") ==
        "`train` writes no metric `val/los`: only `sweep tell` can report it; did you "
        "mean "
        "`val/loss`?");
  CHECK(contains(warning("{name: accuracy, goal: max}"), "metrics of `train`: loss, "));
  for (const char* good :
       {"loss", "val/loss", "{name: val/perplexity}", "seconds_forward", "update_skipped/grad_norm"})
    CHECK(warning(good).empty());
}

TEST_CASE("single mistakes") {
  struct Case {
    const char *text, *said;
  };
  for (const Case& one : std::vector<Case>{
           {"", "nothing varies"},
           {"axes: {optimizer.lr: []}", "has no values"},
           {"axes: {optimizer.lr: [1, 1]}", "occurs twice in the axis"},
           {"axes: {optimizer: {lr: [1]}}", "a list of its presets"},
           {"axes: {optimizer.lr: {log: [0, 1], n: 3}}", "begins above 0"},
           {"axes: {optimizer.lr: {log: [1e-4, 1], n: 1}}", "`optimizer.lr.n` is 1: it must be at least 2"},
           {"axes: {optimizer.lr: {log: [1e-4, 1], linear: [1, 2]}}", "one of `log`, `linear` and `range`"},
           {"axes: {optimizer.lr: {logs: [1e-4, 1]}}", "did you mean `log`"},
           {"axes: {optimizer.lr: {log: [1e-4]}}", "two bounds"},
           {"axes: {model.normalization: {linear: [1, 2]}}", "a range needs numbers"},
           {"axes: {optimizer.lr: {log: [1e-4, 1]}}\nmethod: grid", "needs a number of points"},
           {"axes: {optimizer.lr: {log: [1e-4, 1]}}", "`trials` is missing"},
           {"axes: {optimizer.lr: [1]}\nmethod: bayes", "`bayes` is not a value of `method`"},
           {"axes: {optimizer.lr: [1], model.num_layers: [1, 2]}\nmethod: list", "side by side"},
           {"axes: {optimizer.lr: [1]}\nlink: [{optimizer.lr: 2}]", "is varied twice"},
           {"link: [{model.num_layers: 2}, {model.hidden_size: 2}]", "this row lacks `model.num_layers`"},
           {"axes: {optimizer.lr: [1, 2]}\nset: [optimizer.lr=3]", "is an axis, and `set` gives it a value"},
           {"axes: {optimizer.lr: [1, 2]}\nset: [checkpoint.save=x]", "a sweep cannot set `checkpoint.save`"},
           {"axes: {rng.seed: [1, 2]}\nseeds: [3]", "which is varied too"},
           {"axes: {optimizer.lr: [1, 2]}\nexclude: [{optimizer.lrs: 2}]", "did you mean `optimizer.lr`"},
           {"axes: {optimizer.lr: [1, 2]}\nexclude: [{optimizer.lr: \">x\"}]",
            "is not a number to compare with"},
           {"axes: {optimizer.lr: [1, 2]}\nlimits: {per_trial: 5}", "`limits.per_trial` takes a duration"},
           {"axes: {optimizer.lr: [1, 2]}\nmetric: {at: median}", "last, best or mean(last N)"},
           {"axes: [1]", "`axes` takes a mapping"},
           {"name: ../x\naxes: {optimizer.lr: [1]}", "duplicate key"},
       }) {
    INFO(one.text, "\n", errors_of(one.text));
    CHECK(contains(errors_of(one.text), one.said));
  }
  // A sweep file appends nothing.
  const std::string single = errors_of("axes: {optimizer.lr: [1, 2]}\nseeds: 5");
  CHECK(contains(single, "`seeds` takes a list, not a single value"));
  CHECK(contains(single, "write [5]\n"));
  CHECK(!read_definition_text("", "/tmp", "e.yaml").ok());
  CHECK(!read_definition_text("- a\n", "/tmp", "e.yaml").ok());
  CHECK(!read_definition_text("axes: {optimizer.lr: [1", "/tmp", "e.yaml").ok());
  CHECK(!read_definition_text("schema: capstan/1\nbase: quickstart\naxes: {optimizer.lr: [1]}\n", "/tmp",
                              "e.yaml")
             .ok());
}

TEST_CASE("the command line says the same in Hydra's words") {
  const ParsedDefinition reading =
      words({"optimizer.lr=1e-4,3e-4", "mixed_precision=choice(fp32,bf16_mixed)",
             "model.num_layers=range(1,5,2)", "rng.seed=7,8", "train.train_iters=20"});
  INFO(config::render(reading.diagnostics, reading.sources));
  REQUIRE(reading.ok());
  const Definition& d = reading.definition;
  REQUIRE(d.axes.size() == 3);
  CHECK(d.axes[0].values == std::vector<std::string>{"1e-4", "3e-4"});
  CHECK(d.axes[1].kind == AxisKind::preset);
  CHECK(d.axes[2].values == std::vector<std::string>{"1", "3"});
  CHECK(d.seeds == std::vector<int64_t>{7, 8});
  CHECK(d.set == std::vector<std::string>{"train.train_iters=20"});
  CHECK(d.method == Method::grid);

  const ParsedDefinition drawn =
      words({"optimizer.lr=tag(log,interval(1e-4,1e-2))", "optimizer.weight_decay=uniform(0,1)"}, 5);
  REQUIRE(drawn.ok());
  CHECK(drawn.definition.method == Method::random);
  CHECK(drawn.definition.axes[0].kind == AxisKind::log);
  CHECK(points_of(drawn.definition).points.size() == 5);

  const ParsedDefinition range = words({"optimizer.lr=log(1e-4,1e-2,3)"});
  REQUIRE(range.ok());
  CHECK(range.definition.axes[0].values == std::vector<std::string>{"0.0001", "0.001", "0.01"});

  const ParsedDefinition lists = words({"model.window_size=[1,2],null", "dataset.blend={a: 1},{a: 2, b: 3}"});
  REQUIRE(lists.definition.axes.size() == 2);
  CHECK(lists.definition.axes[0].values == std::vector<std::string>{"[1, 2]", "null"});

  const ParsedDefinition quoted = words({"description='a,b','c,d'", "name=\"e,f\",'g'"});
  REQUIRE(quoted.definition.axes.size() == 2);
  CHECK(quoted.definition.axes[0].values == std::vector<std::string>{"\"a,b\"", "\"c,d\""});
  CHECK(quoted.definition.axes[1].values == std::vector<std::string>{"\"e,f\"", "\"g\""});

  // Half-open, whatever the sum of the steps rounds to.
  CHECK(words({"model.hidden_dropout=range(0,0.9,0.3)"}).definition.axes[0].values ==
        std::vector<std::string>{"0", "0.3", "0.6"});
  CHECK(read("axes: {optimizer.lr: {range: [-3, -1, 1]}}").definition.axes[0].values ==
        std::vector<std::string>{"-3", "-2"});
  for (const char* points : {"0", "1", "2.5", "-4", "1e30"}) {
    const ParsedDefinition wrong = words({"optimizer.lr=log(1e-4,1e-3," + std::string(points) + ")"});
    REQUIRE(wrong.diagnostics.size() == 1);
    CHECK(wrong.diagnostics[0].message ==
          "`log` takes as its third argument the number of points, from 2 to 10000");
  }
  const ParsedDefinition nothing = words({"train.train_iters=20"});
  REQUIRE(nothing.diagnostics.size() == 1);
  CHECK(nothing.diagnostics[0].message == "nothing varies: no field has several values");
  SweepOverrides missing;
  missing.recipe = "no-such-recipe";
  CHECK_THROWS_WITH_AS(definition_from_overrides(missing),
                       doctest::Contains("not found: recipe = no-such-recipe"), Error);
  missing.recipe = "no-such-sweep.yaml";
  CHECK_THROWS_WITH_AS(definition_from_overrides(missing),
                       doctest::Contains("not found: sweep file = no-such-sweep.yaml"), Error);
  for (const char* name : {"null", "~", "a: b", "1e3"}) {
    SweepOverrides line;
    line.recipe = std::string("./") + name + ".yaml";
    line.overrides = {config::Override::token("optimizer.lr=1e-4,3e-4")};
    const ParsedDefinition named = definition_from_overrides(line);
    REQUIRE(named.ok());
    CHECK(named.definition.name == name);
    CHECK(named.definition.base == line.recipe);
  }

  CHECK(!words({"optimizer.lr=lognormal(1,2)"}).ok());
  CHECK(!words({"optimizer.lr=loguniform(1,x)"}).ok());
  CHECK(!words({"optimizer.lr=glob(*)"}).ok());
  CHECK(!words({"mixed_precision=glob(zzz*)"}).ok());
  CHECK(words({"mixed_precision=glob(bf16*)"}).definition.axes[0].kind == AxisKind::preset);
}

TEST_CASE("more of a sweep: values and seeds are added, a base is not changed") {
  const Definition before = read("axes: {optimizer.lr: [1e-4, 3e-4]}\nseeds: [1]\n").definition;
  SweepOverrides more;
  more.overrides = {config::Override::token("optimizer.lr=3e-4,1e-3"), config::Override::token("rng.seed=2")};
  const ParsedDefinition after = extended(before, more, true);
  INFO(config::render(after.diagnostics, after.sources));
  REQUIRE(after.ok());
  CHECK(after.definition.axes[0].values == std::vector<std::string>{"1e-4", "3e-4", "1e-3"});
  CHECK(after.definition.seeds == std::vector<int64_t>{1, 2});
  more.overrides = {config::Override::token("train.train_iters=5")};
  CHECK(!extended(before, more, true).ok());
  CHECK(extended(before, more, false).ok());
}

TEST_CASE("random points depend on the seed alone, and a longer list begins with a shorter one") {
  const auto drawn = [](int64_t seed, int64_t trials, const char* method) {
    Definition d = read(
                       "axes: {optimizer.lr: {log: [1e-4, 1e-2]}, model.num_layers: {linear: [1, "
                       "9]}}\ntrials: 1\nmethod: " +
                       std::string(method))
                       .definition;
    d.seed = seed;
    d.trials = trials;
    return texts(points_of(d));
  };
  for (const int64_t seed : {0, 1, 77}) {
    const auto longer = drawn(seed, 40, "random");
    auto beginning = longer;
    beginning.resize(10);
    CHECK(drawn(seed, 10, "random") == beginning);
    CHECK(drawn(seed + 1, 10, "random") != beginning);
  }
  // Fixed for all time: the same plan on every machine.
  CHECK(drawn(0, 4, "sobol") == std::vector<std::string>{"lr=0.0001 num_layers=1", "lr=0.001 num_layers=5",
                                                         "lr=0.00316228 num_layers=3",
                                                         "lr=0.000316228 num_layers=7"});
  CHECK(drawn(1, 40, "sobol") == drawn(0, 40, "sobol"));
}

TEST_CASE("few points where there are few, a part of a grid in its order") {
  Definition d = read("axes: {optimizer.lr: [1, 2, 3], model.num_layers: [1, 2]}\nmethod: random\ntrials: 50")
                     .definition;
  const Points all = points_of(d);
  CHECK(all.points.size() == 6);
  CHECK(all.exhausted);
  d.method = Method::grid;
  d.trials = 4;
  const auto part = texts(points_of(d));
  CHECK(part.size() == 4);
  CHECK(std::is_sorted(part.begin(), part.end()));
  CHECK(points_of(d).grid == 6);
  d.seed = 9;
  d.trials = 6;
  CHECK(texts(points_of(d)).size() == 6);
  d.method = Method::list;
  d.axes[0].values.pop_back();
  d.trials.reset();
  CHECK(texts(points_of(d)) == std::vector<std::string>{"lr=1 num_layers=1", "lr=2 num_layers=2"});
}

TEST_CASE("comparisons in exclude") {
  const Definition d = read(
                           "axes: {optimizer.lr: [1e-4, 2e-4, 4k, 3%]}\nexclude: [{optimizer.lr: \"<= "
                           "0.0001\"}, {optimizer.lr: [4000, 7]}]")
                           .definition;
  CHECK(texts(points_of(d)) == std::vector<std::string>{"lr=2e-4", "lr=3%"});
  CHECK(number_of("4k") == 4000);
  CHECK(number_of("3%") == 0.03);
  CHECK(!number_of("fp32"));
}

TEST_CASE("the Sobol sequence is the one of Joe and Kuo") {
  // scipy.stats.qmc.Sobol(24, scramble=False), in 1/1024.
  struct Known {
    int index;
    std::vector<int> values;
  };
  const std::vector<Known> known{{2, {768, 256, 256, 256, 768, 768, 256, 768, 768, 768, 768, 768,
                                      256, 256, 768, 256, 768, 256, 768, 256, 256, 768, 256, 256}},
                                 {5, {896, 896, 128, 384, 896, 640, 896, 384, 384, 128, 384, 896,
                                      896, 128, 896, 384, 896, 384, 384, 640, 640, 640, 896, 384}},
                                 {11, {448, 576, 192, 704, 832, 64, 704, 704, 704, 64,  960, 320,
                                       192, 192, 576, 192, 576, 64, 704, 576, 960, 960, 960, 192}},
                                 {100, {424, 264, 792, 744, 904, 760, 24,  488, 648, 712, 472, 696,
                                        488, 872, 328, 504, 696, 760, 856, 344, 776, 408, 8,   504}},
                                 {777, {709, 959, 167, 281, 651, 365, 195, 781, 357, 331, 763, 713,
                                        393, 485, 583, 527, 413, 885, 379, 771, 243, 279, 969, 493}},
                                 {1023, {1,   771, 627, 149, 191, 449, 143, 633, 353, 871, 695, 37,
                                         133, 681, 371, 475, 321, 897, 599, 327, 887, 19,  813, 201}}};
  Sobol sobol(24);
  int index = 0;
  for (const Known& one : known) {
    std::vector<double> point;
    for (; index <= one.index; ++index) point = sobol.next();
    INFO(one.index);
    for (size_t d = 0; d < 24; ++d) CHECK(point[d] * 1024 == one.values[d]);
  }
  CHECK(Sobol(1).next() == std::vector<double>{0});
}
