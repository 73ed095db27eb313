#include "data/input_reader.hpp"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "data/random_file.hpp"

namespace capstan::data {

namespace {
constexpr size_t kBuffer = 256 << 10;
// Largest window that a decompressor must support: 128 MiB.
constexpr int kZstdWindowLog = 27;
}  // namespace

struct InputReader::State {
  RandomFile file;
  InputLimits limits;
  enum class Kind { plain, gzip, zstd } kind = Kind::plain;

  // Holds compressed bytes in [begin, end).
  std::vector<char> buffer;
  size_t begin = 0, end = 0;
  int64_t file_read = 0, produced = 0;
  // Whether a gzip member or zstd frame has begun and not ended.
  bool inside = false;

  z_stream zlib{};
  bool zlib_open = false;
  ZSTD_DCtx* zstd = nullptr;

  explicit State(const std::string& path) : file(path) {}
  ~State() {
    if (zlib_open) inflateEnd(&zlib);
    ZSTD_freeDCtx(zstd);
  }

  size_t read_file(std::span<char> out) {
    const auto count = std::min(static_cast<int64_t>(out.size()), file.size() - file_read);
    file.read(file_read, std::as_writable_bytes(out.first(static_cast<size_t>(count))));
    file_read += count;
    return static_cast<size_t>(count);
  }
  int64_t offset() const { return file_read - static_cast<int64_t>(end - begin); }
  [[noreturn]] void bad(const std::string& what, std::string help = {}) const {
    fail(ErrorCode::format, file.path() + ": offset " + std::to_string(offset()) + ": " + what,
         std::move(help));
  }
  bool refill() {
    if (begin < end) return true;
    begin = 0;
    end = read_file(buffer);
    return end > 0;
  }
  void spend(size_t bytes) {
    produced += static_cast<int64_t>(bytes);
    if (produced > limits.free_bytes && produced / limits.max_expansion > offset())
      bad("decompresses to more than " + std::to_string(limits.max_expansion) + " times its size (" +
              human_bytes(static_cast<double>(produced)) + " so far)",
          "if the file is trusted, decompress it first");
  }

  size_t read_gzip(std::span<char> out) {
    zlib.next_out = reinterpret_cast<Bytef*>(out.data());
    zlib.avail_out = static_cast<uInt>(out.size());
    while (zlib.avail_out == out.size()) {
      if (!refill()) {
        if (inside) bad("the compressed data end too early");
        return 0;
      }
      inside = true;
      zlib.next_in = reinterpret_cast<Bytef*>(buffer.data() + begin);
      zlib.avail_in = static_cast<uInt>(end - begin);
      const int status = inflate(&zlib, Z_NO_FLUSH);
      begin = end - zlib.avail_in;
      // A file may contain several members.
      if (status == Z_STREAM_END) {
        inside = false;
        inflateReset(&zlib);
      } else if (status != Z_OK && status != Z_BUF_ERROR) {
        bad(std::string("corrupt gzip data") + (zlib.msg ? std::string(": ") + zlib.msg : ""));
      }
    }
    return out.size() - zlib.avail_out;
  }

  size_t read_zstd(std::span<char> out) {
    ZSTD_outBuffer to{out.data(), out.size(), 0};
    while (to.pos == 0) {
      // A frame may have more output although all its bytes have been read.
      if (!refill() && !inside) return 0;
      const bool no_more = begin == end;
      ZSTD_inBuffer from{buffer.data(), end, begin};
      const size_t status = ZSTD_decompressStream(zstd, &to, &from);
      begin = from.pos;
      if (ZSTD_isError(status)) bad(std::string("corrupt zstd data: ") + ZSTD_getErrorName(status));
      inside = status != 0;
      if (no_more && to.pos == 0 && inside) bad("the compressed data end too early");
    }
    return to.pos;
  }
};

InputReader::InputReader(const std::string& path, InputLimits limits)
    : state_(std::make_unique<State>(path)) {
  State& state = *state_;
  state.limits = limits;
  if (path.ends_with(".gz")) {
    state.kind = State::Kind::gzip;
    if (inflateInit2(&state.zlib, 15 + 16) != Z_OK) fail(ErrorCode::io, "cannot start zlib");
    state.zlib_open = true;
  } else if (path.ends_with(".zst")) {
    state.kind = State::Kind::zstd;
    state.zstd = ZSTD_createDCtx();
    if (!state.zstd) fail(ErrorCode::io, "cannot start zstd");
    ZSTD_DCtx_setParameter(state.zstd, ZSTD_d_windowLogMax, kZstdWindowLog);
  }
  if (state.kind != State::Kind::plain) state.buffer.resize(kBuffer);
  std::string beginning(static_cast<size_t>(std::min<int64_t>(state.file.size(), 512)), '\0');
  state.file.read(0, std::as_writable_bytes(std::span(beginning)));
  if (state.kind == State::Kind::plain)
    refuse_lfs_pointer(beginning, path);
  else
    refuse_placeholder(beginning, path);
}
InputReader::~InputReader() = default;

size_t InputReader::read(std::span<char> out) {
  if (out.empty()) return 0;
  State& state = *state_;
  if (state.kind == State::Kind::plain) return state.read_file(out);
  const size_t count = state.kind == State::Kind::gzip ? state.read_gzip(out) : state.read_zstd(out);
  state.spend(count);
  return count;
}

int64_t InputReader::file_size() const {
  return state_->file.size();
}
int64_t InputReader::file_bytes_read() const {
  return state_->offset();
}

}  // namespace capstan::data
