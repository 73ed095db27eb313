// The table of a sweep, its statistics beside independent ones.
#include "sweep/table.hpp"
#include "base/json.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <random>

#include "base/error.hpp"
#include "made_results.hpp"
#include "tests/support/errors.hpp"

using namespace capstan;
using namespace capstan::sweep;
using namespace capstan::sweep::test;
using capstan::test::error_of;
using capstan::test::holds;
using nlohmann::json;

// Two axes, three seeds each; one configuration lost a seed, one was pruned, one failed.
static MadeSweep small() {
  MadeSweep sweep({{.path = "optimizer.lr", .values = {"0.001", "0.01"}},
                   {.path = "model.num_layers", .values = {"2", "4"}}});
  const double losses[2][3] = {{2.5, 2.75, 2.25}, {2.0, 2.5, 3.5}};
  for (int layers = 0; layers < 2; ++layers)
    for (int seed = 0; seed < 3; ++seed) {
      TrialResult& trial = sweep.add({"0.001", layers ? "4" : "2"}, seed, losses[layers][seed]);
      trial.status.step = 100;
      trial.status.seconds = 10 + seed;
      trial.measured = {1000.0 + seed, 1 << 20};
    }
  sweep.add({"0.01", "2"}, 0, 1.5).status.step = 100;
  sweep.add({"0.01", "2"}, 1, 9.0, State::failed).status.reason = "exit code 1, out of luck";
  TrialResult& pruned = sweep.add({"0.01", "4"}, 0, 6.0, State::pruned);
  pruned.status.reason = "rung at step 10: 4th of 4";
  pruned.status.step = 10;
  return sweep;
}

TEST_CASE("mean and sample deviation agree with two sums in long double") {
  std::mt19937_64 random(11);
  for (const double offset : {0.0, 3.0, 1e9, -1e-9})
    for (const size_t n : {size_t{2}, size_t{3}, size_t{17}, size_t{1000}}) {
      std::normal_distribution<double> values(offset, 0.25);
      std::vector<double> drawn(n);
      long double sum = 0, squares = 0;
      for (double& value : drawn) sum += value = values(random);
      const long double mean = sum / static_cast<long double>(n);
      for (const double value : drawn) squares += (value - mean) * (value - mean);
      const SeedStatistics statistics = seed_statistics(drawn);
      CHECK(statistics.n == static_cast<int64_t>(n));
      CHECK(statistics.mean == doctest::Approx(static_cast<double>(mean)).epsilon(1e-13));
      CHECK(*statistics.deviation ==
            doctest::Approx(static_cast<double>(std::sqrt(squares / static_cast<long double>(n - 1))))
                .epsilon(1e-9));
    }
  // Known: 2, 4, 4, 4, 5, 5, 7, 9 have mean 5 and sample variance 32/7.
  const double known[] = {2, 4, 4, 4, 5, 5, 7, 9};
  CHECK(seed_statistics(known).mean == 5);
  CHECK(*seed_statistics(known).deviation == doctest::Approx(std::sqrt(32.0 / 7)));
  CHECK(!seed_statistics(std::span(known, 1)).deviation);
  CHECK(seed_statistics({}).n == 0);
  const double equal[] = {0.1, 0.1, 0.1};
  CHECK(seed_statistics(equal).mean == 0.1);
  CHECK(*seed_statistics(equal).deviation == 0);
}

