#include "text/tokenizer/bpe.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "base/error.hpp"
#include "text/tokenizer/byte_level.hpp"
#include "text/tokenizer/text_pieces.hpp"

namespace capstan::text {

// Two tables of pieces whose entries fit one cache line: up to 15 bytes in two 64-bit words with at most 3
// ids, and up to 31 bytes with at most 7. A set has two entries, the newer first, and a full set evicts the
// older one. Both tables have a fixed size, so that hostile text only causes cache misses.
class BpeModel::Memory {
 public:
  template <int words>
  struct Key {
    // The last byte holds the length, which is never 0.
    std::array<uint64_t, words> word;
    bool operator==(const Key& other) const {
      uint64_t difference = 0;
      for (int i = 0; i < words; ++i)
        difference |= word[static_cast<size_t>(i)] ^ other.word[static_cast<size_t>(i)];
      return difference == 0;
    }
  };
  template <int words, int most_ids>
  struct Entry {
    Key<words> key;
    std::array<int32_t, most_ids> ids;
    uint32_t count;
  };
  template <int words, int most_ids, int bits>
  struct Table {
    using E = Entry<words, most_ids>;
    // Maximum length of a piece in bytes.
    static constexpr size_t kLength = words * 8 - 1;
    // Allocated by calloc, so that pages without entries are never touched. An entry of zeros is valid and
    // matches nothing.
    struct FreeMemory {
      void operator()(void* memory) const { std::free(memory); }
    };
    std::unique_ptr<E[], FreeMemory> entries{static_cast<E*>(std::calloc(size_t{2} << bits, sizeof(E)))};
    Table() {
      if (!entries) throw std::bad_alloc();
    }

