#include "data/tokenizer/tokenizer.hpp"

#include <xxhash.h>

#include <algorithm>
#include <mutex>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "data/tokenizer/bpe.hpp"
#include "data/tokenizer/byte_level.hpp"
#include "data/tokenizer/load.hpp"
#include "data/tokenizer/write_json.hpp"

namespace capstan::data {

namespace fs = std::filesystem;

namespace {

// The working memory of one call of encode().
struct Scratch {
  PreTokenizer::Scratch pieces;
  BpeModel::Scratch model;
  std::string normalized;
};

std::string hash_text(std::string_view content) {
  const XXH128_hash_t hash = XXH3_128bits(content.data(), content.size());
  std::string result;
  for (const uint64_t word : {hash.high64, hash.low64})
    for (int shift = 60; shift >= 0; shift -= 4) result += "0123456789abcdef"[word >> shift & 15];
  return result;
}

// What of `bytes` is complete, as UTF-8, with U+FFFD for each maximal part of a broken sequence (as Rust and
// the web do it). Returns the number of bytes used; the rest is the beginning of a character that may still
// be completed (all is used if `last`).
size_t append_lossy(std::string& out, std::string_view bytes, bool last) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  size_t i = 0;
  while (i < bytes.size()) {
    const auto at = [&](size_t k) { return static_cast<unsigned char>(bytes[i + k]); };
    const unsigned first = at(0);
    if (first < 0x80) {
      out += bytes[i++];
      continue;
    }
    const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    if (first < 0xC2 || first > 0xF4) {
      out += kReplacement;
      ++i;
      continue;
    }
    size_t good = 1;
    while (good < length && i + good < bytes.size()) {
      const unsigned low = good > 1 ? 0x80 : first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
      const unsigned high = good > 1 ? 0xBF : first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
      if (at(good) < low || at(good) > high) break;
      ++good;
    }
    if (good == length) {
      out += bytes.substr(i, length);
    } else if (i + good == bytes.size() && !last) {
      return i;
    } else {
      out += kReplacement;
    }
    i += good;
  }
  return i;
}

}  // namespace

struct Tokenizer::Parts {
  Vocabulary vocabulary{0};
  std::vector<AddedToken> added;
  TokenFinder plain, normalized;  // tokens found in the text as given, and in the normalised text
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  BpeModel model{0};
  std::vector<std::string_view> bytes;  // by id; into arena, which does not move any more
  std::string arena;
  std::vector<bool> special;
  std::optional<int32_t> bos, eos, eod;
  std::vector<TokenizerFile> files;
  std::string generated;  // the content of a file without a path

  std::mutex mutex;
  std::vector<std::unique_ptr<Scratch>> idle;

  std::unique_ptr<Scratch> take() {
    std::lock_guard lock(mutex);
    if (idle.empty()) return nullptr;
    auto result = std::move(idle.back());
    idle.pop_back();
    return result;
  }
  void give(std::unique_ptr<Scratch> scratch) {
    constexpr size_t kLargeBuffer = 64 << 20;  // a single huge text must not keep its buffers for ever
    if (scratch->normalized.capacity() > kLargeBuffer || scratch->model.heap.capacity() > kLargeBuffer / 8)
      return;
    std::lock_guard lock(mutex);
    idle.push_back(std::move(scratch));
  }

  void build(const TokenizerSpec& spec);
  void add_vocabulary(const TokenizerSpec& spec);
  void add_merges(const TokenizerSpec& spec);
  void add_finders();
};

