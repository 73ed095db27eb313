#include "data/indexed_dataset.hpp"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <vector>

#include "base/checked.hpp"
#include "base/cursor.hpp"
#include "base/error.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"

namespace capstan::data {

namespace {

// The arrays start at byte 34, so their elements are not aligned.
template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Widens `count` tokens. Returns the index of the first one outside [0, limit), or count.
template <class T>
size_t widen(const std::byte* from, std::span<int32_t> out, int64_t limit) {
  const auto token = [&](size_t i) {
    return static_cast<int64_t>(load<T>(from + i * sizeof(T)));  // NOLINT(bugprone-signed-char-misuse)
  };
  bool bad = false;
  for (size_t i = 0; i < out.size(); ++i) {
    const int64_t value = token(i);
    bad |= value < 0 || value >= limit;
    out[i] = static_cast<int32_t>(value);
  }
  if (!bad) return out.size();
  for (size_t i = 0; i < out.size(); ++i)
    if (token(i) < 0 || token(i) >= limit) return i;
  return out.size();
}

int64_t value_at(TokenType type, const std::byte* at) {
  switch (type) {
    case TokenType::u8:
      return load<uint8_t>(at);
    case TokenType::i8:
      return load<int8_t>(at);
    case TokenType::i16:
      return load<int16_t>(at);
    case TokenType::u16:
      return load<uint16_t>(at);
    case TokenType::i32:
      return load<int32_t>(at);
    default:
      return load<int64_t>(at);
  }
}

}  // namespace

std::string_view name_of(TokenType type) {
  switch (type) {
    case TokenType::u8:
      return "u8";
    case TokenType::i8:
      return "i8";
    case TokenType::i16:
      return "i16";
    case TokenType::i32:
      return "i32";
    case TokenType::i64:
      return "i64";
    case TokenType::f64:
      return "f64";
    case TokenType::f32:
      return "f32";
    case TokenType::u16:
      return "u16";
  }
  return "?";
}

int64_t bytes_of(TokenType type) {
  switch (type) {
    case TokenType::u8:
    case TokenType::i8:
      return 1;
    case TokenType::i16:
    case TokenType::u16:
      return 2;
    case TokenType::i32:
    case TokenType::f32:
      return 4;
    case TokenType::i64:
    case TokenType::f64:
      return 8;
  }
  return 0;
}

TokenType token_type_for_vocab(int64_t vocab_size) {
  return vocab_size < 65500 ? TokenType::u16 : TokenType::i32;
}

// Suggests names of datasets, not of their .bin and .idx files.
static std::string existing_prefix(std::string prefix) {
  std::error_code unknown;
  if (std::filesystem::exists(prefix + ".bin", unknown) || std::filesystem::exists(prefix + ".idx", unknown))
    return prefix;
  const std::string near = near_paths_help(near_paths(prefix, {}, MissingKind::dataset_prefix));
  fail(ErrorCode::not_found, not_found_text("dataset", prefix),
       near.empty() ? "name a dataset of `capstan data prepare` by the prefix of PREFIX.bin and PREFIX.idx"
                    : near);
}

IndexedDataset::IndexedDataset(std::string prefix, int64_t vocab_size)
    : prefix_(existing_prefix(std::move(prefix))),
      index_path_(prefix_ + ".idx"),
      vocab_size_(vocab_size),
      bin_(prefix_ + ".bin"),
      index_(index_path_) {
  const RandomFile index(index_path_);
  if (index.size() != static_cast<int64_t>(index_.bytes().size()))
    fail(ErrorCode::format, "`" + index_path_ + "` changed while it was opened");
  check_header();
  check_arrays(index);
}

void IndexedDataset::bad_index(int64_t offset, const std::string& what) const {
  fail(ErrorCode::format, index_path_ + ": offset " + std::to_string(offset) + ": " + what);
}

void IndexedDataset::check_header() {
  refuse_placeholder(index_.bytes(), index_path_);
  std::string beginning(static_cast<size_t>(std::min<int64_t>(bin_.size(), 64)), '\0');
  bin_.read(0, std::as_writable_bytes(std::span(beginning)));
  refuse_lfs_pointer(beginning, bin_.path());
  ByteCursor cursor(index_.bytes(), index_path_);
  if (cursor.take_text(sizeof kIndexMagic, "the magic") != std::string_view(kIndexMagic, sizeof kIndexMagic))
    fail(ErrorCode::format,
         index_path_ + ": offset 0: not the index of an indexed dataset (it does not begin with MMIDIDX)",
         "name a dataset by its prefix, without .bin or .idx; `capstan data prepare` makes one from text");
  if (const auto version = cursor.read<uint64_t>("the version"); version != 1)
    bad_index(9, "version " + std::to_string(version) + " is not known; only version 1 is");
  const auto code = cursor.read<uint8_t>("the token type");
  if (code < 1 || code > 8) bad_index(17, "token type " + std::to_string(code) + " is not one of 1 to 8");
  type_ = static_cast<TokenType>(code);
  if (type_ == TokenType::f32 || type_ == TokenType::f64)
    bad_index(17, "token type " + std::string(name_of(type_)) + " holds numbers, not token ids");
  item_bytes_ = bytes_of(type_);

  const auto sequences = cursor.read<uint64_t>("the number of sequences");
  const auto boundaries = cursor.read<uint64_t>("the number of document boundaries");
  // Compares the counts with the file's size before multiplying them: each sequence needs 12 bytes, each
  // boundary 8.
  const uint64_t left = cursor.remaining();
  if (sequences > left / 12)
    bad_index(18, std::to_string(sequences) + " sequences need more than the " + std::to_string(left) +
                      " bytes that follow");
  if (boundaries > (left - 12 * sequences) / 8)
    bad_index(26, std::to_string(boundaries) + " document boundaries need more than the " +
                      std::to_string(left - 12 * sequences) + " bytes that follow the sequences");
  if (boundaries == 0) bad_index(26, "no document boundary; even an empty dataset has one");
  sequences_ = static_cast<int64_t>(sequences);
  documents_ = static_cast<int64_t>(boundaries) - 1;
  const uint64_t over = left - 12 * sequences - 8 * boundaries;
  if (over != 0 && over != sequences)
    bad_index(documents_at() + 8 * (documents_ + 1),
              std::to_string(over) + " bytes too many (neither none nor one mode for each of " +
                  std::to_string(sequences) + " sequences)");
  multimodal_ = over != 0;

  if (bin_.size() % item_bytes_ != 0)
    fail(ErrorCode::format, bin_.path() + ": " + std::to_string(bin_.size()) +
                                " bytes are not a multiple of the size of a " + std::string(name_of(type_)) +
                                " token");
  tokens_ = bin_.size() / item_bytes_;
}

void IndexedDataset::check_arrays(const RandomFile& index) const {
  const auto last_boundary = [&](int64_t at) {
    return load<int64_t>(index_.bytes().data() + documents_at() + 8 * at);
  };
  if (last_boundary(0) != 0)
    bad_index(documents_at(),
              "the first document begins at sequence " + std::to_string(last_boundary(0)) + ", not 0");
  if (last_boundary(documents_) != sequences_)
    bad_index(documents_at() + 8 * documents_, "the last document ends at sequence " +
                                                   std::to_string(last_boundary(documents_)) +
                                                   ", but there are " + std::to_string(sequences_));
  if (sequences_ > kFullCheckSequences) {
    const int64_t last = sequences_ - 1;
    if (checked_add(first_token(last), length(last)) != tokens_)
      fail(ErrorCode::format, bin_.path() + ": " + std::to_string(bin_.size()) +
                                  " bytes, but the index ends at token " +
                                  std::to_string(first_token(last) + length(last)));
    return;
  }

  // Reads with read(2) instead of the map, whose pages would count as memory of this process.
  const int64_t chunk = std::min<int64_t>(1 << 16, std::max(sequences_, documents_ + 1));
  std::vector<std::byte> lengths(static_cast<size_t>(4 * chunk)), pointers(static_cast<size_t>(8 * chunk));
  int64_t expected = 0;
  for (int64_t begin = 0; begin < sequences_; begin += chunk) {
    const int64_t count = std::min(chunk, sequences_ - begin);
    index.read(lengths_at() + 4 * begin, std::span(lengths).first(static_cast<size_t>(4 * count)));
    index.read(pointers_at() + 8 * begin, std::span(pointers).first(static_cast<size_t>(8 * count)));
    for (int64_t i = 0; i < count; ++i) {
      const auto tokens = load<int32_t>(lengths.data() + 4 * i);
      if (tokens < 0)
        bad_index(lengths_at() + 4 * (begin + i),
                  "sequence " + std::to_string(begin + i) + " has length " + std::to_string(tokens));
      const auto pointer = load<int64_t>(pointers.data() + 8 * i);
      if (pointer != expected)
        bad_index(pointers_at() + 8 * (begin + i),
                  "sequence " + std::to_string(begin + i) + " points to byte " + std::to_string(pointer) +
                      ", but the lengths before it end at byte " + std::to_string(expected));
      // The sum is at most 2^26 · 2^31 · 8, which does not overflow.
      expected += static_cast<int64_t>(tokens) * item_bytes_;
    }
  }
  if (expected != bin_.size())
    fail(ErrorCode::format, bin_.path() + ": " + std::to_string(bin_.size()) +
                                " bytes, but the index accounts for " + std::to_string(expected));

  int64_t previous = 0;
  for (int64_t begin = 0; begin <= documents_; begin += chunk) {
    const int64_t count = std::min(chunk, documents_ + 1 - begin);
    index.read(documents_at() + 8 * begin, std::span(pointers).first(static_cast<size_t>(8 * count)));
    for (int64_t i = 0; i < count; ++i) {
      const auto boundary = load<int64_t>(pointers.data() + 8 * i);
      if (boundary < previous || boundary > sequences_)
        bad_index(documents_at() + 8 * (begin + i), "document boundary " + std::to_string(boundary) +
                                                        " is not between " + std::to_string(previous) +
                                                        " and " + std::to_string(sequences_));
      previous = boundary;
    }
  }
}

int32_t IndexedDataset::length(int64_t sequence) const {
  const auto tokens = load<int32_t>(index_.bytes().data() + lengths_at() + 4 * sequence);
  if (tokens < 0) [[unlikely]]
    bad_index(lengths_at() + 4 * sequence,
              "sequence " + std::to_string(sequence) + " has length " + std::to_string(tokens));
  return tokens;
}

int64_t IndexedDataset::first_token(int64_t sequence) const {
  if (sequence == sequences_) return tokens_;
  const auto pointer = load<int64_t>(index_.bytes().data() + pointers_at() + 8 * sequence);
  if (pointer < 0 || pointer > bin_.size() || pointer % item_bytes_ != 0) [[unlikely]]
    bad_index(pointers_at() + 8 * sequence, "sequence " + std::to_string(sequence) + " points to byte " +
                                                std::to_string(pointer) + " of a file of " +
                                                std::to_string(bin_.size()));
  return pointer / item_bytes_;
}

int64_t IndexedDataset::document_begin(int64_t document) const {
  const auto boundary = load<int64_t>(index_.bytes().data() + documents_at() + 8 * document);
  if (boundary < 0 || boundary > sequences_) [[unlikely]]
    bad_index(documents_at() + 8 * document, "document boundary " + std::to_string(boundary) +
                                                 " is outside 0 to " + std::to_string(sequences_));
  return boundary;
}

void IndexedDataset::read(int64_t sequence, int64_t offset, std::span<int32_t> out) const {
  CAPSTAN_ASSERT(sequence >= 0 && sequence < sequences_, "a sequence outside the dataset");
  const int64_t begin = first_token(sequence), tokens = length(sequence);
  const auto count = static_cast<int64_t>(out.size());
  CAPSTAN_ASSERT(offset >= 0 && offset <= tokens && count <= tokens - offset,
                 "tokens outside their sequence");
  if (begin > tokens_ - tokens)
    bad_index(pointers_at() + 8 * sequence, "sequence " + std::to_string(sequence) + " ends beyond the " +
                                                std::to_string(tokens_) + " tokens of the .bin file");
  if (count > 0) read_tokens(begin + offset, out);
}

void IndexedDataset::read_tokens(int64_t first, std::span<int32_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  const int64_t at = first * item_bytes_;
  std::byte small[4096];
  std::vector<std::byte> large;
  std::span<std::byte> raw(small);
  if (count * item_bytes_ > static_cast<int64_t>(sizeof small)) {
    large.resize(static_cast<size_t>(count * item_bytes_));
    raw = large;
  }
  raw = raw.first(static_cast<size_t>(count * item_bytes_));
  bin_.read(at, raw);

  const int64_t limit = vocab_size_ > 0 ? vocab_size_ : int64_t{1} << 31;
  size_t good = 0;
  switch (type_) {
    case TokenType::u8:
      good = widen<uint8_t>(raw.data(), out, limit);
      break;
    case TokenType::i8:
      good = widen<int8_t>(raw.data(), out, limit);
      break;
    case TokenType::i16:
      good = widen<int16_t>(raw.data(), out, limit);
      break;
    case TokenType::u16:
      good = widen<uint16_t>(raw.data(), out, limit);
      break;
    case TokenType::i32:
      good = widen<int32_t>(raw.data(), out, limit);
      break;
    default:
      good = widen<int64_t>(raw.data(), out, limit);
      break;
  }
  if (good < out.size()) {
    const auto where = static_cast<int64_t>(good) * item_bytes_;
    const int64_t value = value_at(type_, raw.data() + where);
    fail(ErrorCode::format,
         bin_.path() + ": offset " + std::to_string(at + where) + ": token " + std::to_string(value) +
             (value < 0 ? " is negative" : " is not below the vocabulary size " + std::to_string(limit)),
         value < 0 ? "" : "the dataset was prepared with another tokenizer than the one of this recipe");
  }
}

std::string IndexedDataset::index_hash() const {
  const RandomFile index(index_path_);
  XXH3_state_t* state = XXH3_createState();
  XXH3_128bits_reset(state);
  std::vector<std::byte> buffer(size_t{1} << 20);
  for (int64_t at = 0; at < index.size(); at += static_cast<int64_t>(buffer.size())) {
    const auto part = std::span(buffer).first(
        static_cast<size_t>(std::min(static_cast<int64_t>(buffer.size()), index.size() - at)));
    index.read(at, part);
    XXH3_128bits_update(state, part.data(), part.size());
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state);
  XXH3_freeState(state);
  return hex(hash.high64) + hex(hash.low64);
}

void IndexedDataset::visit_blocks(int64_t most, FunctionRef<bool(std::span<const int32_t>)> visit) const {
  constexpr int64_t kBlock = int64_t{1} << 16;
  const int64_t blocks = ceil_div(tokens_, kBlock);
  const int64_t taken =
      std::max<int64_t>(std::min<int64_t>(1, blocks), ceil_div(std::min(most, tokens_), kBlock));
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < taken; ++i) {
    const auto block = static_cast<int64_t>(static_cast<double>(i) * static_cast<double>(blocks) /
                                            static_cast<double>(taken));
    const int64_t first = (taken == blocks ? i : block) * kBlock;
    ids.resize(static_cast<size_t>(std::min(kBlock, tokens_ - first)));
    read_tokens(first, ids);
    if (!visit(ids)) return;
  }
}

int32_t IndexedDataset::largest_token(int64_t most) const {
  int32_t largest = -1;
  visit_blocks(most, [&](std::span<const int32_t> ids) {
    for (const int32_t id : ids) largest = std::max(largest, id);
    return true;
  });
  return largest;
}

bool IndexedDataset::contains_token(int32_t id, int64_t most) const {
  bool found = false;
  visit_blocks(most, [&](std::span<const int32_t> ids) {
    found = std::ranges::find(ids, id) != ids.end();
    return !found;
  });
  return found;
}

}  // namespace capstan::data
