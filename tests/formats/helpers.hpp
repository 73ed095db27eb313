// The fixtures of tests/formats, and the tensors of a file as fp32.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/tensor_source.hpp"
#include "support/paths.hpp"

namespace capstan::test {

inline const std::filesystem::path kFormatFixtures =
    std::filesystem::path(kSourceDirectory) / "tests/formats";

inline std::vector<float> floats(checkpoint::TensorSource& source, const std::string& name) {
  std::vector<float> values(static_cast<size_t>(source.at(name).shape.elements()));
  source.read_all(name, DType::f32, std::as_writable_bytes(std::span(values)));
  return values;
}

}  // namespace capstan::test
