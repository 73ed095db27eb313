#include "tensor/tensor.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "host_waits.hpp"
#include "tensor/host_view.hpp"
#include "tensor/launch.hpp"
#include "tensor/pinned_buffer.hpp"

using namespace capstan;

namespace {

#if defined(__SANITIZE_ADDRESS__)
// Blocks are from the heap, whose bounds the sanitizer checks.
constexpr bool kOwnBlocks = true;
#else
constexpr bool kOwnBlocks = false;
#endif
const kernels::Table& no_table() {
  static const char nothing[1] = {};
  return reinterpret_cast<const kernels::Table&>(nothing);
}
void double_it(kernels::Context&, const float* x, kernels::Out y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y.as<float>()[i] = 2 * x[i];
}
}  // namespace

TEST_CASE("bf16 rounds to nearest even and keeps what is not finite") {
  CHECK(static_cast<float>(bf16(1.0f)) == 1.0f);
  CHECK(bf16(1.00390625f).bits == bf16(1.0f).bits);       // 1 + 2^-8: a tie goes to the even side
  CHECK(bf16(1.01171875f).bits == bf16(1.015625f).bits);  // 1 + 3 * 2^-8: the other tie
  CHECK(std::isinf(static_cast<float>(bf16(std::numeric_limits<float>::infinity()))));
  CHECK(std::isnan(static_cast<float>(bf16(std::numeric_limits<float>::signaling_NaN()))));
  CHECK(std::isinf(static_cast<float>(bf16(std::numeric_limits<float>::max()))));
}

namespace {
f16 half_of_code(uint32_t code) {
  f16 h;
  h.bits = static_cast<uint16_t>(code);
  return h;
}
// The value of a code that is a number, by IEEE 754.
double value_of_code(uint32_t code) {
  const int exponent = static_cast<int>(code >> 10 & 31);
  const double fraction = static_cast<double>(code & 0x3FFu) / 1024;
  const double size = exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15);
  return code & 0x8000u ? -size : size;
}
}  // namespace

TEST_CASE("fp16: the value of every code, and rounding around the middle between any two") {
  const float infinity = std::numeric_limits<float>::infinity();
  for (uint32_t sign : {0u, 0x8000u}) {
    const float one = sign ? -1.0f : 1.0f;
    for (uint32_t code = 0; code < 0x7C00; ++code) {
      const f16 h = half_of_code(sign | code);
      const auto value = static_cast<float>(h);
      REQUIRE(static_cast<double>(value) == value_of_code(sign | code));
      REQUIRE(std::signbit(value) == (sign != 0));
      REQUIRE(f16(value).bits == h.bits);
      // The next code; beyond the largest number it is infinity, which rounding takes for 65536.
      const uint32_t next = sign | (code + 1);
      const double after = code + 1 < 0x7C00 ? value_of_code(next) : 65536.0 * static_cast<double>(one);
      const auto middle = static_cast<float>((static_cast<double>(value) + after) / 2);  // exact
      REQUIRE(f16(std::nextafter(middle, 0.0f)).bits == h.bits);
      REQUIRE(f16(std::nextafter(middle, one * infinity)).bits == next);
      REQUIRE(f16(middle).bits == (code % 2 == 0 ? h.bits : next));
    }
    CHECK(static_cast<float>(half_of_code(sign | 0x7C00)) == one * infinity);
    CHECK(f16(one * infinity).bits == (sign | 0x7C00));
    CHECK(f16(one * std::numeric_limits<float>::max()).bits == (sign | 0x7C00));
    CHECK(f16(one * std::numeric_limits<float>::denorm_min()).bits == sign);
    for (uint32_t code = 0x7C01; code < 0x8000; ++code) {
      const f16 nan = half_of_code(sign | code);
      REQUIRE(std::isnan(static_cast<float>(nan)));
      REQUIRE(f16(static_cast<float>(nan)).bits == (sign | code | 0x200));
    }
  }
  CHECK(std::isnan(static_cast<float>(f16(std::numeric_limits<float>::signaling_NaN()))));
}

