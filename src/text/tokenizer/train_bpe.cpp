#include "text/tokenizer/train_bpe.hpp"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <queue>
#include <unordered_map>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "text/tokenizer/byte_level.hpp"
#include "text/tokenizer/normalizer.hpp"
#include "text/tokenizer/pre_tokenizer.hpp"
#include "text/tokenizer/write_json.hpp"

namespace capstan::text {

namespace {

// Counts how often each piece of text occurs. Each thread has one; they are joined at the end.
class WordCounts {
 public:
  WordCounts() : slots_(1 << 14, -1) {}

  void add(std::string_view word, int64_t times) {
    if (words_.size() * 2 >= slots_.size()) grow();
    const uint64_t hash = XXH3_64bits(word.data(), word.size());
    uint64_t i = hash & (slots_.size() - 1);
    for (; slots_[i] >= 0; i = (i + 1) & (slots_.size() - 1)) {
      Word& here = words_[static_cast<size_t>(slots_[i])];
      if (here.hash == hash && text(here) == word) {
        here.count += times;
        return;
      }
    }
    slots_[i] = static_cast<int32_t>(words_.size());
    words_.push_back({hash, arena_.size(), static_cast<uint32_t>(word.size()), times});
    arena_ += word;
  }
  size_t size() const { return words_.size(); }
  std::string_view word(size_t i) const { return text(words_[i]); }
  int64_t count(size_t i) const { return words_[i].count; }

 private:
  struct Word {
    uint64_t hash, offset;
    uint32_t bytes;
    int64_t count;
  };
  std::string_view text(const Word& word) const { return {arena_.data() + word.offset, word.bytes}; }
  void grow() {
    slots_.assign(slots_.size() * 2, -1);
    for (size_t w = 0; w < words_.size(); ++w) {
      uint64_t i = words_[w].hash & (slots_.size() - 1);
      while (slots_[i] >= 0) i = (i + 1) & (slots_.size() - 1);
      slots_[i] = static_cast<int32_t>(w);
    }
  }
  std::string arena_;
  std::vector<Word> words_;
  // Hash table of indices into words_, or -1; at most half full.
  std::vector<int32_t> slots_;
};

// The merge loop. Words are sequences of ids in one array, each shrinking in place as its pairs are merged. A
// heap holds (count, pair, words with it); an entry is valid only if its count still equals the pair's. As in
// Hugging Face's trainer, a pair may have several entries, each with its own words, and the count of a pair
// is not reduced when it is merged. This affects rare vocabularies (a token that two merges create), so it is
// reproduced.
class Merger {
 public:
  Merger(const TrainOptions& options, const WordCounts& words);
  void run(int64_t vocab_size, int64_t min_frequency, const TrainProgressSink& progress);
  std::string json(const TrainOptions& options) const;

 private:
  // A pair is left << 32 | right.
  using Pair = uint64_t;
  struct Entry {
    int64_t count;
    Pair pair;
    // Index into word_lists_.
    int32_t words;
    // The heap's top has the highest count and, among equal counts, the smallest pair.
    bool operator<(const Entry& other) const {
      return count != other.count ? count < other.count : pair > other.pair;
    }
  };
  struct PairState {
    int64_t count = 0;
    // List of the words in which the current merge created the pair.
    int32_t fresh = -1;
  };

  static Pair pair_of(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }
  int32_t token(const std::string& text);
  void change(Pair pair, int64_t by, uint32_t word);
  void push_fresh();
  void merge_word(uint32_t word, int32_t left, int32_t right, int32_t id);

  std::vector<std::string> tokens_;
  std::unordered_map<std::string, int32_t> ids_;
  std::vector<int32_t> symbols_;
  // Begin, length in symbols, and count of each word.
  std::vector<uint64_t> begins_;
  std::vector<uint32_t> lengths_;
  std::vector<int64_t> counts_;

  // Pairs in an open-addressing table, from which none is removed.
  std::vector<Pair> keys_;
  std::vector<PairState> states_;
  size_t pairs_ = 0;
  PairState& state(Pair pair);
  void grow_pairs();

