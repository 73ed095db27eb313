#include "data/index_cache.hpp"

#include <unistd.h>
#include <xxhash.h>

#include <array>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "data/random_file.hpp"

namespace capstan::data {

namespace {

constexpr char kMagic[8] = {'C', 'A', 'P', 'I', 'D', 'X', '1', '\n'};

struct Head {
  char magic[8];
  // Sizes of the key, which follows the header, and of the arrays after it.
  uint64_t key_bytes, bytes;
  // XXH3-128 of the key and the arrays.
  uint64_t hash[2];
};
static_assert(sizeof(Head) == 40);

// Computes XXH3-128 over several spans.
class Hash {
 public:
  Hash() : state_(XXH3_createState()) { XXH3_128bits_reset(state_); }
  ~Hash() { XXH3_freeState(state_); }
  Hash(const Hash&) = delete;
  Hash& operator=(const Hash&) = delete;
  void add(std::span<const std::byte> bytes) { XXH3_128bits_update(state_, bytes.data(), bytes.size()); }
  std::array<uint64_t, 2> digest() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(state_);
    return {hash.high64, hash.low64};
  }

 private:
  XXH3_state_t* state_;
};

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace

IndexCache::IndexCache(std::filesystem::path directory) : directory_(std::move(directory)) {
  std::error_code error;
  std::filesystem::create_directories(directory_, error);
  if (error || !std::filesystem::is_directory(directory_))
    fail(ErrorCode::io,
         "cannot create the directory `" + directory_.string() +
             "` for indices: " + (error ? error.message() : "it is a file"),
         "dataset.path_to_cache names another one; null keeps none");
}

std::filesystem::path IndexCache::file_of(std::string_view key) const {
  const XXH128_hash_t hash = XXH3_128bits(key.data(), key.size());
  return directory_ / (hex(hash.high64) + hex(hash.low64) + ".index");
}

bool IndexCache::load(std::string_view key, std::initializer_list<std::span<std::byte>> arrays) const {
  const std::filesystem::path path = file_of(key);
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(path, unknown)) return false;
  try {
    const RandomFile file(path.string());
    uint64_t bytes = 0;
    for (const auto& array : arrays) bytes += array.size();
    if (file.size() != static_cast<int64_t>(sizeof(Head) + key.size() + bytes)) return false;
    Head head;
    file.read(0, std::as_writable_bytes(std::span(&head, 1)));
    if (std::memcmp(head.magic, kMagic, sizeof kMagic) != 0 || head.key_bytes != key.size() ||
        head.bytes != bytes)
      return false;
    std::string stored(key.size(), '\0');
    file.read(sizeof head, std::as_writable_bytes(std::span(stored.data(), stored.size())));
    if (stored != key) return false;
    Hash hash;
    hash.add(bytes_of(key));
    auto at = static_cast<int64_t>(sizeof head + key.size());
    for (const auto& array : arrays) {
      file.read(at, array);
      hash.add(array);
      at += static_cast<int64_t>(array.size());
    }
    return hash.digest() == std::array<uint64_t, 2>{head.hash[0], head.hash[1]};
  } catch (const Error&) {
    // Another process has removed or truncated the file.
    return false;
  }
}

void IndexCache::store(std::string_view key,
                       std::initializer_list<std::span<const std::byte>> arrays) const noexcept {
  try {
    const std::filesystem::path path = file_of(key);
    std::filesystem::path temporary = path;
    temporary += ".tmp." + std::to_string(::getpid()) + "." +
                 std::to_string(std::hash<std::thread::id>{}(std::this_thread::get_id()));
    Head head{};
    std::memcpy(head.magic, kMagic, sizeof kMagic);
    head.key_bytes = key.size();
    Hash hash;
    hash.add(bytes_of(key));
    for (const auto& array : arrays) {
      head.bytes += array.size();
      hash.add(array);
    }
    const auto digest = hash.digest();
    head.hash[0] = digest[0], head.hash[1] = digest[1];
    try {
      FileWriter writer(temporary);
      writer.write(std::as_bytes(std::span(&head, 1)));
      writer.write(key);
      for (const auto& array : arrays) writer.write(array);
      writer.finish();
      std::filesystem::rename(temporary, path);
    } catch (...) {
      std::error_code ignored;
      std::filesystem::remove(temporary, ignored);
    }
  } catch (...) {
    // The arrays are in memory, so the run does not need the file.
  }
}

}  // namespace capstan::data
