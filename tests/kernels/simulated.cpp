// The simulation of CUDA kernels: planted defects are named with their place, and correct kernels give the
// same bits in every order of threads and blocks.
#include <doctest/doctest.h>

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/common/shared_memory_limits.hpp"
#include "kernels/cuda/device.hpp"
#include "kernels/simulated/fiber.hpp"
#include "kernels/simulated/table.hpp"
#include "tensor/device.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/simulated_gpu.hpp"

using namespace capstan;
using namespace capstan::kernels::simulated;
using kernels::LaunchContext;

namespace {

const Order kOrders[] = {{Order::Kind::forward, 0},
                         {Order::Kind::reverse, 0},
                         {Order::Kind::random, 1},
                         {Order::Kind::random, 2},
                         {Order::Kind::random, 77}};

// The message of the defect that a kernel with these threads shows in every order, without its file.
template <class... P>
std::vector<std::string> defects(Grid grid, void (*kernel)(P...), std::type_identity_t<P>... arguments) {
  std::vector<std::string> messages;
  for (const Order& order : kOrders) {
    set_order(order);
    try {
      launch(LaunchContext{}, grid, kernel, arguments...);
      messages.emplace_back("none");
    } catch (const Error& e) {
      CHECK(e.code() == ErrorCode::internal);
      messages.push_back(e.message());
    }
  }
  set_order({});
  return messages;
}
// Whether each message begins with this line of this file and contains `what`.
void check_named(const std::vector<std::string>& messages, int line, const std::string& what) {
  const std::string place = "tests/kernels/simulated.cpp:" + std::to_string(line) + ": ";
  for (const std::string& message : messages) {
    INFO(message);
    CHECK(message.find(place) != std::string::npos);
    CHECK(message.find(what) != std::string::npos);
  }
}

// ---- kernels with defects; `kAt…` is the line that the message names

__global__ void missing_barrier(float* out) {
  CAPSTAN_SHARED(float, values, 64);
  values[thread_index()] = static_cast<float>(thread_index());
  // No sync_threads().
  out[thread_index()] = values[63 - thread_index()];
}
constexpr int kAtRead = __LINE__ - 2, kAtWrite = kAtRead - 2;

__global__ void overwritten_too_early(float* out) {
  CAPSTAN_SHARED(float, total, 1);
  for (int round = 0; round < 2; ++round) {
    if (thread_index() == 0) total[0] = static_cast<float>(round);
    sync_threads();
    out[thread_index()] = total[0];
    // No sync_threads() before the next round.
  }
}

__global__ void wrong_mask(int* out) {
  if (lane_index() < 16) out[thread_index()] = shuffle_xor(thread_index(), 1, 0x0000FF00);
}
constexpr int kAtMask = __LINE__ - 2;

__global__ void missing_lanes(int* out) {
  if (lane_index() < 16) out[thread_index()] = shuffle_xor(thread_index(), 1);
}
constexpr int kAtMissingLanes = __LINE__ - 2;

__global__ void unnamed_source(int* out) {
  if (lane_index() < 16) out[thread_index()] = shuffle(thread_index(), 16, 0x0000FFFF);
}
constexpr int kAtSource = __LINE__ - 2;

__global__ void divergent_shuffles(int* out) {
  if (lane_index() < 16)
    out[thread_index()] = shuffle_xor(1, 1);
  else
    out[thread_index()] = shuffle_xor(2, 1);
}

__global__ void write_past_the_end(int*) {
  CAPSTAN_SHARED(float, values, 33);
  values[thread_index()] = 0;
}
constexpr int kAtWritePast = __LINE__ - 2;

__global__ void read_before_the_beginning(float* out) {
  CAPSTAN_DYNAMIC_SHARED(float, values);
  values[thread_index()] = 0;
  sync_threads();
  out[thread_index()] = values[thread_index() - 1];
}
constexpr int kAtReadBefore = __LINE__ - 2;

__global__ void write_by_address(int*) {
  CAPSTAN_SHARED(float, values, 32);
  values.data()[thread_index() + 1] = 0;
}
constexpr int kAtDeclaration = __LINE__ - 3;

__global__ void two_dynamic_arrays(int*) {
  CAPSTAN_DYNAMIC_SHARED(float, first);
  first[thread_index()] = 0;
  CAPSTAN_DYNAMIC_SHARED(int, second);
  second[thread_index()] = 0;
}
constexpr int kAtSecondArray = __LINE__ - 3;

__global__ void much_shared_memory(int*) {
  CAPSTAN_SHARED(double, values, 6145);
  values[thread_index()] = 0;
}
constexpr int kAtLargeArray = __LINE__ - 3;

template <int kBytes>
__global__ void both_shared_memories(int*) {
  CAPSTAN_SHARED(std::byte, values, kBytes);
  values[thread_index()] = std::byte{0};
  CAPSTAN_DYNAMIC_SHARED(float, of_launch);
  of_launch[thread_index()] = 0;
}
constexpr int kAtConstantArray = __LINE__ - 5;

__global__ void unaligned_vector(const float* in, int*) {
  load_16(in + thread_index());
}
constexpr int kAtVector = __LINE__ - 2;

__global__ void early_return(int n) {
  if (thread_index() >= n) return;
  sync_threads();
}
constexpr int kAtBarrier = __LINE__ - 2;

__global__ void two_barriers(int n) {
  if (thread_index() < n)
    sync_threads();
  else
    sync_threads();
}
constexpr int kAtFirstBarrier = __LINE__ - 4, kAtSecondBarrier = kAtFirstBarrier + 2;

__global__ void barrier_against_shuffle(int* out) {
  if (lane_index() == 3)
    sync_threads();
  else
    out[thread_index()] = shuffle_xor(1, 1);
}
constexpr int kAtWaitingShuffle = __LINE__ - 2;

__global__ void unwaited_copy(const float* in, float* out) {
  CAPSTAN_SHARED(float, values, 64);
  copy_async<4>(values, thread_index(), in + thread_index());
  commit_copies();
  out[thread_index()] = values[thread_index()];
  wait_for_copies<0>();
}
constexpr int kAtCopiedRead = __LINE__ - 3, kAtCopy = kAtCopiedRead - 2;

__global__ void abandoned_copy(const float* in, float*) {
  CAPSTAN_SHARED(float, values, 64);
  copy_async<4>(values, thread_index(), in + thread_index());
}
constexpr int kAtAbandonedCopy = __LINE__ - 2;

// Waits for its own copy, and reads that of another thread without a barrier.
__global__ void copy_without_barrier(const float* in, float* out) {
  CAPSTAN_SHARED(float, values, 64);
  copy_async<4>(values, thread_index(), in + thread_index());
  commit_copies();
  wait_for_copies<0>();
  out[thread_index()] = values[63 - thread_index()];
}

// ---- kernels without defects

// Sums of slices by shuffles, shared memory and barriers, with partial warps of work and early returns of
// threads without any.
__global__ void sums(const float* in, float* out, int n) {
  float sum = 0;
  for (int i = thread_index(); i < n; i += block_threads()) sum += in[block_index() * n + i];
  sum = block_sum(sum);
  const float most = block_max(n > thread_index() ? in[block_index() * n + thread_index()] : -INFINITY);
  if (thread_index() > 0) return;
  out[2 * block_index()] = sum;
  out[2 * block_index() + 1] = most;
}

// A pipeline of two stages: reversed tiles of 64 values, each loaded while the one before is written.
__global__ void reversed_tiles(const float* in, float* out, int tiles) {
  CAPSTAN_SHARED(float, stages, 128);
  const auto start = [&](int tile) {
    if (tile < tiles) copy_async<4>(stages, tile % 2 * 64 + thread_index(), in + tile * 64 + thread_index());
    commit_copies();
  };
  start(0);
  for (int tile = 0; tile < tiles; ++tile) {
    start(tile + 1);
    wait_for_copies<1>();
    sync_threads();
    out[tile * 64 + thread_index()] = stages[tile % 2 * 64 + 63 - thread_index()];
    sync_threads();
  }
  wait_for_copies<0>();
}

__global__ void warp_functions(int* out) {
  const int lane = lane_index();
  int* mine = out + thread_index() * 6;
  mine[0] = shuffle_xor(lane, 5);
  mine[1] = shuffle_up(lane, 3);
  mine[2] = shuffle(lane * 10, (lane + 1) % kWarp);
  mine[3] = static_cast<int>(ballot(lane % 3 == 0));
  mine[4] = warp_sum(lane);
  mine[5] = 0;
  // Two groups of lanes, each with its own mask.
  if (lane < 8)
    mine[5] = shuffle_xor(lane, 1, 0x000000FF);
  else
    mine[5] = shuffle_xor(lane, 2, 0xFFFFFF00);
}

// Each warp exchanges values through its own part of shared memory.
__global__ void exchange_within_warps(int* out) {
  CAPSTAN_SHARED(int, values, 64);
  const int first = warp_index() * kWarp;
  for (int round = 0; round < 3; ++round) {
    values[thread_index()] = thread_index() + round;
    sync_warp();
    out[thread_index()] = values[first + (lane_index() + 1) % kWarp];
    sync_warp();
  }
}

__global__ void add_one(float* x, int64_t n) {
  const int64_t i = global_thread();
  if (i < n) x[i] += 1;
}
__global__ void many_barriers(int* out, int rounds) {
  int sum = 0;
  for (int i = 0; i < rounds; ++i) {
    sync_threads();
    sum += i;
  }
  out[thread_index()] = sum;
}

}  // namespace

