// From a dataset to a trained model with the program alone: train, stop, resume, eval, generate, runs.
#include <doctest/doctest.h>
#include <signal.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "prepared.hpp"

using namespace capstan::test;
using nlohmann::json;
namespace fs = std::filesystem;

TEST_CASE("train, stop at an interval, resume: the losses of an uninterrupted run, to the bit") {
  const Prepared& p = prepared();
  const Finished uninterrupted = p.in({"train", "./tiny.yaml", "--run-dir", "uninterrupted"});
  REQUIRE_MESSAGE(uninterrupted.code == 0, uninterrupted.err);
  CHECK(uninterrupted.out.empty());
  const auto losses = losses_of(p.file("uninterrupted"));
  REQUIRE(losses.size() == 12);
  CHECK(losses.front() == doctest::Approx(std::log(320.0)).epsilon(0.05));
  CHECK(losses.back() < losses.front() - 0.5);
  for (const char* name :
       {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds", "memory_bytes"})
    CHECK(rows_of(p.file("uninterrupted/metrics.jsonl")).front().contains(name));
  const std::string log = read_text(p.file("uninterrupted/log.txt"));
  for (const char* said :
       {"train ./tiny.yaml --run-dir uninterrupted", "FLOP/s", "step 12/12 | loss", "done: 12 steps, loss "})
    CHECK_MESSAGE(contains(log, said), log);

  const Finished stopped = p.in({"train", "./tiny.yaml", "--run-dir", "parts", "train.exit_interval=5"});
  CHECK_MESSAGE(stopped.code == 75, stopped.err);
  CHECK(contains(stopped.err, "--resume"));
  CHECK(losses_of(p.file("parts")).size() == 5);
  // An existing run is refused without --resume, and left as it is.
  CHECK(p.in({"train", "./tiny.yaml", "--run-dir", "parts"}).code == 1);
  CHECK(losses_of(p.file("parts")).size() == 5);
  // A change that alters the results is refused, and the message shows it.
  const Finished other =
      p.in({"train", "./tiny.yaml", "--run-dir", "parts", "--resume", "optimizer.lr=1e-3"});
  CHECK(other.code == 1);
  CHECK(contains(other.err, "optimizer.lr"));
  // Unless the schedule is what is meant to change.
  fs::copy(p.file("parts"), p.file("parts-slower"), fs::copy_options::recursive);
  const Finished slower = p.in({"train", "./tiny.yaml", "--run-dir", "parts-slower", "--resume",
                                "optimizer.lr=1e-3", "scheduler.override_opt_param_scheduler=true"});
  CHECK_MESSAGE(slower.code == 0, slower.err);
  CHECK(contains(slower.err, "changed since the checkpoint: optimizer.lr"));
  CHECK(losses_of(p.file("parts-slower")) != losses);
  const Finished rest = p.in({"train", "./tiny.yaml", "--run-dir", "parts", "--resume"});
  CHECK_MESSAGE(rest.code == 0, rest.err);
  CHECK(losses_of(p.file("parts")) == losses);
  // A longer run is no other run: the learning rate stays at its floor.
  const Finished longer =
      p.in({"train", "./tiny.yaml", "--run-dir", "parts", "--resume", "train.train_iters=14"});
  CHECK_MESSAGE(longer.code == 0, longer.err);
  CHECK(losses_of(p.file("parts")).size() == 14);
  CHECK(contains(longer.err, "schedule of the checkpoint: cosine"));
  CHECK(contains(longer.err, "warning: the learning rate reaches its floor"));
  for (const json& row : rows_of(p.file("parts/metrics.jsonl")))
    if (!row.contains("event") && row["step"] > 12) CHECK(row["learning_rate"] == 5e-4);
  // A run that is not there.
  const Finished none = p.in({"train", "./tiny.yaml", "--run-dir", "part", "--resume"});
  CHECK(none.code == 2);
  CHECK(contains(none.err, "there is no run `part` to resume"));
  CHECK(contains(none.err, "did you mean `parts`"));
  CHECK(!fs::exists(p.file("part")));
  CHECK(p.in({"train", "./tiny.yaml", "--run-dir", "part", "--resume=auto", "train.train_iters=2"}).code ==
        0);
  CHECK(p.in({"train", "./tiny.yaml", "--run-dir", "part", "--resume=perhaps"}).code == 2);
}

TEST_CASE("a resume that gives experts other tokens together is warned of") {
  const Prepared& p = prepared();
  const auto warns = [&](const std::string& name, const std::string& coefficient, const std::string& change) {
    const std::vector<std::string> train = {"train",
                                            "./tiny.yaml",
                                            "--run-dir",
                                            name,
                                            "train.train_iters=3",
                                            "model.num_moe_experts=4",
                                            "model.moe_aux_loss_coeff=" + coefficient};
    auto first = train, second = train;
    if (coefficient == "0") second.emplace_back("model.moe_router_load_balancing_type=none"), first = second;
    first.emplace_back("train.exit_interval=1");
    second.insert(second.end(), {"--resume", change});
    CHECK(p.in(first).code == 75);
    const Finished resumed = p.in(second);
    CHECK_MESSAGE(resumed.code == 0, resumed.err);
    return contains(resumed.err, "warning: `train.micro_batch_size` has changed: the balancing losses");
  };
  CHECK(warns("experts-aux", "0.01", "train.micro_batch_size=1"));
  CHECK_FALSE(warns("experts-none", "0", "train.micro_batch_size=1"));
  CHECK_FALSE(warns("experts-same", "0.01", "logger.log_interval=2"));
}

TEST_CASE("without train.exit_signal_handler a signal ends the process as it always does") {
  const Prepared& p = prepared();
  for (const int signal : {SIGINT, SIGTERM}) {
    Launch launch;
    launch.directory = p.path();
    const std::string name = "unhandled" + std::to_string(signal);
    launch.arguments = {
        "train",     "./tiny.yaml", "train.train_iters=1000000", "train.exit_signal_handler=false",
        "--run-dir", name};
    launch.on_error_text = signal_at("step 3", signal);
    const Finished stopped = run(launch);
    CHECK_MESSAGE(stopped.code == 128 + signal, stopped.err);
    CHECK(!contains(stopped.err, "continue with"));
  }
}

TEST_CASE("a run measured in passes over its data; the test share is evaluated once, at the end") {
  const Prepared& p = prepared();
  const Finished done = p.in({"train", "./tiny.yaml", "train.train_iters=null", "train.epochs=0.1",
                              "dataset.split=\"80,10,10\"", "--run-dir", "epochs"});
  REQUIRE_MESSAGE(done.code == 0, done.err);
  const auto at = done.err.find(" passes over the training data (");
  REQUIRE_MESSAGE(at != std::string::npos, done.err);
  const int samples = std::stoi(done.err.substr(at + 32));
  const auto losses = losses_of(p.file("epochs"));
  CHECK(static_cast<int>(losses.size()) == (samples + 39) / 40);
  int tests = 0;
  for (const json& row : rows_of(p.file("epochs/metrics.jsonl")))
    if (row.value("event", "") == "test") {
      ++tests;
      CHECK(row["step"] == losses.size());
      CHECK(row["perplexity"] == doctest::Approx(std::exp(row["loss"].get<double>())));
      CHECK(row["loss"].get<double>() < losses.front());
    }
  CHECK(tests == 1);
  CHECK(contains(done.err, "| test loss "));
  // The schedule follows: the last rates are those of the end of the cosine.
  const auto rows = rows_of(p.file("epochs/metrics.jsonl"));
  double last_rate = 1;
  for (const json& row : rows)
    if (!row.contains("event")) last_rate = row["learning_rate"];
  CHECK(last_rate < 1e-3);
  // A run that is over is not tested again.
  CHECK(p.in({"train", "./tiny.yaml", "train.train_iters=null", "train.epochs=0.1",
              "dataset.split=\"80,10,10\"", "--run-dir", "epochs", "--resume"})
            .code == 0);
  tests = 0;
  for (const json& row : rows_of(p.file("epochs/metrics.jsonl"))) tests += row.value("event", "") == "test";
  CHECK(tests == 1);
  // 300 documents have no thousandth: such a test share is left out, not refused.
  const Finished small = p.in(
      {"train", "./tiny.yaml", "train.train_iters=1", "dataset.split=\"969,30,1\"", "--run-dir", "small"});
  CHECK_MESSAGE(small.code == 0, small.err);
  CHECK(!contains(small.err, "test loss"));
  // Both lengths at once, and passes over data without an end.
  CHECK(contains(p.in({"train", "./tiny.yaml", "train.epochs=1"}).err, "both set the length of the run"));
  CHECK(
      contains(p.in({"check", "./tiny.yaml", "train.train_iters=null", "train.epochs=1", "dataset=mock"}).err,
               "generated data has no end"));
  CHECK(p.in({"check", "./tiny.yaml", "train.train_iters=null", "train.epochs=1", "--shrink"}).code == 0);
}

TEST_CASE("Megatron's order of samples, and indices that are kept") {
  const Prepared& p = prepared();
  const auto losses = [&](const std::string& run, const std::vector<std::string>& more) {
    std::vector<std::string> words = {"train", "./tiny.yaml", "train.train_iters=3", "--run-dir", run};
    words.insert(words.end(), more.begin(), more.end());
    const Finished done = p.in(words);
    REQUIRE_MESSAGE(done.code == 0, done.err);
    return losses_of(p.file(run));
  };
  const auto own = losses("order-own", {});
  const auto megatron = losses("order-megatron", {"dataset.sample_order=megatron"});
  CHECK(own != megatron);
  const std::string cache = "dataset.path_to_cache=kept-indices";
  CHECK(losses("order-cached", {"dataset.sample_order=megatron", cache}) == megatron);
  size_t files = 0;
  for (const auto& entry : fs::directory_iterator(p.file("kept-indices")))
    files += entry.path().extension() == ".index";
  CHECK(files == 4);  // indices and places of training and validation
  CHECK(losses("order-again", {"dataset.sample_order=megatron", cache}) == megatron);
  CHECK(losses("order-own-cached", {cache}) == own);
}

TEST_CASE("a recipe that extends another runs under its own name") {
  const Prepared& p = prepared();
  std::ofstream(p.file("mine.yaml")) << "extends: ./tiny.yaml\ntrain: {train_iters: 1}\n";
  std::ofstream(p.file("named.yaml")) << "extends: ./tiny.yaml\nname: given\ntrain: {train_iters: 1}\n";
  REQUIRE(p.in({"train", "./mine.yaml"}).code == 0);
  REQUIRE(p.in({"train", "./named.yaml"}).code == 0);
  REQUIRE(p.in({"train", "./mine.yaml", "name=said"}).code == 0);
  for (const char* name : {"mine", "given", "said"})
    CHECK(fs::exists(p.file(std::string("runs/") + name + "/metrics.jsonl")));
}

TEST_CASE("eval and generate from a run and from a checkpoint; runs lists them") {
  const Prepared& p = prepared();
  if (!fs::exists(p.file("uninterrupted")))
    REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "uninterrupted"}).code == 0);
  const Finished total = p.in({"eval", "uninterrupted", "--text", "heldout.txt", "--json"});
  REQUIRE_MESSAGE(total.code == 0, total.err);
  const json result = capstan::json_of(total.out);
  const Finished tokens =
      p.in({"eval", "uninterrupted/checkpoints/step-00000012", "--text", "heldout.txt", "--per-token"});
  REQUIRE_MESSAGE(tokens.code == 0, tokens.err);
  double sum = 0;
  int64_t count = 0;
  std::istringstream lines(tokens.out);
  for (std::string line; std::getline(lines, line); ++count) {
    const json row = capstan::json_of(line);
    CHECK(row["id"].is_number_integer());
    sum += row["logprob"].get<double>();
  }
  CHECK(count == result["tokens"].get<int64_t>());
  CHECK(-sum / static_cast<double>(count) == doctest::Approx(result["loss"].get<double>()).epsilon(1e-6));
  CHECK(std::exp(result["loss"].get<double>()) ==
        doctest::Approx(result["perplexity"].get<double>()).epsilon(1e-6));

  const auto write = [&](std::vector<std::string> more) {
    std::vector<std::string> words = {"generate", "uninterrupted", "--prompt",
                                      "the cat",  "--max-tokens",  "12"};
    words.insert(words.end(), more.begin(), more.end());
    return p.in(words);
  };
  const Finished greedy = write({"--temperature", "0"});
  REQUIRE_MESSAGE(greedy.code == 0, greedy.err);
  CHECK(greedy.out.starts_with("the cat"));
  CHECK(write({"--temperature", "0"}).out == greedy.out);
  CHECK(write({"--top-k", "1"}).out == greedy.out);
  CHECK(write({"--seed", "1"}).out == write({"--seed", "1"}).out);
  CHECK(capstan::json_of(write({"--json"}).out)["prompt"] == "the cat");
  CHECK(write({"--temperature", "-1"}).code == 2);
  CHECK(write({"--top-p", "1.5"}).code == 2);
  CHECK(p.in({"generate", "nowhere", "--prompt", "x"}).code == 2);
  CHECK(p.in({"eval", "uninterrupted", "--text", "missing.txt"}).code == 2);
  // An override that changes nothing here says so.
  CHECK_FALSE(contains(write({"--temperature", "0"}).err, "without effect"));
  const Finished idle = write({"--temperature", "0", "optimizer.lr=3", "dataset.split=9,1,0"});
  CHECK(idle.out == greedy.out);
  CHECK_MESSAGE(contains(idle.err,
                         "warning: without effect on a stored model, which neither trains nor reads a "
                         "dataset: `dataset.split`, `optimizer.lr`"),
                idle.err);
  const Finished preset = write({"--temperature", "0", "optimizer=sgd"});
  CHECK(preset.out == greedy.out);
  CHECK_MESSAGE(contains(preset.err, "nor reads a dataset: `optimizer=sgd`"), preset.err);
  CHECK(contains(write({"--temperature", "0", "dataset=mock"}).err, "nor reads a dataset: `dataset=mock`"));
  const Finished half = write({"--temperature", "0", "mixed_precision=bf16_mixed"});
  CHECK(half.out == greedy.out);
  CHECK_MESSAGE(contains(half.err, "gives the fields itself: `mixed_precision=bf16_mixed`"), half.err);
  // The tokenizer of a run is its own.
  for (const char* other : {"tokenizer=byte", "tokenizer=none"})
    for (const Finished& refused :
         {write({other}), p.in({"eval", "uninterrupted", "--text", "heldout.txt", other})}) {
      CHECK(refused.code == 2);
      CHECK_MESSAGE(contains(refused.err, "`" + std::string(other) + "`: "), refused.err);
      CHECK(contains(refused.err, "cannot be replaced"));
    }
  const Finished elsewhere = p.in({"runs", "ls", "uninterupted"});
  CHECK(elsewhere.code == 2);
  CHECK_MESSAGE(contains(elsewhere.err, "did you mean `uninterrupted`?"), elsewhere.err);

  const json runs = capstan::json_of(p.in({"runs", "ls", ".", "--json"}).out);
  CHECK(runs["schema"] == "capstan.runs/1");
  bool listed = false;
  for (const json& one : runs["runs"])
    listed = listed || (one["name"] == "uninterrupted" && one["state"] == "finished");
  CHECK(listed);
  CHECK(contains(p.in({"runs", "show", "uninterrupted"}).out, "finished"));
}