TEST_CASE("views share storage and slices keep strides") {
  const auto cpu = make_cpu_device(no_table(), 1);
  std::vector<float> values(24);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const Tensor t = Tensor::from_host<float>(*cpu, {2, 3, 4}, values);
  CHECK(t.is_contiguous());
  const Tensor row = t.slice(1, 1, 1);
  CHECK(row.shape() == Shape{2, 1, 4});
  CHECK(!row.is_contiguous());
  CHECK(row.shares_storage_with(t));
  CHECK(t.view({6, 4}).slice(0, 5, 1).to_host<float>() == std::vector<float>{20, 21, 22, 23});
  CHECK(t.flat_range(7, 2, {2}).to_host<float>() == std::vector<float>{7, 8});
  CHECK_THROWS_AS((void)t.view({5, 5}), Error);
  CHECK_THROWS_AS((void)row.view({8}), Error);
  CHECK(t.text() == "fp32[2,3,4] on cpu");

  // The upper half of an fp32 number is a bf16 one, after the lower half.
  const Tensor halves = t.as_type(DType::bf16);
  CHECK(halves.shape() == Shape{2, 3, 8});
  CHECK(halves.shares_storage_with(t));
  CHECK(halves.stride(0) == 24);
  CHECK(halves.view({6, 8}).slice(0, 5, 1).to_floats()[7] == 23);
  CHECK(halves.as_type(DType::f32).to_host<float>() == values);
  CHECK_THROWS_AS((void)t.slice(0, 0, 1).as_type(DType::bf16).slice(2, 0, 3).as_type(DType::f32), Error);
}

TEST_CASE("memory is counted by category, peaks are remembered, blocks are reused") {
  const auto cpu = make_cpu_device(no_table(), 1);
  {
    CategoryScope scope(MemoryCategory::moments);
    const Tensor a = Tensor::zeros(*cpu, {100}, DType::f32);
    CHECK(cpu->memory().now_by_category[static_cast<size_t>(MemoryCategory::moments)] == 512);
  }
  CHECK(cpu->memory().now == 0);
  CHECK(cpu->memory().peak == 512);
  const Tensor b = Tensor::zeros(*cpu, {128}, DType::f32);
  CHECK(cpu->memory().system_requests == 1);
  CHECK(cpu->memory().now_by_category[static_cast<size_t>(MemoryCategory::activations)] == 512);
}

TEST_CASE("blocks are hardly larger than what is asked for, and what is free is divided and joined") {
  for (int64_t bytes : {1, 511, 512, 513, (1 << 20) + 1, 5000000, 123456789}) {
    const int64_t size = AllocatorRules().round(bytes);
    CHECK(size >= bytes);
    CHECK(size < bytes + (bytes > (1 << 20) ? 4096 : 512));
    CHECK(AllocatorRules().round(size) == size);
  }
  constexpr int64_t kMiB = 1 << 20;
  for (const bool meta : {false, true}) {
    const auto device = meta ? make_meta_device(no_table()) : make_cpu_device(no_table(), 1);
    const auto take = [&](int64_t bytes) { return Tensor::empty(*device, {bytes}, DType::u8); };
    // 100 MiB and 3 bytes: a permanent buffer of that size is rounded up to pages of 2 MiB.
    Tensor large = take(100 * kMiB + 3);
    CHECK(device->memory().now == 100 * kMiB + 4096);
    CHECK(device->memory().reserved == 102 * kMiB);
    const std::byte* const address = large.address();
    large = Tensor();
    CHECK(device->memory().now == 0);
    {
      const Tensor first = take(60 * kMiB), second = take(40 * kMiB);  // both in its place
      if (!kOwnBlocks) CHECK(first.address() == address);
      CHECK(device->memory().now == 100 * kMiB);
      CHECK(device->memory().reserved == 102 * kMiB);
      const Tensor more = take(3 * kMiB);  // the end grows by what is missing
      CHECK(device->memory().reserved == 104 * kMiB);
    }
    CHECK(device->memory().system_requests == 2);
    {
      const Tensor all = take(104 * kMiB);  // what is free is one block again
      if (!kOwnBlocks) CHECK(all.address() == address);
      CHECK(device->memory().system_requests == 2);
      CHECK(device->memory().cached() == 0);
    }
    device->release_cached();
    CHECK(device->memory().reserved == 0);
    const Tensor again = take(kMiB + 1);
    CHECK(device->memory().reserved == 2 * kMiB);
    // Small blocks take 64 KiB at once, from which others follow.
    const int64_t requests = device->memory().system_requests;
    const Tensor small = take(60 << 10), others[] = {take(1 << 10), take(1 << 10), take(2 << 10)};
    CHECK(device->memory().reserved == 2 * kMiB + (64 << 10));
    CHECK(device->memory().system_requests == requests + 1);
    const Tensor next = take(1);
    CHECK(device->memory().reserved == 2 * kMiB + (128 << 10));
  }
}

