// Encodes the lines of a text file and decodes the result, in parallel and in the order of the lines.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string_view>

#include "base/function_ref.hpp"
#include "base/thread_pool.hpp"
#include "text/tokenizer/tokenizer.hpp"

namespace capstan::text {

struct FileTotals {
  int64_t lines = 0;
  // Bytes of text.
  int64_t bytes = 0;
  int64_t tokens = 0;
};
// Reports bytes of the file that are done, from the calling thread.
using FileProgress = std::function<void(int64_t done, int64_t total)>;
// Receives the output in order, in parts of any size.
using TextSink = FunctionRef<void(std::string_view)>;

// Writes one JSON line {"ids":[…]} for each line of text. Lines end at \n only, nothing is trimmed, and the
// \n itself is not encoded. A last line without \n is marked {"ids":[…],"newline":false}, so that decoding
// gives back exactly the same file. With `offsets` each line has "offsets":[[begin,end],…] as well.
FileTotals encode_file(const Tokenizer& tokenizer, const std::filesystem::path& file, TextSink write,
                       ThreadPool& pool, const FileProgress& progress = {}, const EncodeOptions& options = {},
                       bool offsets = false);

// Writes the bytes that the ids of each line decode to, and \n: the reverse of encode_file(). Throws
// ErrorCode::format with file:line for a line that is not such JSON or an id that the tokenizer lacks.
FileTotals decode_file(const Tokenizer& tokenizer, const std::filesystem::path& file, TextSink write,
                       ThreadPool& pool, const FileProgress& progress = {});

}  // namespace capstan::text
