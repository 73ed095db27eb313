// Arrays of a run-time element type, random values and comparisons for the kernel tests. Every kernel is run
// with 1, 2 and 3 threads and must give the same bits.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/philox.hpp"
#include "base/thread_pool.hpp"
#include "kernels/table.hpp"
#include "tests/kernels/reference.hpp"
#include "tests/kernels/workspace_memory.hpp"
#include "tests/support/sanitized.hpp"

namespace capstan::testing {

using reference::Vec;

// The kernels that a program tests: the CPU's (cpu_table.cpp), those of the simulated device
// (simulated_table.cpp) or those of a GPU (gpu_table.cpp).
const kernels::Table& table();
// The folder of their sources: "kernels/cpu/" or "kernels/cuda/".
std::string kernel_folder();
// Whether the kernels are simulated and take a hundred times as long.
bool are_simulated();
// The third of the cases that these kernels get in tests with many (runs_case()); nullopt: all.
std::optional<uint64_t> third_of_cases();
// Whether kernels of attention round its weights to the type of the heads; those of the CPU do not, or keep
// their rest as well.
bool rounds_attention_weights();
// More than any launch of a test needs.
size_t workspace_bytes();
// Whether kernels cannot access other memory of the process than its heap and the stack of the tests.
bool reads_heap_alone();
// Before each launch of run_kernel(), `number` from 0: on a simulated device another order of threads.
void prepare_launch(int number);

// The sizes of a test, of which simulated kernels get a few.
template <class T>
std::vector<T> sizes(std::vector<T> all, std::vector<T> few) {
  return are_simulated() ? few : all;
}
// Whether a test with many cases runs this one. Simulated kernels get every n-th, an emulated tile unit and
// builds with sanitizers a third: SSE4, AVX2 and AVX-512 another one each. All other kernels get all.
inline bool runs_case(uint64_t number, uint64_t every) {
  if (are_simulated()) return number % (test::kSanitized ? 3 * every : every) == 0;
  // Not `number % 3`, which would select one value of an inner loop over three.
  const auto third = third_of_cases();
  return !third || (number + number / 3 + number / 9) % 3 == *third;
}

// Values uniform in [-scale, scale); the same for the same seed everywhere.
inline Vec<double> random_values(int64_t n, uint64_t seed, double scale = 1) {
  PhiloxSequence random(philox_key(seed, purpose::test, 0));
  Vec<double> values(static_cast<size_t>(n));
  for (double& v : values) v = (2 * random.uniform() - 1) * scale;
  return values;
}
inline Vec<int32_t> random_ints(int64_t n, uint64_t seed, int64_t below) {
  PhiloxSequence random(philox_key(seed, purpose::test, 1));
  Vec<int32_t> values(static_cast<size_t>(n));
  for (int32_t& v : values) v = static_cast<int32_t>(random.below(static_cast<uint64_t>(below)));
  return values;
}
// Dropout row indices as a sampler gives them: large, not consecutive.
inline Vec<int64_t> dropout_rows(int64_t n) {
  Vec<int64_t> ids(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) ids[static_cast<size_t>(i)] = (int64_t{1} << 33) + 7 * i;
  return ids;
}

// An allocator of memory that begins with a cache line.
template <class T>
struct CacheLines {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  CacheLines() = default;
  template <class U>
  CacheLines(const CacheLines<U>&) {}  // NOLINT
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
  bool operator==(const CacheLines&) const { return true; }
};

// An fp32, bf16, fp16 or u8 array with sentinel elements after it, which find a kernel that writes past its
// end. It begins with a cache line (`aligned`), else 16 bytes after one. rounded(): the values that the
// kernel reads, as doubles.
class Array {
 public:
  using Bytes = std::vector<char, CacheLines<char>>;
  Array() = default;
  Array(DType dtype, const Vec<double>& values, bool aligned = false)
      : dtype_(dtype), n_(values.size()), shift_(aligned ? 0 : 16) {
    bytes_.resize(shift_ + (n_ + kSentinels) * static_cast<size_t>(size_of(dtype)));
    for (size_t i = 0; i < n_ + kSentinels; ++i) set(i, i < n_ ? values[i] : sentinel());
  }
  static Array zeros(DType dtype, int64_t n, double value = 0) {
    return {dtype, Vec<double>(static_cast<size_t>(n), value)};
  }
  operator kernels::In() const { return n_ ? kernels::In{data(), dtype_} : kernels::In{}; }  // NOLINT
  kernels::Out out() { return n_ ? kernels::Out{data(), dtype_} : kernels::Out{}; }
  float* f32() { return n_ ? reinterpret_cast<float*>(data()) : nullptr; }
  void* memory() { return n_ ? data() : nullptr; }
  Vec<double> rounded() const {
    Vec<double> values(n_);
    for (size_t i = 0; i < n_; ++i) values[i] = get(i);
    return values;
  }
  const Bytes& bytes() const { return bytes_; }
  bool sentinels_intact() const {
    for (size_t i = n_; i < n_ + kSentinels; ++i)
      if (get(i) != sentinel()) return false;
    return true;
  }

