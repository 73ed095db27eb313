// The formats behind ExternalModel::open(), with its errors: ErrorCode::not_found, ::format, ::unsupported.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "formats/external_model.hpp"

namespace capstan::formats {

std::unique_ptr<ExternalModel> open_hf(const std::string& name, const std::filesystem::path& directory);
std::unique_ptr<ExternalModel> open_gguf(const std::string& name, const std::filesystem::path& file);

}  // namespace capstan::formats
