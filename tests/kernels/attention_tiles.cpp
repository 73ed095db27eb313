// The tiles of attention on the simulated device: products at every head size, banks, masks of dropout, and
// defects around the matrix operations of a warp, which are named with their place.
#include <doctest/doctest.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/cuda/attention_rows.hpp"

using namespace capstan;
using namespace capstan::kernels::simulated;
using kernels::LaunchContext;

namespace {

constexpr int kRows = 32;

// X Y^T, and the product of its left half with Y, of the rows of a warp.
template <class T, int kHead>
__global__ void tile_products(const T* x, const T* y, int rows, int width, int64_t stride, bool aligned,
                              float* scores, float* outs) {
  using Rows = OperandTile<T, kRows, kHead>;
  CAPSTAN_DYNAMIC_SHARED(Bytes16, memory);
  load_tile<Rows, kWarp>(memory, 0, HeadRows<T>{x, stride, 0, rows, width, aligned});
  load_tile<Rows, kWarp>(memory, Rows::kSize, HeadRows<T>{y, stride, 0, rows, width, aligned});
  commit_copies();
  wait_for_copies<0>();
  sync_threads();
  float sums[2][kRows / 8][4] = {}, out[2][kHead / 8][4] = {};
  multiply_rows<Rows, Rows>(memory, 0, 0, Rows::kSize, sums);
  multiply_columns<Rows>(memory, Rows::kSize, AFragments<T, 2, kRows / 8>(sums), out);
  const auto put = [&](float* to, int columns, int m, int n, int i, float value) {
    to[(16 * m + 8 * (i / 2) + lane_row()) * columns + 8 * n + lane_column() + i % 2] = value;
  };
  for_accumulators<2, kRows / 8>([&](int m, int n, int i) { put(scores, kRows, m, n, i, sums[m][n][i]); });
  for_accumulators<2, kHead / 8>([&](int m, int n, int i) { put(outs, kHead, m, n, i, out[m][n][i]); });
}

template <class T, int kHead>
void check_products(int rows, int width, bool aligned) {
  INFO("head ", kHead, " rows ", rows, " width ", width, " aligned ", aligned, " bytes ", sizeof(T));
  const int64_t stride = aligned ? kHead : kHead + 3;
  // An unaligned array begins one element after an aligned one.
  struct alignas(16) Chunk {
    T values[16 / sizeof(T)];
  };
  const auto count = static_cast<size_t>(kRows * stride + 16);
  std::vector<Chunk> memory[2];
  T* arrays[2];
  for (int i = 0; i < 2; ++i) {
    memory[i].resize(count);
    arrays[i] = &memory[i][0].values[0] + (aligned ? 0 : 1);
    for (int64_t j = 0; j < rows * stride; ++j) {
      const auto value = static_cast<float>(std::sin(0.37 * static_cast<double>(j) + i));
      arrays[i][j] = T(j % stride < width ? value : NAN);
    }
  }
  std::vector<float> scores(size_t{kRows} * kRows, NAN), outs(size_t{kRows} * kHead, NAN);
  const size_t bytes = 2 * 16 * OperandTile<T, kRows, kHead>::kSize;
  launch(LaunchContext{}, {1, kWarp, bytes}, tile_products<T, kHead>, arrays[0], arrays[1], rows, width,
         stride, aligned, scores.data(), outs.data());
  const auto at = [&](int i, int row, int column) {
    return row < rows && column < width
               ? static_cast<double>(static_cast<float>(arrays[i][row * stride + column]))
               : 0.0;
  };
  double worst_score = 0, worst_out = 0;
  for (int row = 0; row < kRows; ++row) {
    for (int other = 0; other < kRows; ++other) {
      double sum = 0;
      for (int k = 0; k < width; ++k) sum += at(0, row, k) * at(1, other, k);
      worst_score = std::max(worst_score, std::abs(sum - scores[static_cast<size_t>(row * kRows + other)]));
    }
    for (int column = 0; column < kHead; ++column) {
      double sum = 0;
      for (int k = 0; k < kRows; ++k) {
        const float score = scores[static_cast<size_t>(row * kRows + k)];
        sum += static_cast<double>(static_cast<float>(T(score))) * at(1, k, column);
      }
      worst_out = std::max(worst_out, std::abs(sum - outs[static_cast<size_t>(row * kHead + column)]));
    }
  }
  CHECK(worst_score < 1e-4);
  CHECK(worst_out < 3e-3);
}

template <class T>
void check_head_sizes() {
  for (const bool aligned : {true, false}) {
    check_products<T, 32>(32, 32, aligned);
    check_products<T, 64>(19, 49, aligned);
    check_products<T, 96>(32, 70, aligned);
    check_products<T, 128>(31, 128, aligned);
    check_products<T, 192>(32, 185, aligned);
    check_products<T, 256>(1, 250, aligned);
  }
}

// The rows of a tile as a block of threads loads them.
template <int kHead, int kThreads, bool kOnce>
__global__ void loaded_rows(HeadRows<bf16> rows, bf16* to) {
  using Rows = OperandTile<bf16, 64, kHead>;
  CAPSTAN_DYNAMIC_SHARED(Bytes16, memory);
  load_tile<Rows, kThreads, kOnce>(memory, 0, rows);
  commit_copies();
  wait_for_copies<0>();
  sync_threads();
  for (int i = thread_index(); i < Rows::kPlane; i += kThreads) {
    const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
    store_16(to + 8 * i, load_16(memory, Rows::at(row / 8 * 8, row % 8, chunk)));
  }
}

// Loads rows `first` and the following ones of `count`, of which `heads` belong to a token.
template <int kHead, int kThreads, bool kOnce>
void check_loaded_rows(int first, int count, int width, int heads, bool aligned) {
  INFO("head ", kHead, " threads ", kThreads, " once ", kOnce, " first ", first, " count ", count, " width ",
       width, " heads ", heads, " aligned ", aligned);
  struct alignas(16) Chunk {
    bf16 values[8];
  };
  const int64_t head_stride = aligned ? kHead + 8 : kHead + 3, stride = heads * head_stride + 16;
  const auto values = static_cast<size_t>((count + heads) * stride + 16);
  std::vector<Chunk> memory(values), loaded(size_t{64} * kHead / 8);
  bf16* const array = &memory[0].values[0] + (aligned ? 0 : 1);
  const auto at = [&](int row) { return row / heads * stride + row % heads * head_stride; };
  for (int64_t i = 0; i < static_cast<int64_t>(values); ++i) array[i] = bf16(NAN);
  for (int row = 0; row < count; ++row)
    for (int column = 0; column < width; ++column)
      array[at(row) + column] = bf16(static_cast<float>(1 + (row * 7 + column) % 251));
  launch(LaunchContext{}, {1, kThreads, 16 * OperandTile<bf16, 64, kHead>::kSize},
         loaded_rows<kHead, kThreads, kOnce>,
         HeadRows<bf16>{array, stride, first, count, width, aligned, 0, head_stride, heads},
         &loaded[0].values[0]);
  int wrong = 0;
  for (int row = 0; row < 64; ++row)
    for (int column = 0; column < kHead; ++column) {
      const int from = first + row;
      const bool there = from >= 0 && from < count && column < width;
      const float expected = there ? static_cast<float>(array[at(from) + column]) : 0.0f;
      if (static_cast<float>((&loaded[0].values[0])[row * kHead + column]) != expected) ++wrong;
    }
  CHECK(wrong == 0);
}
template <int kHead>
void check_loads() {
  for (const bool aligned : {true, false})
    for (const int width : {kHead, kHead - 24, kHead - 5}) {
      check_loaded_rows<kHead, 128, false>(0, 64, width, 1, aligned);
      check_loaded_rows<kHead, 128, false>(-3, 41, width, 1, aligned);
      check_loaded_rows<kHead, 32, false>(60, 90, width, 1, aligned);
      check_loaded_rows<kHead, 32, false>(3, 50, width, 3, aligned);
      check_loaded_rows<kHead, 64, true>(6, 61, width, 5, aligned);
      check_loaded_rows<kHead, 128, true>(0, 200, width, 1, aligned);
    }
}

// Whether 8 rows of a tile have the same chunk in 8 different groups of banks.
template <int kHead>
bool has_no_conflict() {
  using Rows = OperandTile<bf16, kRows, kHead>;
  for (int first = 0; first < kRows; first += 8)
    for (int chunk = 0; chunk < Rows::kChunks; ++chunk) {
      std::set<int> banks;
      for (int row = 0; row < 8; ++row) banks.insert(Rows::at(first, row, chunk) % 8);
      if (banks.size() != 8) return false;
    }
  return true;
}

__global__ void kept_pairs(AttentionCall c, int first_key, const int64_t* rows, int* of_keys,
                           int* of_queries) {
  const Dropout dropout(c, 2);
  KeptKeys<8> keys;
  const int64_t mine[2] = {rows[lane_row()], rows[lane_row() + 8]};
  keys.init(dropout, mine, first_key);
  KeptQueries<8> queries;
  queries.init(
      dropout, [&](int query) { return rows[query]; }, first_key);
  for_accumulators<1, 8>([&](int, int n, int i) {
    const int row = 8 * (i / 2) + lane_row(), column = 8 * n + lane_column() + i % 2;
    of_keys[row * 64 + column] = keys(n, i) ? 1 : 0;
    of_queries[row * 64 + column] = queries(n, i) ? 1 : 0;
  });
}

// ---- defects

__global__ void matrix_past_the_end(int*) {
  CAPSTAN_SHARED(Bytes16, rows, 31);
  if (thread_index() < 31) rows[thread_index()] = Bytes16{};
  sync_threads();
  uint32_t matrices[1][4];
  load_matrices<false>(matrices, rows, {thread_index()});
}
constexpr int kAtPastTheEnd = __LINE__ - 2;

__global__ void matrix_without_barrier(int*) {
  CAPSTAN_SHARED(Bytes16, rows, 64);
  rows[thread_index()] = Bytes16{};
  // No sync_threads().
  uint32_t matrices[1][4];
  load_matrices<true>(matrices, rows, {63 - thread_index()});
}
constexpr int kAtUnordered = __LINE__ - 2;

__global__ void product_of_half_a_warp(float* out) {
  float sums[1][2][4] = {};
  const uint32_t operand[1][4] = {};
  if (lane_index() < 16) multiply_add<bf16, 1>(sums, 0, operand, operand);
  out[thread_index()] = sums[0][0][0];
}
constexpr int kAtHalfAWarp = __LINE__ - 3;

__global__ void partial_copies(const int* in, int* out) {
  CAPSTAN_SHARED(int, values, 128);
  copy_part_async<16>(values, 4 * thread_index(), in + 4 * thread_index(), thread_index() % 17);
  commit_copies();
  wait_for_copies<0>();
  for (int i = 0; i < 4; ++i) out[4 * thread_index() + i] = values[4 * thread_index() + i];
}

std::string defect(Grid grid, void (*kernel)(int*)) {
  try {
    launch(LaunchContext{}, grid, kernel, nullptr);
  } catch (const Error& e) {
    return e.message();
  }
  return "none";
}
}  // namespace

