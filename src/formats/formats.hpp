// The formats behind ForeignModel::open(), with its errors: ErrorCode::not_found, ::format, ::unsupported.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "formats/external_model.hpp"

namespace capstan::interchange {

std::unique_ptr<ForeignModel> open_hf(const std::string& name, const std::filesystem::path& directory);
std::unique_ptr<ForeignModel> open_gguf(const std::string& name, const std::filesystem::path& file);

}  // namespace capstan::interchange