TEST_CASE("the meta device rounds and grows like the device that it stands for") {
  AllocatorRules rules;
  rules.largest_small_block = 4096, rules.small_rounding = 256, rules.large_rounding = 1 << 16;
  rules.small_growth = 1 << 16, rules.large_growth = 20 << 20;
  const auto device = make_meta_device(no_table(), 1, rules);
  const auto take = [&](int64_t bytes) { return Tensor::empty(*device, {bytes}, DType::u8); };
  const Tensor small = take(257);
  CHECK(device->memory().now == 512);
  CHECK(device->memory().reserved == 1 << 16);
  const Tensor large = take(4097);
  CHECK(device->memory().now == 512 + (1 << 16));
  CHECK(device->memory().reserved == (1 << 16) + (20 << 20));
}

TEST_CASE("a tensor is read in chunks, on a device that the host cannot read too") {
  for (const bool checked : {false, true}) {
    const auto device = checked ? make_checked_device(no_table(), 1) : make_cpu_device(no_table(), 1);
    std::vector<float> values(1000), found;
    std::iota(values.begin(), values.end(), 0.0f);
    const Tensor t = Tensor::from_host<float>(*device, {1000}, values);
    size_t pieces = 0;
    const auto snapshot = [&] {
      return device->host_memory().now_by_category[static_cast<size_t>(MemoryCategory::snapshot)];
    };
    std::optional<ChunkReader> reader;
    {
      CategoryScope scope(MemoryCategory::snapshot);
      reader.emplace(*device, 1024);
    }
    CHECK(snapshot() == (checked ? 2 * 1024 : 0));
    const int64_t waits = device->host_waits();
    reader->read(t, [&](std::span<const std::byte> bytes) {
      ++pieces;
      CHECK((!checked || bytes.size() <= 1024));
      const auto* first = reinterpret_cast<const float*>(bytes.data());
      found.insert(found.end(), first, first + bytes.size() / sizeof(float));
    });
    CHECK(found == values);
    CHECK(pieces == (checked ? 4 : 1));
    CHECK(device->host_waits() - waits == (checked ? 4 : 1));
    // A reader that fails in the middle of a tensor reads the next one.
    CHECK_THROWS_AS(reader->read(t, [](std::span<const std::byte>) { throw std::runtime_error("full"); }),
                    std::runtime_error);
    reader.reset();
    CHECK(snapshot() == 0);
  }
}

