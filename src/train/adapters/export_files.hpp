// The small files that a trained model needs beside its weights to be used in other programs.
#pragma once

#include "checkpoint/reader.hpp"
#include "config/core/config.hpp"
#include "formats/convert.hpp"

namespace capstan::train {

// Those of the checkpoint, and, for a model that was trained here, what they do not say yet:
// tokenizer_config.json with the special tokens, generation_config.json with the tokens that end a text, and
// the recipe's chat template. An imported model's files are returned as they came. config: of the
// checkpoint's recipe.
formats::Assets export_files(const checkpoint::Reader& reader, const config::Config& config);

}  // namespace capstan::train