void Tokenizer::Parts::add_vocabulary(const TokenizerSpec& spec) {
  // Ids are dense, so the number of distinct tokens is one more than the highest id.
  const auto at = [&](std::string_view place, std::string_view token) {
    return std::string(place) + "[" + capstan::quoted(token) + "]";
  };
  std::vector<const AddedToken*> fresh;
  {
    int64_t highest = -1;
    for (const auto& [token, id] : spec.vocab) highest = std::max<int64_t>(highest, id);
    for (const AddedToken& token : spec.added) highest = std::max<int64_t>(highest, token.id);
    const auto most = static_cast<int64_t>(spec.vocab.size() + spec.added.size());
    if (highest >= most) {
      for (const auto& [token, id] : spec.vocab)
        if (id == highest)
          fail(ErrorCode::format, at(spec.vocab_place, token) + ": the id " + std::to_string(id) +
                                      " leaves holes: there are only " + std::to_string(most) + " tokens");
      fail(ErrorCode::format, spec.added_place + ": the id " + std::to_string(highest) +
                                  " leaves holes: there are only " + std::to_string(most) + " tokens");
    }
    vocabulary = Vocabulary(highest + 1);
  }
  const auto insert = [&](std::string_view token, int32_t id, std::string_view place) {
    if (token.empty())
      fail(ErrorCode::format, std::string(place) + ": the token of id " + std::to_string(id) + " is empty");
    if (token.size() > (1 << 20))
      fail(ErrorCode::format,
           std::string(place) + ": the token of id " + std::to_string(id) + " has more than 1 MiB");
    switch (vocabulary.add(token, id)) {
      case Vocabulary::Added::yes:
        break;
      case Vocabulary::Added::id_taken:
        fail(ErrorCode::format, at(place, token) + ": the id " + std::to_string(id) + " belongs to " +
                                    capstan::quoted(vocabulary.text(id)) + " already");
      case Vocabulary::Added::text_taken:
        fail(ErrorCode::format, at(place, token) + ": the token is there twice");
    }
  };
  for (const auto& [token, id] : spec.vocab) insert(token, id, spec.vocab_place);

  std::vector<bool> is_added(static_cast<size_t>(vocabulary.size()));
  std::vector<bool> by_content(
      static_cast<size_t>(vocabulary.size()));  // not in the model: decoded as it is written
  for (const AddedToken& token : spec.added) {
    if (token.content.empty()) continue;
    if (token.content.size() > TokenFinder::kMaxBytes)
      fail(ErrorCode::unsupported, at(spec.added_place, token.content.substr(0, 40) + "…") +
                                       ": has more than " + std::to_string(TokenFinder::kMaxBytes) +
                                       " bytes");
    const auto known = vocabulary.find(token.content);
    if (known && *known != token.id)
      fail(ErrorCode::format, at(spec.added_place, token.content) + ": the id " + std::to_string(token.id) +
                                  " is not that of the vocabulary, " + std::to_string(*known));
    if (!known) {
      insert(token.content, token.id, spec.added_place);
      by_content[static_cast<size_t>(token.id)] = true;
    } else if (is_added[static_cast<size_t>(token.id)]) {
      fail(ErrorCode::format, at(spec.added_place, token.content) + ": the token is there twice");
    }
    is_added[static_cast<size_t>(token.id)] = true;
    const bool blank = std::all_of(token.content.begin(), token.content.end(),
                                   [](char c) { return c == ' ' || (c >= 9 && c <= 13); });
    if (blank && (token.lstrip || token.rstrip))
      fail(ErrorCode::unsupported,
           at(spec.added_place, token.content) + ": a token of white space cannot take white space along");
    added.push_back(token);
  }
  if (vocabulary.size() == 0) fail(ErrorCode::format, spec.vocab_place + ": there are no tokens");
  if (const int64_t hole = vocabulary.first_hole(); hole < vocabulary.size())
    fail(ErrorCode::format, spec.vocab_place + ": no token has the id " + std::to_string(hole) +
                                ", but ids go up to " + std::to_string(vocabulary.size() - 1));

  // What each id stands for.
  std::vector<size_t> ends(static_cast<size_t>(vocabulary.size()));
  for (size_t id = 0; id < ends.size(); ++id) {
    const std::string_view token = vocabulary.text(static_cast<int32_t>(id));
    if (by_content[id] || !append_text_bytes(arena, token)) arena += token;
    ends[id] = arena.size();
  }
  arena.shrink_to_fit();
  bytes.resize(ends.size());
  for (size_t id = 0; id < ends.size(); ++id) {
    const size_t begin = id > 0 ? ends[id - 1] : 0;
    bytes[id] = std::string_view(arena).substr(begin, ends[id] - begin);
  }
  special.resize(ends.size());
  for (const AddedToken& token : added)
    if (token.special) special[static_cast<size_t>(token.id)] = true;
}

