// Cluster files of `capstan plan`: a cluster that is accepted gives times, and its text reads back.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/error.hpp"
#include "planner/cluster.hpp"
#include "planner/kernels.hpp"

using namespace capstan;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const planner::Cluster cluster = planner::parse_cluster(text, "fuzz.yaml");
    if (std::isnan(planner::gemm_seconds(cluster, planner::GemmFormat::bf16, 128, 128, 128))) std::abort();
    const std::string written = planner::cluster_text(cluster, {});
    if (planner::cluster_text(planner::parse_cluster(written, "fuzz.yaml"), {}) != written) std::abort();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::config) std::abort();
  }
  return 0;
}
