// Losses and their gradients, against the scalar references.
#include <cstring>

#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;

TEST_CASE("cross-entropy in chunks, full and split over vocabulary shards") {
  const auto& ce = *table().cross_entropy;
  for (DType type : kTypes)
    for (const auto [rows, cols] :
         {std::array<int64_t, 2>{1, 1}, {3, 5}, {17, 37}, {5, 257}, {40, 1000}, {2, 5003}}) {
      INFO(rows, "x", cols, " ", text(type));
      const int64_t stride = cols + 7;
      const Array logits(type, random_values(rows * stride, 1, 8));
      const auto labels = random_ints(rows, 2, cols);
      Array weight(DType::f32, random_values(rows, 3));
      const auto none = Array::zeros(DType::f32, rows);
      const auto y = run_kernel({none, none, none, none, logits}, [&](kernels::Context& c, Vec<Array>& o) {
        ce.row_max(c, logits, rows, cols, stride, o[0].f32());
        ce.row_sums(c, logits, labels.data(), o[0].f32(), rows, cols, stride, 0, o[1].f32(), o[2].f32());
        ce.loss(c, o[0].f32(), o[1].f32(), o[2].f32(), rows, o[3].f32());
        ce.backward(c, o[4], labels.data(), o[0].f32(), o[1].f32(), weight.f32(), rows, cols, stride, 0, 0,
                    o[4].out(), stride);
      });
      const auto values = logits.rounded();
      CHECK(error(y[3].rounded(), reference::cross_entropy(values, labels, cols, stride)) < 1e-5);
      Vec<double> gradient(values.size());
      for (int64_t r = 0; r < rows; ++r) {
        const double loss =
            reference::cross_entropy<double>(values, labels, cols, stride)[static_cast<size_t>(r)];
        const double lse = loss + values[static_cast<size_t>(r * stride + labels[static_cast<size_t>(r)])];
        for (int64_t i = 0; i < cols; ++i)
          gradient[static_cast<size_t>(r * stride + i)] =
              (std::exp(values[static_cast<size_t>(r * stride + i)] - lse) -
               (i == labels[static_cast<size_t>(r)] ? 1.0 : 0.0)) *
              weight.rounded()[static_cast<size_t>(r)];
      }
      CHECK(error(y[4].rounded(), gradient) < tolerance(type));  // and zeros in the padding

      // In one go: in place, and with a gradient in 16 bits in the first half of each row of logits.
      const auto full = run_kernel({none, logits}, [&](kernels::Context& c, Vec<Array>& o) {
        ce.full(c, o[1].out(), labels.data(), weight.f32(), rows, cols, stride, 0, o[0].f32(), o[1].out(),
                stride);
      });
      CHECK(full[0].rounded() == y[3].rounded());
      CHECK(full[1].rounded() == y[4].rounded());
      for (const DType narrow_type : {DType::bf16, DType::f16}) {
        if (type != DType::f32) continue;
        const auto halves = run_kernel({none, logits, Array::zeros(narrow_type, rows * stride)},
                                       [&](kernels::Context& c, Vec<Array>& o) {
                                         const kernels::Out narrow{o[1].out().data, narrow_type};
                                         ce.full(c, o[1].out(), labels.data(), weight.f32(), rows, cols,
                                                 stride, 0, o[0].f32(), narrow, 2 * stride);
                                         for (int64_t r = 0; r < rows; ++r)
                                           std::memcpy(o[2].out().as<uint16_t>() + r * stride,
                                                       narrow.as<uint16_t>() + 2 * r * stride,
                                                       static_cast<size_t>(stride) * sizeof(uint16_t));
                                       });
        CHECK(halves[0].rounded() == y[3].rounded());
        CHECK(halves[2].rounded() == Array(narrow_type, y[4].rounded()).rounded());
      }

      if (cols < 5) continue;
      const int64_t half = cols / 2;  // two shards: maxima and sums are combined as ranks would
      const auto shards =
          run_kernel({none, none, none, none, none, none}, [&](kernels::Context& c, Vec<Array>& o) {
            const kernels::In right{static_cast<const char*>(kernels::In(logits).data) + half * size_of(type),
                                    type};
            ce.row_max(c, logits, rows, half, stride, o[0].f32());
            ce.row_max(c, right, rows, cols - half, stride, o[1].f32());
            for (int64_t r = 0; r < rows; ++r) o[0].f32()[r] = std::max(o[0].f32()[r], o[1].f32()[r]);
            ce.row_sums(c, logits, labels.data(), o[0].f32(), rows, half, stride, 0, o[1].f32(), o[2].f32());
            ce.row_sums(c, right, labels.data(), o[0].f32(), rows, cols - half, stride, half, o[3].f32(),
                        o[4].f32());
            for (int64_t r = 0; r < rows; ++r) o[1].f32()[r] += o[3].f32()[r], o[2].f32()[r] += o[4].f32()[r];
            ce.loss(c, o[0].f32(), o[1].f32(), o[2].f32(), rows, o[5].f32());
          });
      CHECK(error(shards[5].rounded(), reference::cross_entropy(values, labels, cols, stride)) < 1e-5);
    }
}