void Tokenizer::Parts::add_merges(const TokenizerSpec& spec) {
  model = BpeModel(static_cast<int64_t>(spec.merges.size()));
  model.ignore_merges = spec.ignore_merges;
  model.fuse_unknown = spec.fuse_unknown;
  bool complete = true;
  std::string text;
  for (int b = 0; b < 256; ++b) {
    text.clear();
    const char byte = static_cast<char>(b);
    append_byte_text(text, {&byte, 1});
    const auto id = vocabulary.find(text);
    model.byte_ids[static_cast<size_t>(b)] = id.value_or(-1);
    complete = complete && id;
  }
  if (spec.unknown && !spec.unknown->empty()) {
    const auto id = vocabulary.find(*spec.unknown);
    if (!id && !complete)
      fail(ErrorCode::format,
           spec.vocab_place + ": the unknown token " + capstan::quoted(*spec.unknown) + " is not there");
    model.unknown = id.value_or(-1);
  }
  if (spec.byte_fallback && !complete)
    fail(ErrorCode::unsupported,
         spec.vocab_place + ": byte_fallback is not supported in a byte-level tokenizer that lacks bytes");

  std::string joined;
  for (size_t i = 0; i < spec.merges.size(); ++i) {
    const auto& [left, right] = spec.merges[i];
    if (left.empty() && right.empty() && spec.merges_are_lines) continue;
    joined.assign(left).append(right);
    const auto left_id = vocabulary.find(left), right_id = vocabulary.find(right),
               id = vocabulary.find(joined);
    if (!left_id || !right_id || !id) {
      const std::string place = spec.merges_are_lines ? spec.merges_place + ":" + std::to_string(i + 1)
                                                      : spec.merges_place + "[" + std::to_string(i) + "]";
      fail(ErrorCode::format, place + ": " +
                                  capstan::quoted(!left_id    ? left
                                                  : !right_id ? right
                                                              : joined) +
                                  " is not in the vocabulary");
    }
    model.add_merge(*left_id, *right_id, static_cast<uint32_t>(i), *id);
  }
}

void Tokenizer::Parts::add_finders() {
  std::string buffer;
  for (size_t i = 0; i < added.size(); ++i) {
    if (added[i].normalized)
      normalized.add(normalizer.apply(added[i].content, buffer), static_cast<int32_t>(i));
    else
      plain.add(added[i].content, static_cast<int32_t>(i));
  }
}

void Tokenizer::Parts::build(const TokenizerSpec& spec) {
  normalizer = spec.normalizer;
  pre_tokenizer = spec.pre_tokenizer;
  add_vocabulary(spec);
  add_merges(spec);
  add_finders();
  const auto named = [&](const std::optional<std::string>& name) {
    return name ? vocabulary.find(*name) : std::nullopt;
  };
  bos = named(spec.bos);
  eos = named(spec.eos);
  eod = vocabulary.find("<|endoftext|>");
  if (!eod) eod = eos;
}

Tokenizer::Tokenizer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Tokenizer::~Tokenizer() = default;

std::shared_ptr<const Tokenizer> Tokenizer::make(LoadedSpec loaded) {
  auto parts = std::make_unique<Parts>();
  parts->build(loaded.spec);
  return std::shared_ptr<const Tokenizer>(new Tokenizer(std::move(parts)));
}

