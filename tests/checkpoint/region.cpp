#include "tensor/region.hpp"

#include <doctest/doctest.h>

#include <cmath>

#include "checkpoint/safetensors.hpp"
#include "helpers.hpp"

using namespace capstan;
using namespace capstan::checkpoint;
using namespace capstan::checkpoint::test;

// Flat positions of the elements of a region, in row-major order of the tensor.
static std::vector<int64_t> positions(const Shape& shape, const Region& r) {
  const auto values = values_of(ramp(shape), shape, r);
  return {values.begin(), values.end()};
}

TEST_CASE("the regions of a flat range contain exactly its elements, in order") {
  const std::vector<Shape> shapes{
      {},        {1},       {7},       {3, 4},       {1, 5},          {5, 1},
      {2, 3, 4}, {3, 1, 2}, {1, 1, 6}, {2, 2, 3, 2}, {2, 1, 2, 3, 2}, {2, 2, 1, 2, 2, 2}};
  for (const auto& shape : shapes) {
    const int64_t total = shape.elements();
    const size_t most = shape.size() <= 1 ? 1 : 2 * shape.size() - 1;
    for (int64_t begin = 0; begin <= total; ++begin)
      for (int64_t count = 0; begin + count <= total; ++count) {
        const auto regions = flat_range_as_regions(shape, begin, count);
        std::vector<int64_t> got, expected;
        for (const auto& r : regions) {
          REQUIRE(fits(r, shape));
          const auto cells = positions(shape, r);
          got.insert(got.end(), cells.begin(), cells.end());
        }
        for (int64_t i = 0; i < count; ++i) expected.push_back(begin + i);
        REQUIRE(got == expected);  // in order, so that a flat buffer can be split by regions
        REQUIRE(regions.size() <= most);
        if (shape.size() == 2) REQUIRE(regions.size() <= 3);
      }
  }
}

TEST_CASE("a large range needs no large work") {
  const auto r = flat_range_as_regions({int64_t{1} << 20, int64_t{1} << 20}, 5, (int64_t{1} << 40) - 10);
  CHECK(r.size() == 3);
}

TEST_CASE("tiling_problem finds holes and overlaps, compared with counting elements") {
  std::mt19937 random(7);
  int bad = 0, good = 0;
  for (int round = 0; round < 3000; ++round) {
    Shape shape = Shape::filled(1 + random() % 3, 0);
    for (auto& size : shape) size = 1 + static_cast<int64_t>(random() % 4);
    const int64_t total = shape.elements();
    // A true tiling from flat ranges, then possibly one region removed, repeated, moved or shrunk.
    std::vector<Region> chunks;
    for (int64_t at = 0; at < total;) {
      const int64_t count = std::min<int64_t>(total - at, 1 + static_cast<int64_t>(random() % 5));
      for (const auto& r : flat_range_as_regions(shape, at, count)) chunks.push_back(r);
      at += count;
    }
    std::shuffle(chunks.begin(), chunks.end(), random);
    auto& victim = chunks[random() % chunks.size()];
    const size_t d = random() % shape.size();
    switch (random() % 6) {
      case 0:
        chunks.pop_back();
        break;
      case 1:
        chunks.push_back(Region(victim));
        break;
      case 2:
        victim.offsets[d] = 0;
        break;
      case 3:
        victim.sizes[d] -= 1;
        break;
      default:
        break;
    }
    std::vector<int> written(static_cast<size_t>(total));
    for (const auto& chunk : chunks)
      for (const int64_t cell : positions(shape, chunk)) ++written[static_cast<size_t>(cell)];
    bool exact = true;
    for (const int count : written) exact = exact && count == 1;
    const auto problem = tiling_problem(shape, chunks);
    REQUIRE(problem.has_value() == !exact);
    ++(exact ? good : bad);
    if (!problem) continue;
    // The message names the first wrong element with its true count.
    size_t first = 0;
    while (written[first] == 1) ++first;
    Shape index = Shape::filled(shape.size(), 0);
    size_t rest = first;
    for (size_t k = shape.size(); k-- > 0; rest /= static_cast<size_t>(shape[k]))
      index[k] = static_cast<int64_t>(rest % static_cast<size_t>(shape[k]));
    const std::string text =
        written[first] == 0 ? " is in no region" : " is in " + std::to_string(written[first]) + " regions";
    REQUIRE(*problem == "element " + index.text() + text);
  }
  CHECK(good > 500);
  CHECK(bad > 500);
}

TEST_CASE("a pinwheel, which no straight line divides, is a tiling") {
  const std::vector<Region> chunks{
      {{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 0}, {2, 1}}, {{1, 1}, {1, 1}}};
  CHECK(!tiling_problem({3, 3}, chunks));
}

