// Normalizes text before it is split into pieces. Qwen's tokenizers require NFC; other byte-level tokenizers
// require nothing.
#pragma once

#include <string>
#include <string_view>

namespace capstan::text {

class Normalizer {
 public:
  bool nfc = false;

  bool active() const { return nfc; }
  // Returns the normalized text: `text` itself if nothing changes (the usual case, detected without copying),
  // else `buffer`. Bytes that are not valid UTF-8 are kept.
  std::string_view apply(std::string_view text, std::string& buffer) const;
};

}  // namespace capstan::text