TEST_CASE("simulated kernels: a missing barrier is named, with both accesses") {
  std::array<float, 64> out{};
  const auto messages = defects({1, 64}, missing_barrier, out.data());
  for (const std::string& message : messages) {
    INFO(message);
    CHECK(message.find("no barrier between two accesses of values[") != std::string::npos);
    CHECK(message.find("simulated.cpp:" + std::to_string(kAtRead)) != std::string::npos);
    CHECK(message.find("simulated.cpp:" + std::to_string(kAtWrite)) != std::string::npos);
  }
  for (const std::string& message : defects({1, 64}, overwritten_too_early, out.data()))
    CHECK(message.find("no barrier between two accesses of total[0]") != std::string::npos);
}

TEST_CASE("simulated kernels: masks of warp operations") {
  std::array<int, 32> out{};
  check_named(defects({1, 32}, wrong_mask, out.data()), kAtMask,
              "the mask 0x0000ff00 of this warp operation does not name lane ");
  check_named(defects({1, 32}, missing_lanes, out.data()), kAtMissingLanes, "has returned");
  check_named(defects({1, 32}, unnamed_source, out.data()), kAtSource,
              "reads the value of lane 16, which the mask does not name");
  for (const std::string& message : defects({1, 32}, divergent_shuffles, out.data()))
    CHECK(message.find("executes this warp operation with the mask 0xffffffff, and thread ") !=
          std::string::npos);
}

