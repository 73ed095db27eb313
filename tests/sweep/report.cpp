// The page of a sweep: what is in it, how large it gets, and that no text of a sweep becomes markup or
// script.
#include "sweep/report.hpp"
#include "base/json.hpp"

#include <doctest/doctest.h>

#include <limits>

#include "made_results.hpp"
#include "sweep/report_page.hpp"

using namespace capstan;
using namespace capstan::sweep;
using namespace capstan::sweep::test;
using nlohmann::json;

static size_t occurrences(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

// The JSON that the script of the page reads.
static json data_of(const std::string& page) {
  const std::string begin = "id=\"data\">";
  const size_t at = page.find(begin) + begin.size();
  return capstan::json_of(page.substr(at, page.find("</script>", at) - at));
}

TEST_CASE("the page holds every trial, thinned curves and the best recipe") {
  const Results results = many_trials(24, 1000);
  const std::string page = report_html(results, "# the recipe\nname: made\n", "sweeps/made");
  CHECK(page.starts_with("<!DOCTYPE html>"));
  const json data = data_of(page);
  REQUIRE(data["trials"].size() == 24);
  const size_t best = best_configuration(results)->trials.at(0);
  for (const TrialResult& trial : results.trials)
    if (trial.status.state == State::done) CHECK(*trial.status.metric >= *results.trials[best].status.metric);
  CHECK(data["best"]["trials"] == json{best});
  CHECK(data["best"]["planned"] == 1);
  CHECK(data["best"]["recipe"] == "# the recipe\nname: made\n");
  CHECK(data["best"]["command"] ==
        "capstan train sweeps/made/trials/" + results.plan.trials[best].id + "/recipe.yaml");
  CHECK(data["keys"][0] == json{{"path", "optimizer.lr"}, {"name", "lr"}, {"log", true}});
  CHECK(data["keys"][1]["log"] == false);
  for (size_t i = 0; i < 24; ++i) {
    const json& trial = data["trials"][i];
    CHECK(trial["s"].size() == trial["v"].size());
    CHECK(trial["s"].size() <= 302);
    CHECK(trial["s"].size() >= 200);
    // The ends stay, and the lowest and highest of all.
    CHECK(trial["s"].front() == results.trials[i].curve.front().step);
    CHECK(trial["s"].back() == results.trials[i].curve.back().step);
    double lowest = 1e9;
    for (const CurvePoint& point : results.trials[i].curve) lowest = std::min(lowest, point.value);
    double kept = 1e9;
    for (const double value : trial["v"]) kept = std::min(kept, value);
    CHECK(kept == doctest::Approx(lowest).epsilon(1e-5));
  }
  CHECK(page.find("http") == page.find("http-equiv"));  // nothing is fetched
  CHECK(occurrences(page, "http") == 1);
}

TEST_CASE("the best is a configuration, by its mean over the seeds, and no single lucky seed") {
  MadeSweep sweep({{.path = "optimizer.lr", .values = {"1e-3", "1e-2"}}});
  sweep.add({"1e-3"}, 1, 3.0);
  sweep.add({"1e-2"}, 1, 2.0);  // the best trial of all
  sweep.add({"1e-3"}, 2, 3.2);
  sweep.add({"1e-2"}, 2, 5.0);
  sweep.add({"1e-3"}, 3, std::nullopt, State::failed);
  const auto best = best_configuration(sweep.results);
  REQUIRE(best);
  CHECK(best->trials == std::vector<size_t>{0, 2});
  CHECK(best->planned == 3);
  CHECK(best->metric.mean == doctest::Approx(3.1));
  CHECK(*best->metric.deviation == doctest::Approx(0.1414213562));
  const json data = data_of(report_html(sweep.results, "", "s"));
  CHECK(data["best"]["configuration"] == sweep.results.plan.trials[0].configuration);
  CHECK(data["best"]["text"] == "3.10 ± 0.14");
  CHECK(data["best"]["trials"] == json{0, 2});
  CHECK(data["best"]["seeds"] == json{1, 2});
  CHECK(data["best"]["planned"] == 3);
  CHECK(data["importance"]["axes"][0]["importance"].is_number());
  CHECK(data["best"]["metric"].get<double>() == doctest::Approx(3.1));
  CHECK(data["best"]["command"] ==
        "capstan train s/trials/" + sweep.results.plan.trials[0].id + "/recipe.yaml");
  CHECK(report_body().find("The best trial") == std::string_view::npos);
}

TEST_CASE("pages of many trials stay small") {
  CHECK(report_html(many_trials(24, 20000), "", "s").size() < 1'000'000);
  CHECK(report_html(many_trials(500, 2000), "", "s").size() < 5'000'000);
  CHECK(report_html(many_trials(5000, 300), "", "s").size() < 5'000'000);
}

TEST_CASE("names, values, reasons and recipes are text, whatever is in them") {
  const std::string hostile =
      "</script><script>alert(\"1\")</script><!-- & ' \" \\ {{script}} \xE2\x80\xA8 \xFF";
  MadeSweep sweep({{.path = "name", .values = {hostile, "b"}}});
  sweep.results.plan.name = hostile;
  sweep.results.plan.definition.metric.name = "loss<b>";
  sweep.add({hostile}, 1, 2.0);
  TrialResult& failed = sweep.add({"b"}, 1, std::nullopt, State::failed);
  failed.status.reason = hostile;
  failed.curve = {{1, std::numeric_limits<double>::quiet_NaN()}, {2, 1.0}};
  const std::string page = report_html(sweep.results, hostile, hostile);
  CHECK(occurrences(page, "<script") == 2);
  CHECK(occurrences(page, "</script>") == 2);
  CHECK(occurrences(page, "alert") ==
        occurrences(page, "u003cscript>alert") + 1);  // the title has its own escapes
  CHECK(page.find("<title>&lt;/script>&lt;script>alert(&quot;1&quot;)") != std::string::npos);
  const json data = data_of(page);
  CHECK(data["best"]["recipe"].get<std::string>().starts_with("</script><script>alert(\"1\")"));
  CHECK(data["trials"][0]["values"][0].get<std::string>().find("{{script}}") != std::string::npos);
  CHECK(data["trials"][1]["s"] == json{2});
}

TEST_CASE("a sweep without a result has a page too") {
  MadeSweep sweep({{.path = "optimizer.lr", .values = {"1e-3", "1e-2"}}});
  sweep.add({"1e-3"}, std::nullopt, std::nullopt, State::pending);
  sweep.add({"1e-2"}, std::nullopt, std::nullopt, State::running);
  const json data = data_of(report_html(sweep.results, "", "s"));
  CHECK(data["best"].is_null());
  CHECK(data["ranked"].is_null());
  CHECK(data["others"].size() == 3);
  CHECK(data["keys"][0]["log"] == true);
}