TEST_CASE("the first line of train appears at once; what is missing is reported before anything begins") {
  const Prepared& p = prepared();
  double best = 1e9;
  Finished result;
  for (int attempt = 0; attempt < 5; ++attempt) {
    result = p.in({"train", "./tiny.yaml", "dataset=mock", "train.train_iters=1", "--run-dir",
                   "first" + std::to_string(attempt)});
    CHECK_MESSAGE(result.code == 0, result.err);
    best = std::min(best, result.first_line_seconds);
  }
#if CAPSTAN_TIMED
  MESSAGE("first line after " << 1e3 * best << " ms");
  CHECK(best < 0.1);
#endif
  const Finished missing =
      p.in({"train", "./tiny.yaml", "dataset.data_path=not_there", "--run-dir", "never"});
  CHECK(missing.code == 2);
  CHECK(contains(missing.err, "not_there"));
  CHECK_FALSE(fs::exists(p.file("never")));
  // A recipe for GPUs is valid everywhere; a note of `check` gives the reason with which `train` refuses it.
  const Finished checked = p.in({"check", "./tiny.yaml", "train.device=cuda"});
  CHECK(checked.code == 0);
  if (contains(checked.err,
               "note[C0805]: the recipe cannot be trained on this machine: train.device: cuda: ")) {
    for (const char* ranks : {"1", "2"}) {
      const Finished gpu =
          p.in({"train", "./tiny.yaml", "train.device=cuda", "--run-dir", "never", "--nproc", ranks});
      CHECK(gpu.code == 1);
      CHECK(gpu.err.find("error: train.device: cuda: ") == gpu.err.rfind("error: "));
      CHECK(contains(gpu.err, "train.device=cpu trains here"));
    }
  }
  // The note is at the field that is refused.
  const Finished router = p.in({"check", "./tiny.yaml", "--json", "train.device=simulated",
                                "model.num_moe_experts=4", "model.moe_router_dtype=fp64"});
  CHECK(router.code == 0);
  bool noted = false;
  const json checked_router = capstan::json_of(router.out);
  for (const json& one : checked_router["diagnostics"]) {
    if (one["code"] != "C0805") continue;
    noted = true;
    CHECK(one["path"] == "model.moe_router_dtype");
    CHECK(one.contains("file"));
  }
  CHECK(noted);
  // `auto` trains on the CPU where there is no GPU, which NCCL cannot.
  const std::string nccl = "dist.distributed_backend=nccl";
  const Finished transport = p.in({"check", "./tiny.yaml", nccl});
  CHECK(transport.code == 0);
  if (contains(transport.err, "note[C0805]: the recipe cannot be trained on this machine: ")) {
    const std::string reason = "dist.distributed_backend: nccl: the ranks do not train on GPUs";
    CHECK(contains(transport.err, reason));
    CHECK(contains(p.in({"train", "./tiny.yaml", nccl, "--run-dir", "never"}).err, reason));
  }
  const Finished grid = p.in({"train", "llama3-70b", "dataset=mock", "--run-dir", "never"});
  CHECK(grid.code != 0);
  CHECK_FALSE(fs::exists(p.file("never")));
}