TEST_CASE("tiles of attention: products of rows and of columns at every head size") {
  check_head_sizes<bf16>();
  check_head_sizes<f16>();
}

TEST_CASE("tiles of attention: products of three terms have the accuracy of fp32") {
  for (const bool aligned : {true, false}) {
    check_products<float, 32>(32, 32, aligned);
    check_products<float, 64>(29, 57, aligned);
    check_products<float, 128>(32, 117, aligned);
  }
  const float values[][2] = {{1.0f, -1e-30f}, {3.14159265f, 1e30f}, {1.0f / 3, -65504.4f}};
  for (const auto& [low, high] : values) {
    uint32_t terms[3];
    pack_terms<float>(low, high, terms);
    float sums[2] = {};
    for (int i = 2; i >= 0; --i) {
      sums[0] += std::bit_cast<float>(terms[i] << 16);
      sums[1] += std::bit_cast<float>(terms[i] & 0xFFFF0000);
    }
    CHECK(sums[0] == low);
    CHECK(sums[1] == high);
  }
}

TEST_CASE("tiles of attention: rows before, in and after a sequence, of one and of several heads") {
  check_loads<32>();
  check_loads<64>();
  check_loads<96>();
  check_loads<128>();
  check_loads<192>();
  check_loads<256>();
}

