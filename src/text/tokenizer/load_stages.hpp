// The stages of a tokenizer.json around its model: normalizer, pre-tokenizer, post-processor, decoder.
// Private to the loaders.
#pragma once

#include "text/tokenizer/json_reader.hpp"
#include "text/tokenizer/spec.hpp"

namespace capstan::text {

// Reads "normalizer", "pre_tokenizer", "post_processor" and "decoder" of the root, each of which may be
// absent or null.
void read_stages(const JsonNode& root, TokenizerSpec& spec);

}  // namespace capstan::text
