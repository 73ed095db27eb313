// Helpers of the checkpoint tests: a temporary directory, bytes of known values, the text of an error.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/store.hpp"
#include "checkpoint/writer.hpp"
#include "support/paths.hpp"
#include "tensor/region.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/files.hpp"
#include "tests/support/temporary_directory.hpp"

namespace capstan::checkpoint::test {

namespace fs = std::filesystem;
using capstan::test::error_of;
using capstan::test::holds;
using capstan::test::slurp;
using capstan::test::spill;
using capstan::test::TemporaryDirectory;

inline fs::path golden(const std::string& name) {
  return fs::path(capstan::test::kSourceDirectory) / "tests/golden/checkpoint" / name;
}
inline std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}
template <class T>
std::span<std::byte> writable_bytes_of(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

// Element i of a tensor is i, so that misplaced elements are found.
inline std::vector<float> ramp(const Shape& shape, float first = 0) {
  std::vector<float> values(static_cast<size_t>(shape.elements()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i);
  return values;
}
// The elements of `region` of a full row-major tensor.
inline std::vector<float> values_of(const std::vector<float>& values, const Shape& shape,
                                    const Region& region) {
  std::vector<float> result;
  for (size_t i = 0; i < values.size(); ++i) {
    bool inside = true;
    size_t rest = i;
    for (size_t d = shape.size(); d-- > 0;) {
      const auto index = static_cast<int64_t>(rest % static_cast<size_t>(shape[d]));
      rest /= static_cast<size_t>(shape[d]);
      inside = inside && index >= region.offsets[d] && index < region.offsets[d] + region.sizes[d];
    }
    if (inside) result.push_back(values[i]);
  }
  return result;
}

// A small checkpoint of two tensors by one rank; `first` tells saves apart.
inline fs::path save_small(FileSystem& files, const fs::path& root, int64_t step, float first = 0,
                           const std::string& attempt = "a", const std::string& run = "run") {
  SaveInfo info;
  info.step = step;
  info.consumed_samples = step * 8;
  info.consumed_tokens = step * 64;
  info.run_id = run;
  info.recipe_hash = "0123";
  info.layout = "dp1";
  info.version = "0.1.0";
  Writer writer(files, root, info, attempt, 0, 1);
  const auto weight = ramp({3, 5}, first), bias = ramp({5}, first + 0.5f);
  writer.add("w", DType::f32, {3, 5}, full_region({3, 5}), bytes_of(weight));
  writer.add("b", DType::f32, {5}, full_region({5}), bytes_of(bias));
  writer.add_text(kStateFile, "{\"step\": " + std::to_string(step) + "}\n");
  return writer.commit({writer.finish_rank()});
}

}  // namespace capstan::checkpoint::test
