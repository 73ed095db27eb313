// The checked device finds every missing copy and wait.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "support/processes.hpp"
#include "tensor/access_order.hpp"
#include "tensor/checked_queue.hpp"
#include "tensor/host_view.hpp"
#include "tensor/launch.hpp"
#include "tensor/pinned_buffer.hpp"

using namespace capstan;
using test::fate_of;
using test::kCrashed;

namespace {

const kernels::Table& unused_table() {
  static const char nothing[1] = {};
  return reinterpret_cast<const kernels::Table&>(nothing);
}
std::unique_ptr<Device> checked(uint64_t seed = 1) {
  return make_checked_device(unused_table(), 1, {.seed = seed});
}
std::unique_ptr<Device> patient_checked() {
  return make_checked_device(unused_table(), 1, {.patient = true});
}

void add_one(kernels::Context&, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] + 1;
}
void scale(kernels::Context&, float* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}
// Of each of `rows` rows, which begin `ld` elements apart, `n` elements.
void scale_columns(kernels::Context&, float* x, int64_t ld, float factor, int64_t rows, int64_t n) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < n; ++i) x[row * ld + i] *= factor;
}
void sum_columns(kernels::Context&, const float* x, int64_t ld, float* sum, int64_t rows, int64_t n) {
  *sum = 0;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < n; ++i) *sum += x[row * ld + i];
}
void write_at(kernels::Context&, float* x, int64_t place) {
  x[place] = 1;
}
void break_down(kernels::Context&, int32_t number) {
  throw std::runtime_error("kernel " + std::to_string(number) + " broke down");
}

std::vector<float> counting(int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), 0.0f);
  return values;
}

constexpr std::array kAllQueues{Queue::compute, Queue::communication, Queue::host_to_device,
                                Queue::device_to_host};

// The message of the error that `act` throws; empty: it throws none.
std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE(
    "checked device: kernels and copies reach the memory, in the order of their calls, whatever the delays") {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    const auto device = checked(seed);
    const int64_t n = 1000;
    const Tensor x = Tensor::from_host<float>(*device, {n}, counting(n));
    std::vector<float> expected = counting(n);
    for (int i = 0; i < 40; ++i) {
      launch(*device, &add_one, x, x, n);
      launch(*device, &scale, x, 0.5f, n);
      for (float& v : expected) v = (v + 1) * 0.5f;
    }
    CHECK(x.to_host<float>() == expected);
    CHECK(Tensor::zeros(*device, {3}).to_host<float>() == std::vector<float>(3, 0.0f));
    device->copy(x.address(), x.address() + 40, 20);
    const auto moved = x.to_host<float>();
    CHECK(std::equal(moved.begin(), moved.begin() + 5, expected.begin() + 10));
    CHECK(x.text() == "fp32[1000] on checked");
  }
}

TEST_CASE("a queue of the checked device holds some work until a wait needs it, other work by seed") {
  constexpr int kItems = 256, kSeeds = 8;
  std::array<std::atomic<int>, kSeeds> ran{};
  std::vector<std::unique_ptr<CheckedQueue>> queues;
  for (size_t seed = 0; seed < kSeeds; ++seed) {
    queues.push_back(std::make_unique<CheckedQueue>(seed, CheckedQueue::DelayedItems::some));
    for (int i = 0; i < kItems; ++i) queues.back()->push([&count = ran[seed]] { ++count; });
  }
  // Each queue stops at the first item that it holds.
  const auto counts = [&] { return std::vector<int>(ran.begin(), ran.end()); };
  std::vector<int> before, now = counts();
  const auto differ = [&] { return std::set<int>(now.begin(), now.end()).size() > kSeeds / 2; };
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while ((before != now || !differ()) && std::chrono::steady_clock::now() < end) {
    before = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    now = counts();
  }
  CHECK(differ());
  for (size_t seed = 0; seed < kSeeds; ++seed) {
    CHECK(now[seed] < kItems);
    queues[seed]->wait(queues[seed]->last());
    CHECK(ran[seed].load() == kItems);
  }
}