    static Key<words> key_of(std::string_view piece, const char* readable_end) {
      Key<words> key{};
      if (readable_end - piece.data() >= words * 8) {
        std::memcpy(key.word.data(), piece.data(), sizeof(key.word));
        for (size_t i = 0; i < words; ++i) {
          // Number of bytes of the piece in this word.
          const auto kept = static_cast<int>(piece.size()) - static_cast<int>(i) * 8;
          key.word[i] &= kept >= 8 ? ~uint64_t{0} : kept <= 0 ? 0 : (uint64_t{1} << (kept * 8)) - 1;
        }
      } else {
        std::memcpy(key.word.data(), piece.data(), piece.size());
      }
      key.word[words - 1] |= uint64_t{piece.size()} << 56;
      return key;
    }
    E* set_of(const Key<words>& key) {
      uint64_t hash = 0;
      for (size_t i = 0; i < words; ++i)
        hash = (hash ^ key.word[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
      hash *= 0xBF58476D1CE4E5B9u;
      return &entries[(hash >> (64 - bits)) * 2];
    }
    static void put(E* set, const Key<words>& key, const std::vector<int32_t>& ids) {
      set[1] = set[0];
      set[0].key = key;
      std::copy(ids.begin(), ids.end(), set[0].ids.begin());
      set[0].count = static_cast<uint32_t>(ids.size());
    }
  };
  Table<2, 3, 15> narrow;  // 32-byte entries, 2 MiB
  Table<4, 7, 12> wide;    // 64-byte entries, 512 KiB
};

BpeModel::Scratch::Scratch() : memory(std::make_unique<Memory>()) {}
BpeModel::Scratch::~Scratch() = default;

void BpeModel::reserve(int64_t merges) {
  const uint64_t slots = std::bit_ceil(static_cast<uint64_t>(merges) * 2 + 2);
  merges_.assign(slots, Merge{kFree, 0, 0});
  mask_ = slots - 1;
  shift_ = 64 - std::countr_zero(slots);
}

void BpeModel::add_merge(int32_t left, int32_t right, uint32_t rank, int32_t id) {
  const uint64_t pair = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  uint64_t i = slot(pair);
  while (merges_[i].pair != kFree && merges_[i].pair != pair) i = (i + 1) & mask_;
  merges_[i] = {pair, rank, id};
}

void BpeModel::encode_words(const PieceBatch& batch, Scratch& scratch, std::vector<int32_t>& out) const {
  Memory& memory = *scratch.memory;
  // Space that is reserved for the ids of each piece; a cached piece never needs more.
  constexpr size_t kIdsPerPiece = 8;
  size_t used = out.size();
  if (out.capacity() < used + kIdsPerPiece * batch.pieces.size())
    out.reserve(std::max(out.capacity() * 2, used + kIdsPerPiece * batch.pieces.size()));
  out.resize(used + kIdsPerPiece * batch.pieces.size());
  int32_t* write = out.data() + used;

  const auto append_ids = [&](size_t pieces_left) {
    const size_t count = scratch.ids.size();
    // Grows by more than this piece needs, to leave space for the following ones.
    if (count > kIdsPerPiece) {
      used = static_cast<size_t>(write - out.data());
      out.resize(used + count + kIdsPerPiece * pieces_left);
      write = out.data() + used;
    }
    std::copy(scratch.ids.begin(), scratch.ids.end(), write);
    write += count;
  };

  const auto encode_remembered = [&](auto& table, std::string_view piece, size_t pieces_left) {
    const auto key = table.key_of(piece, batch.readable_end);
    auto* set = table.set_of(key);
    const auto* hit = set[0].key == key ? &set[0] : set[1].key == key ? &set[1] : nullptr;
    if (hit) [[likely]] {
      std::memcpy(write, hit->ids.data(), sizeof(hit->ids));
      write += hit->count;
      return;
    }
    encode_ids(piece, scratch);
    if (scratch.ids.size() <= set->ids.size()) table.put(set, key, scratch.ids);
    append_ids(pieces_left);
  };

  for (size_t p = 0; p < batch.pieces.size(); ++p) {
    const std::string_view piece = batch.pieces[p];
    const size_t left = batch.pieces.size() - p - 1;
    if (piece.size() <= memory.narrow.kLength) {
      encode_remembered(memory.narrow, piece, left);
    } else if (piece.size() <= memory.wide.kLength) {
      encode_remembered(memory.wide, piece, left);
    } else {
      encode_ids(piece, scratch);
      append_ids(left);
    }
  }
  out.resize(static_cast<size_t>(write - out.data()));
}

void BpeModel::finish_characters() {
  character_ids_.assign(0x10000, -1);
  for (int32_t id = 0; id < vocabulary_.size(); ++id) {
    const std::string_view text = vocabulary_.text(id);
    if (text.empty() || text.size() > 3 || !vocabulary_.of_model(id)) continue;
    const CodePoint c = decode_character(text.data(), text.data() + text.size());
    if (c.bytes == text.size() && !(c.value == 0xFFFD && c.bytes == 1)) character_ids_[c.value] = id;
  }
  // If no merge joins a character to a ▁ after it, the text is split before each ▁ and the words are cached.
  split_words_ = !ignore_merges && prefix.empty() && suffix.empty() && vocabulary_.find_of_model(kMetaspace);
  for (const Merge& merge : merges_) {
    if (merge.pair == kFree) continue;
    const std::string_view left = vocabulary_.text(static_cast<int32_t>(merge.pair >> 32)),
                           right = vocabulary_.text(static_cast<int32_t>(merge.pair & 0xFFFFFFFF));
    if (right.starts_with(kMetaspace) && !left.ends_with(kMetaspace)) split_words_ = false;
  }
}

void BpeModel::encode(const PieceBatch& batch, Model::Scratch& scratch, std::vector<int32_t>& out) const {
  auto& own = static_cast<Scratch&>(scratch);
  if (!split_words_) return encode_words(batch, own, out);
  own.words.clear();
  for (const std::string_view piece : batch.pieces) {
    size_t begin = 0;
    for (size_t at = piece.find(kMetaspace); at != std::string_view::npos;) {
      if (at > begin) own.words.push_back(piece.substr(begin, at - begin));
      begin = at;
      while (piece.substr(at, kMetaspace.size()) == kMetaspace) at += kMetaspace.size();
      at = piece.find(kMetaspace, at);
    }
    own.words.push_back(piece.substr(begin));
  }
  encode_words({own.words, batch.readable_end}, own, out);
}

void BpeModel::encode_piece(std::string_view piece, Model::Scratch& scratch,
                            std::vector<ModelToken>& out) const {
  auto& own = static_cast<Scratch&>(scratch);
  if (find_token(piece, own)) {
    out.push_back({own.ids[0], 0, piece.size()});
    return;
  }
  // look_up() and merge_long() fill `lengths` only if it is not empty.
  own.lengths.assign(1, 0);
  look_up(piece, own);
  merge_long(own);
  size_t at = 0;
  for (size_t i = 0; i < own.ids.size(); ++i) {
    out.push_back({own.ids[i], at, at + own.lengths[i]});
    at += own.lengths[i];
  }
  own.lengths.clear();
}

bool BpeModel::find_token(std::string_view piece, Scratch& scratch) const {
  if (!ignore_merges) return false;
  std::string_view text = piece;
  if (!characters) {
    scratch.text.clear();
    append_byte_text(scratch.text, piece);
    text = scratch.text;
  }
  const auto id = vocabulary_.find_of_model(text);
  if (id) scratch.ids.assign(1, *id);
  return id.has_value();
}

void BpeModel::encode_ids(std::string_view piece, Scratch& scratch) const {
  if (find_token(piece, scratch)) return;
  look_up(piece, scratch);
  constexpr size_t kShort = 48;
  if (scratch.ids.size() < 2) return;
  if (scratch.ids.size() <= kShort)
    merge_short(scratch.ids);
  else
    merge_long(scratch);
}

void BpeModel::look_up(std::string_view piece, Scratch& scratch) const {
  auto& ids = scratch.ids;
  ids.clear();
  if (piece.size() >= size_t{std::numeric_limits<int32_t>::max()})
    fail(ErrorCode::unsupported, "a piece of text of " + std::to_string(piece.size()) +
                                     " bytes cannot be split into words; the limit is 2 GiB");
  if (characters) return look_up_characters(piece, scratch);
  bool unknown_before = false;
  for (const char c : piece) {
    const int32_t id = byte_ids[static_cast<unsigned char>(c)];
    if (id >= 0) {
      ids.push_back(id);
      unknown_before = false;
    } else if (unknown >= 0 && !(fuse_unknown && unknown_before)) {
      ids.push_back(unknown);
      unknown_before = true;
    }
  }
  if (!scratch.lengths.empty()) scratch.lengths.assign(ids.size(), 1);
}

int32_t BpeModel::character_id(std::string_view character, char32_t value) const {
  if (value < 0x10000) return character_ids_[value];
  return vocabulary_.find_of_model(character).value_or(-1);
}

void BpeModel::look_up_characters(std::string_view piece, Scratch& scratch) const {
  auto& ids = scratch.ids;
  auto& lengths = scratch.lengths;
  const bool measure = !lengths.empty();
  lengths.clear();
  const auto add = [&](int32_t id, size_t bytes) {
    ids.push_back(id);
    if (measure) lengths.push_back(static_cast<uint32_t>(bytes));
  };
  // Bytes of preceding unknown characters that have no id yet.
  size_t unknown_bytes = 0;
  const auto add_unknown = [&] {
    if (unknown_bytes > 0) add(unknown, unknown_bytes);
    unknown_bytes = 0;
  };
  size_t at = 0;
  for_each_character(piece, [&](char32_t value, size_t bytes) {
    std::string_view character = piece.substr(at, bytes);
    const bool first = at == 0;
    at += bytes;
    int32_t id = -1;
    if (prefix.empty() && suffix.empty()) {
      id = character_id(character, value);
    } else {
      scratch.text.clear();
      if (!first) scratch.text += prefix;
      scratch.text += character;
      if (at == piece.size()) scratch.text += suffix;
      character = scratch.text;
      id = vocabulary_.find_of_model(character).value_or(-1);
    }
    if (id >= 0) {
      add_unknown();
      add(id, bytes);
      return;
    }
    const auto has_byte = [&](char c) { return byte_ids[static_cast<unsigned char>(c)] >= 0; };
    if (byte_fallback && std::all_of(character.begin(), character.end(), has_byte)) {
      for (const char c : character) add(byte_ids[static_cast<unsigned char>(c)], 1);
      return;
    }
    if (unknown < 0) return;
    if (!fuse_unknown) add_unknown();
    unknown_bytes += bytes;
  });
  add_unknown();
  if (measure && lengths.empty()) lengths.assign(1, 0);
}

void BpeModel::merge_short(std::vector<int32_t>& ids) const {
  constexpr uint32_t kNone = ~uint32_t{0};
  std::array<uint32_t, 64> rank;
  std::array<int32_t, 64> merged;
  size_t count = ids.size();
  const auto look_up = [&](size_t i) {
    const Merge* merge = find(ids[i], ids[i + 1]);
    rank[i] = merge ? merge->rank : kNone;
    merged[i] = merge ? merge->id : -1;
  };
  for (size_t i = 0; i + 1 < count; ++i) look_up(i);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i)
      if (rank[i] < rank[best]) best = i;
    if (rank[best] == kNone) break;
    ids[best] = merged[best];
    // Removes the symbol at best + 1, and with it one pair.
    for (size_t i = best + 1; i + 1 < count; ++i) ids[i] = ids[i + 1];
    for (size_t i = best + 1; i + 2 < count; ++i) {
      rank[i] = rank[i + 1];
      merged[i] = merged[i + 1];
    }
    --count;
    if (best > 0) look_up(best - 1);
    if (best + 1 < count) look_up(best);
  }
  ids.resize(count);
}

void BpeModel::merge_long(Scratch& scratch) const {
  auto& ids = scratch.ids;
  // Heap entries are rank << 32 | position, the smallest on top.
  auto& heap = scratch.heap;
  const bool measure = !scratch.lengths.empty();
  const auto count = static_cast<int32_t>(ids.size());
  scratch.next.resize(ids.size());
  scratch.previous.resize(ids.size());
  int32_t* const next = scratch.next.data();
  int32_t* const previous = scratch.previous.data();
  constexpr int32_t kGone = -2;
  heap.clear();
  for (int32_t i = 0; i < count; ++i) {
    next[i] = i + 1 < count ? i + 1 : -1;
    previous[i] = i - 1;
    if (i + 1 < count)
      if (const Merge* merge = find(ids[static_cast<size_t>(i)], ids[static_cast<size_t>(i) + 1]))
        heap.push_back(uint64_t{merge->rank} << 32 | static_cast<uint32_t>(i));
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto push = [&](int32_t left) {
    if (left < 0 || next[left] < 0) return;
    const Merge* merge = find(ids[static_cast<size_t>(left)], ids[static_cast<size_t>(next[left])]);
    if (!merge) return;
    heap.push_back(uint64_t{merge->rank} << 32 | static_cast<uint32_t>(left));
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const uint64_t top = heap.back();
    heap.pop_back();
    const auto position = static_cast<int32_t>(top & 0xFFFFFFFF);
    // The symbol was merged into another one, or is the last.
    if (next[position] < 0) continue;
    const int32_t right = next[position];
    const Merge* merge = find(ids[static_cast<size_t>(position)], ids[static_cast<size_t>(right)]);
    // The pair has changed since.
    if (!merge || merge->rank != top >> 32) continue;
    ids[static_cast<size_t>(position)] = merge->id;
    if (measure)
      scratch.lengths[static_cast<size_t>(position)] += scratch.lengths[static_cast<size_t>(right)];
    next[position] = next[right];
    next[right] = kGone;
    if (next[position] >= 0) previous[next[position]] = position;
    push(previous[position]);
    push(position);
  }
  size_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (next[i] == kGone) continue;
    if (measure) scratch.lengths[kept] = scratch.lengths[static_cast<size_t>(i)];
    ids[kept++] = ids[static_cast<size_t>(i)];
  }
  ids.resize(kept);
}

}  // namespace capstan::text
