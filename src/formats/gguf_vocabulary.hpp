// Constants for reading and writing a GGUF file's tokenizer. Included only by .cpp files.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "text/tokenizer/pre_tokenizer.hpp"

namespace capstan::formats {

// Values of tokenizer.ggml.token_type.
inline constexpr int64_t kNormal = 1, kUnknown = 2, kControl = 3, kUser = 4, kUnused = 5, kByte = 6;

// llama.cpp's names for pre-tokenizers, each of which selects a regular expression.
struct PreTokenizer {
  const char* name;
  // Null selects ByteLevel's own pattern.
  const std::string_view* pattern;
  // Each digit is split off before the pattern applies.
  bool digits;
  // Does not merge a word that is a token.
  bool ignores_merges;
};
inline constexpr std::array kPreTokenizers = {PreTokenizer{"llama-bpe", &text::kLlama3Pattern, false, true},
                                              PreTokenizer{"dbrx", &text::kLlama3Pattern, false, false},
                                              PreTokenizer{"qwen2", &text::kQwen2Pattern, false, false},
                                              PreTokenizer{"smollm", nullptr, true, false},
                                              PreTokenizer{"gpt-2", nullptr, false, false},
                                              PreTokenizer{"gpt-4o", &text::kO200kPattern, false, false},
                                              PreTokenizer{"llama3", &text::kLlama3Pattern, false, true},
                                              PreTokenizer{"llama-v3", &text::kLlama3Pattern, false, true}};

}  // namespace capstan::formats
