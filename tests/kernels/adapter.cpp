// DoRA's magnitudes and weights of 4 bits against scalar references.
#include "kernels/adapter.hpp"

#include <array>

#include "kernels/common/nf4.hpp"
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;

namespace {

const kernels::Adapter& adapter() {
  return *testing::table().adapter;
}
double at(const Vec<double>& x, int64_t i) {
  return x[static_cast<size_t>(i)];
}
// 8-bit codes in an array of floats, whose sentinels are checked.
uint8_t* bytes(Array& x) {
  return reinterpret_cast<uint8_t*>(x.f32());
}
uint8_t byte(const Array& x, int64_t i) {
  return kernels::In(x).as<uint8_t>()[i];
}
Array allocate_bytes(int64_t n) {
  return Array::zeros(DType::f32, (n + 3) / 4);
}

// The values of a matrix after quantization in blocks, and their codes.
struct Nf4Reference {
  Vec<double> values;
  Vec<int> codes;
  Vec<float> scales;
};
Nf4Reference nf4_reference(const Vec<double>& x, int64_t block) {
  Nf4Reference r;
  for (int64_t first = 0; first < static_cast<int64_t>(x.size()); first += block) {
    const int64_t last = std::min(first + block, static_cast<int64_t>(x.size()));
    double largest = 0;
    for (int64_t i = first; i < last; ++i) largest = std::max(largest, std::abs(at(x, i)));
    r.scales.push_back(static_cast<float>(largest));
    for (int64_t i = first; i < last; ++i) {
      int nearest = 0;
      const double fraction = at(x, i) / std::max(largest, 1e-38);
      for (int code = 1; code < 16; ++code)
        if (std::abs(fraction - kernels::kNf4Values[code]) <
            std::abs(fraction - kernels::kNf4Values[nearest]))
          nearest = code;
      r.codes.push_back(nearest);
      r.values.push_back(kernels::kNf4Values[nearest] * static_cast<float>(largest));
    }
  }
  return r;
}

}  // namespace

TEST_CASE("DoRA: lengths of rows of the adapted weight") {
  for (const DType type : kTypes)
    for (const auto [out, in, rank] :
         {std::array<int64_t, 3>{1, 1, 1}, {5, 37, 3}, {3, 4099, 8}, {2, 70, 300}}) {
      INFO(text(type), " out=", out, " in=", in, " rank=", rank);
      const Array w(type, random_values(out * in, 1)), b(type, random_values(out * rank, 2)),
          p(DType::f32, random_values(out * rank, 3)), g(DType::f32, random_values(rank * rank, 4));
      const double s = 0.75;
      const auto n2 =
          run_kernel({Array::zeros(DType::f32, out, NAN)}, [&](kernels::Context& c, Vec<Array>& y) {
            Array projected = p, gram = g;
            adapter().row_lengths(c, w, projected.f32(), b, gram.f32(), static_cast<float>(s), y[0].f32(),
                                  out, in, rank);
          });
      const auto ws = w.rounded(), bs = b.rounded(), ps = p.rounded(), gs = g.rounded();
      Vec<double> expected;
      for (int64_t j = 0; j < out; ++j) {
        double total = 0;
        for (int64_t i = 0; i < in; ++i) total += at(ws, j * in + i) * at(ws, j * in + i);
        for (int64_t k = 0; k < rank; ++k) {
          total += 2 * s * at(ps, j * rank + k) * at(bs, j * rank + k);
          for (int64_t l = 0; l < rank; ++l)
            total += s * s * at(bs, j * rank + k) * at(gs, k * rank + l) * at(bs, j * rank + l);
        }
        expected.push_back(total);
      }
      CHECK(error(n2[0].rounded(), expected) < 1e-6);
    }
}

TEST_CASE("DoRA: scaled columns, in place as well, and the gradient of the magnitudes") {
  for (const DType type : kTypes)
    for (const auto [rows, columns] : {std::array<int64_t, 2>{1, 1}, {35, 67}, {150, 40}, {700, 3}}) {
      INFO(text(type), " rows=", rows, " columns=", columns);
      const Array u(type, random_values(rows * columns, 1)), dy(type, random_values(rows * columns, 2)),
          m(type, random_values(columns, 3));
      Vec<double> lengths = random_values(columns, 4);
      for (double& v : lengths) v = 1.5 + v;
      const Array n2(DType::f32, lengths);
      const auto us = u.rounded(), ds = dy.rounded(), ms = m.rounded(), ns = n2.rounded();
      const auto y =
          run_kernel({u, Array::zeros(type, rows * columns), Array::zeros(DType::f32, columns, 2)},
                     [&](kernels::Context& c, Vec<Array>& out) {
                       Array squares = n2;
                       adapter().scale_columns(c, u, m, squares.f32(), out[1].out(), rows, columns);
                       adapter().scale_columns(c, out[0], m, squares.f32(), out[0].out(), rows, columns);
                       adapter().magnitude_gradient(c, dy, u, squares.f32(), out[2].f32(), rows, columns);
                     });
      Vec<double> scaled, gradient(static_cast<size_t>(columns), 2);
      for (int64_t i = 0; i < rows * columns; ++i) {
        const int64_t j = i % columns;
        const double length = std::sqrt(at(ns, j));
        scaled.push_back(at(us, i) * at(ms, j) / length);
        gradient[static_cast<size_t>(j)] += at(ds, i) * at(us, i) / length;
      }
      CHECK(error(y[1].rounded(), scaled) < tolerance(type));
      CHECK(y[0].rounded() == y[1].rounded());
      CHECK(error(y[2].rounded(), gradient) < tolerance(DType::f32));
    }
}

