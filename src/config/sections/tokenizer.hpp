// The tokenizer: names the files; the vocabulary size of the model is model.vocab_size.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/core/types.hpp"

namespace capstan::config {

enum class TokenizerKind : uint8_t { huggingface, sentencepiece, gpt2_bpe, byte, none };
enum class PreTokenizer : uint8_t { gpt2, llama3, qwen };

template <>
struct EnumNames<TokenizerKind> {
  static constexpr EnumEntry<TokenizerKind> list[] = {
      {TokenizerKind::huggingface, "huggingface", "a tokenizer.json, or a directory with one",
       "HuggingFaceTokenizer"},
      {TokenizerKind::sentencepiece, "sentencepiece", "a SentencePiece .model (BPE or Unigram)",
       "SentencePieceTokenizer"},
      {TokenizerKind::gpt2_bpe, "gpt2_bpe", "vocab.json and merges.txt (byte-level BPE)", "GPT2BPETokenizer"},
      {TokenizerKind::byte, "byte", "one id for each byte, and one for the end of a document"},
      {TokenizerKind::none, "none", "no tokenizer: the dataset holds ids already", "NullTokenizer"},
  };
};

template <>
struct EnumNames<PreTokenizer> {
  static constexpr EnumEntry<PreTokenizer> list[] = {
      {PreTokenizer::gpt2, "gpt2", "GPT-2"},
      {PreTokenizer::llama3, "llama3", "Llama 3"},
      {PreTokenizer::qwen, "qwen", "Qwen 2 and later", "qwen2"},
  };
};

struct TokenizerConfig {
  TokenizerKind tokenizer_type = TokenizerKind::none;
  std::optional<Path> tokenizer_model;
  std::optional<Path> vocab_file;
  std::optional<Path> merge_file;
  PreTokenizer pre_tokenizer = PreTokenizer::gpt2;
  std::string eod_token = "<|endoftext|>";
  std::optional<Path> chat_template;
};

}  // namespace capstan::config
