// Base64 (RFC 4648, with padding), as tables in a tokenizer.json are written.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace capstan::text {

std::optional<std::string> decode_base64(std::string_view text);  // nullopt: not base64

}  // namespace capstan::text