static void stop_and_resume(const std::string& name, int signal, const std::vector<std::string>& more) {
  const Prepared& p = prepared();
  Launch launch;
  launch.directory = p.path();
  launch.arguments = {"train", "./tiny.yaml", "train.train_iters=1000000", "--run-dir", name};
  launch.arguments.insert(launch.arguments.end(), more.begin(), more.end());
  launch.on_error_text = signal_at("step 3", signal);
  const Finished stopped = run(launch);
  CHECK_MESSAGE(stopped.code == 75, stopped.err);
  CHECK(contains(stopped.err, "continue with"));
  const int64_t steps = static_cast<int64_t>(losses_of(p.file(name)).size());
  CHECK(steps >= 3);
  std::vector<std::string> again = {
      "train", "./tiny.yaml", "train.train_iters=" + std::to_string(1000000),    "--run-dir",
      name,    "--resume",    "train.exit_interval=" + std::to_string(steps + 1)};
  again.insert(again.end(), more.begin(), more.end());
  const Finished on = p.in(again);
  CHECK_MESSAGE(on.code == 75, on.err);
  CHECK(contains(on.err, "resumed from"));
  CHECK(static_cast<int64_t>(losses_of(p.file(name)).size()) == steps + 1);
}

TEST_CASE("a trace of a run and of a recipe; what does not fit ends with code 3 and says what would") {
  const Prepared& p = prepared();
  const Finished traced = p.in({"train", "./tiny.yaml", "--run-dir", "traced", "profiling.trace=true",
                                "profiling.profile_step_start=2", "profiling.profile_step_end=4"});
  CHECK_MESSAGE(traced.code == 0, traced.err);
  const json trace = capstan::json_of(read_text(p.file("traced/trace/rank-0.json")));
  std::set<int> steps;
  for (const json& event : trace["traceEvents"])
    if (event["ph"] == "X") steps.insert(event["args"]["step"].get<int>());
  CHECK(steps == std::set<int>{2, 3});
  CHECK(losses_of(p.file("traced")).size() == 12);
  for (const char* device : {"train.device=cpu", "train.device=checked"}) {
    const Finished command = p.in({"trace", "./tiny.yaml", device, "-o", "traced.json"});
    CHECK_MESSAGE(command.code == 0, command.err);
    CHECK(capstan::json_of(read_text(p.file("traced.json")))["traceEvents"].size() > 100);
  }

  // The memory of kernels depends on the processor, so the limit is taken from the error for a micro-batch of
  // 1.
  const Finished least = p.in({"train", "./tiny.yaml", "--run-dir", "large", "resilience.memory_limit=1KiB",
                               "train.micro_batch_size=1"});
  CHECK_MESSAGE(least.code == 3, least.err);
  const size_t said = least.err.find("a step needs ");
  REQUIRE(said != std::string::npos);
  const std::string needs = least.err.substr(said + 13, least.err.find(" (", said) - said - 13);
  const double kib = std::stod(needs) * (contains(needs, "MiB") ? 1024 : 1);
  const std::string limit =
      "resilience.memory_limit=" + std::to_string(static_cast<int64_t>(kib) + 12) + "KiB";
  const Finished large = p.in({"train", "./tiny.yaml", "--run-dir", "large", limit});
  CHECK_MESSAGE(large.code == 3, large.err);
  CHECK_MESSAGE(contains(large.err, "train.micro_batch_size=1"), large.err);
  CHECK_FALSE(fs::exists(p.file("large")));
  const Finished fits =
      p.in({"train", "./tiny.yaml", "--run-dir", "large", limit, "train.micro_batch_size=1"});
  CHECK_MESSAGE(fits.code == 0, fits.err);
}

