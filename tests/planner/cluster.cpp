// Cluster files: presets, files of the user, and what is wrong with them.
#include "planner/cluster.hpp"

#include <doctest/doctest.h>

#include "planner/plan.hpp"
#include "planner/resolver.hpp"
#include "planner/search.hpp"
#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/temporary_directory.hpp"

using namespace capstan;
using namespace capstan::planner;
using namespace capstan::planner::test;
using namespace capstan::test;

namespace {

std::string error_of_cluster(const std::string& name_or_file) {
  return error_of([&] { read_cluster(name_or_file); });
}

}  // namespace

TEST_CASE("every preset reads, and states the source of each figure") {
  const auto presets = config::Library::standard().presets("cluster");
  CHECK(presets.size() == 11);
  for (const auto& preset : presets) {
    CAPTURE(preset.name);
    const Cluster cluster = read_cluster(preset.name);
    CHECK(cluster.name == preset.name);
    CHECK(cluster.usable_memory.value > cluster.memory.value * 9 / 10);
    // A context and the buffers of NCCL take 2 GiB and more.
    CHECK(cluster.memory.value - cluster.usable_memory.value >= int64_t{2} << 30);
    CHECK(cluster.bf16_tflops > 100);
    CHECK(cluster.tf32_tflops.value_or(0) == doctest::Approx(cluster.bf16_tflops / 2).epsilon(0.03));
    CHECK_FALSE(preset.description.empty());
    const auto document = config::Library::standard().preset("cluster", preset.name);
    size_t begin = document->text.find('\n') + 1;
    while (begin < document->text.size()) {
      const size_t end = document->text.find('\n', begin);
      const std::string line = document->text.substr(begin, end - begin);
      if (!line.starts_with("gpu: ") && !line.starts_with("calibration: "))
        CHECK_MESSAGE(line.find("  # ") != std::string::npos, line);
      begin = end + 1;
    }
  }
}

TEST_CASE("a rack with a common NVLink network has a fast domain of several nodes") {
  CHECK(read_cluster("gb200").fast_domain() == 72);
  CHECK(read_cluster("h100").fast_domain() == 8);
}

TEST_CASE("a plan and a search refuse the formats that the trainer refuses on such a GPU") {
  const auto error = [](const std::string& cluster, const std::string& precision) {
    const auto recipe = resolver("llama3-8b", {"mixed_precision=" + precision});
    const Cluster gpus = read_cluster(cluster);
    const std::string of_plan = error_of([&] { make_plan(*recipe({}), gpus, MemoryChoice::formula); });
    CHECK(of_plan == error_of([&] { search_layouts(*recipe({}), gpus, recipe); }));
    return of_plan;
  };
  CHECK(holds(error("h100", "bf16_with_mxfp8_mixed"),
              "needs a GPU of compute capability 10.0 or newer, and this one (H100 SXM 80 GB) has 9.0"));
  CHECK(holds(error("b200", "bf16_with_fp8_subchannel_scaling_mixed"),
              "needs a GPU of compute capability 9.0"));
  CHECK(error("b200", "bf16_with_mxfp8_mixed").empty());
  CHECK(error("h100", "bf16_with_fp8_subchannel_scaling_mixed").empty());
  const Plan plan =
      make_plan(resolve("llama3-8b", {}).value(), read_cluster("mi300x"), MemoryChoice::formula);
  CHECK(holds(plan.warnings.front(), "no backend for MI300X"));
}

TEST_CASE("a name that does not exist is an error with a similar one") {
  const std::string error = error_of_cluster("h10");
  CHECK(holds(error, "not_found: not found: cluster = h10"));
  CHECK(holds(error, "did you mean `h100`?"));
  CHECK(holds(error_of_cluster("./no-such.yaml"), "not_found: not found: cluster = ./no-such.yaml"));
  CHECK(holds(error_of_cluster("./no-such.yaml"), "known clusters: a100-40"));
}

TEST_CASE("the preset of a GPU is found by the name that its driver says") {
  const auto found = cluster_of_gpu("NVIDIA H100 80GB HBM3");
  REQUIRE(found);
  CHECK(found->name == "h100");
  CHECK(cluster_of_gpu("NVIDIA B200")->name == "b200");
  CHECK(cluster_of_gpu("NVIDIA GB200")->name == "gb200");
  CHECK_FALSE(cluster_of_gpu("NVIDIA H100"));
  CHECK_FALSE(cluster_of_gpu(""));
}

TEST_CASE("the text of a cluster reads back as the same cluster, with comments") {
  for (const auto& preset : config::Library::standard().presets("cluster")) {
    const Cluster cluster = read_cluster(preset.name);
    const std::string text = cluster_text(cluster, {{"memory", "data sheet"}, {"gemm_fill_length", ""}});
    CHECK(holds(text, "  # data sheet\n"));
    CHECK(holds(text, "\ngemm_fill_length: 256\n"));
    CHECK_FALSE(holds(text, "gemm_tile_rows"));
    const Cluster again = parse_cluster(text, "again.yaml");
    CHECK(again.name == "again.yaml");
    CHECK(cluster_text(again, {}) == cluster_text(cluster, {}));
    CHECK(again.bf16_tflops == cluster.bf16_tflops);
    CHECK(again.power == cluster.power);
  }
}

TEST_CASE("all wrong fields of a file are reported with their lines") {
  const TemporaryDirectory directory;
  const std::string file = (directory.path() / "mine.yaml").string();
  spill(file, "gpu: mine\nmemory: 1GiB\nusable_memory: 2GiB\nbf16_tflop: 1\nmemory_bandwidth: fast\n");
  const std::string error = error_of_cluster(file);
  CHECK(holds(error, "config: the cluster file has errors"));
  CHECK(holds(
      error,
      "mine.yaml:4:1: unknown key `cluster.bf16_tflop`; a field with a similar name exists: `bf16_tflops`"));
  CHECK(holds(error, "mine.yaml:5:19: "));
}

TEST_CASE("a file of the user is read, and its fields are compared with each other") {
  const TemporaryDirectory directory;
  const std::string file = (directory.path() / "mine.yaml").string();
  const std::string text =
      "gpu: mine\nmemory: 1GiB\nusable_memory: 900MiB\nbf16_tflops: 100\nmemory_bandwidth: 1000\n"
      "multiprocessors: 10\ngpus_per_node: 4\nintra_bandwidth: 100\ninter_bandwidth: 10\n";
  spill(file, text +
                  "bus_bandwidth_by_nodes: {8: 20, 2: 80}\ngather_bandwidth_by_nodes: {4: 5}\ncalibration: "
                  "measured\n");
  const Cluster cluster = read_cluster(file);
  CHECK(cluster.usable_memory.value == 900 << 20);
  CHECK(cluster.uncertainty() == 0.1);
  REQUIRE(cluster.bus_bandwidth_by_nodes.size() == 2);
  CHECK(cluster.bus_bandwidth_by_nodes.front().first == "2");
  CHECK(cluster.gather_bandwidth_by_nodes.front().second == 5);
  spill(file, text + "fast_domain_size: 6\nbus_bandwidth_by_nodes: {two: 20}\n");
  const std::string error = error_of_cluster(file);
  CHECK(holds(error, "mine.yaml:10:19: `fast_domain_size` is not a multiple of `gpus_per_node`"));
  CHECK(holds(error, "`two` is not a number of nodes"));
}
