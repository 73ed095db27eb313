#include "checkpoint/hash.hpp"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>

#include "base/file.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"

namespace capstan::checkpoint {

struct Hasher::State {
  explicit State(int64_t block) : block_bytes(block), full(XXH3_createState()), part(XXH3_createState()) {
    CAPSTAN_ASSERT(full && part && block > 0, "hash state");
    XXH3_128bits_reset(full);
    XXH3_64bits_reset(part);
  }
  ~State() {
    XXH3_freeState(full);
    XXH3_freeState(part);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void end_block() {
    hash.blocks.push_back(hex(XXH3_64bits_digest(part)));
    XXH3_64bits_reset(part);
    in_block = 0;
  }

  int64_t block_bytes;
  XXH3_state_t *full, *part;
  int64_t in_block = 0;
  FileHash hash;
};

Hasher::Hasher(int64_t block_bytes) : state_(std::make_unique<State>(block_bytes)) {}
Hasher::~Hasher() = default;

void Hasher::update(std::span<const std::byte> bytes) {
  State& s = *state_;
  s.hash.bytes += static_cast<int64_t>(bytes.size());
  while (!bytes.empty()) {
    // Hashes slices that fit the cache, because both hashes read them.
    const size_t left = static_cast<size_t>(s.block_bytes - s.in_block);
    const auto slice = bytes.first(std::min({bytes.size(), left, size_t{1} << 16}));
    XXH3_128bits_update(s.full, slice.data(), slice.size());
    XXH3_64bits_update(s.part, slice.data(), slice.size());
    s.in_block += static_cast<int64_t>(slice.size());
    bytes = bytes.subspan(slice.size());
    if (s.in_block == s.block_bytes) s.end_block();
  }
}

FileHash Hasher::finish() {
  State& s = *state_;
  if (s.in_block > 0) s.end_block();
  const XXH128_hash_t full = XXH3_128bits_digest(s.full);
  s.hash.full = hex(full.high64) + hex(full.low64);
  return std::move(s.hash);
}

std::string hash_of(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return hex(hash.high64) + hex(hash.low64);
}
std::string hash_of(std::string_view text) {
  return hash_of(std::as_bytes(std::span(text.data(), text.size())));
}

FileHash hash_file(const std::filesystem::path& path, int64_t block_bytes) {
  // O_NOFOLLOW, O_NONBLOCK: follow no links, and do not block on a pipe without a writer.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (file.get() < 0 && errno == ENOENT) fail_not_found("file", path.string());
  if (file.get() < 0) fail(ErrorCode::io, "cannot open `" + path.string() + "`: " + system_error_text(errno));
  Hasher hasher(block_bytes);
  std::vector<std::byte> buffer(size_t{1} << 18);
  while (const ssize_t got = ::read(file.get(), buffer.data(), buffer.size())) {
    if (got > 0)
      hasher.update(std::span(buffer).first(static_cast<size_t>(got)));
    else if (errno != EINTR)
      fail(ErrorCode::io, "cannot read `" + path.string() + "`: " + system_error_text(errno));
  }
  return hasher.finish();
}

}  // namespace capstan::checkpoint