TEST_CASE("scalars and empty tensors tile") {
  CHECK(tiling_problem({}, {}) == "element [] is in no region");
  const std::vector<Region> one{Region{}}, two{Region{}, Region{}};
  CHECK(!tiling_problem({}, one));
  CHECK(tiling_problem({}, two) == "element [] is in 2 regions");
  CHECK(!tiling_problem({0, 4}, {}));
}

TEST_CASE("elements are copied between regions of any rank and offset") {
  std::mt19937 random(11);
  for (int round = 0; round < 3000; ++round) {
    Shape shape = Shape::filled(random() % 7, 0);
    for (auto& size : shape) size = 1 + static_cast<int64_t>(random() % 3);
    const auto values = ramp(shape);
    const auto any = [&] {
      Region r = full_region(shape);
      for (size_t d = 0; d < shape.size(); ++d) {
        r.offsets[d] = static_cast<int64_t>(random()) % shape[d];
        r.sizes[d] = 1 + static_cast<int64_t>(random()) % (shape[d] - r.offsets[d]);
      }
      return r;
    };
    const Region source = any(), target = any();
    const auto part = intersect(source, target);
    if (!part) continue;
    const auto from = values_of(values, shape, source);
    std::vector<float> to(static_cast<size_t>(target.sizes.elements()), -1);
    copy_region(*part, source, bytes_of(from).data(), DType::f32, target, writable_bytes_of(to).data(),
                DType::f32);
    auto expected = values_of(values, shape, target);
    const auto inside = values_of(values, shape, *part);
    for (auto& value : expected)
      if (!std::count(inside.begin(), inside.end(), value)) value = -1;
    REQUIRE(to == expected);
  }
}

TEST_CASE("an empty region copies nothing, whichever dimension is empty") {
  const std::vector<float> values = ramp({3, 4});
  for (const Shape& sizes : {Shape{0, 4}, Shape{3, 0}, Shape{0, 2}, Shape{0, 0}}) {
    const Region empty{{0, 0}, sizes};
    copy_region(empty, full_region({3, 4}), bytes_of(values).data(), DType::f32, empty, nullptr, DType::f32);
    std::vector<float> kept(12, -1);
    copy_region(empty, full_region({3, 4}), bytes_of(values).data(), DType::f32, full_region({3, 4}),
                writable_bytes_of(kept).data(), DType::f32);
    CHECK(kept == std::vector<float>(12, -1));
  }
}

TEST_CASE("conversions: bf16 and fp16 round to nearest even, fp16 widens exactly") {
  const std::vector<float> values{1.0f, 1.00390625f, 1.01171875f, -3.0e38f, 3.4e38f, std::nanf(""), 1e-40f};
  const Region all = full_region({7});
  std::vector<bf16> narrow(7);
  copy_region(all, all, bytes_of(values).data(), DType::f32, all, writable_bytes_of(narrow).data(),
              DType::bf16);
  for (size_t i = 0; i < 7; ++i) CHECK(narrow[i].bits == bf16(values[i]).bits);
  CHECK(narrow[1].bits == 0x3F80);  // half way: to the even one
  CHECK(narrow[2].bits == 0x3F82);
  std::vector<float> wide(7);
  copy_region(all, all, bytes_of(narrow).data(), DType::bf16, all, writable_bytes_of(wide).data(),
              DType::f32);
  CHECK(wide[0] == 1.0f);
  CHECK(std::isnan(wide[5]));

  const SafetensorsFile file(golden("half.safetensors"));
  const auto half = file.bytes(file.at("half")), truth = file.bytes(file.at("float"));
  const int64_t count = file.at("half").shape[0];
  const Region range = full_region({count});
  std::vector<float> widened(static_cast<size_t>(count));
  copy_region(range, range, half.data(), DType::f16, range, writable_bytes_of(widened).data(), DType::f32);
  for (size_t i = 0; i < widened.size(); ++i) {
    float expected;
    std::memcpy(&expected, truth.data() + i * 4, 4);
    const bool same =
        std::isnan(expected) ? std::isnan(widened[i]) : std::memcmp(&expected, &widened[i], 4) == 0;
    REQUIRE(same);
  }
  std::vector<f16> narrowed(7);
  copy_region(all, all, bytes_of(values).data(), DType::f32, all, writable_bytes_of(narrowed).data(),
              DType::f16);
  for (size_t i = 0; i < 7; ++i) CHECK(narrowed[i].bits == f16(values[i]).bits);
  std::vector<bf16> brain(7);
  copy_region(all, all, bytes_of(narrowed).data(), DType::f16, all, writable_bytes_of(brain).data(),
              DType::bf16);
  for (size_t i = 0; i < 7; ++i) CHECK(brain[i].bits == bf16(static_cast<float>(narrowed[i])).bits);
  CHECK(!can_convert(DType::f16, DType::i64));
  CHECK(!can_convert(DType::i64, DType::f32));
}