TEST_CASE("a start that is refused leaves the run as it was") {
  const Prepared& p = prepared();
  if (!fs::exists(p.file("uninterrupted")))
    REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "uninterrupted"}).code == 0);
  fs::copy(p.file("uninterrupted"), p.file("kept"), fs::copy_options::recursive);
  const auto texts = [&] {
    std::string all;
    for (const char* name :
         {"recipe.yaml", "recipe.given.yaml", "command.txt", "run.json", "metrics.jsonl", "log.txt"})
      all += read_text(p.file(std::string("kept/") + name));
    return all;
  };
  const std::string before = texts();
  CHECK(p.in({"train", "./tiny.yaml", "--run-dir", "keeps", "--resume", "rng.seed=7", "train.train_iters=50"})
            .code == 1);
  CHECK(texts() == before);
  // Missing weights are reported before there is a run; the corrected command begins it.
  const Finished missing =
      p.in({"train", "./tiny.yaml", "--run-dir", "retry", "checkpoint.pretrained_checkpoint=nosuch"});
  CHECK(missing.code == 2);
  const Finished corrected = p.in({"train", "./tiny.yaml", "--run-dir", "retry",
                                   "checkpoint.pretrained_checkpoint=uninterrupted", "train.train_iters=1"});
  CHECK_MESSAGE(corrected.code == 0, corrected.err);
}