TEST_CASE("NF4: codes are those of the nearest values, and their values come back") {
  for (const auto [n, block] :
       {std::array<int64_t, 2>{1, 64}, {64, 64}, {333, 64}, {1001, 32}, {500, 6}, {2500, 1024}}) {
    INFO("n=", n, " block=", block);
    Vec<double> wide = random_values(n, 5, 2.0);
    // A block of zeros.
    for (int64_t i = block; i < std::min(n, 2 * block); ++i) wide[static_cast<size_t>(i)] = 0;
    const Array x(DType::f32, wide);
    const auto expected = nf4_reference(x.rounded(), block);
    const auto blocks = static_cast<int64_t>(expected.scales.size());
    const auto stored =
        run_kernel({allocate_bytes((n + 1) / 2), Array::zeros(DType::f32, blocks, NAN)},
                   [&](kernels::Context& c, Vec<Array>& out) {
                     Array values = x;
                     adapter().nf4_quantize(c, values.f32(), n, block, bytes(out[0]), out[1].f32());
                   });
    for (int64_t i = 0; i < n; ++i) {
      const int code = byte(stored[0], i / 2) >> (i % 2 == 0 ? 4 : 0) & 15;
      REQUIRE(code == expected.codes[static_cast<size_t>(i)]);
    }
    for (int64_t i = 0; i < blocks; ++i)
      CHECK(at(stored[1].rounded(), i) == expected.scales[static_cast<size_t>(i)]);
    for (const DType type : kTypes) {
      const auto y = run_kernel({Array::zeros(type, n, NAN)}, [&](kernels::Context& c, Vec<Array>& out) {
        Array codes = stored[0], scales = stored[1];
        adapter().nf4_dequantize(c, {{0, 0}, {1, n}}, n, block, bytes(codes), scales.f32(), nullptr, nullptr,
                                 nullptr, nullptr, out[0].out());
      });
      CHECK(y[0].rounded() == Array(type, expected.values).rounded());
    }
  }
}

TEST_CASE("NF4: regions of a matrix whose scales are quantized in turn") {
  struct Case {
    int64_t rows, columns, block;
    int64_t first_row, row_count, first_column, column_count;
  };
  // Full rows, whose blocks go on in the next one; columns of full blocks.
  for (const Case& k :
       {Case{40, 48, 64, 4, 12, 0, 48}, {300, 128, 32, 7, 280, 64, 64}, {3, 64, 16, 0, 3, 48, 16}}) {
    INFO("block=", k.block, " columns=", k.columns);
    const auto map = kernels::nf4_scale_map();
    const int64_t n = k.row_count * k.column_count, blocks = n / k.block,
                  all = k.rows * k.columns / k.block / kernels::kNf4NestedBlock + 1;
    const auto random_codes = random_ints(n / 2, 1, 256), random_scales = random_ints(blocks, 2, 256);
    Array codes = allocate_bytes(n / 2), scales = allocate_bytes(blocks);
    for (int64_t i = 0; i < n / 2; ++i)
      bytes(codes)[i] = static_cast<uint8_t>(random_codes[static_cast<size_t>(i)]);
    for (int64_t i = 0; i < blocks; ++i)
      bytes(scales)[i] = static_cast<uint8_t>(random_scales[static_cast<size_t>(i)]);
    Array nested(DType::f32, random_values(all, 3));
    const float offset = 0.3f;
    Vec<double> expected;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t element =
          (k.first_row + i / k.column_count) * k.columns + k.first_column + i % k.column_count;
      const float own =
          map[byte(scales, i / k.block)] * nested.f32()[element / k.block / kernels::kNf4NestedBlock];
      const float value = kernels::kNf4Values[byte(codes, i / 2) >> (i % 2 == 0 ? 4 : 0) & 15];
      expected.push_back(value * (own + offset));
    }
    const auto y = run_kernel({Array::zeros(DType::f32, n, NAN)}, [&](kernels::Context& c, Vec<Array>& out) {
      adapter().nf4_dequantize(c, {{k.first_row, k.first_column}, {k.row_count, k.column_count}}, k.columns,
                               k.block, bytes(codes), nullptr, bytes(scales), nested.f32(), map.data(),
                               &offset, out[0].out());
    });
    CHECK(y[0].rounded() == expected);
  }
}