  std::vector<std::vector<uint32_t>> word_lists_;
  std::vector<int32_t> free_lists_;
  // Pairs with a new list of words.
  std::vector<Pair> touched_;
  std::priority_queue<Entry> heap_;
  // Merges in the order of their rank.
  std::vector<Pair> merges_;
};

constexpr uint64_t kNoPair = ~uint64_t{0};

int32_t Merger::token(const std::string& text) {
  const auto [entry, is_new] = ids_.emplace(text, static_cast<int32_t>(tokens_.size()));
  if (is_new) tokens_.push_back(text);
  return entry->second;
}

Merger::PairState& Merger::state(Pair pair) {
  if (pairs_ * 2 >= keys_.size()) grow_pairs();
  const auto shift = 64 - std::countr_zero(keys_.size());
  uint64_t i = (pair * 0x9E3779B97F4A7C15u) >> shift;
  while (keys_[i] != pair) {
    if (keys_[i] == kNoPair) {
      keys_[i] = pair;
      ++pairs_;
      break;
    }
    i = (i + 1) & (keys_.size() - 1);
  }
  return states_[i];
}

void Merger::grow_pairs() {
  std::vector<Pair> keys(std::max<size_t>(1 << 16, keys_.size() * 2), kNoPair);
  std::vector<PairState> states(keys.size());
  const auto shift = 64 - std::countr_zero(keys.size());
  for (size_t old = 0; old < keys_.size(); ++old) {
    if (keys_[old] == kNoPair) continue;
    uint64_t i = (keys_[old] * 0x9E3779B97F4A7C15u) >> shift;
    while (keys[i] != kNoPair) i = (i + 1) & (keys.size() - 1);
    keys[i] = keys_[old];
    states[i] = states_[old];
  }
  keys_ = std::move(keys);
  states_ = std::move(states);
}

// Adds to the count of a pair. A word that gained the pair is recorded once, because all changes of one word
// are consecutive.
void Merger::change(Pair pair, int64_t by, uint32_t word) {
  PairState& pair_state = state(pair);
  pair_state.count += by;
  if (by <= 0) return;
  if (pair_state.fresh < 0) {
    if (free_lists_.empty()) {
      pair_state.fresh = static_cast<int32_t>(word_lists_.size());
      word_lists_.emplace_back();
    } else {
      pair_state.fresh = free_lists_.back();
      free_lists_.pop_back();
    }
    touched_.push_back(pair);
  }
  auto& list = word_lists_[static_cast<size_t>(pair_state.fresh)];
  if (list.empty() || list.back() != word) list.push_back(word);
}

void Merger::push_fresh() {
  for (const Pair pair : touched_) {
    PairState& pair_state = state(pair);
    if (pair_state.count > 0) {
      heap_.push({pair_state.count, pair, pair_state.fresh});
    } else {
      word_lists_[static_cast<size_t>(pair_state.fresh)].clear();
      free_lists_.push_back(pair_state.fresh);
    }
    pair_state.fresh = -1;
  }
  touched_.clear();
}

Merger::Merger(const TrainOptions& options, const WordCounts& words) {
  for (const auto& special : options.special_tokens) token(special);
  // The alphabet, in the order of its characters.
  std::array<uint16_t, 256> characters = byte_to_character();
  std::sort(characters.begin(), characters.end());
  for (const uint16_t character : characters) token(byte_text(character_to_byte()[character]));
  std::array<int32_t, 256> byte_ids;
  for (int b = 0; b < 256; ++b) byte_ids[static_cast<size_t>(b)] = ids_.at(byte_text(b));
  size_t bytes = 0;
  for (size_t w = 0; w < words.size(); ++w) bytes += words.word(w).size();
  symbols_.reserve(bytes);
  for (size_t w = 0; w < words.size(); ++w) {
    begins_.push_back(symbols_.size());
    for (const char c : words.word(w)) symbols_.push_back(byte_ids[static_cast<unsigned char>(c)]);
    lengths_.push_back(static_cast<uint32_t>(words.word(w).size()));
    counts_.push_back(words.count(w));
  }
  for (size_t w = 0; w < begins_.size(); ++w)
    for (size_t i = begins_[w]; i + 1 < begins_[w] + lengths_[w]; ++i)
      change(pair_of(symbols_[i], symbols_[i + 1]), counts_[w], static_cast<uint32_t>(w));
  push_fresh();
}

void Merger::merge_word(uint32_t word, int32_t left, int32_t right, int32_t id) {
  int32_t* const symbols = symbols_.data() + begins_[word];
  const uint32_t length = lengths_[word];
  const int64_t count = counts_[word];
  uint32_t write = 0;
  for (uint32_t read = 0; read < length; ++read) {
    if (symbols[read] != left || read + 1 == length || symbols[read + 1] != right) {
      symbols[write++] = symbols[read];
      continue;
    }
    if (write > 0) {
      const int32_t before = symbols[write - 1];
      change(pair_of(before, left), -count, word);
      change(pair_of(before, id), count, word);
    }
    if (read + 2 < length) {
      const int32_t after = symbols[read + 2];
      change(pair_of(right, after), -count, word);
      change(pair_of(id, after), count, word);
    }
    symbols[write++] = id;
    ++read;
  }
  lengths_[word] = write;
}

void Merger::run(int64_t vocab_size, int64_t min_frequency, const TrainProgressSink& progress) {
  int64_t reported = 0;
  while (static_cast<int64_t>(tokens_.size()) < vocab_size && !heap_.empty()) {
    Entry top = heap_.top();
    heap_.pop();
    const int64_t now = state(top.pair).count;
    if (top.count != now) {
      // An entry whose count fell to 0 sinks to the bottom of the heap, where it ends the loop.
      top.count = now;
      heap_.push(top);
      continue;
    }
    if (top.count < 1 || top.count < min_frequency) break;
    const auto left = static_cast<int32_t>(top.pair >> 32),
               right = static_cast<int32_t>(top.pair & 0xFFFFFFFF);
    const int32_t id = token(tokens_[static_cast<size_t>(left)] + tokens_[static_cast<size_t>(right)]);
    merges_.push_back(top.pair);
    const std::vector<uint32_t> list = std::move(word_lists_[static_cast<size_t>(top.words)]);
    word_lists_[static_cast<size_t>(top.words)].clear();
    free_lists_.push_back(top.words);
    for (const uint32_t word : list) merge_word(word, left, right, id);
    push_fresh();
    const auto size = static_cast<int64_t>(tokens_.size());
    if (progress && size - reported >= 64) progress({"merging", reported = size, vocab_size});
  }
  if (progress)
    progress({"merging", static_cast<int64_t>(tokens_.size()), static_cast<int64_t>(tokens_.size())});
}

std::string Merger::json(const TrainOptions& options) const {
  TokenizerText text;
  text.pre_tokenizer = options.pre_tokenizer;
  text.add_prefix_space = options.add_prefix_space;
  for (const auto& special : options.special_tokens) text.special_ids.push_back(ids_.at(special));
  for (size_t id = 0; id < tokens_.size(); ++id)
    text.vocab.emplace_back(tokens_[id], static_cast<int32_t>(id));
  // A pair that was merged twice counts at its later rank.
  std::unordered_map<Pair, size_t> last;
  for (size_t rank = 0; rank < merges_.size(); ++rank) last[merges_[rank]] = rank;
  for (size_t rank = 0; rank < merges_.size(); ++rank)
    if (last[merges_[rank]] == rank)
      text.merges.emplace_back(tokens_[merges_[rank] >> 32], tokens_[merges_[rank] & 0xFFFFFFFF]);
  return tokenizer_json(std::move(text));
}

// Splits documents into words on all threads.
class WordCounter {
 public:
  WordCounter(const TrainOptions& options, ThreadPool& pool)
      : pool_(pool), workers_(static_cast<size_t>(pool.size())) {
    using Kind = PreTokenizerStep::Kind;
    PreTokenizerStep step;
    step.kind = options.pre_tokenizer == PreTokenizerChoice::gpt2     ? Kind::gpt2
                : options.pre_tokenizer == PreTokenizerChoice::llama3 ? Kind::llama3
                                                                      : Kind::qwen2;
    normalizer_.nfc = options.pre_tokenizer == PreTokenizerChoice::qwen2;
    if (options.add_prefix_space && step.kind == Kind::gpt2) {
      step.add_prefix_space = true;
    } else if (options.add_prefix_space) {
      // The space is inserted before each piece that the pattern split off.
      pre_tokenizer_.steps.push_back(step);
      step = {};
      step.add_prefix_space = true;
    }
    pre_tokenizer_.steps.push_back(step);
  }