std::shared_ptr<const Tokenizer> Tokenizer::from_json(std::string text, const std::string& name) {
  std::string copy = text;
  auto result = make(read_tokenizer_json(std::move(text), name));
  result->parts_->files.push_back({"tokenizer.json", {}, copy.size(), hash_text(copy)});
  result->parts_->generated = std::move(copy);
  return result;
}

std::shared_ptr<const Tokenizer> Tokenizer::load(const fs::path& path) {
  std::error_code ignored;
  if (path == "bytes" && !fs::exists(path, ignored)) return byte_tokenizer();
  std::vector<TokenizerFile> files;
  const auto read = [&](const fs::path& file) {
    std::string content = read_file(file, JsonFile::kMaxBytes);
    files.push_back({file.filename().string(), fs::absolute(file), content.size(), hash_text(content)});
    return content;
  };
  if (!fs::is_directory(path, ignored)) {
    auto result = make(read_tokenizer_json(read(path), path.string()));
    files.back().name = "tokenizer.json";
    result->parts_->files = std::move(files);
    return result;
  }
  const auto exists = [&](const char* name) { return fs::is_regular_file(path / name, ignored); };
  const fs::path config = path / "tokenizer_config.json";
  LoadedSpec loaded;
  if (exists("tokenizer.json")) {
    loaded = read_tokenizer_json(read(path / "tokenizer.json"), (path / "tokenizer.json").string());
    if (exists("tokenizer_config.json"))
      read_special_names(JsonFile(read(config), config.string()), loaded.spec);
  } else if (exists("vocab.json") && exists("merges.txt")) {
    std::string vocab = read(path / "vocab.json"), merges = read(path / "merges.txt");
    std::string settings = exists("tokenizer_config.json") ? read(config) : std::string();
    loaded = read_vocab_and_merges(std::move(vocab), (path / "vocab.json").string(), std::move(merges),
                                   (path / "merges.txt").string(), std::move(settings), config.string());
  } else {
    fail(ErrorCode::not_found,
         "`" + path.string() + "` has neither tokenizer.json nor vocab.json with merges.txt");
  }
  for (const char* name : {"special_tokens_map.json", "chat_template.jinja"})
    if (exists(name)) read(path / name);
  auto result = make(std::move(loaded));
  result->parts_->files = std::move(files);
  return result;
}

std::shared_ptr<const Tokenizer> Tokenizer::load_pair(const fs::path& vocab, const fs::path& merges,
                                                      PreTokenizerChoice pre_tokenizer) {
  const LoadedSpec loaded = read_vocab_and_merges(read_file(vocab, JsonFile::kMaxBytes), vocab.string(),
                                                  read_file(merges, JsonFile::kMaxBytes), merges.string(),
                                                  std::string(), std::string());
  Parts().build(loaded.spec);  // what is wrong is said with the names and lines of these files
  TokenizerText text;
  text.pre_tokenizer = pre_tokenizer;
  text.ignore_merges = pre_tokenizer == PreTokenizerChoice::llama3;
  text.vocab = loaded.spec.vocab;
  for (const auto& merge : loaded.spec.merges)
    if (!merge.first.empty()) text.merges.push_back(merge);
  for (const AddedToken& added : loaded.spec.added) text.special_ids.push_back(added.id);
  return from_json(tokenizer_json(std::move(text)), vocab.string());
}

void Tokenizer::encode(std::string_view text, std::vector<int32_t>& out, const EncodeOptions& options) const {
  Parts& parts = *parts_;
  auto scratch = parts.take();
  if (!scratch) scratch = std::make_unique<Scratch>();
  const auto sink = [&](const PieceBatch& batch) {
    parts.model.encode(batch, parts.vocabulary, scratch->model, out);
  };
  const auto encode_text = [&](std::string_view part, int32_t id) {
    if (id >= 0)
      out.push_back(id);
    else
      parts.pre_tokenizer.run(part, scratch->pieces, sink);
  };
  const auto encode_part = [&](std::string_view part, int32_t id) {
    if (id >= 0) {
      out.push_back(id);
      return;
    }
    part = parts.normalizer.apply(part, scratch->normalized);
    if (parts.normalized.empty())
      encode_text(part, -1);
    else
      parts.normalized.split(part, parts.added, options.specials_as_text, encode_text);
  };
  if (parts.plain.empty())
    encode_part(text, -1);
  else
    parts.plain.split(text, parts.added, options.specials_as_text, encode_part);
  parts.give(std::move(scratch));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::vector<int32_t> result;
  encode(text, result, options);
  return result;
}

