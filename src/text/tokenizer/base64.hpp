// Base64 (RFC 4648, with padding), the encoding of tables in a tokenizer.json.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace capstan::text {

// Returns nullopt if the text is not base64.
std::optional<std::string> decode_base64(std::string_view text);

}  // namespace capstan::text