  void count(std::span<const std::string_view> documents) {
    pool_.parallel_for(static_cast<int64_t>(documents.size()), [&](int64_t tile, int index) {
      Worker& worker = workers_[static_cast<size_t>(index)];
      const std::string_view text =
          normalizer_.apply(documents[static_cast<size_t>(tile)], worker.normalized);
      pre_tokenizer_.run(text, worker.scratch, [&](const PieceBatch& batch) {
        for (const std::string_view piece : batch.pieces) worker.words.add(piece, 1);
      });
    });
  }

  // All words, in the order of their bytes.
  WordCounts finish() {
    WordCounts joined;
    for (Worker& worker : workers_) {
      for (size_t w = 0; w < worker.words.size(); ++w)
        joined.add(worker.words.word(w), worker.words.count(w));
      worker.words = WordCounts();
    }
    std::vector<uint32_t> order(joined.size());
    for (size_t w = 0; w < order.size(); ++w) order[w] = static_cast<uint32_t>(w);
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return joined.word(a) < joined.word(b); });
    WordCounts sorted;
    for (const uint32_t w : order) sorted.add(joined.word(w), joined.count(w));
    return sorted;
  }

 private:
  struct Worker {
    WordCounts words;
    PreTokenizer::Scratch scratch;
    std::string normalized;
  };
  ThreadPool& pool_;
  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  std::vector<Worker> workers_;
};

