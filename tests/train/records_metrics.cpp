#include "train/records/metrics.hpp"

#include <doctest/doctest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <random>

#include "base/json.hpp"
#include "records_helpers.hpp"

using namespace capstan;
using namespace capstan::records;
using namespace capstan::records::test;

static std::vector<ReadRow> rows_of(const fs::path& path, int64_t* skipped = nullptr) {
  std::vector<ReadRow> rows;
  const int64_t count = read_metrics(path, [&](const ReadRow& row) { rows.push_back(row); });
  if (skipped) *skipped = count;
  return rows;
}

TEST_CASE("a row is one JSON object; what is not finite is null") {
  const MetricsRow row = MetricsRow(12, "note")
                             .number("loss", 2.5)
                             .number("bad", std::nan(""))
                             .number("worse", -std::numeric_limits<double>::infinity())
                             .number("small", 0.1f)
                             .numbers("list", std::vector<double>{0.25, std::nan(""), 2})
                             .integer("big", INT64_MIN)
                             .boolean("yes", true)
                             .text("why", "a \"b\"\n\x01\xFF é");
  CHECK(row.line() ==
        "{\"step\": 12, \"event\": \"note\", \"loss\": 2.5, \"bad\": null, \"worse\": null, \"small\": 0.1, "
        "\"list\": [0.25, null, 2], \"big\": -9223372036854775808, \"yes\": true, \"why\": \"a "
        "\\\"b\\\"\\n\\u0001\xEF\xBF\xBD é\"}\n");
  const auto parsed = capstan::json_of(row.line());
  CHECK(parsed["big"] == INT64_MIN);

  const TemporaryDirectory directory;
  MetricsWriter(directory.path() / "metrics.jsonl").write(row);
  const ReadRow read = rows_of(directory.path() / "metrics.jsonl").at(0);
  CHECK(read.number("small") == doctest::Approx(0.1));
  CHECK(std::isnan(read.number("bad")));
  REQUIRE(read.lists.size() == 1);
  CHECK(read.lists[0].first == "list");
  CHECK(read.lists[0].second.at(0) == 0.25);
  CHECK(std::isnan(read.lists[0].second.at(1)));
  CHECK(read.lists[0].second.at(2) == 2);
}

TEST_CASE("memory of a row includes the scratch memory of kernels, which earlier versions count by itself") {
  ReadRow row;
  CHECK(std::isnan(row.memory_bytes()));
  row.numbers = {{"kernel_scratch_bytes", 5}};
  CHECK(std::isnan(row.memory_bytes()));
  row.numbers.emplace_back("memory_bytes", 7);
  CHECK(row.memory_bytes() == 12);
  row.numbers = {{"memory_bytes", 7}};
  CHECK(row.memory_bytes() == 7);
  row.numbers.emplace_back("kernel_scratch_bytes", std::nan(""));
  CHECK(row.memory_bytes() == 7);
}

TEST_CASE("numbers read back as the same bits") {
  std::mt19937_64 random(3);
  for (int i = 0; i < 20000; ++i) {
    const double value = std::bit_cast<double>(random());
    const float narrow = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isfinite(value) || !std::isfinite(narrow)) continue;
    const auto parsed = capstan::json_of(MetricsRow(0).number("a", value).number("b", narrow).line());
    REQUIRE(std::bit_cast<uint64_t>(parsed["a"].get<double>()) == std::bit_cast<uint64_t>(value));
    REQUIRE(std::bit_cast<uint32_t>(static_cast<float>(parsed["b"].get<double>())) ==
            std::bit_cast<uint32_t>(narrow));
  }
}

TEST_CASE("rows are there at once, in order, and are appended to") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "metrics.jsonl";
  CHECK(!last_logged_step(path));
  {
    MetricsWriter writer(path);
    writer.write(MetricsRow(1).number("loss", 3.0));
    CHECK(rows_of(path).size() == 1);
    writer.write(MetricsRow(2).number("loss", 2.0));
    writer.sync();
  }
  MetricsWriter writer(path);
  writer.write(MetricsRow(2, "stopped").text("reason", "SIGTERM"));
  const auto rows = rows_of(path);
  REQUIRE(rows.size() == 3);
  CHECK(rows[1].step == 2);
  CHECK(rows[1].number("loss") == 2.0);
  CHECK(std::isnan(rows[1].number("accuracy")));
  CHECK(rows[2].event == "stopped");
  CHECK(rows[2].texts[0].second == "SIGTERM");
  CHECK(last_logged_step(path)->number("loss") == 2.0);
  CHECK(holds(error_of([&] { rows_of(directory.path() / "none"); }), "not found: "));
}