TEST_CASE("one row for each configuration, the best first, the unfinished below") {
  const MadeSweep sweep = small();
  const Table table = make_table(sweep.results);
  REQUIRE(table.rows.size() == 4);
  CHECK(table.ranked == 3);
  CHECK(table.rows[0].metric.n == 1);  // the failed seed does not count
  CHECK(table.rows[0].metric.mean == 1.5);
  CHECK(!table.rows[0].metric.deviation);
  CHECK(states_text(table.rows[0]) == "1 done, 1 failed");
  CHECK(table.rows[0].reason == "exit code 1, out of luck");
  CHECK(table.rows[1].metric.mean == 2.5);
  CHECK(*table.rows[1].metric.deviation == 0.25);
  CHECK(table.rows[1].tokens_per_second.mean == 1001);
  CHECK(*table.rows[1].best == 2.25);
  CHECK(table.rows[2].metric.mean == doctest::Approx(8.0 / 3));
  CHECK(*table.rows[2].metric.deviation == doctest::Approx(std::sqrt(7.0 / 12)));
  CHECK(!table.rows[3].ranked);
  CHECK(states_text(table.rows[3]) == "pruned");

  MadeSweep best_is_most = small();
  best_is_most.results.plan.definition.metric.goal = Metric::Goal::max;
  const Table maximized = make_table(best_is_most.results);
  CHECK(maximized.rows[0].metric.mean == doctest::Approx(8.0 / 3));
  CHECK(*maximized.rows[0].best == 3.5);
  CHECK(!maximized.rows[3].ranked);
}

TEST_CASE("csv has every digit, and quotes what needs it") {
  const MadeSweep sweep = small();
  CHECK(table_csv(make_table(sweep.results), sweep.results) ==
        "optimizer.lr,model.num_layers,loss,loss_sd,n,best,steps,tokens_per_second,memory_bytes,seconds,"
        "state,reason,trials\n"
        "0.01,2,1.5,,1,1.5,100,,,,\"1 done, 1 failed\",\"exit code 1, out of luck\",00000007 00000008\n"
        "0.001,2,2.5,0.25,3,2.25,100,1001,1048576,11,done,,00000001 00000002 00000003\n"
        "0.001,4,2.6666666666666665,0.7637626158259733,3,2,100,1001,1048576,11,done,,00000004 00000005 "
        "00000006\n"
        "0.01,4,6,,1,6,10,,,,pruned,rung at step 10: 4th of 4,00000009\n");
}

TEST_CASE("json says the same") {
  const MadeSweep sweep = small();
  const json table = capstan::json_of(table_json(make_table(sweep.results), sweep.results));
  CHECK(table["schema"] == "capstan.sweep-table/1");
  CHECK(table["metric"] == json{{"name", "loss"}, {"goal", "min"}, {"at", "last"}});
  REQUIRE(table["rows"].size() == 4);
  CHECK(table["rows"][1]["values"]["optimizer.lr"] == "0.001");
  CHECK(table["rows"][1]["sd"] == 0.25);
  CHECK(table["rows"][0]["sd"].is_null());
  CHECK(table["rows"][0]["states"] == json{{"done", 1}, {"failed", 1}});
  CHECK(table["rows"][3]["ranked"] == false);
}

static const std::string& configuration(const Table& table, size_t row) {
  return table.rows[row].configuration;
}

TEST_CASE("markdown and the table for people: a row of several seeds names none of them") {
  const MadeSweep sweep = small();
  const Table table = make_table(sweep.results);
  CHECK(table_markdown(table, sweep.results) ==
        "| # | lr | num_layers | loss | n | steps | tokens/s | memory | time | configuration | state |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n"
        "| 1 | 0.01 | 2 | 1.5 | 1 | 100 | - | - | - | " +
            configuration(table, 0) +
            " | 1 done, 1 failed |\n"
            "| 2 | 0.001 | 2 | 2.50 ± 0.25 | 3 | 100 | 1.00K | 1.00 MiB | 11s | " +
            configuration(table, 1) +
            " | done |\n"
            "| 3 | 0.001 | 4 | 2.67 ± 0.76 | 3 | 100 | 1.00K | 1.00 MiB | 11s | " +
            configuration(table, 2) +
            " | done |\n"
            "\n"
            "| lr | num_layers | loss | n | steps | tokens/s | memory | time | configuration | state | "
            "reason |\n"
            "|---|---|---|---|---|---|---|---|---|---|---|\n"
            "| 0.01 | 4 | 6 | 1 | 10 | - | - | - | " +
            configuration(table, 3) + " | pruned | rung at step 10: 4th of 4 |\n");
}

