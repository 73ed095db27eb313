// capstan plan, as a user runs it.
#include <doctest/doctest.h>

#include <algorithm>

#include "base/json.hpp"
#include "process.hpp"
#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/paths.hpp"
#include "support/sanitized.hpp"
#include "support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::test;

TEST_CASE("a plan says whether it fits, how fast it is, and what limits it") {
  const auto plan = run({"plan", "llama3-8b"});
  CHECK(plan.code == 0);
  CHECK(holds(plan.out, "8.03B parameters, on h100"));
  CHECK(holds(plan.out, "fits: pipeline rank 0 needs "));
  CHECK(holds(plan.out, "exact: the trainer's step on the meta device"));
  CHECK(holds(plan.out, "causal attention), MFU "));
  CHECK(holds(plan.out, "note: times are not calibrated on this cluster"));
  CHECK(holds(plan.out, "limits:\n  matrix products: "));
}

TEST_CASE("the exact memory of a plan is that of show --step for a GPU") {
  const auto plan = run({"plan", "llama3-8b", "--json"});
  REQUIRE(plan.code == 0);
  const Json object = json_of(plan.out);
  CHECK(object["schema"] == "capstan.plan/1");
  CHECK(object["fits"] == true);
  CHECK(object["memory_exact"] == true);
  CHECK(object["gpu"] == "H100 SXM 80 GB");
  CHECK(object["layout"]["cp"] == 2);
  CHECK(object["layout"]["dp"] == 4);
  CHECK(object["layout"]["schedule"].is_null());
  const auto show = run({"show", "llama3-8b", "--step", "train.device=cuda"});
  REQUIRE(show.code == 0);
  const double gib = object["memory_bytes"]["total"].get<double>() / (1 << 30);
  const size_t at = show.out.find("largest: rank 0: ");
  REQUIRE(at != std::string::npos);
  CHECK(std::stod(show.out.substr(at + 17)) == doctest::Approx(gib).epsilon(0.002));
  // The parts add up to the step, and the ranges hold the figures.
  double sum = 0;
  for (const auto& part : object["parts"]) sum += part["seconds"].get<double>();
  const auto seconds = object["step_seconds"].get<double>();
  CHECK(sum == doctest::Approx(seconds).epsilon(1e-6));
  CHECK(object["step_seconds_range"][0] < seconds);
  CHECK(object["step_seconds_range"][1] > seconds);
  CHECK(object["mfu"].get<double>() > 0.3);
  CHECK_FALSE(object["limits"].empty());
}

TEST_CASE("a plan that does not fit ends with code 3 and overrides that fit") {
  const auto plan = run({"plan", "llama3-8b", "--cluster", "l40s"});
  CHECK(plan.code == 3);
  CHECK(holds(plan.out, "does not fit: pipeline rank 0 needs "));
  CHECK(holds(plan.out, "fits with:"));
  CHECK(holds(plan.err, "the run does not fit: memory: pipeline rank 0 needs "));
  const auto again = run({"plan", "llama3-8b", "--cluster", "l40s", "--json"});
  CHECK(again.code == 3);
  const Json object = json_of(again.out);
  CHECK(object["fits"] == false);
  REQUIRE_FALSE(object["changes"].empty());
  // The first of them does.
  std::vector<std::string> words = {"plan", "llama3-8b", "--cluster", "l40s"};
  for (const auto& one : object["changes"][0]["overrides"]) words.push_back(one.get<std::string>());
  CHECK(run(words).code == 0);
}