 private:
  static constexpr size_t kSentinels = 64;
  // Exact in bf16 and fp16, or in a byte.
  double sentinel() const { return dtype_ == DType::u8 ? 0xA5 : 768; }
  char* data() { return bytes_.data() + shift_; }
  const char* data() const { return bytes_.data() + shift_; }
  void set(size_t i, double v) {
    if (dtype_ == DType::f32)
      reinterpret_cast<float*>(data())[i] = static_cast<float>(v);
    else if (dtype_ == DType::bf16)
      reinterpret_cast<bf16*>(data())[i] = bf16(static_cast<float>(v));
    else if (dtype_ == DType::u8)
      reinterpret_cast<uint8_t*>(data())[i] = static_cast<uint8_t>(v);
    else
      reinterpret_cast<f16*>(data())[i] = f16(static_cast<float>(v));
  }
  double get(size_t i) const {
    if (dtype_ == DType::f32) return reinterpret_cast<const float*>(data())[i];
    if (dtype_ == DType::bf16) return static_cast<float>(reinterpret_cast<const bf16*>(data())[i]);
    if (dtype_ == DType::u8) return reinterpret_cast<const uint8_t*>(data())[i];
    return static_cast<float>(reinterpret_cast<const f16*>(data())[i]);
  }
  DType dtype_ = DType::f32;
  size_t n_ = 0, shift_ = 0;
  Bytes bytes_;
};

// What the workspace of a launch holds before it: NaNs (each byte 0xff), or zeros.
enum class Contents : unsigned char { zeros = 0, nans = 0xff };

// The launch of a kernel: threads, and a workspace of `bytes`, with sentinel bytes after it. Fails the test
// if a kernel reports an error and the test does not take it.
class Launch {
 public:
  explicit Launch(int threads, size_t bytes = workspace_bytes(), Contents contents = Contents::nans)
      : pool_(threads),
        bytes_(bytes),
        contents_(contents),
        memory_(take_memory(bytes + kSentinels, contents)) {
    reset();
    context_ = {&pool_, nullptr, {reinterpret_cast<std::byte*>(memory_.data()), bytes}, &error_};
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch() {
    CHECK(error_.file == nullptr);
    CHECK(sentinels_intact());
    kept_memory(contents_).push_back(std::move(memory_));
  }
  kernels::Context& context() const { return context_; }
  // The workspace as it was before the first kernel.
  void reset() {
    memory_.reset();
    std::memset(memory_.data() + bytes_, kSentinel, kSentinels);
  }
  bool sentinels_intact() const {
    return std::all_of(memory_.data() + bytes_, memory_.data() + bytes_ + kSentinels,
                       [](char byte) { return byte == kSentinel; });
  }
  kernels::KernelError take_error() { return std::exchange(error_, {}); }

 private:
  static constexpr size_t kSentinels = 256;
  static constexpr char kSentinel = 0x5A;
  // The memory of ended launches: to make one takes longer than most kernels of the tests.
  static std::vector<WorkspaceMemory>& kept_memory(Contents contents) {
    thread_local std::vector<WorkspaceMemory> zeros, nans;
    return contents == Contents::zeros ? zeros : nans;
  }
  static WorkspaceMemory take_memory(size_t bytes, Contents contents) {
    std::vector<WorkspaceMemory>& kept = kept_memory(contents);
    const auto found =
        std::ranges::find_if(kept, [&](const auto& memory) { return memory.bytes() >= bytes; });
    if (found == kept.end()) return {bytes, static_cast<unsigned char>(contents), reads_heap_alone()};
    std::swap(*found, kept.back());
    WorkspaceMemory memory = std::move(kept.back());
    kept.pop_back();
    return memory;
  }

  ThreadPool pool_;
  const size_t bytes_;
  const Contents contents_;
  WorkspaceMemory memory_;
  kernels::KernelError error_;
  kernels::LaunchContext context_;
};

// The launches of run_kernel(), the one with all threads first.
struct TestLaunch {
  int threads;
  Contents contents;
};
inline constexpr TestLaunch kTestLaunches[] = {
    {3, Contents::nans}, {1, Contents::nans}, {2, Contents::nans}, {3, Contents::zeros}};

// Runs `body(context, outputs)` with 3, 1 and 2 threads, each on fresh copies of `outputs`, and with 3 once
// more, each after prepare_launch(); the workspace holds NaNs, and once zeros. Checks that bits agree and
// that nothing was written after the arrays, and returns the outputs.
template <class Body>
Vec<Array> run_kernel(const Vec<Array>& outputs, Body&& body) {
  Vec<Array> first;
  int number = 0;
  for (const auto& [threads, contents] : std::span(kTestLaunches).first(test::kSanitized ? 1 : 4)) {
    prepare_launch(number++);
    Launch launch(threads, workspace_bytes(), contents);
    Vec<Array> mine = outputs;
    body(launch.context(), mine);
    for (size_t i = 0; i < mine.size(); ++i) {
      INFO("output ", i, " with ", threads, " threads",
           contents == Contents::zeros ? " and zeros in the workspace" : "");
      CHECK(mine[i].sentinels_intact());
      if (!first.empty()) CHECK(mine[i].bytes() == first[i].bytes());
    }
    if (first.empty()) first = std::move(mine);
  }
  return first;
}

inline double tolerance(DType dtype) {
  return dtype == DType::f32 ? 1e-5 : dtype == DType::bf16 ? 1e-2 : 1.5e-3;
}
// The largest |value - expected| relative to |expected| plus the root mean square of all expected values; NaN
// counts as infinitely wrong.
inline double error(const Vec<double>& value, const Vec<double>& expected) {
  if (value.size() != expected.size()) return INFINITY;
  double squares = 0, worst = 0;
  for (double e : expected) squares += e * e;
  const double rms = expected.empty() ? 0 : std::sqrt(squares / static_cast<double>(expected.size()));
  for (size_t i = 0; i < value.size(); ++i) {
    if (value[i] == expected[i]) continue;
    const double e = std::abs(value[i] - expected[i]) / (std::abs(expected[i]) + rms + 1e-30);
    if (!(e <= worst)) worst = std::isnan(e) ? INFINITY : e;
  }
  return worst;
}

// Root of the mean square of the errors, as a fraction of that of the expected values.
inline double rms_error(const Vec<double>& value, const Vec<double>& expected) {
  if (value.size() != expected.size()) return INFINITY;
  double squares = 0, of_errors = 0;
  for (size_t i = 0; i < value.size(); ++i) {
    squares += expected[i] * expected[i];
    of_errors += (value[i] - expected[i]) * (value[i] - expected[i]);
  }
  return std::sqrt(of_errors / (squares + 1e-60));
}

// Checks values that may be infinite or NaN, which must be the expected ones. tolerance: of the others,
// relative.
inline void check_extreme(const Vec<double>& values, const Vec<double>& expected, double tolerance) {
  REQUIRE(values.size() == expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    INFO("element ", i, ": ", values[i], ", expected ", expected[i]);
    if (std::isnan(expected[i]))
      CHECK(std::isnan(values[i]));
    else if (std::isinf(expected[i]))
      CHECK(values[i] == expected[i]);
    else
      CHECK(std::abs(values[i] - expected[i]) <= tolerance * (1 + std::abs(expected[i])));
  }
}

inline kernels::AttentionShape attention_shape(int64_t groups, int64_t per_group, int64_t head_dim,
                                               int64_t batch, int64_t seq) {
  kernels::AttentionShape a;
  a.groups = groups;
  a.heads_per_group = per_group;
  a.qk_dim = a.v_dim = head_dim;
  a.batch = batch;
  a.seq = seq;
  a.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
  a.dropout_key = philox_key(5, purpose::attention_dropout, 3);
  return a;
}

// The heads that begin at element `first` of an array.
inline kernels::HeadsIn view_of(const Array& x, kernels::HeadStrides strides, int64_t first = 0) {
  const kernels::In all = x;
  return {{all.as<std::byte>() + first * size_of(all.dtype), all.dtype}, strides};
}
inline kernels::HeadsOut view_of(Array& x, kernels::HeadStrides strides, int64_t first = 0) {
  const kernels::Out all = x.out();
  return {{all.as<std::byte>() + first * size_of(all.dtype), all.dtype}, strides};
}
// Heads of a contiguous [tokens, groups, heads_per_group, width].
inline kernels::HeadStrides contiguous_heads(int64_t groups, int64_t heads_per_group, int64_t width) {
  return {groups * heads_per_group * width, heads_per_group * width, width};
}
// Packed QKV of an attention shape, as views.
template <class A>
struct PackedViews {
  using Heads = decltype(view_of(std::declval<A&>(), kernels::HeadStrides()));
  Heads q, k, v;
  PackedViews(A& x, const kernels::QkvLayout& l)
      : q(view_of(x, l.strides())),
        k(view_of(x, l.strides(), l.key(0))),
        v(view_of(x, l.strides(), l.value(0))) {}
};

// Documents::cu_seqlens of documents that are given as starts, one for each token.
inline Vec<int32_t> document_bounds(const Vec<int32_t>& starts, int64_t seq) {
  Vec<int32_t> bounds;
  const auto tokens = static_cast<int64_t>(starts.size());
  for (int64_t i = 0; i < tokens; ++i)
    if (starts[static_cast<size_t>(i)] == i % seq) bounds.push_back(static_cast<int32_t>(i));
  if (tokens > 0) bounds.push_back(static_cast<int32_t>(tokens));
  return bounds;
}
// One of the two forms; empty: one document to a sequence.
inline kernels::Documents packing_of(const Vec<int32_t>& starts, const Vec<int32_t>& bounds,
                                     bool cumulative) {
  if (starts.empty()) return {};
  if (!cumulative) return {.start = starts.data()};
  return {.cu_seqlens = bounds.data(), .count = static_cast<int64_t>(bounds.size()) - 1};
}

inline const char* text(DType dtype) {
  return dtype == DType::f32 ? "fp32" : dtype == DType::bf16 ? "bf16" : "fp16";
}
inline const Vec<DType> kTypes{DType::f32, DType::bf16, DType::f16};

}  // namespace capstan::testing
