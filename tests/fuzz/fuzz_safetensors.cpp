// The safetensors header parser on arbitrary bytes: as a complete file, and as a header that is given its
// length and data, so that mutations reach behind the outer frame.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "checkpoint/safetensors.hpp"

using namespace capstan;
using namespace capstan::checkpoint;

static void parse(const std::string& file) {
  try {
    const auto bytes = std::as_bytes(std::span(file.data(), file.size()));
    const SafetensorsHeader header = parse_safetensors(bytes, "input");
    // An accepted header describes the file exactly.
    int64_t at = header.data_begin;
    for (const auto& entry : header.entries) {
      if (header.data_begin + entry.begin != at || entry.end < entry.begin) std::abort();
      at = header.data_begin + entry.end;
    }
    if (at != static_cast<int64_t>(file.size())) std::abort();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::format) std::abort();
  }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  parse(input);
  if (size < 2) return 0;
  const std::string header = input.substr(2);
  std::string file(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(file.data(), &length, sizeof length);
  parse(file + header +
        std::string(static_cast<size_t>(data[0]) | static_cast<size_t>(data[1] & 15) << 8, 'x'));
  return 0;
}
