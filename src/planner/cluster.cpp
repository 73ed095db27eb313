#include "planner/cluster.hpp"

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "config/core/compose.hpp"
#include "config/core/convert.hpp"
#include "config/core/emit.hpp"
#include "config/core/tree.hpp"

namespace capstan::planner {

using config::Diagnostic;
using config::Node;
using config::Source;

static void describe(config::Section<Cluster>& s) {
  s.doc("a cluster of GPUs, for `plan`");
  s.field("gpu", &Cluster::gpu).doc("name of the GPU, for reports").required();
  s.field("device_name", &Cluster::device_name)
      .doc("name of the GPU as its driver says it; `train` finds a preset by it");
  s.field("compute_capability", &Cluster::compute_capability)
      .doc(
          "compute capability of the GPU, such as 9.0: `plan` refuses formats that it does not have; 0: it "
          "is "
          "no GPU of CUDA")
      .range(0, 99);
  s.field("device", &Cluster::device)
      .doc(
          "device whose kernels and allocator the memory of a plan is for: cuda, or cpu where the ranks are");
  s.field("memory", &Cluster::memory).doc("memory of one GPU").min(1).required();
  s.field("usable_memory", &Cluster::usable_memory)
      .doc("memory that the trainer can allocate: without CUDA context, NCCL buffers and the driver's part")
      .min(1)
      .required();
  s.field("bf16_tflops", &Cluster::bf16_tflops)
      .doc("dense peak of GEMMs in bf16 or fp16 with fp32 accumulation")
      .unit("TFLOP/s")
      .above(0)
      .max(1e6)
      .required();
  s.field("fp8_tflops", &Cluster::fp8_tflops)
      .doc("dense peak of GEMMs in fp8")
      .unit("TFLOP/s")
      .above(0)
      .max(1e6);
  s.field("fp4_tflops", &Cluster::fp4_tflops)
      .doc("dense peak of GEMMs in fp4")
      .unit("TFLOP/s")
      .above(0)
      .max(1e6);
  s.field("tf32_tflops", &Cluster::tf32_tflops)
      .doc("dense peak of GEMMs in TF32")
      .unit("TFLOP/s")
      .above(0)
      .max(1e6);
  s.field("fp32_tflops", &Cluster::fp32_tflops)
      .doc("peak of GEMMs in fp32")
      .unit("TFLOP/s")
      .above(0)
      .max(1e6);
  s.field("memory_bandwidth", &Cluster::memory_bandwidth)
      .doc("peak bandwidth of the GPU's memory")
      .unit("GB/s")
      .above(0)
      .max(1e9)
      .required();
  s.field("multiprocessors", &Cluster::multiprocessors)
      .doc("multiprocessors (compute units) of one GPU, over which the tiles of a GEMM are divided")
      .range(1, 4096)
      .required();
  s.field("gemm_tile_rows", &Cluster::gemm_tile_rows)
      .doc("rows of the output tile of a GEMM thread block")
      .range(8, 1024);
  s.field("gemm_tile_columns", &Cluster::gemm_tile_columns)
      .doc("columns of the output tile of a GEMM thread block")
      .range(8, 1024);

  s.field("gpus_per_node", &Cluster::gpus_per_node).doc("GPUs of one node").range(1, 1024).required();
  s.field("fast_domain_size", &Cluster::fast_domain_size)
      .doc("GPUs that share the fast network, where it joins several nodes (NVL72); default gpus_per_node")
      .range(1, 65536);
  s.field("intra_bandwidth", &Cluster::intra_bandwidth)
      .doc("peak bandwidth of one GPU within the fast domain, in one direction")
      .unit("GB/s")
      .above(0)
      .max(1e9)
      .required();
  s.field("intra_peer_bandwidth", &Cluster::intra_peer_bandwidth)
      .doc("peak bandwidth between two GPUs, where each pair has a link of its own (a mesh without a switch)")
      .unit("GB/s")
      .above(0)
      .max(1e9);
  s.field("inter_bandwidth", &Cluster::inter_bandwidth)
      .doc("peak bandwidth of one GPU between fast domains, in one direction")
      .unit("GB/s")
      .above(0)
      .max(1e9)
      .required();
  s.field("intra_latency", &Cluster::intra_latency)
      .doc("latency of one step of a collective within the fast domain")
      .unit("us")
      .range(0, 1e4);
  s.field("inter_latency", &Cluster::inter_latency)
      .doc("latency of one step of a collective between fast domains")
      .unit("us")
      .range(0, 1e4);
  s.field("bus_bandwidth_by_nodes", &Cluster::bus_bandwidth_by_nodes)
      .doc(
          "measured bus bandwidth of an all-reduce over all GPUs of N nodes in GB/s, as nccl-tests prints it "
          "({2: 362, 4: 160}); it limits collectives between nodes");
  s.field("gather_bandwidth_by_nodes", &Cluster::gather_bandwidth_by_nodes)
      .doc("the same of all-gathers and reduce-scatters; default that of an all-reduce");

  s.field("host_memory", &Cluster::host_memory)
      .doc("memory of one node's host, which limits offload; without it offload is not limited")
      .min(1);
  s.field("host_bandwidth", &Cluster::host_bandwidth)
      .doc("attained bandwidth between one GPU and host memory, in one direction, for offload")
      .unit("GB/s")
      .above(0)
      .max(1e9);
  s.field("host_memory_bandwidth", &Cluster::host_memory_bandwidth)
      .doc(
          "attained bandwidth of host memory for each GPU of a node, for optimizer state that is updated "
          "there")
      .unit("GB/s")
      .above(0)
      .max(1e9);

  s.field("gemm_efficiency", &Cluster::gemm_efficiency)
      .doc("attained fraction of the peak by a large GEMM; smaller ones are derated by their tiles")
      .fraction()
      .above(0);
  s.field("gemm_fill_length", &Cluster::gemm_fill_length)
      .doc("inner dimension at which a GEMM attains half of its rate: its first iterations load operands")
      .range(0, 65536);
  s.field("fp8_gemm_efficiency", &Cluster::fp8_gemm_efficiency)
      .doc("the same in fp8; default gemm_efficiency")
      .fraction()
      .above(0);
  s.field("fp4_gemm_efficiency", &Cluster::fp4_gemm_efficiency)
      .doc("the same in fp4; default gemm_efficiency")
      .fraction()
      .above(0);
  s.field("grouped_gemm_efficiency", &Cluster::grouped_gemm_efficiency)
      .doc("rate of the grouped GEMMs of experts, as a fraction of that of one GEMM with the same tiles")
      .fraction()
      .above(0);
  s.field("attention_forward_efficiency", &Cluster::attention_forward_efficiency)
      .doc("attained fraction of the bf16 peak by the forward pass of causal attention of 4096 tokens")
      .fraction()
      .above(0);
  s.field("attention_backward_efficiency", &Cluster::attention_backward_efficiency)
      .doc("attained fraction of the bf16 peak by the backward pass of causal attention of 4096 tokens")
      .fraction()
      .above(0);
  s.field("attention_fill_length", &Cluster::attention_fill_length)
      .doc(
          "length at which attention attains half of its rate for endless sequences; 0: the rate does not "
          "depend on the length")
      .unit("tokens")
      .range(0, 65536);
  s.field("memory_efficiency", &Cluster::memory_efficiency)
      .doc("attained fraction of the memory bandwidth by kernels without a GEMM")
      .fraction()
      .above(0);
  s.field("intra_efficiency", &Cluster::intra_efficiency)
      .doc("attained fraction of intra_bandwidth by a large collective")
      .fraction()
      .above(0);
  s.field("inter_efficiency", &Cluster::inter_efficiency)
      .doc("attained fraction of inter_bandwidth by a large collective")
      .fraction()
      .above(0);
  s.field("kernel_latency", &Cluster::kernel_latency)
      .doc("time of a kernel in addition to its work: launch, first and last wave")
      .unit("us")
      .range(0, 1e4);
  s.field("other_fraction", &Cluster::other_fraction)
      .doc(
          "time of a step on up to 16 GPUs that the parts do not explain (jitter, host), as a fraction of "
          "them; on more it grows with the root of the logarithm of their number, as the slowest of them is "
          "slower")
      .fraction();
  s.field("calibration", &Cluster::calibration).doc("source of the attained fractions");
  s.field("power", &Cluster::power).doc("power of one GPU under load").unit("W").above(0).max(1e6);
  s.field("price_per_hour", &Cluster::price_per_hour).doc("price of one GPU for an hour").range(0, 1e9);
  s.field("power_usage_effectiveness", &Cluster::power_usage_effectiveness)
      .doc("energy of the data center by that of its computers (PUE)")
      .range(1, 10);
  s.field("gpu_hours_between_failures", &Cluster::gpu_hours_between_failures)
      .doc("mean time between failures of one GPU with its part of node and network; of N GPUs an Nth of it")
      .unit("h")
      .above(0)
      .max(1e12);
  s.field("restart_time", &Cluster::restart_time)
      .doc("time from a failure to the next step: detection, restart and load")
      .unit("s")
      .range(0, 1e7);
  s.field("storage_bandwidth", &Cluster::storage_bandwidth)
      .doc("bandwidth of the storage of checkpoints for each GPU of a run")
      .unit("GB/s")
      .above(0)
      .max(1e9);
}

std::string cluster_text(const Cluster& cluster, const std::map<std::string, std::string>& comments) {
  const config::Value values = config::type_of<Cluster>().load(&cluster);
  std::string text;
  for (size_t i = 0; i < values.keys.size(); ++i) {
    const config::FieldInfo& field = *cluster_fields().find(values.keys[i]);
    const auto comment = comments.find(field.name);
    if (comment == comments.end() && !field.required && values.items[i] == field.default_value) continue;
    text += field.name + ": " + config::yaml_inline(*field.type, values.items[i]);
    if (comment != comments.end() && !comment->second.empty()) text += "  # " + comment->second;
    text += "\n";
  }
  return text;
}

const config::RecordInfo& cluster_fields() {
  return *config::type_of<Cluster>().record;
}

namespace {

[[noreturn]] void fail_no_cluster(const config::Library& library, const std::string& name) {
  std::vector<std::string> names;
  for (const auto& entry : library.presets("cluster")) names.push_back(entry.name);
  const auto near = near_matches(name, names);
  fail(ErrorCode::not_found, not_found_text("cluster", config::shortened(name)),
       (near.empty() ? "" : "did you mean `" + near[0] + "`? ") + "known clusters: " + join(names, ", ") +
           "; a file of your own is given by its path");
}

// Checks between fields.
void check_fields(const Cluster& cluster, const Node& root, std::vector<Diagnostic>& diagnostics) {
  const auto error = [&](const char* key, std::string message, std::string help) {
    Diagnostic& added = diagnostics.emplace_back();
    added.message = std::move(message);
    const Node* node = root.find(key);
    added.location = node ? node->location : root.location;
    added.help(std::move(help));
  };
  if (cluster.usable_memory.value > cluster.memory.value)
    error("usable_memory", "`usable_memory` is above `memory`", "it is a part of `memory`");
  if (cluster.fast_domain() % cluster.gpus_per_node != 0)
    error("fast_domain_size", "`fast_domain_size` is not a multiple of `gpus_per_node`",
          "a fast domain is made of full nodes");
  const auto check_bandwidths = [&](const char* key, const BandwidthByNodes& bandwidths) {
    for (const auto& [nodes, bandwidth] : bandwidths)
      if (!(parse_int(nodes).value_or(0) > 0) || !(bandwidth > 0))
        error(key, "`" + nodes + "` is not a number of nodes with a bandwidth above 0",
              "write {2: 362, 4: 160}");
  };
  check_bandwidths("bus_bandwidth_by_nodes", cluster.bus_bandwidth_by_nodes);
  check_bandwidths("gather_bandwidth_by_nodes", cluster.gather_bandwidth_by_nodes);
}

Cluster parse_source(Source source) {
  source.text = config::normalized(std::move(source.text));
  if (trim(source.text).empty())
    fail(ErrorCode::config, "the cluster file " + source.name + " is empty",
         "`capstan recipe cp cluster=h100 FILE` writes one");
  const std::vector<Source> sources{std::move(source)};
  std::vector<Diagnostic> diagnostics;
  Cluster cluster;
  if (const auto root = config::parse_yaml(0, sources, diagnostics)) {
    config::FieldInfo field;
    field.name = field.path = "cluster";
    field.type = &config::type_of<Cluster>();
    if (const auto value = config::convert(field, *root, "cluster", {&sources, &diagnostics, {}})) {
      field.type->store(&cluster, *value);
      check_fields(cluster, *root, diagnostics);
    }
  }
  std::string errors;
  for (const Diagnostic& one : diagnostics)
    errors += "\n    " + config::location_text(one.location, sources) + ": " + one.message +
              (one.helps.empty() ? "" : "; " + join(one.helps, "; "));
  if (!errors.empty()) fail(ErrorCode::config, "the cluster file has errors" + errors);
  for (BandwidthByNodes* bandwidths : {&cluster.bus_bandwidth_by_nodes, &cluster.gather_bandwidth_by_nodes})
    std::ranges::sort(*bandwidths, {}, [](const auto& one) { return *parse_int(one.first); });
  return cluster;
}

}  // namespace

Cluster read_cluster(const std::string& name_or_file, const config::Library& library) {
  Source source;
  if (config::is_path(name_or_file)) {
    if (!std::filesystem::exists(name_or_file)) fail_no_cluster(library, name_or_file);
    source = {Source::Kind::file, name_or_file, read_file(name_or_file, config::TreeLimits::kFileBytes), {}};
  } else {
    const auto preset = library.preset("cluster", name_or_file);
    if (!preset) fail_no_cluster(library, name_or_file);
    if (preset->file.empty())
      source = {Source::Kind::embedded, preset->name, preset->text, {}};
    else
      source = {
          Source::Kind::file, preset->name, read_file(preset->file, config::TreeLimits::kFileBytes), {}};
  }
  Cluster cluster = parse_source(std::move(source));
  cluster.name = name_or_file;
  return cluster;
}

Cluster parse_cluster(std::string text, const std::string& name) {
  Cluster cluster = parse_source({Source::Kind::file, name, std::move(text), {}});
  cluster.name = name;
  return cluster;
}

std::optional<Cluster> cluster_of_gpu(const std::string& device_name, const config::Library& library) {
  if (device_name.empty()) return std::nullopt;
  for (const auto& preset : library.presets("cluster"))
    if (Cluster cluster = read_cluster(preset.name, library); cluster.device_name == device_name)
      return cluster;
  return std::nullopt;
}

}  // namespace capstan::planner
