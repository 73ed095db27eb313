// The tokenizer in a GGUF file's metadata ↔ a tokenizer.json.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/gguf_file.hpp"

namespace capstan::formats {

// The text of a tokenizer.json; empty where the file has no tokenizer. ErrorCode::format for metadata of
// other types; ::unsupported for kinds that are not read, by name.
std::string tokenizer_json_of(const GgufMetadata& metadata, const std::string& file);
// tokenizer_config.json beside it: the names of special tokens, and the chat template.
std::string tokenizer_config_of(const GgufMetadata& metadata);
// generation_config.json: the ids of the tokens that begin, end and pad a text. Empty where none ends it.
std::string generation_config_of(const GgufMetadata& metadata);

// For writing: a tokenizer.json. rows: of the embedding; what the tokenizer has no token for is padded.
// config, generation: of a tokenizer_config.json and a generation_config.json, may be empty.
// ErrorCode::format; ::unsupported for what llama.cpp would compute otherwise.
std::vector<std::pair<std::string, GgufValue>> gguf_tokenizer(std::string_view tokenizer_json,
                                                              std::string_view config,
                                                              std::string_view generation,
                                                              const std::string& chat_template, int64_t rows);
// The same of a SentencePiece model: of the files of a directory by name, tokenizer.model among them. It has
// to be BPE with pieces for bytes and a normalizer that only turns blanks into ▁.
std::vector<std::pair<std::string, GgufValue>> gguf_sentencepiece(
    const std::vector<std::pair<std::string, std::string>>& files, int64_t rows);

}  // namespace capstan::formats
