// A recipe for users on the CUDA kernels, which the host runs: the CPU's losses, a resume to the bit, and two
// ranks whose transfers block and match as NCCL's.
#include <doctest/doctest.h>

#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "process.hpp"

using namespace capstan::test;

namespace {

constexpr int kFinished = 0, kStopped = 75;

// Three steps of a small quickstart, in fp32. Returns what the program writes.
std::string train_quickstart(const ScratchDirectory& scratch, const std::string& run_dir,
                             const std::vector<std::string>& more, int exit_code = kFinished) {
  Launch launch;
  launch.directory = scratch.path();
  launch.arguments = {"train",
                      "quickstart",
                      "dataset=mock",
                      "tokenizer=none",
                      "model.num_layers=2",
                      "model.hidden_size=32",
                      "model.ffn_hidden_size=88",
                      "model.num_attention_heads=4",
                      "model.num_query_groups=2",
                      "model.seq_length=32",
                      "model.vocab_size=96",
                      "train.train_iters=3",
                      "train.threads=1",
                      "validation.eval_interval=null",
                      "logger.log_interval=1",
                      "--run-dir",
                      run_dir};
  launch.arguments.insert(launch.arguments.end(), more.begin(), more.end());
  const Finished finished = run(launch);
  REQUIRE_MESSAGE(finished.code == exit_code, finished.err);
  return finished.err;
}

// Of each step: loss and gradient norm.
std::vector<double> numbers_of(const ScratchDirectory& scratch, const std::string& run_dir) {
  std::vector<double> numbers;
  std::istringstream rows(read_text(scratch.file(run_dir + "/metrics.jsonl")));
  for (std::string line; std::getline(rows, line);) {
    const auto row = capstan::json_of(line);
    if (row.contains("event")) continue;
    numbers.push_back(row["loss"].get<double>());
    numbers.push_back(row["grad_norm"].get<double>());
  }
  return numbers;
}

void check_near(const std::vector<double>& found, const std::vector<double>& expected) {
  REQUIRE(found.size() == 6);
  REQUIRE(expected.size() == 6);
  for (size_t i = 0; i < found.size(); ++i) CHECK(std::abs(found[i] / expected[i] - 1) < 1e-4);
}

// The part of a line of the log between `begin` and `end`.
std::string between(const std::string& text, const std::string& begin, const std::string& end) {
  const size_t from = text.find(begin);
  REQUIRE(from != std::string::npos);
  return text.substr(from + begin.size(), text.find(end, from) - from - begin.size());
}

}  // namespace

TEST_CASE("train.device=simulated: the CPU's losses, the estimated memory, and a resume to the bit") {
  const ScratchDirectory scratch;
  train_quickstart(scratch, "cpu", {"train.device=cpu"});
  const std::string log = train_quickstart(scratch, "full", {"train.device=simulated"});
  CHECK_MESSAGE(contains(log, " on simulated 0 (CUDA kernels on the host, compute capability 9.0): 1 rank"),
                log);
  CHECK(between(log, "memory measured: ", ";") + "; on" == between(log, "memory estimated: ", " the host:"));
  const auto full = numbers_of(scratch, "full");
  check_near(full, numbers_of(scratch, "cpu"));

  train_quickstart(scratch, "resumed", {"train.device=simulated", "train.exit_interval=2"}, kStopped);
  train_quickstart(scratch, "resumed", {"train.device=simulated", "--resume"});
  CHECK(numbers_of(scratch, "resumed") == full);
}

TEST_CASE("train.device=simulated: two ranks with transfers that block and match as NCCL's") {
  const ScratchDirectory scratch;
  train_quickstart(scratch, "cpu", {"train.device=cpu"});
  train_quickstart(scratch, "ranks",
                   {"--nproc", "2", "train.device=simulated", "dist.distributed_backend=nccl_stand_in",
                    "dist.tp=2", "dist.sp=true"});
  check_near(numbers_of(scratch, "ranks"), numbers_of(scratch, "cpu"));
}

TEST_CASE("bench and trace on a device with queues take its times") {
  const ScratchDirectory scratch;
  const auto on_device = [&](std::vector<std::string> arguments) {
    Launch launch;
    launch.directory = scratch.path();
    for (const char* more :
         {"train.device=simulated", "dataset=mock", "tokenizer=none", "model.num_layers=1",
          "model.hidden_size=32", "model.ffn_hidden_size=88", "model.num_attention_heads=4",
          "model.num_query_groups=2", "model.seq_length=32", "model.vocab_size=96", "train.threads=1",
          "train.micro_batch_size=1", "train.global_batch_size=1", "mixed_precision=bf16_mixed"})
      arguments.emplace_back(more);
    launch.arguments = std::move(arguments);
    const Finished finished = run(launch);
    REQUIRE_MESSAGE(finished.code == 0, finished.err);
    return finished.out;
  };
  const auto bench =
      capstan::json_of(on_device({"bench", "step", "quickstart residual + norm", "quickstart qkv forward",
                                  "--seconds", "0.01", "--json", "-r", "quickstart"}));
  CHECK(bench["device"].get<std::string>().starts_with("simulated 0 ("));
  CHECK(bench["gemm_gflops"].get<double>() > 0);
  CHECK(bench["step_gemm_gflops"].get<double>() > 0);
  CHECK(bench["copy_gbps"].get<double>() > 0);
  REQUIRE(bench["kernels"].size() == 2);
  for (const auto& kernel : bench["kernels"]) {
    CHECK(kernel["rate"].get<double>() > 0);
    CHECK(kernel["fraction_of_peak"].get<double>() > 0);
    // A peak of the host is none of the device.
    CHECK(!kernel.contains("onednn_rate"));
  }
  CHECK(bench["step"]["tokens_per_second"].get<double>() > 0);
  CHECK(bench["step"]["fraction_of_peak"].get<double>() > 0);
  CHECK(bench["step"]["operations"].size() > 10);

  CHECK(contains(on_device({"trace", "quickstart", "-o", "trace.json"}), "trace.json: "));
  const auto trace = capstan::json_of(read_text(scratch.file("trace.json")));
  double linear = 0;
  for (const auto& event : trace["traceEvents"])
    if (event["name"] == "linear" && event["ph"] == "X") linear += event["dur"].get<double>();
  CHECK(linear > 0);
}
