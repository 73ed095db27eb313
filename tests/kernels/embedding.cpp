// Embeddings, against the formulas in double.
#include "tests/kernels/support.hpp"

using namespace capstan;
using namespace capstan::testing;

TEST_CASE("embedding with positions and shards, and its gradient") {
  const auto& embedding = *table().embedding;
  for (DType type : kTypes)
    for (int64_t cols : {1, 5, 37, 257}) {
      const int64_t rows = 61, vocabulary = 11, first = 3, here = 6;
      const auto ids = random_ints(rows, 1, vocabulary), positions = random_ints(rows, 2, 20);
      const Array table(type, random_values(here * cols, 3)), place(type, random_values(20 * cols, 4)),
          dout(type, random_values(rows * cols, 5)), start(DType::f32, random_values(here * cols, 6));
      for (bool with_positions : {false, true}) {
        const auto y =
            run_kernel({Array::zeros(type, rows * cols), start}, [&](kernels::Context& c, Vec<Array>& out) {
              embedding.forward(c, table, ids.data(), with_positions ? kernels::In(place) : kernels::In{},
                                with_positions ? positions.data() : nullptr, out[0].out(), rows, cols, first,
                                here);
              embedding.backward(c, dout, ids.data(), out[1].f32(), rows, cols, first, here);
            });
        Vec<double> expected(static_cast<size_t>(rows * cols)), gradient = start.rounded();
        const auto ts = table.rounded(), ps = place.rounded(), ds = dout.rounded();
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < cols; ++i) {
            const int64_t id = ids[static_cast<size_t>(r)] - first;
            double& value = expected[static_cast<size_t>(r * cols + i)];
            if (id >= 0 && id < here) {
              value = ts[static_cast<size_t>(id * cols + i)];
              gradient[static_cast<size_t>(id * cols + i)] += ds[static_cast<size_t>(r * cols + i)];
            }
            if (with_positions)
              value += ps[static_cast<size_t>(positions[static_cast<size_t>(r)] * cols + i)];
          }
        CHECK(error(y[0].rounded(), expected) < tolerance(type));
        CHECK(error(y[1].rounded(), gradient) < 1e-5);
      }
    }
}

TEST_CASE("the gradient of an embedding adds the rows of a token in their order") {
  const auto& embedding = *table().embedding;
  // Rows of magnitudes that make another order another sum.
  const int64_t rows = 5000, cols = 3, vocabulary = 700;
  auto ids = random_ints(rows, 1, vocabulary);
  for (size_t r = 0; r < ids.size(); r += 3) ids[r] = 5;
  Vec<double> values = random_values(rows * cols, 2);
  for (size_t i = 0; i < values.size(); ++i) values[i] *= std::pow(10.0, static_cast<double>(i % 7));
  const Array dout(DType::f32, values), start(DType::f32, random_values(vocabulary * cols, 3));
  const auto y = run_kernel({start}, [&](kernels::Context& c, Vec<Array>& out) {
    embedding.backward(c, dout, ids.data(), out[0].f32(), rows, cols, 0, vocabulary);
  });
  Vec<double> expected = start.rounded();
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < cols; ++i) {
      double& sum = expected[static_cast<size_t>(ids[static_cast<size_t>(r)] * cols + i)];
      sum = static_cast<double>(static_cast<float>(sum) +
                                static_cast<float>(values[static_cast<size_t>(r * cols + i)]));
    }
  CHECK(y[0].rounded() == expected);
}
