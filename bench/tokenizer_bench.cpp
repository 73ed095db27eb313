// tokenizer_bench TOKENIZER TEXT [DOCUMENT_BYTES [ROUNDS]]: megabytes a second of processor time of one
// thread, encoding and decoding.
//
// The text is split at newlines into documents of about DOCUMENT_BYTES (default 2000). Each of ROUNDS
// (default 3) encodes all of it; the best one counts. bench/peers/data.py runs it in turns with Hugging
// Face's.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "base/text.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace {
// Of this thread on its core: other programs on the machine do not count.
double seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}
}  // namespace

int main(int argc, char** argv) {
  using namespace capstan;
  try {
    if (argc < 3) {
      std::fprintf(stderr, "usage: tokenizer_bench TOKENIZER TEXT [DOCUMENT_BYTES [ROUNDS]]\n");
      return 2;
    }
    const double start = seconds();
    const auto tokenizer = text::Tokenizer::load(argv[1]);
    const double loaded = seconds() - start;
    const MappedFile file(argv[2]);
    const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
    const auto size = static_cast<size_t>(argc > 3 ? parse_int(argv[3]).value_or(2000) : 2000);
    const auto rounds = argc > 4 ? parse_int(argv[4]).value_or(3) : 3;
    std::vector<std::string_view> documents;
    for (size_t begin = 0; begin < text.size();) {
      size_t end = text.find('\n', std::min(text.size() - 1, begin + size));
      end = end == std::string_view::npos ? text.size() : end + 1;
      documents.push_back(text.substr(begin, end - begin));
      begin = end;
    }
    double encode = 1e30, decode = 1e30;
    std::vector<int32_t> ids;
    for (int round = 0; round < rounds; ++round) {
      const double before = seconds();
      ids.clear();
      for (const auto document : documents) tokenizer->encode(document, ids);
      encode = std::min(encode, seconds() - before);
    }
    size_t decoded = 0;
    for (int round = 0; round < rounds; ++round) {
      const double before = seconds();
      decoded = tokenizer->decode_bytes(ids).size();
      decode = std::min(decode, seconds() - before);
    }
    uint64_t sum = 0;
    for (const int32_t id : ids) sum = sum * 31 + static_cast<uint64_t>(id);
    std::printf(
        "load %.0f ms; %zu documents, %.1f MB, %zu tokens, checksum %016llx; encode %.1f MB/s, decode %.1f "
        "MB/s%s\n",
        loaded * 1e3, documents.size(), static_cast<double>(text.size()) / 1e6, ids.size(),
        static_cast<unsigned long long>(sum), static_cast<double>(text.size()) / 1e6 / encode,
        static_cast<double>(text.size()) / 1e6 / decode,
        decoded == text.size() ? "" : " (not the same text)");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