TEST_CASE("a queue of the checked device delays some of its work") {
  // The delays of these items are 15 ms at least with each of the seeds; without them the fastest takes less.
  constexpr int kItems = 8192;
  auto fastest = std::chrono::steady_clock::duration::max();
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const auto start = std::chrono::steady_clock::now();
    CheckedQueue queue(seed, CheckedQueue::DelayedItems::none);
    for (int i = 0; i < kItems; ++i) queue.push([] {});
    queue.wait(queue.last());
    fastest = std::min(fastest, std::chrono::steady_clock::now() - start);
  }
  CHECK(fastest >= std::chrono::milliseconds(15));
}

TEST_CASE("checked device: host code that touches a tensor's memory crashes") {
  const auto device = checked();
  const Tensor x = Tensor::from_host<float>(*device, {100}, counting(100));
  const auto touch = [&](int64_t byte, bool write) {
    return fate_of([&] {
      auto* at = reinterpret_cast<volatile char*>(x.address()) + byte;
      if (write)
        *at = 1;
      else
        (void)*at;
    });
  };
  CHECK(touch(0, false) == kCrashed);
  CHECK(touch(399, false) == kCrashed);
  CHECK(touch(0, true) == kCrashed);
  CHECK(fate_of([] {}) == 0);
  CHECK(device->host_address(x.address()) == nullptr);
}

TEST_CASE("checked device: a kernel that runs past its block, or into what was given back, crashes") {
  const auto run_on = [](Device& device, std::byte* address, int64_t place) {
    // As `launch` does it, in a child that has no queue.
    return fate_of(
        [&] { write_at(device.context(), reinterpret_cast<float*>(device.kernel_address(address)), place); });
  };
  const auto device = checked();
  std::byte* gone = nullptr;
  {
    const Tensor x = Tensor::empty(*device, {128});  // 512 bytes: a full block
    const Tensor y = Tensor::empty(*device, {1 << 20});
    CHECK(run_on(*device, x.address(), 127) == 0);
    CHECK(run_on(*device, x.address(), 128) == kCrashed);
    CHECK(run_on(*device, y.address(), (1 << 20) - 1) == 0);
    CHECK(run_on(*device, y.address(), 1 << 20) == kCrashed);
    gone = y.address();
  }
  CHECK(run_on(*device, gone, 5) == 0);  // kept for reuse
  device->release_cached();
  CHECK(device->memory().reserved == 0);
  CHECK(run_on(*device, gone, 5) == kCrashed);
  CHECK(Tensor::empty(*device, {1 << 20}).address() != gone);
}

TEST_CASE("checked device: memory that was not written is NaN in every type, also when it was used before") {
  const auto device = checked();
  std::byte* before = nullptr;
  for (int round = 0; round < 2; ++round) {
    const Tensor x = Tensor::empty(*device, {16});
    if (round == 0) before = x.address();
    CHECK(x.address() == before);  // the block is used again
    for (const float v : x.to_host<float>()) CHECK(std::isnan(v));
    Tensor::from_host<float>(*device, {16}, counting(16));
    device->copy_to_device(x.address(), counting(16).data(), 64);
    CHECK(x.to_host<float>() == counting(16));
  }
  for (const float v : Tensor::empty(*device, {16}, DType::bf16).to_floats()) CHECK(std::isnan(v));
  for (const double v : Tensor::empty(*device, {16}, DType::f64).to_host<double>()) CHECK(std::isnan(v));
  for (const int32_t v : Tensor::empty(*device, {16}, DType::i32).to_host<int32_t>()) CHECK(v > 2000000000);
}

TEST_CASE("checked device: a freed block's next owner comes after the last kernel of the one before") {
  const auto device = patient_checked();
  const int64_t n = 64;
  const Tensor result = Tensor::empty(*device, {n});
  {
    const Tensor x = Tensor::from_host<float>(*device, {n}, counting(n));
    launch(*device, &add_one, x, result, n);
  }
  const Tensor other = Tensor::zeros(*device, {n});
  auto expected = counting(n);
  for (float& v : expected) v += 1;
  CHECK(result.to_host<float>() == expected);
  CHECK(other.to_host<float>() == std::vector<float>(static_cast<size_t>(n), 0.0f));
}

