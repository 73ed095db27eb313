// The fixtures of tests/formats, the tensors of a file as fp32, and checkpoints as sources of an export.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/reader.hpp"
#include "checkpoint/tensor_source.hpp"
#include "formats/convert.hpp"
#include "support/paths.hpp"

namespace capstan::test {

inline const std::filesystem::path kFormatFixtures =
    std::filesystem::path(kSourceDirectory) / "tests/formats";

inline std::vector<float> floats(checkpoint::TensorSource& source, const std::string& name) {
  std::vector<float> values(static_cast<size_t>(source.at(name).shape.elements()));
  source.read_all(name, DType::f32, std::as_writable_bytes(std::span(values)));
  return values;
}

inline formats::ExportSource exported_of(checkpoint::Reader& reader, const config::ModelConfig& model) {
  formats::ExportSource exported{&reader, model, {}};
  for (const auto name : formats::asset_files())
    if (reader.has_file(name)) exported.assets.emplace_back(name, reader.read_text(name));
  return exported;
}

}  // namespace capstan::test
