// The ways to split text before merging that a byte-level BPE tokenizer can be made with.
#pragma once

#include <cstdint>
#include <string_view>

namespace capstan::text {

// qwen2 normalizes to NFC as well.
enum class PreTokenizerChoice : uint8_t { gpt2, llama3, qwen2 };

// "gpt2", "llama3", "qwen2"; ErrorCode::usage otherwise
PreTokenizerChoice pre_tokenizer_by_name(std::string_view name);

}  // namespace capstan::text
