// The small files that a trained model needs beside its weights to be used in other programs.
#pragma once

#include "checkpoint/reader.hpp"
#include "config/sections/config.hpp"
#include "formats/convert.hpp"

namespace capstan::train {

// The asset files of a checkpoint. A model that was trained here also gets the files that it lacks:
// tokenizer_config.json with the special tokens, generation_config.json with the tokens that end a text, and
// the recipe's chat template. The files of an imported model are returned unchanged. `config` is the
// configuration of the checkpoint's recipe.
formats::Assets export_files(const checkpoint::Reader& reader, const config::Config& config);

// The reason why other programs that read an export of this checkpoint do not stop at the end of an answer.
// Empty: they do, or the model has no chat template, or it was imported with its own.
std::string turn_end_problem(const checkpoint::Reader& reader, const config::Config& config);

}  // namespace capstan::train
