// Launches of real sizes, of which a sample of the blocks runs: planted defects that only such sizes show.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/cuda/device.hpp"
#include "support/child.hpp"
#include "support/errors.hpp"
#include "support/sampled_device.hpp"
#include "support/sanitized.hpp"
#include "support/simulated_gpu.hpp"
#include "tensor/tensor.hpp"

using namespace capstan;
using namespace capstan::kernels::simulated;
using kernels::LaunchContext;

namespace {

std::vector<int64_t> blocks_run;

__global__ void list_block_kernel(int64_t blocks, int) {
  if (thread_index() == 0 && grid_blocks() == blocks) blocks_run.push_back(block_index());
}
__global__ void waiting_kernel(int* waits) {
  for (int i = 0; i < 1000; ++i) {
    if (thread_index() == 0) ++*waits;
    sync_threads();
  }
}

// The index of the last thread does not fit into an int.
constexpr Grid kManyThreads{int64_t{1} << 24, 256};
constexpr int kAtProduct = __LINE__ + 2;
__global__ void overflowing_kernel(float* x) {
  const int i = static_cast<int>(block_index()) * block_threads() + thread_index();
  x[i < 0 ? 0 : i] = 1;
}
constexpr int kAtNarrow = __LINE__ + 2;
__global__ void narrowing_kernel(float* x) {
  const int i = narrow<int>(global_thread());
  x[i] = 1;
}
__global__ void write_kernel(float* x, int64_t count) {
  if (global_thread() < count) x[global_thread()] = 1;
}

// The blocks of a launch with so many.
std::vector<int64_t> run_list(int64_t blocks, int argument) {
  blocks_run.clear();
  launch(LaunchContext{}, {blocks, 64}, list_block_kernel, blocks, argument);
  return blocks_run;
}
std::string at_line(int line) {
  return "tests/kernels/sampled.cpp:" + std::to_string(line) + ": ";
}

}  // namespace

TEST_CASE("sampled launches: the first block, the last one and others, once for each launch") {
  const SampledLaunches sampled({.blocks = 5, .launches = 3});
  constexpr int64_t kBlocks = INT32_MAX;
  const std::vector<int64_t> blocks = run_list(kBlocks, 1);
  REQUIRE(blocks.size() == 5);
  CHECK(blocks.front() == 0);
  CHECK(blocks.back() == kBlocks - 1);
  CHECK(std::ranges::adjacent_find(blocks, std::greater_equal()) == blocks.end());
  CHECK(run_list(kBlocks, 1).empty());
  // Other arguments; up to three launches of the same grid.
  CHECK(run_list(kBlocks, 2) == blocks);
  CHECK(run_list(kBlocks, 3) == blocks);
  CHECK(run_list(kBlocks, 4).empty());
  CHECK(run_list(3, 1) == std::vector<int64_t>{0, 1, 2});
  CHECK(sampled_blocks({.blocks = 5, .seed = 1}, kBlocks, 64) !=
        sampled_blocks({.blocks = 5, .seed = 2}, kBlocks, 64));
  // As many threads as run completely, and one block more.
  CHECK(sampled_blocks({.complete = 640}, 10, 64).size() == 10);
  CHECK(sampled_blocks({.complete = 640}, 11, 64).size() == 4);
}

TEST_CASE("sampled launches: what a child ran does not run again in another, unless it is small") {
  SharedLaunches shared;
  const auto blocks_of_child = [&](int64_t blocks, int argument, int capability) {
    const test::ChildResult result = test::run_in_child([&] {
      const test::SimulatedGpu gpu(capability);
      const SampledLaunches sampled({.launches = 1, .shared = &shared});
      std::fprintf(stderr, "%zu", run_list(blocks, argument).size());
    });
    CHECK(result.succeeded);
    return result.text;
  };
  CHECK(blocks_of_child(1000, 1, 90) == "4");
  CHECK(blocks_of_child(1000, 1, 90) == "0");
  CHECK(blocks_of_child(1000, 2, 90) == "4");
  CHECK(blocks_of_child(1000, 1, 80) == "4");
  CHECK(blocks_of_child(3, 1, 90) == "3");
  CHECK(blocks_of_child(3, 1, 90) == "3");
}

TEST_CASE("sampled launches: a block ends after its waits, and the next launch is complete again") {
  int waits = 0;
  {
    const SampledLaunches sampled({.waits = 64 * 10});
    launch(LaunchContext{}, {1, 64}, waiting_kernel, &waits);
    CHECK(waits >= 5);
    CHECK(waits <= 20);
  }
  waits = 0;
  launch(LaunchContext{}, {1, 64}, waiting_kernel, &waits);
  CHECK(waits == 1000);
}

TEST_CASE("sampled launches: integers that are too small for a real size are named") {
  test::SampledDevice device;
  const Tensor x = Tensor::empty(device, {kManyThreads.blocks * kManyThreads.threads});
  auto* const data = reinterpret_cast<float*>(x.address());
  if (!test::kSanitized)  // which ends the program
    CHECK_THROWS_WITH_AS(launch(LaunchContext{}, kManyThreads, overflowing_kernel, data),
                         doctest::Contains((at_line(kAtProduct) + "a product overflows its type").c_str()),
                         Error);
  try {
    launch(LaunchContext{}, kManyThreads, narrowing_kernel, data);
    FAIL("an index was narrowed");
  } catch (const Error& e) {
    CHECK(e.message().find(at_line(kAtNarrow)) != std::string::npos);
    CHECK(e.message().find(" does not fit into an integer of 32 bits") != std::string::npos);
  }
}

TEST_CASE("sampled launches: an access behind a large tensor is named, with its launch and block") {
  constexpr int64_t kCount = (int64_t{1} << 33) + 5, kBlocks = kCount / 256 + 1;
  test::SampledDevice device;
  const Tensor x = Tensor::zeros(device, {kCount});
  auto* const data = reinterpret_cast<float*>(x.address());
  launch(LaunchContext{}, {kBlocks, 256}, write_kernel, data, kCount);
  CHECK(data[kCount - 1] == 1);
  const int line = __LINE__ + 3;
  const test::ChildResult result = test::run_in_child([&] {
    device.report_faults();
    launch(LaunchContext{}, {kBlocks + 16, 256}, write_kernel, data, 2 * kCount);
  });
  CHECK_FALSE(result.succeeded);
  INFO(result.text);
  CHECK(result.text.find(at_line(line) + "block ") != std::string::npos);
  CHECK(result.text.find(" of " + std::to_string(kBlocks + 16) + ": access to ") != std::string::npos);
  CHECK(result.text.find(" bytes after a block of " + std::to_string(4 * kCount) + " bytes (activations)") !=
        std::string::npos);
  // A block is zero again for the next tensor.
  Tensor small = Tensor::empty(device, {3});
  reinterpret_cast<float*>(small.address())[2] = 7;
  const std::byte* const before = small.address();
  small = {};
  small = Tensor::empty(device, {3});
  REQUIRE(small.address() == before);
  CHECK(reinterpret_cast<float*>(small.address())[2] == 0);
}
