// Constants for reading and writing a GGUF file's tokenizer. Included only by .cpp files.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace capstan::formats {

// Values of tokenizer.ggml.token_type.
inline constexpr int64_t kNormal = 1, kUnknown = 2, kControl = 3, kUser = 4, kUnused = 5, kByte = 6;

inline constexpr const char* kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
inline constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline constexpr const char* kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// llama.cpp's names for pre-tokenizers, each of which selects a regular expression.
struct PreTokenizer {
  const char* name;
  const char* pattern;  // null: ByteLevel's own
  bool digits;          // each by itself, before
  bool ignores_merges;  // of a word that is a token
};
inline constexpr std::array kPreTokenizers = {
    PreTokenizer{"llama-bpe", kLlama3, false, true}, PreTokenizer{"dbrx", kLlama3, false, false},
    PreTokenizer{"qwen2", kQwen2, false, false},     PreTokenizer{"smollm", nullptr, true, false},
    PreTokenizer{"gpt-2", nullptr, false, false},    PreTokenizer{"llama3", kLlama3, false, true},
    PreTokenizer{"llama-v3", kLlama3, false, true}};

inline constexpr std::string_view kBlank = "\u2581";  // SentencePiece's replacement for a space

}  // namespace capstan::formats