TEST_CASE("--top, --where and --group-by") {
  const MadeSweep sweep = small();
  const Results& results = sweep.results;
  const Table top = make_table(results, {.top = 2});
  CHECK(top.rows.size() == 2);
  CHECK(top.hidden == 2);

  const auto means = [&](const std::string& where) {
    std::vector<double> found;
    for (const TableRow& row : make_table(results, {.where = {where}}).rows) found.push_back(row.metric.mean);
    return found;
  };
  CHECK(means("lr=0.001") == std::vector<double>{2.5, 8.0 / 3});
  CHECK(means("optimizer.lr==1e-3 & num_layers=2") == std::vector<double>{2.5});
  CHECK(means("lr=1e-3,0.01 && num_layers!=2") == std::vector<double>{8.0 / 3, 6});
  CHECK(means("loss<2.6") == std::vector<double>{1.5, 2.5});
  CHECK(means("metric >= 2.5 & state=done") == std::vector<double>{2.5, 8.0 / 3});
  CHECK(means("n>1&sd<0.5") == std::vector<double>{2.5});
  CHECK(means("seed=0") == std::vector<double>{1.5, 2.0, 2.5, 6});
  CHECK(means("state=pruned") == std::vector<double>{6});
  CHECK(means("lr=77").empty());
  CHECK(make_table(results, {.where = {"lr=0.001", "loss<2.6"}}).rows.size() == 1);
  CHECK(holds(error_of([&] { means("learning=2"); }), "the condition has an unknown name: `learning`"));
  CHECK(holds(error_of([&] { means("num_layer=2"); }), "did you mean `num_layers`?"));
  CHECK(holds(error_of([&] { means("lr"); }), "`lr` is not a condition"));
  CHECK(holds(error_of([&] { means("lr>"); }), "is not a condition"));
  CHECK(holds(error_of([&] { means("lr>much"); }), "`much` is not a number"));

  const Table grouped = make_table(results, {.group_by = {"num_layers"}});
  REQUIRE(grouped.rows.size() == 2);
  CHECK(grouped.keys == std::vector<std::string>{"model.num_layers"});
  CHECK(grouped.rows[0].metric.n == 4);  // of layers 2: 2.5, 2.75, 2.25, 1.5
  CHECK(grouped.rows[0].metric.mean == 2.25);
  CHECK(*grouped.rows[0].metric.deviation == doctest::Approx(std::sqrt(0.875 / 3)));
  CHECK(*grouped.rows[0].best == 1.5);
  CHECK(results.plan.trials[*grouped.rows[0].best_trial].id == "00000007");
  CHECK(make_table(results, {.group_by = {"lr", "optimizer.lr"}}).rows.size() == 2);
  CHECK(
      holds(error_of([&] { make_table(results, {.group_by = {"layers"}}); }), "did you mean `num_layers`?"));
}

TEST_CASE("a finished trial without a finite metric is below, with the reason") {
  MadeSweep sweep({{.path = "optimizer.lr", .values = {"1", "2"}}});
  sweep.add({"1"}, std::nullopt, std::nullopt);
  sweep.add({"2"}, std::nullopt, 3.0);
  const Table table = make_table(sweep.results);
  REQUIRE(table.rows.size() == 2);
  CHECK(table.rows[0].metric.mean == 3.0);
  CHECK(table.rows[1].reason == "no finite `loss`");
}

TEST_CASE("names of metrics on the command line") {
  const Metric usual;
  CHECK(metric_of("val/loss", usual).name == "val/loss");
  CHECK(metric_of("val/loss:best", usual).at == "best");
  CHECK(metric_of(" max accuracy : last", usual).goal == Metric::Goal::max);
  CHECK(metric_of("loss:mean(last 20)", usual).window == 20);
  for (const char* wrong :
       {"", ":best", "loss:", "loss:worst", "loss:mean", "loss:mean(last 0)", "loss:mean(last x)"}) {
    CAPTURE(wrong);
    CHECK(holds(error_of([&] { metric_of(wrong, usual); }), "is not a metric"));
  }
}

