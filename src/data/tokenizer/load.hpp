// From the text of a tokenizer's files to a TokenizerSpec. Private to the tokenizer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/tokenizer/json_reader.hpp"
#include "data/tokenizer/spec.hpp"

namespace capstan::data {

// The specification together with the documents that its views point into.
struct LoadedSpec {
  TokenizerSpec spec;
  std::vector<std::unique_ptr<JsonFile>> documents;
  std::unique_ptr<const std::string> merges_text;  // apart, so that moving the rest does not move it
};

// `name` is what messages call the file. Components that this build does not know are ErrorCode::unsupported,
// by name and path.
LoadedSpec read_tokenizer_json(std::string text, std::string name);
// GPT-2's pair of files. `config` is the text of a tokenizer_config.json beside them, empty when there is
// none.
LoadedSpec read_vocab_and_merges(std::string vocab, std::string vocab_name, std::string merges,
                                 std::string merges_name, std::string config, std::string config_name);
// Takes the names of the begin and end tokens from a tokenizer_config.json.
void read_special_names(const JsonFile& config, TokenizerSpec& spec);

}  // namespace capstan::data