TEST_CASE("capped logits: values, and the gradient for what was capped") {
  const auto& ce = *table().cross_entropy;
  for (const float cap : {3.0f, 30.0f})
    for (const auto [rows, cols] : {std::array<int64_t, 2>{1, 1}, {3, 5}, {17, 37}, {5, 257}}) {
      INFO(rows, "x", cols, " cap=", cap);
      const int64_t stride = cols + 7;
      const Array logits(DType::f32, random_values(rows * stride, 1, 8));
      const auto labels = random_ints(rows, 2, cols);
      Array weight(DType::f32, random_values(rows, 3));
      const auto none = Array::zeros(DType::f32, rows);
      const auto y = run_kernel(
          {none, none, none, none, logits, Array::zeros(DType::f32, rows * stride, NAN)},
          [&](kernels::Context& c, Vec<Array>& o) {
            ce.softcap(c, o[4].out(), cap, rows * stride);
            ce.row_max(c, o[4], rows, cols, stride, o[0].f32());
            ce.row_sums(c, o[4], labels.data(), o[0].f32(), rows, cols, stride, 0, o[1].f32(), o[2].f32());
            ce.loss(c, o[0].f32(), o[1].f32(), o[2].f32(), rows, o[3].f32());
            ce.backward(c, o[4], labels.data(), o[0].f32(), o[1].f32(), weight.f32(), rows, cols, stride, 0,
                        cap, o[5].out(), stride);
          });
      const auto full = run_kernel({none, logits}, [&](kernels::Context& c, Vec<Array>& o) {
        ce.full(c, o[1].out(), labels.data(), weight.f32(), rows, cols, stride, cap, o[0].f32(), o[1].out(),
                stride);
      });
      CHECK(full[0].rounded() == y[3].rounded());
      CHECK(full[1].rounded() == y[5].rounded());
      const auto losses = [&](const auto& x) {
        auto z = x;
        for (auto& v : z) v = reference::capped(v, static_cast<double>(cap));
        return reference::cross_entropy(z, labels, cols, stride);
      };
      CHECK(error(y[3].rounded(), losses(logits.rounded())) < 1e-5);
      const auto gradient = reference::complex_step(
          logits.rounded(), [&](const auto& z) { return reference::contract(losses(z), weight.rounded()); });
      CHECK(error(y[5].rounded(), gradient) < 1e-5);
    }
}

TEST_CASE("an undefined logit makes the loss undefined") {
  const auto& ce = *table().cross_entropy;
  for (size_t bad : {size_t{0}, size_t{9}, size_t{36}}) {
    Vec<double> values = random_values(37, 1);
    values[bad] = NAN;
    const Array logits(DType::f32, values);
    const int32_t label = 20;
    const auto none = Array::zeros(DType::f32, 1);
    const auto y = run_kernel({none, none, none, none}, [&](kernels::Context& c, Vec<Array>& o) {
      ce.row_max(c, logits, 1, 37, 37, o[0].f32());
      ce.row_sums(c, logits, &label, o[0].f32(), 1, 37, 37, 0, o[1].f32(), o[2].f32());
      ce.loss(c, o[0].f32(), o[1].f32(), o[2].f32(), 1, o[3].f32());
    });
    CHECK(std::isnan(y[3].rounded()[0]));
  }
}
