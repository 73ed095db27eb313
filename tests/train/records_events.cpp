#include "train/records/events.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <limits>

#include "records_helpers.hpp"
#include "support/paths.hpp"
#include "train/records/metrics.hpp"

using namespace capstan;
using namespace capstan::records;
using namespace capstan::records::test;

TEST_CASE("crc32c equals the known answers") {
  CHECK(crc32c("123456789") == 0xE3069283u);
  CHECK(crc32c("") == 0);
  CHECK(crc32c(std::string(32, '\0')) == 0x8A9136AAu);  // RFC 3720 B.4
  CHECK(crc32c(std::string(32, '\xFF')) == 0x62A8AB43u);
}

TEST_CASE("events are TensorBoard's own bytes") {
  // tests/golden/make_checkpoint_fixtures.py wrote the same events with TensorBoard's classes.
  const std::vector<Scalar> first{{"loss", 2.5}}, second{{"loss", 2.25}, {"lm/grad norm é", 1e-30}},
      third{{"loss", std::numeric_limits<double>::infinity()}, {"zero", 0.0}}, fourth{{"loss", 2.0}};
  const std::vector<Histogram> histograms{{"loads", {0.5, 2.5, 0.0, 1.0}}, {"equal", {1.0, 1.0, 1.0}}};
  const std::string bytes = frame_record(version_event(1.0)) + frame_record(session_start_event(1.25, 100)) +
                            frame_record(summary_event(1.5, 101, first)) +
                            frame_record(summary_event(2.5, int64_t{1} << 40, second)) +
                            frame_record(summary_event(3.5, 0, third)) +
                            frame_record(summary_event(4.5, 102, fourth, histograms));
  CHECK(bytes == slurp(fs::path(capstan::test::kSourceDirectory) / "tests/golden/checkpoint/events.golden"));
}

TEST_CASE("tags cannot break out of their line") {
  const auto event = [](const std::string& tag) {
    const std::vector<Scalar> scalars{{tag, 1.0}};
    return summary_event(1.0, 1, scalars);
  };
  CHECK(event("a\nb\"c\x7F") == event("a_b\"c_"));
  CHECK(event("bad\xFFutf") == event("bad_utf"));
  CHECK(event("cut\xC3") == event("cut_"));
  CHECK(event(std::string(100000, 't')) == event(std::string(512, 't')));
  CHECK(event(std::string(511, 't') + "é") == event(std::string(511, 't')));
}

TEST_CASE("a file begins with the version and grows by complete records") {
  const TemporaryDirectory directory;
  const std::vector<Scalar> scalars{{"loss", 2.5}};
  const fs::path nested = directory.path() / "tensorboard";
  EventsWriter writer(nested, 1.0);
  CHECK(writer.path().filename().string().starts_with("events.out.tfevents.0000000001."));
  CHECK(slurp(writer.path()) == frame_record(version_event(1.0)));
  writer.write(7, 2.0, scalars);
  writer.write(8, 2.0, {});  // nothing to say
  CHECK(slurp(writer.path()) ==
        frame_record(version_event(1.0)) + frame_record(summary_event(2.0, 7, scalars)));
  const EventsWriter resumed(nested, 1.0, 5);  // the same second: another file
  CHECK(resumed.path() != writer.path());
  CHECK(slurp(resumed.path()) ==
        frame_record(version_event(1.0)) + frame_record(session_start_event(1.0, 6)));
  spill(directory.path() / "file", "");
  CHECK(holds(error_of([&] { EventsWriter(directory.path() / "file", 1.0); }), "cannot create"));
}

TEST_CASE("a sample for scripts/peers/check_events.py") {
  const char* out = std::getenv("CAPSTAN_PEER_OUT");
  if (!out) return;
  // A run and its resume from step 30, with metrics.jsonl as the truth.
  const fs::path run = fs::path(out) / "events";
  fs::remove_all(run);
  fs::create_directories(run);
  for (int part = 0; part < 2; ++part) {
    if (part == 1) truncate_after_step(run / "metrics.jsonl", 30);
    MetricsWriter metrics(run / "metrics.jsonl");
    EventsWriter events(run, 1000.0 + 100 * part, part ? std::optional<int64_t>(30) : std::nullopt);
    for (int64_t step = part ? 31 : 1; step <= (part ? 60 : 50); ++step) {
      const double loss = 10 / std::sqrt(static_cast<double>(step)) + part;
      metrics.write(
          MetricsRow(step).number("loss", loss).number("grad_norm", 1.0 / static_cast<double>(step)));
      const std::vector<Scalar> scalars{{"loss", loss}, {"grad_norm", 1.0 / static_cast<double>(step)}};
      events.write(step, 1000.0 + 100 * part + static_cast<double>(step), scalars);
    }
  }
}
