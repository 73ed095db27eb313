// A tokenizer.json, and after a NUL a tokenizer_config.json, or a SentencePiece model, which begins with a
// line break, on their way into a GGUF file: a named error, or metadata that make a tokenizer.json again.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/error.hpp"
#include "formats/gguf_tokenizer.hpp"

using namespace capstan;
using namespace capstan::formats;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  const size_t end = input.find('\0');
  try {
    GgufMetadata metadata;
    const std::string settings = end == std::string::npos ? "" : input.substr(end + 1);
    for (auto& [key, value] : input.starts_with('\n') ? gguf_sentencepiece({{"tokenizer.model", input}}, 1000)
                                                      : gguf_tokenizer(std::string_view(input).substr(0, end),
                                                                       settings, settings, "", 400))
      if (!metadata.emplace(key, std::move(value)).second) std::abort();
    if (tokenizer_json_of(metadata, "made").empty()) std::abort();
    tokenizer_config_of(metadata);
    generation_config_of(metadata);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::format && error.code() != ErrorCode::unsupported) std::abort();
  }
  return 0;
}
