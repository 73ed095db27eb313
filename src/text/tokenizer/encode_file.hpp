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
  int64_t bytes = 0;  // of text
  int64_t tokens = 0;
};
// Bytes of the file; from the calling thread.
using FileProgress = std::function<void(int64_t done, int64_t total)>;
using TextSink = FunctionRef<void(std::string_view)>;  // gets the output piece by piece, in order

// One JSON line {"ids":[…]} for each line of text. Lines end at \n only, nothing is trimmed, the \n itself is
// not encoded. A last line without \n is marked {"ids":[…],"newline":false}, so that decoding gives back the
// very file. With `offsets` each line has "places":[[begin,end],…] as well.
FileTotals encode_file(const Tokenizer& tokenizer, const std::filesystem::path& file, TextSink write,
                       ThreadPool& pool, const FileProgress& progress = {}, const EncodeOptions& options = {},
                       bool offsets = false);

// The reverse: the bytes that each line's ids stand for, and \n. ErrorCode::format with file:line for a line
// that is not such JSON or an id that the tokenizer lacks.
FileTotals decode_file(const Tokenizer& tokenizer, const std::filesystem::path& file, TextSink write,
                       ThreadPool& pool, const FileProgress& progress = {});

}  // namespace capstan::text