TEST_CASE("a new run continues another one's state; a run whose checkpoints or data lie elsewhere goes on") {
  const Prepared& p = prepared();
  REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "first6", "train.exit_interval=6"}).code == 75);
  if (!fs::exists(p.file("uninterrupted")))
    REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "uninterrupted"}).code == 0);
  const Finished second = p.in({"train", "./tiny.yaml", "--run-dir", "second6", "checkpoint.load=first6"});
  REQUIRE_MESSAGE(second.code == 0, second.err);
  auto losses = losses_of(p.file("uninterrupted"));
  losses.erase(losses.begin(), losses.begin() + 6);
  CHECK(losses_of(p.file("second6")) == losses);
  CHECK(p.in({"train", "./tiny.yaml", "--run-dir", "third6", "checkpoint.load=first6", "rng.seed=7"}).code ==
        1);

  // checkpoint.save named anew: the run goes on from where it had saved.
  const Finished elsewhere =
      p.in({"train", "./tiny.yaml", "--run-dir", "first6", "--resume", "checkpoint.save=elsewhere"});
  CHECK_MESSAGE(elsewhere.code == 0, elsewhere.err);
  CHECK(contains(elsewhere.err, "resumed from"));
  CHECK(losses_of(p.file("first6")) == losses_of(p.file("uninterrupted")));

  // Everything moved to another directory.
  REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "movable", "train.exit_interval=6"}).code == 75);
  fs::create_directory(p.file("moved"));
  for (const char* name :
       {"tiny.yaml", "tokenizer.json", "corpus_text_document.bin", "corpus_text_document.idx"})
    fs::copy(p.file(name), p.file(std::string("moved/") + name));
  fs::rename(p.file("movable"), p.file("moved/movable"));
  Launch launch;
  launch.directory = p.file("moved");
  launch.arguments = {"train", "./tiny.yaml", "--run-dir", "movable", "--resume"};
  const Finished moved = run(launch);
  CHECK_MESSAGE(moved.code == 0, moved.err);
  CHECK(losses_of(p.file("moved/movable")) == losses_of(p.file("uninterrupted")));

  // Other samples under the same name, and under another: refused, and nothing is trained.
  REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "second", "train.exit_interval=6"}).code == 75);
  const auto swap_bytes = [&](const std::string& file) {
    std::string bytes = read_text(p.file(file));
    for (size_t i = 0; i + 3 < bytes.size(); i += 4)
      std::swap(bytes[i], bytes[i + 2]), std::swap(bytes[i + 1], bytes[i + 3]);
    std::ofstream(p.file(file), std::ios::binary) << bytes;
  };
  swap_bytes("corpus_text_document.bin");
  const Finished altered = p.in({"train", "./tiny.yaml", "--run-dir", "second", "--resume"});
  CHECK(altered.code == 1);
  CHECK_MESSAGE(contains(altered.err, "the data files hold other samples"), altered.err);
  swap_bytes("corpus_text_document.bin");
  swap_bytes("moved/corpus_text_document.bin");
  const Finished other = p.in({"train", "./tiny.yaml", "--run-dir", "second", "--resume",
                               "dataset.data_path=[moved/corpus_text_document]"});
  CHECK(other.code == 1);
  CHECK_MESSAGE(contains(other.err, "dataset.data_path"), other.err);
  CHECK(p.in({"train", "./tiny.yaml", "--run-dir", "second", "--resume"}).code == 0);
  CHECK(losses_of(p.file("second")) == losses_of(p.file("uninterrupted")));
}