TEST_CASE("tiles of attention: matrices are read without bank conflicts") {
  CHECK(has_no_conflict<32>());
  CHECK(has_no_conflict<64>());
  CHECK(has_no_conflict<96>());
  CHECK(has_no_conflict<128>());
  CHECK(has_no_conflict<192>());
  CHECK(has_no_conflict<256>());
}

TEST_CASE("tiles of attention: lanes that share random numbers drop the pairs of the definition") {
  AttentionCall c{};
  c.dropout = 0.4f;
  c.dropout_key = {17, 4};
  c.head_offset = 5;
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < 64; ++i) rows.push_back((int64_t{1} << 35) + 3 * i);
  std::vector<int> of_keys(16 * 64), of_queries(16 * 64);
  const int first_key = 1236;
  launch(LaunchContext{}, {1, kWarp}, kept_pairs, c, first_key, rows.data(), of_keys.data(),
         of_queries.data());
  const uint32_t threshold = kernels::dropout_threshold(c.dropout);
  const auto kept = [&](int query, int key) {
    return kernels::keep_attention(c.dropout_key, rows[static_cast<size_t>(query)], 7, first_key + key,
                                   threshold)
               ? 1
               : 0;
  };
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 64; ++column) {
      const auto i = static_cast<size_t>(row * 64 + column);
      CHECK(of_keys[i] == kept(row, column));
      CHECK(of_queries[i] == kept(column, row));
    }
}

