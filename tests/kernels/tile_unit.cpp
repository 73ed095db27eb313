// The emulated tile unit does what Intel's manual says, and finds misuse; the kernels of this program run on
// it.
#include <array>
#include <stdexcept>

#define CAPSTAN_AMX_EMULATION "tests/kernels/emulated_amx.hpp"
#include "kernels/cpu/amx_core.hpp"
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::kernels;

namespace {

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_of_row[16] = {};
  uint8_t rows[16] = {};
};

// Tile 0: sums of 3 x 5, tile 1: A of 3 x 8, tile 2: B of 8 x 5 in pairs of rows.
Shapes odd_shapes() {
  Shapes s;
  s.bytes_of_row[0] = 20, s.rows[0] = 3;
  s.bytes_of_row[1] = 16, s.rows[1] = 3;
  s.bytes_of_row[2] = 20, s.rows[2] = 4;
  return s;
}

struct Release {
  ~Release() { _tile_release(); }
};

}  // namespace

TEST_CASE("the kernels of this program use the tile unit") {
  CHECK(runs_amx());
}

TEST_CASE("a GEMM of small tiles") {
  const Release release;
  const Shapes shapes = odd_shapes();
  _tile_loadconfig(&shapes);
  const auto a = testing::random_values(3 * 8, 1), b = testing::random_values(8 * 5, 2),
             c = testing::random_values(3 * 5, 3);
  bf16 left[3][8], right[4][5][2];
  float sums[3][7];
  double expected[3][5];
  for (size_t i = 0; i < 24; ++i) left[i / 8][i % 8] = bf16(static_cast<float>(a[i]));
  for (size_t i = 0; i < 40; ++i) right[i / 5 / 2][i % 5][i / 5 % 2] = bf16(static_cast<float>(b[i]));
  for (size_t m = 0; m < 3; ++m)
    for (size_t n = 0; n < 7; ++n) {
      sums[m][n] = n < 5 ? static_cast<float>(c[m * 5 + n]) : 9.0f;
      if (n >= 5) continue;
      expected[m][n] = sums[m][n];
      for (size_t k = 0; k < 8; ++k)
        expected[m][n] += double{static_cast<float>(left[m][k])} * static_cast<float>(right[k / 2][n][k % 2]);
    }
  _tile_loadd(0, sums, sizeof(sums[0]));
  _tile_loadd(1, left, sizeof(left[0]));
  _tile_loadd(2, right, sizeof(right[0]));
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, sums, sizeof(sums[0]));
  for (size_t m = 0; m < 3; ++m) {
    for (size_t n = 0; n < 5; ++n) CHECK(std::abs(sums[m][n] - expected[m][n]) < 1e-6);
    CHECK(sums[m][5] == 9.0f);  // beyond the tile's columns
  }
}

TEST_CASE("vectors give the sums of the tile unit") {
  constexpr int64_t kSteps = 3;
  const int64_t length = kSteps * amx::kDepth;
  const auto x = testing::random_values(amx::kPanel * length, 4),
             y = testing::random_values(amx::kPanel * length, 5);
  std::vector<bf16> a(x.size()), b(y.size());
  for (size_t i = 0; i < a.size(); ++i)
    a[i] = bf16(static_cast<float>(x[i])), b[i] = bf16(static_cast<float>(y[i]));
  alignas(64) static bf16 left[kSteps * amx::kStepValues], right[kSteps * amx::kStepValues];
  amx::pack_panels(true, true, a.data(), length, amx::kPanel, length, left, 0);
  amx::pack_panels(false, true, b.data(), length, amx::kPanel, length, right, 0);
  alignas(64) std::array<float, amx::kPanel * amx::kPanel> tiles{}, vectors{};
  const amx::TileConfig config;
  for (const bool add : {false, true}) {
    amx::multiply(left, right, kSteps, add, tiles.data(), amx::kPanel);
    amx::multiply_on_vectors(left, right, kSteps, add, vectors.data(), amx::kPanel);
    for (int64_t m = 0; m < amx::kPanel; ++m)
      for (int64_t n = 0; n < amx::kPanel; ++n) {
        double expected = 0;
        for (int64_t k = 0; k < length; ++k)
          expected += double{static_cast<float>(a[static_cast<size_t>(m * length + k)])} *
                      static_cast<float>(b[static_cast<size_t>(n * length + k)]);
        const auto at = static_cast<size_t>(m * amx::kPanel + n);
        CHECK(std::abs(tiles[at] - (add ? 2 : 1) * expected) < 1e-4);
        CHECK(std::abs(vectors[at] - (add ? 2 : 1) * expected) < 1e-4);
      }
  }
}

TEST_CASE("subnormal numbers are zeros, and rounding to bf16 is to even") {
  using emulated::flushed, emulated::from_bf16, emulated::to_bf16;
  CHECK(flushed(1e-39f) == 0);
  CHECK(from_bf16(1) == 0);
  CHECK(from_bf16(0x3f80) == 1);
  CHECK(to_bf16(1e-39f) == 0);
  CHECK(to_bf16(std::bit_cast<float>(0x3f808000u)) == 0x3f80);
  CHECK(to_bf16(std::bit_cast<float>(0x3f818000u)) == 0x3f82);
  CHECK(to_bf16(std::bit_cast<float>(0x3f808001u)) == 0x3f81);
  CHECK(to_bf16(INFINITY) == 0x7f80);
  CHECK(to_bf16(std::bit_cast<float>(0x7f800001u)) == 0x7fc0);
}

TEST_CASE("misuse of the unit is found") {
  const Release release;
  alignas(64) float memory[16 * 17] = {};
  CHECK_THROWS_AS(_tile_zero(0), std::logic_error);  // not configured
  Shapes shapes = odd_shapes();
  shapes.rows[9] = 1;
  CHECK_THROWS_AS(_tile_loadconfig(&shapes), std::logic_error);
  shapes = odd_shapes();
  shapes.rows[0] = 17;
  CHECK_THROWS_AS(_tile_loadconfig(&shapes), std::logic_error);
  shapes = odd_shapes();
  shapes.palette = 2;
  CHECK_THROWS_AS(_tile_loadconfig(&shapes), std::logic_error);
  shapes = odd_shapes();
  _tile_loadconfig(&shapes);
  CHECK_THROWS_AS(_tile_zero(3), std::logic_error);                // no rows
  CHECK_THROWS_AS(_tile_zero(8), std::logic_error);                // no such tile
  CHECK_THROWS_AS(_tile_stored(0, memory, 64), std::logic_error);  // nothing in it
  _tile_zero(0);
  _tile_zero(1);
  CHECK_THROWS_AS(_tile_dpbf16ps(0, 1, 2), std::logic_error);
  _tile_zero(2);
  _tile_dpbf16ps(0, 1, 2);
  CHECK_THROWS_AS(_tile_dpbf16ps(0, 2, 1), std::logic_error);  // shapes
  CHECK_THROWS_AS(_tile_dpbf16ps(0, 1, 1), std::logic_error);
  _tile_release();
  CHECK_THROWS_AS(_tile_stored(0, memory, 64), std::logic_error);
  CHECK_THROWS_AS(_mm512_load_ps(memory + 1), std::logic_error);
}