TEST_CASE("simulated kernels: accesses outside of shared memory") {
  std::array<float, 64> out{};
  check_named(defects({1, 64}, write_past_the_end, nullptr), kAtWritePast, "which has 33 elements");
  check_named(defects({1, 64, 64 * sizeof(float)}, read_before_the_beginning, out.data()), kAtReadBefore,
              "thread 0 of block 0 reads values[-1], which has 64 elements");
  if (!test::kSanitized)  // which ends the program
    check_named(defects({1, 32}, write_by_address, nullptr), kAtDeclaration,
                "a thread wrote outside of values, which has 32 elements");
}

TEST_CASE("simulated kernels: what a GPU does not run") {
  alignas(16) const std::array<float, 64> in{};
  check_named(defects({1, 32, 256}, two_dynamic_arrays, nullptr), kAtSecondArray,
              "second lies in the same dynamic shared memory as first");
  check_named(defects({1, 32}, much_shared_memory, nullptr), kAtLargeArray,
              "have 49160 bytes, and a GPU allows 49152");
  // A launch raises the limit of its kernel only if it has many bytes of its own.
  CHECK_NOTHROW(launch(LaunchContext{}, {1, 32, size_t{48} << 10}, both_shared_memories<32>, nullptr));
  check_named(defects({1, 32, size_t{16} << 10}, both_shared_memories<32769>, nullptr), kAtConstantArray,
              "has 49153 bytes, and a launch with 16384 of them allows 49152");
  check_named(defects({1, 32}, unaligned_vector, in.data(), nullptr), kAtVector,
              "a vector of 16 bytes is not aligned to its size");
  // Named at the launch.
  const auto check_grid = [](const Grid& grid, const std::string& what) {
    check_named(defects(grid, write_past_the_end, nullptr), grid.at.line, what);
  };
  check_grid({1, 48}, "a block has 48 threads, and a GPU runs complete warps of 32, 1024 threads at most");
  check_grid({1, 2048}, "a block has 2048 threads, ");
  check_grid({int64_t{1} << 31, 32}, "a launch has 2147483648 blocks, and a GPU runs 2147483647 at most");
  const auto check_shared = [&](int capability, size_t kibibytes) {
    const test::SimulatedGpu gpu(capability);
    const size_t most = kibibytes << 10;
    constexpr size_t kDeclared = 33 * sizeof(float);
    CHECK_NOTHROW(launch(LaunchContext{}, {1, 32, most - kDeclared}, write_past_the_end, nullptr));
    check_named(defects({1, 32, most}, write_past_the_end, nullptr), kAtWritePast - 1,
                "and a GPU allows " + std::to_string(most));
    check_grid({1, 32, most + 1},
               "bytes of shared memory for each block, and a GPU allows " + std::to_string(most));
  };
  check_shared(80, 163);
  check_shared(86, 99);
  check_shared(89, 99);
  check_shared(90, 227);
  check_shared(103, 227);
  check_shared(120, 99);
  CHECK_NOTHROW(launch(LaunchContext{}, {0, 32}, write_past_the_end, nullptr));
}

