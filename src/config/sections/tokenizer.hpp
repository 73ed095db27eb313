// The tokenizer: names the files; the vocabulary size of the model is model.vocab_size.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace capstan::config {

enum class TokenizerKind : uint8_t { huggingface, gpt2_bpe, byte, none };
enum class PreTokenizer : uint8_t { gpt2, llama3, qwen };

struct TokenizerConfig {
  TokenizerKind tokenizer_type = TokenizerKind::none;
  std::optional<std::string> tokenizer_model;       // huggingface: tokenizer.json
  std::optional<std::string> vocab_file;            // gpt2_bpe: vocab.json
  std::optional<std::string> merge_file;            // gpt2_bpe: merges.txt
  PreTokenizer pre_tokenizer = PreTokenizer::gpt2;  // gpt2_bpe; a tokenizer.json names its own
  std::string eod_token = "<|endoftext|>";
};

}  // namespace capstan::config