TEST_CASE("simulated kernels: defects of matrix operations are named") {
  const auto place = [](int line) { return "tests/kernels/attention_tiles.cpp:" + std::to_string(line); };
  const std::string past = defect({1, 32}, matrix_past_the_end);
  CHECK(past.find(place(kAtPastTheEnd)) != std::string::npos);
  CHECK(past.find("reads rows[31], which has 31 elements") != std::string::npos);
  const std::string unordered = defect({1, 64}, matrix_without_barrier);
  CHECK(unordered.find(place(kAtUnordered)) != std::string::npos);
  CHECK(unordered.find("no barrier between two accesses of rows[") != std::string::npos);
  std::vector<float> out(32);
  try {
    launch(LaunchContext{}, {1, 32}, product_of_half_a_warp, out.data());
    FAIL("half a warp multiplied");
  } catch (const Error& e) {
    CHECK(e.message().find(place(kAtHalfAWarp)) != std::string::npos);
    CHECK(e.message().find("has returned") != std::string::npos);
  }
}

TEST_CASE("simulated kernels: partial asynchronous copies end with zeros") {
  alignas(16) std::array<int, 128> in{};
  in.fill(-1);
  std::array<int, 128> out{};
  launch(LaunchContext{}, {1, 32}, partial_copies, in.data(), out.data());
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t given = i / 4 % 17, first = i % 4 * 4;
    uint32_t expected = 0;
    for (size_t byte = 0; byte < 4; ++byte)
      if (first + byte < given) expected |= 0xFFu << 8 * byte;
    CHECK(static_cast<uint32_t>(out[i]) == expected);
  }
}