TEST_CASE("simulated kernels: barriers that not all threads reach") {
  std::array<int, 64> out{};
  check_named(defects({2, 64}, early_return, 40), kAtBarrier, "has returned");
  for (const std::string& message : defects({1, 64}, two_barriers, 32)) {
    INFO(message);
    CHECK(message.find("barrier divergence") != std::string::npos);
    CHECK(message.find("simulated.cpp:" + std::to_string(kAtFirstBarrier)) != std::string::npos);
    CHECK(message.find("simulated.cpp:" + std::to_string(kAtSecondBarrier)) != std::string::npos);
  }
  check_named(defects({1, 64}, barrier_against_shuffle, out.data()), kAtWaitingShuffle,
              "waits for thread 3 of block 0, which waits at ");
}

TEST_CASE("simulated kernels: asynchronous copies take effect at their wait") {
  std::array<float, 64> in{}, out{};
  for (const std::string& message : defects({1, 64}, unwaited_copy, in.data(), out.data())) {
    INFO(message);
    CHECK(message.find("before the asynchronous copy at ") != std::string::npos);
    CHECK(message.find("simulated.cpp:" + std::to_string(kAtCopiedRead)) != std::string::npos);
    CHECK(message.find("simulated.cpp:" + std::to_string(kAtCopy)) != std::string::npos);
  }
  check_named(defects({1, 64}, abandoned_copy, in.data(), out.data()), kAtAbandonedCopy,
              "returns without waiting for this asynchronous copy");
  for (const std::string& message : defects({1, 64}, copy_without_barrier, in.data(), out.data()))
    CHECK(message.find("no barrier between two accesses of values[") != std::string::npos);
}

TEST_CASE("simulated kernels: a request that kernels cannot meet is refused by name") {
  kernels::KernelError error;
  const LaunchContext context{.error = &error};
  std::array<float, 8> x{};
  std::array<uint8_t, 8> codes{};
  const kernels::Out y{x.data(), DType::f32};
  const kernels::QuantizedOutput second{.format = {.layout = kernels::ScaleLayout::block_128x128},
                                        .rows = {.codes = codes.data()}};
  kernels::simulated_table().activation->forward(context, kernels::ActivationKind::silu, false, y, {}, y, 1,
                                                 8, second);
  REQUIRE(error.file != nullptr);
  try {
    throw_kernel_error(error);
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::unsupported);
    CHECK(e.message().find("a scale of the tensor or of blocks 1x128 and 1x32 only") != std::string::npos);
  }
  CHECK(error.file == nullptr);
}