void check(const TrainOptions& options) {
  std::vector<std::string> names = options.special_tokens;
  std::sort(names.begin(), names.end());
  if (std::adjacent_find(names.begin(), names.end()) != names.end())
    fail(ErrorCode::usage, "a special token is named twice");
  for (const auto& name : names)
    if (name.empty() || name.size() > 1024) fail(ErrorCode::usage, "a special token has 1 to 1024 bytes");
  const auto least = static_cast<int64_t>(names.size()) + 256;
  if (options.vocab_size < least)
    fail(ErrorCode::usage, "a vocabulary of " + std::to_string(options.vocab_size) + " entries is too small",
         "at least " + std::to_string(least) + ": 256 bytes and " + std::to_string(names.size()) +
             " special tokens");
  if (options.vocab_size > (int64_t{1} << 24))
    fail(ErrorCode::usage, "a vocabulary of " + std::to_string(options.vocab_size) +
                               " entries is too large; the limit is 2^24");
  if (options.min_frequency < 0) fail(ErrorCode::usage, "the minimum frequency of a pair is negative");
}

std::string learn(WordCounter& counter, const TrainOptions& options, const TrainProgressSink& progress) {
  const WordCounts words = counter.finish();
  if (progress)
    progress({"counting", static_cast<int64_t>(words.size()), static_cast<int64_t>(words.size())});
  Merger merger(options, words);
  merger.run(options.vocab_size, options.min_frequency, progress);
  return merger.json(options);
}

// The first offset from `offset` on that no piece of any pattern crosses: between an ASCII letter or digit
// and a newline.
size_t split_offset(std::string_view text, size_t offset) {
  for (size_t i = offset; i < text.size(); ++i) {
    const char before = text[i - 1];
    const bool alphanumeric = (before >= 'a' && before <= 'z') || (before >= 'A' && before <= 'Z') ||
                              (before >= '0' && before <= '9');
    if (text[i] == '\n' && alphanumeric) return i;
  }
  return text.size();
}

}  // namespace

std::string train_bpe(DocumentSource documents, const TrainOptions& options, ThreadPool& pool,
                      const TrainProgressSink& progress) {
  check(options);
  WordCounter counter(options, pool);
  constexpr size_t kBatchBytes = 8 << 20;
  int64_t bytes = 0;
  for (bool more = true; more;) {
    std::vector<std::string> batch;
    size_t batch_bytes = 0;
    while (batch_bytes < kBatchBytes) {
      std::string document;
      more = documents(document);
      if (!more) break;
      batch_bytes += document.size() + 64;
      bytes += static_cast<int64_t>(document.size());
      batch.push_back(std::move(document));
    }
    const std::vector<std::string_view> views(batch.begin(), batch.end());
    counter.count(views);
    if (progress) progress({"reading", bytes, 0});
  }
  return learn(counter, options, progress);
}

static std::string_view text_of(const MappedFile& map) {
  return {reinterpret_cast<const char*>(map.bytes().data()), map.bytes().size()};
}

std::string train_bpe(std::span<const std::filesystem::path> files, const TrainOptions& options,
                      ThreadPool& pool, const TrainProgressSink& progress) {
  check(options);
  WordCounter counter(options, pool);
  std::vector<MappedFile> maps;
  int64_t total = 0, done = 0;
  for (const auto& file : files) {
    maps.emplace_back(file);
    refuse_lfs_pointer(text_of(maps.back()), file.string());
    maps.back().advise_sequential();
    total += static_cast<int64_t>(maps.back().bytes().size());
  }
  constexpr size_t kChunk = 1 << 20;
  std::vector<std::string_view> chunks;
  size_t chunk_bytes = 0;
  const auto flush = [&] {
    counter.count(chunks);
    done += static_cast<int64_t>(chunk_bytes);
    if (progress) progress({"reading", done, total});
    chunks.clear();
    chunk_bytes = 0;
  };
  for (const MappedFile& map : maps) {
    const std::string_view text = text_of(map);
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = text.size() - begin > kChunk ? split_offset(text, begin + kChunk) : text.size();
      chunks.push_back(text.substr(begin, end - begin));
      chunk_bytes += end - begin;
      begin = end;
      if (chunk_bytes >= static_cast<size_t>(pool.size()) * 4 * kChunk) flush();
    }
  }
  flush();
  return learn(counter, options, progress);
}

}  // namespace capstan::text
