// Converts adapters between Capstan checkpoints and PEFT files.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "formats/convert.hpp"

namespace capstan::train {

// from: a run with `peft`, or a checkpoint of one. base: the value of base_model_name_or_path; null: the
// path of the base when the adapters were trained. Module names are those of the model as `convert` writes it
// to hf:. The base itself is not read.
formats::WriteResult write_peft_files(const std::string& from, const std::filesystem::path& to,
                                      const std::optional<std::string>& base);

// Writes a checkpoint of the adapters alone, as a run with the base's recipe would have saved it at step 0.
// from, base: arguments of open_adapters() and base_of_adapters().
formats::WriteResult read_peft_files(const std::string& from, const std::filesystem::path& to,
                                     const std::optional<std::string>& base);

}  // namespace capstan::train
