// The GGUF parser on arbitrary bytes: what it accepts describes the file, and the metadata make a tokenizer
// or a named error.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "formats/gguf_file.hpp"
#include "formats/gguf_tokenizer.hpp"
#include "named_error.hpp"

using namespace capstan;
using namespace capstan::formats;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  fuzz::expect_named_error([&] {
    const GgufHeader header = parse_gguf(bytes, "input");
    for (const GgufTensor& tensor : header.tensors) {
      const uint64_t begin = header.data_begin + tensor.offset;
      if (begin < header.data_begin || begin > size || tensor.bytes > size - begin) std::abort();
      const GgmlType& type = *find_ggml_type(tensor.type);
      std::vector<float> values(static_cast<size_t>(tensor.bytes / static_cast<uint64_t>(type.bytes)) *
                                static_cast<size_t>(type.block));
      dequantize(type, bytes.subspan(begin, tensor.bytes), values);
    }
    tokenizer_json_of(header.metadata, "input");
    tokenizer_config_of(header.metadata);
  });
  return 0;
}