TEST_CASE("diff names the first step and the first tensor that part; plot draws runs on one page") {
  const Prepared& p = prepared();
  REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "one", "train.threads=2"}).code == 0);
  REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "same", "dataset.num_workers=3"}).code == 0);
  const Finished equal = p.in({"diff", "one", "same"});
  CHECK_MESSAGE(equal.code == 0, equal.out);
  CHECK(contains(equal.out, "dataset.num_workers"));
  CHECK(contains(equal.out, "12 logged steps have the same numbers"));
  CHECK(contains(equal.out, "2 checkpoints are equal bit by bit"));

  // The same until step 6, then another rate: reported as step 7, because the loss of step 7 is still that of
  // the weights of step 6.
  REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "other", "train.exit_interval=6"}).code == 75);
  REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "other", "--resume", "optimizer.lr=1e-3",
                "scheduler.override_opt_param_scheduler=true"})
              .code == 0);
  const Finished parted = p.in({"diff", "one", "other", "--json"});
  CHECK(parted.code == 1);
  const json result = capstan::json_of(parted.out);
  CHECK(result["first_step"]["step"] == 7);
  CHECK(result["first_step"]["name"] == "learning_rate");
  CHECK(result["checkpoints"] == 2);
  CHECK(result["checkpoint_step"] == 12);
  CHECK(result["tensors"][0]["elements"].get<int64_t>() > 0);
  const Finished tensors = p.in({"diff", "one/checkpoints/step-00000006", "other/checkpoints/step-00000006"});
  CHECK_MESSAGE(tensors.code == 0, tensors.out);
  // Another length, and files that are missing, are said.
  REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "short", "train.exit_interval=7"}).code == 75);
  const Finished shorter = p.in({"diff", "one", "short"});
  CHECK(shorter.code == 0);
  CHECK_MESSAGE(contains(shorter.out, "5 logged steps are only in the first"), shorter.out);
  fs::remove(p.file("short/metrics.jsonl"));
  const Finished without = p.in({"diff", "one", "short"});
  CHECK(without.code == 2);
  CHECK_MESSAGE(contains(without.out, "not compared: "), without.out);
  CHECK(p.in({"diff", "one", "nowhere"}).code == 2);

  REQUIRE(p.in({"runs", "plot", "one", "other", "-o", "runs.html"}).code == 0);
  const std::string page = read_text(p.file("runs.html"));
  CHECK(contains(page, "</html>"));
  CHECK_FALSE(contains(page, "src="));
  CHECK(contains(page, "<title>2 runs · Capstan</title>"));
  const std::string mark = "id=\"data\">";
  const size_t begin = page.find(mark) + mark.size();
  const json drawn = capstan::json_of(page.substr(begin, page.find("</script>", begin) - begin));
  REQUIRE(drawn["runs"].size() == 2);
  for (const json& run : drawn["runs"]) {
    const std::string name = run["name"];
    CHECK(run["state"] == "finished");
    for (const char* key : {"grad_norm", "learning_rate", "tokens_per_second", "mfu", "memory_bytes"})
      CHECK(run["curves"][key]["s"].size() == 12);
    const auto truth = losses_of(p.file(name));
    const json& loss = run["curves"]["loss"];
    REQUIRE(loss["v"].size() == truth.size());
    for (size_t i = 0; i < truth.size(); ++i) {
      CHECK(loss["s"][i] == i + 1);
      CHECK(loss["v"][i].get<double>() == doctest::Approx(truth[i]).epsilon(1e-5));
    }
    CHECK(run["experts"].is_null());
    CHECK(run["curves"]["validation"]["s"] == json{6, 12});
    CHECK(run["validation"].get<double>() ==
          doctest::Approx(run["curves"]["validation"]["v"][1].get<double>()).epsilon(1e-5));
  }
  CHECK(p.in({"runs", "plot", "nowhere", "-o", "x.html"}).code == 2);
}

