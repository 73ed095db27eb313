// The tokenizer in a GGUF file's metadata ↔ a tokenizer.json.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/gguf_file.hpp"

namespace capstan::formats {

// Returns the text of a tokenizer.json; empty if the file has no tokenizer. Throws ErrorCode::format for
// metadata of the wrong type, and ::unsupported, with the name, for unsupported kinds of tokenizers.
std::string tokenizer_json_of(const GgufMetadata& metadata, const std::string& file);
// Returns the text of its tokenizer_config.json, with the names of special tokens and the chat template.
std::string tokenizer_config_of(const GgufMetadata& metadata);
// Returns the text of its generation_config.json, with the token ids that begin, end and pad a text; empty
// if no token ends it.
std::string generation_config_of(const GgufMetadata& metadata);

// Returns the metadata for a tokenizer.json. config, generation: texts of a tokenizer_config.json and a
// generation_config.json, may be empty. rows: rows of the embedding; rows without a token get padding tokens.
// Throws ErrorCode::format, or ::unsupported for tokenizers that llama.cpp would apply differently.
std::vector<std::pair<std::string, GgufValue>> gguf_tokenizer(std::string_view tokenizer_json,
                                                              std::string_view config,
                                                              std::string_view generation,
                                                              const std::string& chat_template, int64_t rows);
// Returns the metadata for a SentencePiece model. files: the names and contents of a directory's files,
// including tokenizer.model. The model must be BPE with byte pieces, and its normalizer may only replace
// spaces by ▁.
std::vector<std::pair<std::string, GgufValue>> gguf_sentencepiece(
    const std::vector<std::pair<std::string, std::string>>& files, int64_t rows);

}  // namespace capstan::formats