TEST_CASE("checked device: a source on the host may change as soon as the copy has been asked for") {
  const auto device = patient_checked();
  std::vector<float> values = counting(50);
  const Tensor x = Tensor::from_host<float>(*device, {50}, values);
  values.assign(50, -1.0f);
  CHECK(x.to_host<float>() == counting(50));
  // More than the queue keeps: the host waits now and then, and nothing is lost.
  const int64_t n = 5 << 20;
  std::vector<Tensor> many;
  for (int i = 0; i < 5; ++i) many.push_back(Tensor::from_host<float>(*device, {n}, counting(n)));
  for (const Tensor& t : many)
    CHECK(t.flat_range(n - 1, 1, {1}).to_host<float>()[0] == static_cast<float>(n - 1));
}

TEST_CASE("checked device: without the wait for its event a copy to the host has not happened") {
  const auto device = patient_checked();
  const int64_t n = 32;
  for (const Queue queue : kAllQueues) {
    const Tensor x = Tensor::from_host<float>(*device, {n}, counting(n));
    device->synchronize();
    std::vector<float> seen(static_cast<size_t>(n), -7.0f);
    device->start_copy_to_host(seen.data(), x.address(), x.bytes(), queue);
    const auto event = device->record(queue);
    CHECK(!event->done());
    // A read before the wait gets NaN, which a test notices.
    for (const float value : seen) CHECK(std::isnan(value));
    event->wait();
    CHECK(event->done());
    CHECK(seen == counting(n));
  }
}

TEST_CASE("checked device: a kernel runs on the queue that its launch names") {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const auto device = checked(seed);
    const int64_t n = 100;
    for (const Queue queue : kAllQueues) {
      const Tensor x = Tensor::from_host<float>(*device, {n}, counting(n));
      device->wait_for(queue, *device->record(Queue::compute));
      launch(*device, queue, &scale, x, 3.0f, n);
      device->wait_for(Queue::compute, *device->record(queue));
      auto expected = counting(n);
      for (float& v : expected) v *= 3;
      CHECK(x.to_host<float>() == expected);
    }
  }
}

TEST_CASE("checked device: a missing wait between two queues is found and named in every direction") {
  const int64_t n = 32;
  const auto is_named = [](Device& device, Queue second, const char* access) {
    const std::string error = error_of([&] { device.record(second)->wait(); });
    CAPTURE(error);
    CHECK(error.find("missing wait: ") != std::string::npos);
    CHECK(error.find(access) != std::string::npos);
    CHECK(error.find("of the queue " + std::string(name_of(second))) != std::string::npos);
  };
  auto doubled = counting(n);
  for (float& v : doubled) v *= 2;
  for (const Queue first : kAllQueues) {
    for (const Queue second : kAllQueues) {
      if (first == second) continue;
      CAPTURE(name_of(first));
      CAPTURE(name_of(second));
      for (const bool waits : {false, true}) {
        CAPTURE(waits);
        const auto device = patient_checked();
        const Tensor x = Tensor::from_host<float>(*device, {n}, counting(n));
        const Tensor y = Tensor::zeros(*device, {n});
        device->synchronize();
        // Read after write: `second` reads what `first` writes.
        launch(*device, first, &scale, x, 2.0f, n);
        if (waits) device->wait_for(second, *device->record(first));
        launch(*device, second, &add_one, x, y, n);
        if (!waits) {
          is_named(*device, second, " reads 128 bytes that kernel ");
          // The kernel did not run.
          CHECK(y.to_host<float>() == std::vector<float>(static_cast<size_t>(n), 0.0f));
        }
        device->synchronize();
        CHECK(x.to_host<float>() == doubled);
        // Write after read: `second` overwrites what `first` reads.
        std::vector<float> seen(static_cast<size_t>(n));
        device->start_copy_to_host(seen.data(), x.address(), x.bytes(), first);
        if (waits) device->wait_for(second, *device->record(first));
        launch(*device, second, &scale, x, 0.5f, n);
        if (!waits) is_named(*device, second, " writes 128 bytes that a copy on the queue ");
        device->record(second)->wait();
        device->record(first)->wait();
        CHECK(seen == doubled);
        device->synchronize();
        CHECK(x.to_host<float>() == (waits ? counting(n) : doubled));
      }
    }
  }
}