TEST_CASE("a resume truncates the file to its step, and a torn line off") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "metrics.jsonl";
  CHECK(truncate_after_step(path, 5) == 0);
  std::string text, kept;
  for (int64_t step = 1; step <= 10; ++step) {
    text += MetricsRow(step).number("loss", 1.0 / static_cast<double>(step)).line();
    if (step == 5)
      text += MetricsRow(5, "validation").number("loss", 1.0).line() + "{\"event\": \"saved\"}\n";
    if (step == 5) kept = text;
  }
  for (const std::string tail : {"", "{\"step\": 11, \"lo", "{\"step\": 2}"}) {
    spill(path, text + tail);
    CHECK(truncate_after_step(path, 10) == (tail.empty() ? 0 : 1));
    CHECK(slurp(path) == text);
    spill(path, text + tail);
    CHECK(truncate_after_step(path, 5) == (tail.empty() ? 5 : 6));
    CHECK(slurp(path) == kept);
  }
  CHECK(truncate_after_step(path, 0) == 7);
  CHECK(slurp(path).empty());
  CHECK(truncate_after_step(path, 0) == 0);
  // A damaged row that claims a later step goes alone: the rows after it are the run's.
  std::string damaged, without;
  for (int64_t step = 1; step <= 10; ++step) {
    const std::string row = MetricsRow(step == 4 ? 94 : step).number("loss", 1.0).line();
    damaged += row;
    if (step != 4 && step <= 8) without += row;
  }
  spill(path, damaged);
  CHECK(truncate_after_step(path, 8) == 3);
  CHECK(slurp(path) == without);
  // Every truncation of the file, wherever a crash left it, gives a prefix of complete rows.
  for (size_t size = 0; size <= text.size(); ++size) {
    spill(path, text.substr(0, size));
    truncate_after_step(path, 100);
    const size_t end = text.rfind('\n', size == 0 ? 0 : size - 1);
    CHECK(slurp(path) == (size == 0 || end == std::string::npos ? "" : text.substr(0, end + 1)));
  }
}

TEST_CASE("damaged lines are skipped and counted") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "metrics.jsonl";
  spill(path,
        "{\"step\": 1, \"loss\": 2}\n\xFF\xFE\n[1]\n{\"step\": \"x\", \"loss\": null}\n\n{\"step\": 3, "
        "\"loss\": 1e999}\n" +
            std::string(100000, '[') + "\n{\"step\": 4, \"loss\": 1.5, \"deep\": {\"a\": []}}\n{\"step\": 5");
  int64_t skipped = 0;
  const auto rows = rows_of(path, &skipped);
  CHECK(skipped == 5);
  REQUIRE(rows.size() == 3);
  CHECK(!rows[1].step);
  CHECK(std::isnan(rows[1].number("loss")));
  CHECK(rows[2].step == 4);
  CHECK(last_logged_step(path)->step == 4);
}

TEST_CASE("the last step of a long file is found from its end") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "metrics.jsonl";
  std::string text;
  for (int64_t step = 1; step <= 20000; ++step)
    text += MetricsRow(step).number("loss", 1.0 / static_cast<double>(step)).line();
  spill(path, text + MetricsRow(20000, "finished").line());
  CHECK(last_logged_step(path)->step == 20000);
}

TEST_CASE("a full disk leaves complete rows, and writing goes on when there is space again") {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "metrics.jsonl";
  MetricsWriter writer(path);
  writer.write(MetricsRow(1).number("loss", 3.0));
  const std::string before = slurp(path);
  struct rlimit old {};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &old) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit small = old;
  small.rlim_cur = before.size() + 5;  // the next row fits only in part
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  const std::string text = error_of([&] { writer.write(MetricsRow(2).number("loss", 2.0)); });
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &old) == 0);
  std::signal(SIGXFSZ, handler);
  CHECK(holds(text, "cannot write"));
  CHECK(slurp(path) == before);
  writer.write(MetricsRow(3).number("loss", 1.0));
  CHECK(rows_of(path).size() == 2);
}
