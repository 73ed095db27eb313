// What is done to text before it is split into pieces. Qwen's tokenizers ask for NFC, the other byte-level
// ones for nothing.
#pragma once

#include <string>
#include <string_view>

namespace capstan::text {

class Normalizer {
 public:
  bool nfc = false;

  bool active() const { return nfc; }
  // The normalized text: `text` itself where nothing changes (the usual case, found without copying), else
  // `buffer`. Bytes that are not UTF-8 are kept as they are.
  std::string_view apply(std::string_view text, std::string& buffer) const;
};

}  // namespace capstan::text