TEST_CASE("simulated kernels: norms of wide rows fit into the shared memory of every GPU") {
  constexpr int64_t kRows = 2, kCols = 25'001;
  const kernels::NormRows shape{kRows, kCols, 1, 0, kCols};
  std::vector<float> x(kRows * kCols), dy(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = std::sin(static_cast<float>(i)), dy[i] = std::cos(static_cast<float>(i) * 0.3f);
  const std::vector<float> gamma(x.begin(), x.begin() + kCols);
  const auto in = [](const std::vector<float>& v) { return kernels::In{v.data(), DType::f32}; };
  const auto out = [](std::vector<float>& v) { return kernels::Out{v.data(), DType::f32}; };
  const auto& norm = *kernels::simulated_table().norm;
  const auto results = [&](size_t shared_bytes) {
    set_most_shared_bytes(shared_bytes);
    std::vector<std::byte> workspace(norm.backward_workspace(shape, true).total(1));
    kernels::KernelError error;
    LaunchContext context{.error = &error};
    context.workspace = {workspace.data(), workspace.size()};
    std::vector<float> y(x.size()), dx(x.size()), rstd(kRows), mean(kRows), dgamma(kCols), dbeta(kCols);
    norm.forward(context, false, shape, in(x), {}, {}, in(gamma), 0, in(gamma), 1e-5f, out(y), mean.data(),
                 rstd.data(), {});
    norm.backward(context, false, shape, in(dy), in(x), in(gamma), 0, mean.data(), rstd.data(), out(dx),
                  false, dgamma.data(), dbeta.data());
    CHECK(error.file == nullptr);
    return std::vector{y, dx, rstd, mean, dgamma, dbeta};
  };
  const auto expected = results(kernels::kMaxSharedBytes);
  // sm_86, sm_89 and sm_120.
  CHECK(results(size_t{99} << 10) == expected);
  check_named(defects({1, 32, size_t{99} << 10}, both_shared_memories<32>, nullptr), kAtConstantArray,
              "and a GPU allows 101376");
  set_most_shared_bytes(kernels::kMaxSharedBytes);
}

TEST_CASE("simulated kernels: gradients of head norm weights are refused where shared memory is too small") {
  const kernels::HeadNormShape shape{
      .qkv = {1, 198, 128}, .rows = 1, .query_cols = 198 * 128, .key_cols = 128, .eps = 1e-5f};
  std::vector<float> x(static_cast<size_t>(shape.qkv.row()), 0.5f), dx(x.size()), dqueries(x.size()),
      dkeys(x.size());
  const std::array<float, 2> sums{1, 2};
  const kernels::In in{x.data(), DType::f32};
  const auto& norm = *kernels::simulated_table().head_norm;
  std::vector<std::byte> workspace(norm.backward_workspace(shape, true).total(1));
  for (const size_t shared_bytes : {kernels::kMaxSharedBytes, size_t{99} << 10}) {
    set_most_shared_bytes(shared_bytes);
    kernels::KernelError error;
    LaunchContext context{.error = &error};
    context.workspace = {workspace.data(), workspace.size()};
    norm.backward(context, shape, in, in, sums.data(), sums.data(), in, in, {dx.data(), DType::f32},
                  dqueries.data(), dkeys.data());
    CHECK((error.file != nullptr) == (shared_bytes < kernels::kMaxSharedBytes));
    if (error.file) CHECK_THROWS_WITH_AS(throw_kernel_error(error), doctest::Contains("wide QKV"), Error);
  }
  set_most_shared_bytes(kernels::kMaxSharedBytes);
}

TEST_CASE("simulated kernels: after a defect the next launch is as usual") {
  std::array<float, 64> out{};
  CHECK_THROWS_AS(launch(LaunchContext{}, {3, 64}, missing_barrier, out.data()), Error);
  out.fill(0);
  launch(LaunchContext{}, {1, 64}, add_one, out.data(), 64);
  CHECK(out[63] == 1);
  std::array<float, 128> in{}, reversed{};
  std::iota(in.begin(), in.end(), 0.0f);
  launch(LaunchContext{}, {1, 64}, reversed_tiles, in.data(), reversed.data(), 2);
  CHECK(reversed[0] == 63);
  CHECK(reversed[127] == 64);
}

// Marks of the address sanitizer beside the locals of a fiber that was destroyed made it refuse a file that
// was mapped there later.
TEST_CASE("simulated kernels: a stack leaves its addresses clean to the next mapping") {
  struct Visit {
    Fiber caller;
    Fiber* visited = nullptr;
    char* local = nullptr;
  } visit;
  {
    Fiber fiber(
        [](void* argument) {
          auto& from = *static_cast<Visit*>(argument);
          // Unlike a variable, it lies on this stack in every build.
          from.local = static_cast<char*>(__builtin_alloca(32));
          std::memset(from.local, 1, 32);
          from.visited->switch_to(from.caller);
        },
        &visit);
    visit.visited = &fiber;
    visit.caller.switch_to(fiber);
  }
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  void* address = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(visit.local) / page * page);
  void* memory =
      ::mmap(address, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  REQUIRE(memory == address);
  std::memset(memory, 1, page);
  ::munmap(memory, page);
}

TEST_CASE("simulated kernels: equal bits in every order and on any number of the host's threads") {
  constexpr int kBlocks = 40, kColumns = 1037;
  std::vector<float> in(size_t{kBlocks} * kColumns);
  for (size_t i = 0; i < in.size(); ++i) in[i] = std::sin(static_cast<float>(i) * 0.37f);
  std::vector<float> first;
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    for (const Order& order : kOrders) {
      set_order(order);
      std::vector<float> out(size_t{2} * kBlocks, NAN);
      launch({.pool = &pool}, {kBlocks, 512}, sums, in.data(), out.data(), kColumns);
      if (first.empty()) first = out;
      CHECK(out == first);
      std::vector<float> tiles(64 * 7), reversed(64 * 7);
      std::iota(tiles.begin(), tiles.end(), 0.0f);
      launch({.pool = &pool}, {1, 64}, reversed_tiles, tiles.data(), reversed.data(), 7);
      for (int i = 0; i < 64 * 7; ++i)
        CHECK(reversed[static_cast<size_t>(i)] == static_cast<float>(i / 64 * 64 + 63 - i % 64));
      std::vector<int> values(size_t{64} * 6), exchanged(64);
      launch({.pool = &pool}, {1, 64}, warp_functions, values.data());
      for (int i = 0; i < 64; ++i) {
        const int lane = i % 32;
        const int expected[] = {lane ^ 5, lane < 3 ? lane : lane - 3,    (lane + 1) % 32 * 10, 0x49249249,
                                496,      lane < 8 ? lane ^ 1 : lane ^ 2};
        for (int k = 0; k < 6; ++k) CHECK(values[static_cast<size_t>(i * 6 + k)] == expected[k]);
      }
      launch({.pool = &pool}, {1, 64}, exchange_within_warps, exchanged.data());
      for (int i = 0; i < 64; ++i) CHECK(exchanged[static_cast<size_t>(i)] == i / 32 * 32 + (i + 1) % 32 + 2);
    }
  }
  set_order({});
}

TEST_CASE("simulated kernels: many threads and many barriers, and their speed") {
  const auto rate = [](int64_t steps, auto&& run) {
    run();
    const auto begin = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    return static_cast<double>(steps) / seconds.count() / 1e6;
  };
  constexpr int64_t kThreads = test::kSanitized ? 1 << 14 : 1 << 20;
  constexpr int kRounds = test::kSanitized ? 20 : 1000;
  std::vector<float> x(kThreads);
  const double without = rate(kThreads, [&] {
    launch(LaunchContext{}, {kThreads / 256, 256}, add_one, x.data(), kThreads);
  });
  std::vector<int> out(256);
  const double with = rate(256 * kRounds, [&] {
    launch(LaunchContext{}, {1, 256}, many_barriers, out.data(), kRounds);
  });
  CHECK(x == std::vector<float>(kThreads, 2));  // of two launches
  CHECK(out == std::vector<int>(256, kRounds * (kRounds - 1) / 2));
  INFO("million threads a second: ", without, ", waits at a barrier: ", with);
#ifdef CAPSTAN_TIMED  // far below what an idle core does: 65 and 20
  CHECK(without > 2);
  CHECK(with > 0.5);
#endif
}