std::string_view Tokenizer::bytes_of(int32_t id) const {
  return id >= 0 && id < vocab_size() ? parts_->bytes[static_cast<size_t>(id)] : std::string_view();
}

std::string Tokenizer::decode_bytes(std::span<const int32_t> ids, bool skip_special) const {
  std::string result;
  for (const int32_t id : ids)
    if (!(skip_special && is_special(id))) result += bytes_of(id);
  return result;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  const std::string raw = decode_bytes(ids, skip_special);
  std::string result;
  result.reserve(raw.size());
  append_lossy(result, raw, true);
  return result;
}

int64_t Tokenizer::vocab_size() const {
  return static_cast<int64_t>(parts_->bytes.size());
}
std::optional<int32_t> Tokenizer::id_of(std::string_view token) const {
  return parts_->vocabulary.find(token);
}
std::string_view Tokenizer::token_of(int32_t id) const {
  return parts_->vocabulary.text(id);
}
bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && parts_->special[static_cast<size_t>(id)];
}
std::optional<int32_t> Tokenizer::eod() const {
  return parts_->eod;
}
std::optional<int32_t> Tokenizer::bos() const {
  return parts_->bos;
}
std::optional<int32_t> Tokenizer::eos() const {
  return parts_->eos;
}
const std::vector<TokenizerFile>& Tokenizer::files() const {
  return parts_->files;
}

std::string Tokenizer::content_hash() const {
  std::string all;
  for (const TokenizerFile& file : parts_->files) all += file.name + '\0' + file.hash + '\0';
  return hash_text(all);
}

void Tokenizer::write_to(const fs::path& directory) const {
  for (const TokenizerFile& file : parts_->files) {
    const std::string content =
        file.path.empty() ? parts_->generated : read_file(file.path, JsonFile::kMaxBytes);
    if (hash_text(content) != file.hash)
      fail(ErrorCode::failed, "`" + file.path.string() + "` has changed since the tokenizer was read");
    write_file_durably(directory / file.name, content);
  }
}

std::string StreamDecoder::push(int32_t id) {
  if (skip_special_ && tokenizer_->is_special(id)) return {};
  pending_ += tokenizer_->bytes_of(id);
  std::string result;
  pending_.erase(0, append_lossy(result, pending_, false));
  return result;
}

std::string StreamDecoder::finish() {
  std::string result;
  append_lossy(result, pending_, true);
  pending_.clear();
  return result;
}

std::shared_ptr<const Tokenizer> byte_tokenizer() {
  static const std::shared_ptr<const Tokenizer> tokenizer = [] {
    std::string json =
        "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[{\"id\":256,\"content\":"
        "\"<|endoftext|>\","
        "\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}],"
        "\"normalizer\":null,"
        "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_"
        "regex\":false},"
        "\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_"
        "offsets\":true,\"use_regex\":false},"
        "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":null,"
        "\"end_of_word_suffix\":null,"
        "\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":false,\"vocab\":{";
    for (int b = 0; b < 256; ++b) {
      const char byte = static_cast<char>(b);
      std::string token;
      append_byte_text(token, {&byte, 1});
      json += capstan::quoted(token) + ":" + std::to_string(b) + ",";
    }
    json += "\"<|endoftext|>\":256},\"merges\":[]}}";
    return Tokenizer::from_json(std::move(json), "the byte tokenizer");
  }();
  return tokenizer;
}

}  // namespace capstan::data
