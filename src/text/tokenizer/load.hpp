// Reads the text of a tokenizer's files into a TokenizerSpec. Private to the tokenizer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "text/tokenizer/json_reader.hpp"
#include "text/tokenizer/spec.hpp"

namespace capstan::text {

// The specification together with the documents that its views point into.
struct LoadedSpec {
  TokenizerSpec spec;
  std::vector<std::unique_ptr<JsonFile>> documents;
  // Text of merges.txt or vocab.txt, allocated so that a move of LoadedSpec keeps its address.
  std::unique_ptr<const std::string> lines;

  const JsonFile& add_document(std::string text, std::string name);
};

// Reads a tokenizer.json. Messages refer to the file as `name`. Throws ErrorCode::unsupported, with name and
// path, for components that this build does not know.
LoadedSpec read_tokenizer_json(std::string text, std::string name);
// Reads GPT-2's pair of files. `config` is the text of a tokenizer_config.json beside them, empty if there is
// none.
LoadedSpec read_vocab_and_merges(std::string vocab, std::string vocab_name, std::string merges,
                                 std::string merges_name, std::string config, std::string config_name);
// Reads BERT's vocab.txt: one token on each line, whose id is the line number from 0.
LoadedSpec read_vocab_lines(std::string vocab, std::string vocab_name, std::string config,
                            std::string config_name);
// Reads a SentencePiece .model. `config` is the text of a tokenizer_config.json beside it, empty if there is
// none.
LoadedSpec read_sentencepiece(std::string model, const std::string& name, std::string config,
                              std::string config_name);
// Takes the names of the special tokens, and whether they go around a text, from a tokenizer_config.json or a
// special_tokens_map.json.
void read_special_names(const JsonNode& config, TokenizerSpec& spec);
// Takes "added_tokens_decoder" of a tokenizer_config.json, for files that have no added tokens of their own.
void read_added_tokens_decoder(const JsonNode& config, TokenizerSpec& spec);

}  // namespace capstan::text
