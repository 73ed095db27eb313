// Estimated memory, resident memory and limits of runs of two ranks.
#include <doctest/doctest.h>

#include "base/json.hpp"
#include "memory.hpp"

using namespace capstan::test;

TEST_CASE("resident memory of a rank is what the estimate says") {
  const ScratchDirectory scratch;
  const Words words = recipe({"dist.tensor_model_parallel_size=2", "dist.sequence_parallel=true",
                              "model.vocab_size=32768", "model.hidden_size=768"});
  const double estimated = estimated_mib(scratch, words, {"--step", "--ranks", "2"});
  const Finished trained = in(scratch, "train", words, {"--run-dir", "r", "--nproc", "2"});
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  check_resident(trained.resident_mib, estimated);
}

TEST_CASE("check, show --step and train refuse alike what a limit does not allow") {
  const ScratchDirectory scratch;
  const auto refusal = [](const std::string& text) {
    const size_t at = text.find("error: a step needs ");
    return at == std::string::npos ? text : text.substr(at, text.find('\n', at) - at);
  };
  for (const int stages : {1, 2}) {
    Words words = tiny_recipe({"train.threads=1", "model.num_layers=2", "resilience.memory_limit=100KiB"});
    Words more, train{"--run-dir", "r"};
    if (stages == 2) {
      words.push_back("dist.pipeline_model_parallel_size=2");
      more = {"--ranks", "2"};
      train = {"--run-dir", "r", "--nproc", "2"};
    }
    const Finished checked = in(scratch, "check", words, more);
    CHECK_MESSAGE(checked.code == 3, checked.err);
    CHECK(checked.out.empty());
    CHECK_MESSAGE(contains(checked.err, "resilience.memory_limit allows 100.0 KiB"), checked.err);
    CHECK(contains(checked.err, "on rank ") == (stages == 2));
    Words step = more;
    step.insert(step.begin(), "--step");
    const Finished shown = in(scratch, "show", words, step);
    CHECK(shown.code == 3);
    CHECK(contains(shown.out, "largest: rank"));
    CHECK(refusal(shown.err) == refusal(checked.err));
    const Finished trained = in(scratch, "train", words, train);
    CHECK_MESSAGE(trained.code == 3, trained.err);
    CHECK_MESSAGE(refusal(trained.err) == refusal(checked.err), trained.err);
    Words as_json = more;
    as_json.insert(as_json.begin(), "--json");
    const Finished machine = in(scratch, "check", words, as_json);
    CHECK(machine.code == 3);
    CHECK(contains(refusal(checked.err), capstan::json_of(machine.out)["does_not_fit"]["reason"]));
    CHECK(capstan::json_of(machine.out)["ok"] == false);
    words.push_back("resilience.memory_limit=100MiB");
    const Finished enough = in(scratch, "check", words, more);
    CHECK_MESSAGE(enough.code == 0, enough.err);
    CHECK_MESSAGE(contains(enough.out, "no errors"), enough.out);
    CHECK(in(scratch, "show", words, step).code == 0);
  }
}
