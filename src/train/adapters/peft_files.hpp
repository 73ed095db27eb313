// Adapters between our checkpoints and PEFT's files.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "formats/convert.hpp"

namespace capstan::train {

// from: a run with `peft`, or a checkpoint of one. base: what base_model_name_or_path says; null: where the
// base was when the adapters were trained. Its modules are those of the model as `convert` would write it to
// hf:. The base itself is not read.
formats::WriteResult write_peft_files(const std::string& from, const std::filesystem::path& to,
                                      const std::optional<std::string>& base);

// A checkpoint of the adapters alone, as a run of step 0 with the base's recipe would have saved it. from,
// base: as open_adapters() and base_of_adapters() take them.
formats::WriteResult read_peft_files(const std::string& from, const std::filesystem::path& to,
                                     const std::optional<std::string>& base);

}  // namespace capstan::train