TEST_CASE("short names tell paths apart") {
  const auto names = [](std::vector<std::string> paths) { return short_names(paths); };
  CHECK(names({"optimizer.lr", "model.num_layers"}) == std::vector<std::string>{"lr", "num_layers"});
  CHECK(names({"a.b.x", "a.c.x", "x"}) == std::vector<std::string>{"b.x", "c.x", "x"});
  CHECK(names({"seed", "rng.seed"}) == std::vector<std::string>{"seed", "rng.seed"});
  CHECK(names({"dataset.blend[0].weight", "lr"}) == std::vector<std::string>{"blend[0].weight", "lr"});
}

TEST_CASE("variance explained: a sum of effects splits exactly, whatever their order") {
  MadeSweep sweep({{.path = "a", .values = {"1", "2", "3"}},
                   {.path = "b", .values = {"1", "2"}},
                   {.path = "c", .values = {"1", "2"}}});
  // a adds -1, 0, 1; b adds ∓2; c nothing: variances 2/3 and 4.
  for (int a = 0; a < 3; ++a)
    for (int b = 0; b < 2; ++b)
      for (int c = 0; c < 2; ++c)
        sweep.add({std::to_string(a + 1), std::to_string(b + 1), std::to_string(c + 1)}, std::nullopt,
                  5.0 + (a - 1) + 4 * b - 2);
  const auto explained = explained_variance(sweep.results);
  REQUIRE(explained);
  CHECK(explained->n == 12);
  CHECK(explained->axes[0].paths == std::vector<std::string>{"b"});
  CHECK(explained->axes[0].importance == doctest::Approx(6.0 / 7));
  CHECK(explained->axes[1].importance == doctest::Approx(1.0 / 7));
  CHECK(explained->axes[2].importance == doctest::Approx(0.0));
  CHECK(explained->rest == doctest::Approx(0.0));

  // Only together: an exclusive or.
  MadeSweep both({{.path = "a", .values = {"1", "2"}}, {.path = "b", .values = {"1", "2"}}});
  for (int i = 0; i < 4; ++i)
    both.add({std::to_string(i / 2), std::to_string(i % 2)}, std::nullopt, (i / 2) ^ (i % 2));
  CHECK(explained_variance(both.results)->rest == doctest::Approx(1.0));
  // Linked paths are one axis.
  both.results.plan.definition.link = {{{"a", "0"}, {"b", "0"}}};
  CHECK(explained_variance(both.results)->axes.size() == 1);
  CHECK(explained_variance(both.results)->axes[0].importance == doctest::Approx(1.0));
  // Not for points that were drawn, nor where nothing differs.
  both.results.plan.definition.method = Method::random;
  CHECK(!explained_variance(both.results));
  MadeSweep flat({{.path = "a", .values = {"1", "2"}}});
  for (int i = 0; i < 4; ++i) flat.add({std::to_string(i % 2)}, i, 1.0);
  CHECK(!explained_variance(flat.results));
}

TEST_CASE("invalid trials stand in what programs read, with the reason") {
  MadeSweep sweep = small();
  sweep.results.plan.invalid.push_back({{{"optimizer.lr", "-1"}, {"model.num_layers", "2"}},
                                        3,
                                        {"error[C0202]: `optimizer.lr` is -1", "more"}});
  const Table table = make_table(sweep.results);
  CHECK(table_csv(table, sweep.results)
            .ends_with("\n-1,2,,,,,,,,,invalid,error[C0202]: `optimizer.lr` is -1; more,\n"));
  const json all = capstan::json_of(table_json(table, sweep.results));
  REQUIRE(all["invalid"].size() == 1);
  CHECK(all["invalid"][0]["values"]["optimizer.lr"] == "-1");
  CHECK(all["invalid"][0]["seed"] == 3);
  CHECK(all["invalid"][0]["reasons"][1] == "more");
  CHECK(make_table(sweep.results, {.where = {"state=invalid"}}).invalid.size() == 1);
  CHECK(make_table(sweep.results, {.where = {"lr>0"}}).invalid.empty());
  CHECK(make_table(sweep.results, {.where = {"loss<3"}}).invalid.empty());
  CHECK(make_table(sweep.results, {.top = 2}).invalid.empty());
}
