#include "data/inspect.hpp"

#include <doctest/doctest.h>

#include "base/json.hpp"
#include "dataset_helpers.hpp"

using namespace capstan;
using namespace capstan::data;
using namespace capstan::data::testing;

TEST_CASE("counts, lengths and samples of a dataset") {
  InspectOptions options;
  options.samples = 2;
  options.sample_tokens = 4;
  options.scan_tokens = true;
  const auto report = inspect(fixture("small_u16.idx"), options);
  CHECK(report.prefix == fixture("small_u16"));
  CHECK(report.documents == 5);
  CHECK(report.empty_documents == 2);
  CHECK(report.sequences == 4);
  CHECK(report.tokens == 11);
  CHECK(report.shortest == 0);
  CHECK(report.longest == 5);
  CHECK(report.mean == 2.2);
  CHECK(report.largest_token == 65499);
  CHECK(report.length_counts[0] == 2);  // empty
  CHECK(report.length_counts[2] == 2);  // 2 and 3
  CHECK(report.length_counts[3] == 1);  // 4 to 7
  REQUIRE(report.samples.size() == 2);
  CHECK(report.samples[1].document == 2);
  CHECK(report.samples[1].tokens == 3);
  CHECK(report.samples[1].ids == std::vector<int32_t>{4, 5, 6});
  CHECK(report.samples[1].text.empty());

  const auto text = to_text_report(report);
  CHECK(text.find("documents     5 (2 empty)") != std::string::npos);
  CHECK(text.find("65 499") != std::string::npos);
  CHECK(text.find("2 - 3") != std::string::npos);
  const auto json = capstan::json_of(to_json_report(report));
  CHECK(json["tokens"] == 11);
  CHECK(json["token_type"] == "u16");
  CHECK(json["lengths"].size() == 3);
  CHECK(json["samples"][0]["ids"].size() == 3);
}

TEST_CASE("a text file is told from the prefix of a dataset") {
  const TempDirectory directory;
  write_text(directory / "corpus.txt", "some text\n");
  const std::string error = error_of([&] { inspect(directory / "corpus.txt", {}); });
  CHECK(error.find("corpus.txt` is a file, not the prefix of a dataset") != std::string::npos);
}

TEST_CASE("an empty dataset can be looked at, a damaged one is refused") {
  const TempDirectory directory;
  write_dataset(directory / "none", {});
  CHECK(to_text_report(inspect(directory / "none")).find("documents     0") != std::string::npos);
  write_text(directory / "bad.idx", "MMIDIDX");
  write_text(directory / "bad.bin", "");
  CHECK(error_of([&] { inspect(directory / "bad"); }).find("bad.idx: offset 0") != std::string::npos);
}