TEST_CASE(
    "plot draws the load of the experts of each layer, and the losses of routers and predicted tokens") {
  const Prepared& p = prepared();
  REQUIRE(p.in({"train", "./tiny.yaml", "--run-dir", "experts", "model.num_moe_experts=4",
                "model.moe_router_load_balancing_type=[aux_loss,seq_aux_loss]",
                "model.moe_aux_loss_coeff=[0.1,0.01]", "model.moe_z_loss_coeff=0.01",
                "model.mtp_num_layers=2", "model.moe_expert_capacity_factor=0.6", "train.train_iters=4"})
              .code == 0);
  REQUIRE(p.in({"runs", "plot", "experts", "-o", "experts.html"}).code == 0);
  const std::string page = read_text(p.file("experts.html")), mark = "id=\"data\">";
  const size_t begin = page.find(mark) + mark.size();
  const json drawn = capstan::json_of(page.substr(begin, page.find("</script>", begin) - begin));
  const json& curves = drawn["runs"][0]["curves"];
  size_t layers = 0, step = 0;
  for (const json& row : rows_of(p.file("experts") + "/metrics.jsonl")) {
    if (row.contains("event")) continue;
    layers = 0;
    double most = 0;
    for (const auto& [name, load] : row.items()) {
      const std::string prefix = "expert_load_layer_";
      if (!name.starts_with(prefix)) continue;
      ++layers;
      const auto of = load.get<std::vector<double>>();
      const double relative = 4 * *std::max_element(of.begin(), of.end());
      most = std::max(most, relative);
      const json& curve = curves["expert_load layer " + name.substr(prefix.size())];
      CHECK(curve["v"].at(step).get<double>() == doctest::Approx(relative).epsilon(1e-5));
      // The map has each expert, the layers in the order of their numbers.
      const json& map = drawn["runs"][0]["experts"];
      CHECK(map["layers"] == json{0, 1, 2, 3});
      CHECK(map["experts"] == 4);
      CHECK(map["steps"] == json{1, 2, 3, 4});
      for (size_t expert = 0; expert < 4; ++expert)
        CHECK(map["loads"].at(step).at(4 * std::stoul(name.substr(prefix.size())) + expert) ==
              doctest::Approx(4 * of[expert]).epsilon(6e-3));
    }
    CHECK(row["expert_max_load"].get<double>() == doctest::Approx(most).epsilon(1e-9));
    for (const auto& [curve, loss] : {std::pair("balance_loss", "balance_loss"),
                                      {"balance_loss aux_loss", "aux_loss"},
                                      {"balance_loss seq_aux_loss", "seq_aux_loss"},
                                      {"z_loss", "z_loss"},
                                      {"expert_dropped", "expert_dropped"},
                                      {"expert_dropped layer 1", "expert_dropped_layer_1"},
                                      {"mtp_loss depth 1", "mtp_1_loss"},
                                      {"mtp_loss depth 2", "mtp_2_loss"}})
      CHECK(
          curves[curve]["v"].at(step).get<double>() ==
          doctest::Approx(row[loss].get<double>() * (std::string_view(curve).starts_with("expert") ? 100 : 1))
              .epsilon(1e-5));
    ++step;
  }
  CHECK(step == 4);
  // Those of multi-token prediction have experts too.
  CHECK(layers == 4);
  CHECK(std::ranges::count(drawn["charts"], "mtp_loss", [](const json& chart) { return chart["key"]; }) == 1);
}

TEST_CASE("SIGINT and SIGTERM save and end with 75") {
  stop_and_resume("interrupted", SIGINT, {});
  stop_and_resume("terminated", SIGTERM, {});
}