TEST_CASE(
    "checked device: a missing wait between two queues is found where kernels use columns of a matrix") {
  constexpr int64_t kRows = 5, kColumns = 7;
  enum class Bug : uint8_t { reads_early, overwrites_what_is_read, overwrites_what_is_written };
  for (const Queue first : kAllQueues)
    for (const Queue second : kAllQueues) {
      if (first == second) continue;
      for (const Bug bug :
           {Bug::reads_early, Bug::overwrites_what_is_read, Bug::overwrites_what_is_written}) {
        // Where the columns of the second kernel begin; those of the first are 2 and 3.
        for (const int64_t begin : {0, 1, 2, 3, 4, 5})
          for (const bool waits : {false, true}) {
            CAPTURE(name_of(first));
            CAPTURE(name_of(second));
            CAPTURE(static_cast<int>(bug));
            CAPTURE(begin);
            CAPTURE(waits);
            const auto device = checked();
            const Tensor x = Tensor::zeros(*device, {kRows, kColumns}), sum = Tensor::zeros(*device, {1});
            device->synchronize();
            const auto write = [&](Queue queue, const Tensor& columns) {
              launch(*device, queue, &scale_columns, columns, columns.stride(0), 2.0f, kRows, int64_t{2});
            };
            const auto read = [&](Queue queue, const Tensor& columns) {
              launch(*device, queue, &sum_columns, columns, columns.stride(0), sum, kRows, int64_t{2});
            };
            const Tensor here = x.slice(1, 2, 2), there = x.slice(1, begin, 2);
            bug == Bug::overwrites_what_is_read ? read(first, here) : write(first, here);
            if (waits) device->wait_for(second, *device->record(first));
            bug == Bug::reads_early ? read(second, there) : write(second, there);
            const std::string error = error_of([&] { device->synchronize(); });
            if (waits || begin < 1 || begin > 3)
              CHECK(error == "");
            else
              CHECK(error.find("missing wait: kernel 1 of the queue " + std::string(name_of(second)) +
                               (bug == Bug::reads_early ? " reads 40 bytes" : " writes 40 bytes")) !=
                    std::string::npos);
          }
      }
    }
}

TEST_CASE("the rows of a view are its elements, whatever the order of its slices") {
  const auto device = make_cpu_device(unused_table(), 1);
  const auto count = [](const Tensor& t) {
    int64_t groups = 0;
    t.for_each_rows([&](const ByteRows&) { ++groups; });
    return groups;
  };
  const Tensor x = Tensor::empty(*device, {3, 4, 5, 6}, DType::bf16);
  for (int dim = 0; dim < 4; ++dim)
    for (int other = 0; other < 4; ++other)
      for (const int64_t size : {0, 1, 2}) {
        const Tensor view = x.slice(dim, 1, 2).slice(other, 0, size);
        std::vector<int> expected(3 * 4 * 5 * 6), found(expected.size());
        for (int64_t a = 0; a < view.size(0); ++a)
          for (int64_t b = 0; b < view.size(1); ++b)
            for (int64_t c = 0; c < view.size(2); ++c)
              for (int64_t d = 0; d < view.size(3); ++d)
                ++expected[static_cast<size_t>((view.address() - x.address()) / 2 + a * view.stride(0) +
                                               b * view.stride(1) + c * view.stride(2) + d)];
        view.for_each_rows([&](const ByteRows& rows) {
          for (int64_t row = 0; row < rows.rows; ++row)
            for (int64_t i = 0; i < rows.row_bytes / 2; ++i)
              ++found[static_cast<size_t>((rows.row(row) - x.address()) / 2 + i)];
        });
        CHECK(found == expected);
      }
  CHECK(count(x) == 1);
  CHECK(count(x.slice(3, 1, 2)) == 1);
  CHECK(count(x.slice(1, 1, 2)) == 1);
  CHECK(count(x.slice(2, 1, 2).slice(1, 0, 3)) == 3);
}