TEST_CASE("chunks are copied on the device-to-host queue, after the work of the compute queue") {
  const auto device = make_checked_device(no_table(), 1, {.patient = true});
  const Tensor t = Tensor::from_host<float>(*device, {4}, std::vector<float>(4, 1.0f));
  ChunkReader reader(*device, 8);
  std::atomic<bool> computed{false}, seen{false};
  device->enqueue(Queue::compute, [&] { computed.store(true); });
  device->enqueue(Queue::device_to_host, [] {});
  reader.read(t, [&](std::span<const std::byte> bytes) {
    CHECK(computed.load());
    CHECK(*reinterpret_cast<const float*>(bytes.data()) == 1.0f);
    // Kernels that follow do not delay the copies.
    if (!seen.exchange(true))
      device->enqueue(Queue::compute, [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
  });
  CHECK(seen.load());
}

TEST_CASE("every way in which the host waits for a device counts, and nothing else") {
  for (const auto& device : {make_cpu_device(no_table(), 1), make_checked_device(no_table(), 1)}) {
    CAPTURE(std::string(device->name()));
    test::check_host_waits(*device);
  }
}

TEST_CASE("pinned memory is counted as memory of the host") {
  for (const auto& device :
       {make_cpu_device(no_table(), 1), make_checked_device(no_table(), 1), make_meta_device(no_table())}) {
    const int64_t total = device->host_memory().total();
    CategoryScope scope(MemoryCategory::snapshot);
    PinnedBuffer small(*device, 100), large(*device, (int64_t{1} << 21) + 1);
    const MemoryUse use = device->host_memory();
    CHECK(use.now == 512 + (int64_t{1} << 21) + 4096);
    CHECK(use.now_by_category[static_cast<size_t>(MemoryCategory::snapshot)] == use.now);
    CHECK(use.total() == total + use.now);
    if (!device->shares_host_memory()) CHECK(device->memory().now == 0);
    if (!device->is_meta()) {
      CHECK(reinterpret_cast<uintptr_t>(small.data()) % 64 == 0);
      std::ranges::fill(large.host_write(), std::byte{7});
    }
    const PinnedBuffer moved = std::move(large);
    CHECK(moved.bytes() == (int64_t{1} << 21) + 1);
    small = PinnedBuffer(*device, 1000);
    CHECK(device->host_memory().now == 1024 + (int64_t{1} << 21) + 4096);
  }
}

TEST_CASE("launch passes raw arrays on a real device and runs nothing on meta") {
  const auto cpu = make_cpu_device(no_table(), 1);
  const Tensor x = Tensor::from_host<float>(*cpu, {3}, std::vector<float>{1, 2, 3});
  const Tensor y = Tensor::empty(*cpu, {3});
  launch(*cpu, &double_it, x, y, x.elements());
  CHECK(y.to_host<float>() == std::vector<float>{2, 4, 6});
  CHECK_THROWS_AS(launch(*cpu, &double_it, Tensor::empty(*cpu, {3}, DType::bf16), y, int64_t{3}), Error);

  const auto meta = make_meta_device(no_table());
  const Tensor big = Tensor::empty(*meta, {1 << 20, 1 << 20});
  launch(*meta, &double_it, big, big, big.elements());
  CHECK(meta->memory().peak == int64_t{4} << 40);
}

TEST_CASE(
    "the block allocator against a map of bytes: the same size or the first one, no overlap, all free space "
    "is joined") {
  for (const uint64_t seed : {1, 2, 3}) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    BlockAllocator allocator(64);
    // Owner of each byte; 0: free.
    std::vector<int> owner;
    // Offset and size.
    std::vector<std::pair<int64_t, int64_t>> held;
    const auto free_runs = [&] {
      std::vector<std::pair<int64_t, int64_t>> runs;
      for (size_t i = 0; i < owner.size(); ++i) {
        if (owner[i]) continue;
        if (i == 0 || owner[i - 1]) runs.emplace_back(static_cast<int64_t>(i), 0);
        ++runs.back().second;
      }
      return runs;
    };
    for (int step = 1; step < 3000; ++step) {
      if (!held.empty() && random() % 5 < 2) {
        const size_t at = random() % held.size();
        allocator.put_back(held[at].first, held[at].second);
        std::fill_n(owner.begin() + held[at].first, held[at].second, 0);
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
        continue;
      }
      const int64_t size = 1 + static_cast<int64_t>(random() % (random() % 8 ? 40 : 300));
      const auto runs = free_runs();
      int64_t expected = -1;
      for (const auto& [offset, length] : runs)
        if (expected < 0 && length >= size) expected = offset;
      for (const auto& [offset, length] : std::vector(runs.rbegin(), runs.rend()))
        if (length == size) expected = offset;
      auto offset = allocator.take(size);
      REQUIRE(offset.has_value() == (expected >= 0));
      if (!offset) {
        const int64_t at_end = !runs.empty() && runs.back().first + runs.back().second == allocator.end()
                                   ? runs.back().second
                                   : 0;
        const int64_t more = allocator.missing(size);
        CHECK(more % 64 == 0);
        CHECK((more >= size - at_end && more < size - at_end + 64));
        allocator.grow(more);
        expected = static_cast<int64_t>(owner.size()) - at_end;
        owner.resize(owner.size() + static_cast<size_t>(more));
        offset = allocator.take(size);
      }
      REQUIRE(*offset == expected);
      std::fill_n(owner.begin() + *offset, size, step);
      held.emplace_back(*offset, size);
    }
    CHECK(allocator.end() == static_cast<int64_t>(owner.size()));
    for (const auto& [offset, size] : held) allocator.put_back(offset, size);
    CHECK(allocator.missing(allocator.end()) == 0);
    CHECK(allocator.shrink() == static_cast<int64_t>(owner.size()));
    CHECK(allocator.end() == 0);
  }
}