TEST_CASE("a plan for GPUs with another memory lists the changes after which it fits, cheapest first") {
  const auto plan = run({"plan", "llama3-8b", "--gpu-memory", "40GB", "--json"});
  CHECK(plan.code == 3);
  const Json object = json_of(plan.out);
  // What CUDA, NCCL and the driver take of an H100 is taken from these too.
  CHECK(object["usable_memory_bytes"] == 40'000'000'000 - (int64_t{3} << 30));
  CHECK(object["host_memory_limit_bytes"] == 2'000'000'000'000);
  CHECK(object["host_memory_bytes_of_node"].get<int64_t>() > 0);
  REQUIRE(object["changes"].size() >= 2);
  double before = 0;
  for (const auto& change : object["changes"]) {
    CHECK_FALSE(change["name"].get<std::string>().empty());
    CHECK(change["memory_bytes"] <= object["usable_memory_bytes"]);
    CHECK(change["step_seconds"] >= before);
    before = change["step_seconds"];
  }
  const auto little = run({"plan", "llama3-8b", "--gpu-memory", "2GB"});
  CHECK(little.code == 2);
  CHECK(holds(little.err, "--gpu-memory 2GB is not more than the 3.00 GiB that CUDA, NCCL and the driver"));
  CHECK(holds(little.err, "help: give more, such as 79.6 GiB"));
  const auto fraction = run({"plan", "llama3-8b", "--gpu-memory", "3.1GiB"});
  CHECK(fraction.code == 2);
  CHECK(holds(fraction.err, "help: use a smaller unit"));
  const auto unit = run({"plan", "llama3-8b", "--gpu-memory", "40G"});
  CHECK(unit.code == 2);
  CHECK(holds(unit.err, "--gpu-memory 40G is ambiguous"));
}

TEST_CASE("wrong clusters and numbers of GPUs are errors of the command line") {
  const auto unknown = run({"plan", "llama3-8b", "--cluster", "h10"});
  CHECK(unknown.code == 2);
  CHECK(holds(unknown.err, "not found: cluster = h10"));
  CHECK(holds(unknown.err, "did you mean `h100`?"));
  const auto gpus = run({"plan", "llama3-8b", "--gpus", "7"});
  CHECK(gpus.code == 2);
  CHECK(holds(gpus.err, "--gpus"));
  const TemporaryDirectory directory;
  const std::string file = (directory.path() / "mine.yaml").string();
  spill(file, "gpu: mine\nmemorry: 8GiB\n");
  const auto wrong = run({"plan", "llama3-8b", "--cluster", file});
  CHECK(wrong.code == 2);
  CHECK(holds(wrong.err, "mine.yaml:2:1: unknown key `cluster.memorry`"));
  const auto format =
      run({"plan", "llama3-8b", "--cluster", "mi300x", "mixed_precision=bf16_with_nvfp4_mixed"});
  CHECK(format.code == 2);
  CHECK(holds(format.err, "`fp4_tflops`"));
}

TEST_CASE("a plan of a token or compute budget says days, failures, energy and cost") {
  const auto plan = run({"plan", "llama3-8b", "--tokens", "15T", "--price-per-gpu-hour", "2", "--json"});
  REQUIRE(plan.code == 0);
  const Json object = json_of(plan.out), length = object["run"];
  CHECK(length["tokens"] == 15e12);
  CHECK(length["flops"].get<double>() == doctest::Approx(15e12 * object["flops_per_token"].get<double>()));
  CHECK(length["cost"].get<double>() == doctest::Approx(2 * length["gpu_hours"].get<double>()));
  const auto text = run({"plan", "llama3-8b", "--compute", "1e22"});
  CHECK(text.code == 0);
  CHECK(holds(text.out, "(causal attention, output layer); by 6 N "));
  CHECK(holds(text.out, "steps; Daly 2006): goodput "));
  CHECK(holds(text.out, " MWh (700 W a GPU, PUE 1.20"));
  CHECK(run({"plan", "llama3-8b", "--tokens", "15T", "--compute", "1e22"}).code == 2);
  CHECK(run({"plan", "llama3-8b", "--tokens", "0"}).code == 2);
  const std::string rule = "about 20 is compute-optimal";
  CHECK(holds(run({"plan", "llama3-8b", "--compute", "1e22"}).out, rule));
  CHECK_FALSE(holds(run({"plan", "lora", "model=llama3-8b", "--compute", "1e22"}).out, rule));
  // More failures than saves.
  const TemporaryDirectory directory;
  const std::string failing = (directory.path() / "failing.yaml").string();
  spill(failing, slurp(std::string(kSourceDirectory) + "/configs/cluster/h100.yaml") +
                     "gpu_hours_between_failures: 0.001\n");
  const auto never = run({"plan", "llama3-8b", "--tokens", "1T", "--cluster", failing});
  CHECK(holds(never.out, "it never ends"));
  CHECK_FALSE(holds(never.out, "MWh"));
  CHECK(
      json_of(
          run({"plan", "llama3-8b", "--tokens", "1T", "--cluster", failing, "--json"}).out)["run"]["seconds"]
          .is_null());
  // A run that only takes long.
  const auto lengthy = run({"plan", "llama3-8b", "--tokens", "10000T"});
  CHECK(holds(lengthy.out, "K years, of which "));
  CHECK(holds(lengthy.out, " MWh"));
  CHECK(holds(run({"plan", "llama3-8b", "--compute", "1e15"}).out, " tokens, 1 step, "));
  const auto little = run({"plan", "llama3-8b", "--compute", "1"});
  CHECK(little.code == 2);
  CHECK(holds(little.err, "--compute 1 is less than one token takes, "));
  CHECK(run({"plan", "llama3-8b", "--search", "--tokens", "1T"}).code == 2);
}

TEST_CASE("a timeline is drawn as text, as a trace and as a picture") {
  const TemporaryDirectory directory;
  const std::string trace = (directory.path() / "step.json").string(),
                    svg = (directory.path() / "step.svg").string();
  const auto plan = run({"plan", "llama3-70b", "--memory", "formula", "--timeline", "--trace", trace, "--svg",
                         svg, "train.global_batch_size=32"});
  REQUIRE(plan.code == 0);
  CHECK(holds(plan.out, "; . is idle\nrank 0    0a   1a   2a "));
  CHECK(holds(plan.out, "\nbytes that one GPU sends in a step, by link:\n"));
  const Json events = json_of(slurp(trace))["traceEvents"];
  int forward = 0;
  double last = 0;
  for (const auto& event : events)
    if (event["ph"] == "X") {
      forward += event["name"] == "forward" ? 1 : 0;
      last = std::max(last, event["ts"].get<double>() + event["dur"].get<double>());
    }
  // Four ranks of five chunks, for 16 micro-batches.
  CHECK(forward == 4 * 5 * 16);
  const auto again =
      run({"plan", "llama3-70b", "--memory", "formula", "--json", "train.global_batch_size=32"});
  CHECK(last == doctest::Approx(1e6 * json_of(again.out)["step_seconds"].get<double>()).epsilon(1e-6));
  const std::string picture = slurp(svg);
  CHECK(picture.starts_with("<svg xmlns="));
  CHECK(picture.ends_with("</svg>\n"));
  CHECK(holds(picture, "<title>forward of micro-batch 15, chunk 4: "));
  // Files that are something else are not overwritten.
  spill(svg, "notes");
  CHECK(run({"plan", "llama3-70b", "--memory", "formula", "--svg", svg}).code == 2);
}

TEST_CASE("a plan is a page that needs nothing else") {
  const TemporaryDirectory directory;
  const std::string file = (directory.path() / "plan.html").string();
  const auto plan = run({"plan", "gpt2-1.5b", "--json", "--html", file, "train.global_batch_size=64"});
  REQUIRE(plan.code == 0);
  const std::string page = slurp(file);
  CHECK(page.starts_with("<!DOCTYPE html>"));
  // Nothing is loaded: the only address is the name of SVG.
  const std::string name = "http://www.w3.org/2000/svg";
  for (size_t at = page.find("://"); at != std::string::npos; at = page.find("://", at + 1))
    CHECK(page.compare(at - 4, name.size(), name) == 0);
  CHECK(holds(page, "<title>forward of micro-batch 7, chunk 0: "));
  // The data of the page are those of --json and of a search.
  const std::string before = "<script type=\"application/json\" id=\"data\">";
  const size_t begin = page.find(before) + before.size(), end = page.find("</script>", begin);
  const Json data = json_of(page.substr(begin, end - begin)), object = json_of(plan.out);
  CHECK(data["plan"] == object);
  CHECK(data["run"] == object["run"]);
  CHECK(data["search"]["layouts"].size() > 1);
  CHECK(data["links"][0]["part"] == "data_parallel");
}

TEST_CASE("a search prints layouts, best first, whose overrides make a recipe that fits") {
  const auto text = run({"plan", "llama3-8b", "--gpus", "16", "--search"});
  CHECK(text.code == 0);
  CHECK(holds(text.out, "layouts, of which "));
  CHECK(holds(text.out, "\nthe first: "));
  const auto found = run({"plan", "llama3-8b", "--gpus", "16", "--search", "--json"});
  REQUIRE(found.code == 0);
  const Json object = json_of(found.out);
  CHECK(object["schema"] == "capstan.plan-search/1");
  REQUIRE(object["layouts"].size() > 5);
  double before = 0, least = 1e18;
  int recipes = 0;
  for (const auto& layout : object["layouts"]) {
    recipes += layout["is_recipe"] ? 1 : 0;
    const auto seconds = layout["step_seconds"].get<double>();
    CHECK(seconds >= before);
    before = seconds;
    if (&layout == &object["layouts"][0] || !kSanitized) {
      std::vector<std::string> words = {"plan", "llama3-8b", "--gpus", "16", "--json"};
      for (const auto& one : layout["overrides"]) words.push_back(one.get<std::string>());
      const auto plan = run(words);
      CHECK(plan.code == 0);
      CHECK(json_of(plan.out)["step_seconds"].get<double>() == doctest::Approx(seconds));
      CHECK(layout["tp"].get<int>() * layout["pp"].get<int>() * layout["cp"].get<int>() *
                layout["dp"].get<int>() ==
            16);
      CHECK((layout["schedule"].is_null() == (layout["pp"] == 1)));
    }
    // In the order of time each layout of the Pareto front needs less memory than those before it.
    const auto bytes = layout["memory_bytes"]["total"].get<double>();
    if (layout["pareto_front"]) {
      CHECK(bytes < least);
      least = bytes;
    } else {
      CHECK(bytes > 0.995 * least);
    }
    double more = 0;
    for (const auto& part : layout["seconds_more_than_first"]) more += part.get<double>();
    CHECK(more == doctest::Approx(seconds - object["layouts"][0]["step_seconds"].get<double>()));
  }
  CHECK(object["layouts"][0]["pareto_front"] == true);
  CHECK(recipes == 1);
  CHECK(holds(text.out, ": the recipe as it is\n"));
  // A number of GPUs that the recipe's own layout does not divide.
  if (!kSanitized) CHECK(run({"plan", "llama3-70b", "--gpus", "16", "--search"}).code == 0);
  // 97 GPUs do not divide the batch; virtual stages of the recipe do not divide the other one.
  const auto indivisible = run({"plan", "llama3-70b", "--gpus", "97", "--search"});
  CHECK(indivisible.code == 2);
  CHECK(indivisible.err.find("train.global_batch_size=485 or 582") != std::string::npos);
  if (!kSanitized)
    CHECK(run({"plan", "llama3-70b", "--gpus", "60", "train.global_batch_size=540", "--search"}).code == 0);
  CHECK(run({"plan", "llama3-70b", "--gpus", "2", "--search"}).code == 3);
}

#if CAPSTAN_TIMED
TEST_CASE("a search over 512 GPUs takes less than 5 s of one core" * doctest::test_suite("timed")) {
  for (const char* recipe : {"llama3.1-405b", "deepseek-v3", "qwen3-235b-a22b"}) {
    CAPTURE(recipe);
    const auto found = run({"plan", recipe, "--gpus", "512", "--search"});
    MESSAGE("search over 512 GPUs: " << found.cpu_seconds << " s");
    CHECK(found.code == 0);
    CHECK(found.cpu_seconds < 5);
  }
}

TEST_CASE("a plan of 1024 GPUs takes less than 100 ms" * doctest::test_suite("timed")) {
  for (const char* recipe : {"llama3.1-405b", "llama3-70b", "gpt3-175b", "gpt-a100-1008b", "kimi-k2"}) {
    CAPTURE(recipe);
    std::vector<double> times;
    for (int i = 0; i < 9; ++i) {
      const auto plan = run({"plan", recipe, "--gpus", "1024", "--cluster", "h100"});
      CHECK(plan.code == 0);
      times.push_back(plan.cpu_seconds);
    }
    std::sort(times.begin(), times.end());
    MESSAGE("plan of 1024 GPUs: " << 1e3 * times[4] << " ms");
    CHECK(times[4] < 0.1);
  }
}
#endif

TEST_CASE("bench --calibrate writes a cluster file of this machine that plan reads" *
          doctest::test_suite("full")) {
  const TemporaryDirectory directory;
  const std::string file = (directory.path() / "mine.yaml").string();
  // A model of a few kernels, each measured for as short a time as can be.
  std::vector<std::string> small = {"quickstart",
                                    "mixed_precision=fp32",
                                    "model.num_layers=1",
                                    "model.hidden_size=64",
                                    "model.ffn_hidden_size=128",
                                    "model.num_attention_heads=2",
                                    "model.num_query_groups=2",
                                    "model.seq_length=64",
                                    "model.vocab_size=512",
                                    "train.micro_batch_size=1",
                                    "train.global_batch_size=1"};
  const auto with = [&](std::vector<std::string> words, const std::vector<std::string>& more) {
    words.insert(words.end(), small.begin(), small.end());
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const auto measured = run(with({"bench", "--calibrate", file, "--seconds", "0.01", "-r"}, {}));
  REQUIRE_MESSAGE(measured.code == 0, measured.err);
  CHECK(measured.out == file + "\n");
  const std::string text = slurp(file);
  CHECK(text.starts_with("# Measured by `capstan bench --calibrate FILE` on 1 rank, "));
  // Each figure has its origin beside it.
  for (const char* figure :
       {"\ndevice: cpu\n",
        "\nfp32_tflops: ", "\nmemory_bandwidth: ", "  # bytes read and written by a copy\n",
        "\nother_fraction: ", "  # a training step of quickstart: ", "\ncalibration: measured\n"})
    CHECK_MESSAGE(holds(text, figure), text);
  const auto planned = run(with({"plan"}, {"--cluster", file, "--json"}));
  REQUIRE_MESSAGE(planned.code == 0, planned.err);
  const Json plan = json_of(planned.out);
  CHECK(plan["step_seconds"].get<double>() > 0);
  CHECK(plan["fits"] == true);
  CHECK(run(with({"plan"}, {"--cluster", file})).out.find("not calibrated") == std::string::npos);
  // A file of another kind is not overwritten.
  spill(file, "name: mine\n");
  CHECK(run({"bench", "--calibrate", file}).code == 2);
  CHECK(slurp(file) == "name: mine\n");
  // Nothing is measured that could not be written.
  const auto nowhere = run({"bench", "--calibrate", (directory.path() / "none" / "x.yaml").string()});
  CHECK(nowhere.code != 0);
  CHECK(holds(nowhere.err, "there is no directory"));
}