TEST_CASE("rows overlap, and cover each other, exactly where their bytes do") {
  std::array<std::byte, 64> memory;
  uint64_t state = 1;
  const auto random = [&](int64_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>(state >> 33) % n;
  };
  int overlaps = 0, covered = 0;
  for (int round = 0; round < 20'000; ++round) {
    const auto rows = [&](int64_t stride) {
      const int64_t width = 1 + random(std::min<int64_t>(stride, 6));
      return ByteRows{memory.data() + random(20), width, 1 + random(5), stride};
    };
    const int64_t stride = 1 + random(8);
    const ByteRows a = rows(stride), b = rows(random(2) == 0 ? stride : 1 + random(8));
    const auto bytes_of = [&](const ByteRows& all) {
      std::array<bool, 64> used{};
      for (int64_t row = 0; row < all.rows; ++row)
        for (int64_t i = 0; i < all.row_bytes; ++i)
          used[static_cast<size_t>(all.row(row) + i - memory.data())] = true;
      return used;
    };
    const auto in_a = bytes_of(a), in_b = bytes_of(b);
    bool common = false, all = true;
    for (size_t i = 0; i < memory.size(); ++i) {
      common |= in_a[i] && in_b[i];
      all &= in_a[i] || !in_b[i];
    }
    CAPTURE(round);
    CHECK(overlap(a, b) == common);
    // Not every one is found.
    CHECK((!covers(a, b) || all));
    if (a.stride == b.stride && a.rows == b.rows && a.begin <= b.begin) CHECK(covers(a, a));
    overlaps += common ? 1 : 0;
    covered += covers(a, b) ? 1 : 0;
  }
  CHECK(overlaps > 1000);
  CHECK(covered > 300);
}

TEST_CASE("a kernel on a queue that add_queue() made is an error") {
  const auto device = checked();
  const Tensor x = Tensor::zeros(*device, {4});
  const Queue added = device->add_queue(AddedQueue::work, "copies");
  const std::string text = "a queue that add_queue() made";
  for (const auto& act : std::vector<std::function<void()>>{
           [&] { launch(*device, added, &scale, x, 1.0f, int64_t{4}); },
           [&] { (void)device->context(added); }, [&] { device->take_workspace(added, {.shared = 64}); }})
    CHECK(error_of(act).find(text) != std::string::npos);
}

namespace {

// Whether the device says that the host misses a wait: how the host uses the memory, and the copy.
void check_named(const std::string& error, const std::string& use, const std::string& copy) {
  CAPTURE(error);
  CHECK(error ==
        "internal error: missing wait: the host " + use + " that " + copy + ", and does not wait for it");
}

}  // namespace

TEST_CASE("checked device: a missing wait between the host and a queue is named in both directions") {
  const int64_t n = 32;
  for (const Queue queue : kAllQueues) {
    const std::string name(name_of(queue));
    CAPTURE(name);
    const auto device = patient_checked();
    const Tensor x = Tensor::zeros(*device, {n});
    device->synchronize();
    CategoryScope scope(MemoryCategory::data);
    PinnedBuffer buffer(*device, x.bytes());
    std::ranges::fill(buffer.host_write(), std::byte{1});
    // The host may read the source of a copy that is under way, and not write it.
    device->start_copy_to_device(x.address(), buffer.data(), x.bytes(), queue);
    const auto copied = device->record(queue);
    CHECK(buffer.host_read()[5] == std::byte{1});
    check_named(error_of([&] { buffer.host_write(); }), "writes 128 bytes of a pinned buffer (data)",
                "a copy from the host on the queue " + name + " reads");
    copied->wait();
    buffer.host_write()[5] = std::byte{2};
    // The host must not use the target at all.
    device->start_copy_to_host(buffer.data(), x.address(), x.bytes(), queue);
    const std::string copy = "a copy to the host on the queue " + name + " writes";
    check_named(error_of([&] { (void)buffer.host_read(); }), "reads 128 bytes of a pinned buffer (data)",
                copy);
    check_named(error_of([&] { buffer.host_write(); }), "writes 128 bytes of a pinned buffer (data)", copy);
    // A wait for another queue is none for this one, unless that queue has waited.
    const Queue other = queue == Queue::compute ? Queue::communication : Queue::compute;
    device->record(other)->wait();
    check_named(error_of([&] { (void)buffer.host_read(); }), "reads 128 bytes of a pinned buffer (data)",
                copy);
    device->wait_for(other, *device->record(queue));
    device->record(other)->wait();
    CHECK(buffer.host_read()[5] == std::byte{1});
    // Ordinary memory of the host, where its use is declared.
    std::vector<float> values(static_cast<size_t>(n));
    const ByteRows middle{reinterpret_cast<std::byte*>(values.data()) + 60, 8},
        other_half{middle.begin + 4, 64};
    device->start_copy_to_host(values.data(), x.address(), 64, queue);
    check_named(error_of([&] { device->declare_host_access(middle, false); }), "reads 8 bytes", copy);
    device->declare_host_access(other_half, true);
    device->synchronize();
    device->declare_host_access(middle, true);
  }
}

TEST_CASE("checked device: the host that finds a copy done has waited for it") {
  const auto device = checked();
  PinnedBuffer buffer(*device, 64);
  const Tensor x = Tensor::zeros(*device, {16});
  device->start_copy_to_host(buffer.data(), x.address(), x.bytes(), Queue::compute);
  const auto copied = device->record(Queue::compute);
  // A queue that holds much work runs without a wait.
  for (size_t i = 0; i < 2 * CheckedQueue::kMaxHeld; ++i) device->enqueue(Queue::compute, [] {});
  while (!copied->done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(buffer.host_read()[0] == std::byte{0});
}

TEST_CASE("checked device: a pinned buffer that is released or lent again while a queue uses it is named") {
  const int64_t n = 32;
  for (const Queue queue : {Queue::communication, Queue::host_to_device, Queue::device_to_host})
    for (const bool waits : {false, true}) {
      const std::string name(name_of(queue));
      CAPTURE(name);
      CAPTURE(waits);
      const auto device = patient_checked();
      const Tensor x = Tensor::zeros(*device, {n}), y = Tensor::zeros(*device, {n});
      device->synchronize();
      {
        PinnedBuffer buffer(*device, x.bytes());
        std::ranges::fill(buffer.host_write(), std::byte{1});
        device->start_copy_to_device(x.address(), buffer.data(), x.bytes(), queue);
        if (waits) device->record(queue)->wait();
      }
      const std::string error = error_of([&] { device->record(queue)->wait(); });
      if (waits)
        CHECK(error == "");
      else
        check_named(error, "releases 512 bytes of a pinned buffer (activations)",
                    "a copy from the host on the queue " + name + " reads");
      // The copy found its source.
      CHECK(x.as_type(DType::i32).to_host<int32_t>()[3] == 0x01010101);
      // The pool's next owner; null: the buffer is said not to be in use.
      PinnedPool& pool = device->pinned_pool();
      PinnedBuffer lent = pool.take(x.bytes());
      device->start_copy_to_host(lent.data(), y.address(), y.bytes(), queue);
      pool.give_back(std::move(lent), waits ? device->record(queue) : nullptr);
      const std::string again = error_of([&] { pool.take(x.bytes()); });
      if (waits)
        CHECK(again == "");
      else
        check_named(again, "writes 512 bytes of a pinned buffer (workspace)",
                    "a copy to the host on the queue " + name + " writes");
      // The pool has released that buffer.
      CHECK(error_of([&] { device->synchronize(); }).empty() == waits);
    }
}

TEST_CASE("checked device: a wait of the host that a test leaves out is named where its result is used") {
  const auto read_in_chunks = [](int64_t ignored) {
    const auto device = make_checked_device(unused_table(), 1, {.ignored_host_wait = ignored});
    const Tensor x = Tensor::from_host<float>(*device, {100}, counting(100));
    std::vector<float> found;
    ChunkReader reader(*device, 160);
    reader.read(x, [&](std::span<const std::byte> bytes) {
      const auto* const begin = reinterpret_cast<const float*>(bytes.data());
      found.insert(found.end(), begin, begin + bytes.size() / sizeof(float));
    });
    CHECK(found == counting(100));
  };
  // Chunks of 160, 160 and 80 bytes.
  for (const int64_t ignored : {0, 1, 2})
    check_named(error_of([&] { read_in_chunks(ignored); }),
                "reads 160 bytes of a pinned buffer (activations)",
                "a copy to the host on the queue device to host writes");
  read_in_chunks(3);
}

TEST_CASE("the purpose of an added queue, not its name, says whether tests leave out its waits") {
  for (const AddedQueue purpose : {AddedQueue::work, AddedQueue::transfers, AddedQueue::delivery}) {
    const auto device = make_checked_device(unused_table(), 1, {.ignored_wait = 0});
    const Tensor x = Tensor::zeros(*device, {8});
    device->synchronize();
    PinnedBuffer buffer(*device, x.bytes());
    const Queue added = device->add_queue(purpose, "transfers of `shard`");
    launch(*device, &scale, x, 1.0f, int64_t{8});
    device->wait_for(added, *device->record(Queue::compute));
    device->start_copy_to_host(buffer.data(), x.address(), x.bytes(), added);
    const std::string error = error_of([&] { device->synchronize(); });
    CAPTURE(error);
    CHECK((error.find("missing wait: ") != std::string::npos) == (purpose == AddedQueue::work));
  }
}

TEST_CASE("checked device: a missing wait for a pinned buffer is found, and its contents change in order") {
  const int64_t n = 32;
  for (const bool reads_wait : {true, false})
    for (const bool writes_wait : {true, false}) {
      CAPTURE(reads_wait);
      CAPTURE(writes_wait);
      const auto device = patient_checked();
      const Tensor x = Tensor::from_host<float>(*device, {n}, counting(n)), y = Tensor::zeros(*device, {n}),
                   z = Tensor::zeros(*device, {n});
      device->synchronize();
      PinnedBuffer buffer(*device, x.bytes());
      const auto follow = [&](Queue queue, Queue earlier, bool waits) {
        if (waits) device->wait_for(queue, *device->record(earlier));
      };
      device->start_copy_to_host(buffer.data(), x.address(), x.bytes(), Queue::device_to_host);
      // Nothing has been copied yet: the host finds NaN.
      CHECK(std::isnan(*reinterpret_cast<const float*>(buffer.data())));
      follow(Queue::host_to_device, Queue::device_to_host, reads_wait);
      device->start_copy_to_device(y.address(), buffer.data(), y.bytes(), Queue::host_to_device);
      follow(Queue::device_to_host, Queue::host_to_device, writes_wait);
      // The copy before this one has not run, and still finds the first contents.
      device->start_copy_to_host(buffer.data(), z.address(), z.bytes(), Queue::device_to_host);
      const std::string error = error_of([&] { device->synchronize(); });
      if (!reads_wait)
        CHECK(error.find(
                  "missing wait: a copy from the host on the queue host to device reads 128 bytes that a "
                  "copy to the host on the queue device to host writes") != std::string::npos);
      else if (!writes_wait)
        CHECK(
            error.find("missing wait: a copy to the host on the queue device to host writes 128 bytes that a "
                       "copy from the host on the queue host to device reads") != std::string::npos);
      else
        CHECK(error == "");
      if (reads_wait && writes_wait) CHECK(y.to_host<float>() == counting(n));
    }
}

TEST_CASE("checked device: memory freed while another queue uses it is found") {
  const int64_t n = 64;
  for (const Queue queue : {Queue::communication, Queue::host_to_device, Queue::device_to_host}) {
    for (const bool waits : {false, true}) {
      CAPTURE(name_of(queue));
      CAPTURE(waits);
      const auto device = patient_checked();
      std::vector<float> seen(static_cast<size_t>(n));
      {
        const Tensor x = Tensor::from_host<float>(*device, {n}, counting(n));
        device->synchronize();
        device->start_copy_to_host(seen.data(), x.address(), x.bytes(), queue);
        if (waits) device->wait_for(Queue::compute, *device->record(queue));
      }
      // The block's next owner would write it.
      const Tensor next = Tensor::zeros(*device, {n});
      const std::string error = error_of([&] { device->record(Queue::compute)->wait(); });
      CHECK(error == (waits ? ""
                            : "internal error: missing wait: its release writes 512 bytes "
                              "that a copy on the queue " +
                                  std::string(name_of(queue)) + " reads, and does not wait for it"));
      device->record(queue)->wait();
      CHECK(seen == counting(n));
    }
  }
}

TEST_CASE("checked device: events tell when the work of a queue ran, and spans name its queue") {
  const auto device = checked();
  std::vector<QueueSpan> spans;
  QueueScope unheard(*device, Queue::communication);
  unheard.end("unheard");
  device->listen([&](const QueueSpan& span) { spans.push_back(span); });
  const Queue added = device->add_queue(AddedQueue::transfers, "transfers of `shard`");
  const auto sleep = [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  const auto before = device->record_time(Queue::compute);
  device->enqueue(Queue::compute, sleep);
  const auto after = device->record_time(Queue::compute);
  device->wait_for(added, *after);
  QueueScope scope(*device, added);
  device->enqueue(added, sleep);
  scope.end("send");
  CHECK(device->queues_work());
  device->synchronize();
  CHECK(after->time() - before->time() >= 0.005);
  REQUIRE(spans.size() == 1);
  CHECK(spans[0].queue == "transfers of `shard`");
  CHECK(spans[0].name == "send");
  CHECK(spans[0].before->time() >= after->time());
  CHECK(spans[0].after->time() - spans[0].before->time() >= 0.005);
}

TEST_CASE("checked device: an error reaches the queues that wait for it, and one synchronize() ends it") {
  const auto device = checked();
  const int64_t n = 16;
  const Tensor x = Tensor::from_host<float>(*device, {n}, counting(n));
  std::vector<float> seen(static_cast<size_t>(n));
  launch(*device, Queue::communication, &break_down, int32_t{7});
  device->wait_for(Queue::compute, *device->record(Queue::communication));
  device->wait_for(Queue::device_to_host, *device->record(Queue::compute));
  device->start_copy_to_host(seen.data(), x.address(), x.bytes(), Queue::device_to_host);
  CHECK_THROWS_WITH(device->record(Queue::device_to_host)->wait(), "kernel 7 broke down");
  CHECK(std::isnan(seen[0]));  // left out
  CHECK_THROWS_WITH(device->synchronize(), "kernel 7 broke down");
  device->synchronize();
  CHECK(x.to_host<float>() == counting(n));
}

TEST_CASE(
    "checked device: what fails in the queue is thrown by the next wait, once, and the device goes on") {
  const auto device = checked();
  const Tensor x = Tensor::from_host<float>(*device, {4}, counting(4));
  for (const int way : {0, 1, 2}) {
    launch(*device, &break_down, int32_t{way});
    launch(*device, &break_down, int32_t{77});  // left out
    try {
      if (way == 0)
        device->synchronize();
      else if (way == 1)
        (void)x.to_host<float>();
      else
        device->record(Queue::compute)->wait();
      FAIL("expected an error");
    } catch (const std::runtime_error& error) {
      CHECK(error.what() == "kernel " + std::to_string(way) + " broke down");
    }
    CHECK(x.to_host<float>() == counting(4));
  }
  launch(*device, &break_down, int32_t{5});  // without a wait the device ends without an error
}

TEST_CASE("checked device: a kernel takes tensors of its own device only") {
  const auto device = checked(), other = checked();
  const auto cpu = make_cpu_device(unused_table(), 1);
  const Tensor here = Tensor::zeros(*device, {4});
  CHECK_THROWS_AS(launch(*device, &scale, Tensor::zeros(*other, {4}), 1.0f, int64_t{4}), Error);
  CHECK_THROWS_AS(launch(*device, &scale, Tensor::zeros(*cpu, {4}), 1.0f, int64_t{4}), Error);
  CHECK_THROWS_AS(launch(*cpu, &add_one, here, Tensor::zeros(*cpu, {4}), int64_t{4}), Error);
}

TEST_CASE("checked device: the allocator rounds, books and reuses as on the CPU") {
  const auto cpu = make_cpu_device(unused_table(), 1), device = checked();
  for (Device* d : {cpu.get(), device.get()}) {
    CategoryScope scope(MemoryCategory::moments);
    std::vector<Tensor> kept;
    for (const int64_t n : {1, 129, 5000, 300000, 1000000}) {
      kept.push_back(Tensor::empty(*d, {n}));
      Tensor::empty(*d, {n});
    }
    Tensor::empty(*d, {129});
  }
  CHECK(device->memory().peak == cpu->memory().peak);
  CHECK(device->memory().now == 0);
  CHECK(device->memory().reserved == cpu->memory().reserved);
  CHECK(device->memory().system_requests == cpu->memory().system_requests);
}

TEST_CASE("host views: the memory itself on the CPU, a copy elsewhere; what is stored is in the tensor") {
  const auto cpu = make_cpu_device(unused_table(), 1), device = checked();
  for (Device* d : {cpu.get(), device.get()}) {
    const Tensor x = Tensor::from_host<float>(*d, {5}, counting(5));
    launch(*d, &add_one, x, x, int64_t{5});
    HostView view(x);
    CHECK((view.data() == x.address()) == (d == cpu.get()));
    CHECK(view.as<float>()[4] == 5);
    view.as<float>()[0] = 9;
    view.store();
    CHECK(x.to_host<float>() == std::vector<float>{9, 2, 3, 4, 5});
    HostView fresh(x, HostView::Contents::undefined);
    std::fill_n(fresh.as<float>(), 5, 3.0f);
    fresh.store();
    CHECK(x.to_host<float>() == std::vector<float>(5, 3.0f));
  }
}
