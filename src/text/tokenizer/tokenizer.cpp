#include "text/tokenizer/tokenizer.hpp"

#include <xxhash.h>

#include <algorithm>
#include <functional>
#include <mutex>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/missing.hpp"
#include "base/text.hpp"
#include "text/tokenizer/byte_level.hpp"
#include "text/tokenizer/load.hpp"
#include "text/tokenizer/pipeline.hpp"
#include "text/tokenizer/utf8_lossy.hpp"
#include "text/tokenizer/write_json.hpp"

namespace capstan::text {

namespace fs = std::filesystem;

std::string hash_text(std::string_view content) {
  const XXH128_hash_t hash = XXH3_128bits(content.data(), content.size());
  return hex(hash.high64) + hex(hash.low64);
}

std::unique_ptr<Tokenizer::Pipeline::Scratch> Tokenizer::Pipeline::take() {
  {
    std::lock_guard lock(mutex);
    if (!idle.empty()) {
      auto result = std::move(idle.back());
      idle.pop_back();
      return result;
    }
  }
  auto result = std::make_unique<Scratch>();
  result->model = model->make_scratch();
  return result;
}

void Tokenizer::Pipeline::put_back(std::unique_ptr<Scratch> scratch) {
  // Buffers that a very long text has enlarged are released.
  constexpr size_t kLargeBuffer = 64 << 20;
  if (scratch->normalized.capacity() > kLargeBuffer || scratch->model->bytes() > kLargeBuffer) return;
  std::lock_guard lock(mutex);
  idle.push_back(std::move(scratch));
}

Tokenizer::Tokenizer(std::unique_ptr<Pipeline> pipeline) : pipeline_(std::move(pipeline)) {}
Tokenizer::~Tokenizer() = default;

std::shared_ptr<const Tokenizer> Tokenizer::make(LoadedSpec loaded) {
  auto pipeline = std::make_unique<Pipeline>();
  pipeline->build(loaded.spec);
  return std::shared_ptr<const Tokenizer>(new Tokenizer(std::move(pipeline)));
}

namespace {

TokenizerFile generated(std::string name, std::string text) {
  TokenizerFile file{std::move(name), {}, text.size(), hash_text(text), {}};
  file.text = std::move(text);
  return file;
}

}  // namespace

std::shared_ptr<const Tokenizer> Tokenizer::from_json(std::string text, const std::string& name) {
  auto result = make(read_tokenizer_json(text, name));
  result->pipeline_->files.push_back(generated("tokenizer.json", std::move(text)));
  return result;
}

std::shared_ptr<const Tokenizer> Tokenizer::from_sentencepiece(std::string model, const std::string& name) {
  auto result = make(read_sentencepiece(model, name, {}, {}));
  result->pipeline_->files.push_back(generated("tokenizer.model", std::move(model)));
  return result;
}

// The files of a directory, or of another container such as a GGUF file.
struct Tokenizer::FileSource {
  // Precedes a file's name in messages.
  std::string location;
  std::function<bool(const char* name)> exists;
  std::function<std::string(const char* name)> read;
};

namespace {

// Reads a file that a user named, and refuses files of failed downloads.
std::string read_named(const fs::path& file) {
  std::string content = read_file(file, JsonFile::kMaxBytes);
  refuse_placeholder(content, file.string());
  return content;
}

// Help for a file that is no tokenizer, which names a tokenizer file beside it if there is one.
std::string tokenizer_beside(const fs::path& path) {
  std::error_code unknown;
  for (const char* name : {"tokenizer.json", "tokenizer.model"})
    if (const fs::path other = path.parent_path() / name;
        path.filename() != name && fs::exists(other, unknown))
      return "did you mean `" + other.string() + "`?";
  return "a tokenizer.json, a SentencePiece .model, or a directory with one";
}

// Parses the content of a tokenizer.json. If it does not look like one, the message of an error begins with
// that.
LoadedSpec read_tokenizer_file(std::string content, const fs::path& path, bool json) {
  const bool looks_like_one =
      json ? content.find("\"model\"") != std::string::npos && content.find("\"vocab\"") != std::string::npos
           : path.extension() == ".model" && content.starts_with('\n');
  try {
    return json || path.extension() == ".json"
               ? read_tokenizer_json(std::move(content), path.string())
               : read_sentencepiece(std::move(content), path.string(), {}, {});
  } catch (const Error& error) {
    if (looks_like_one || error.code() != ErrorCode::format) throw;
    fail(ErrorCode::format,
         "`" + path.string() +
             "` is not a tokenizer, neither a tokenizer.json nor a SentencePiece model: " + error.message(),
         tokenizer_beside(path));
  }
}

}  // namespace

std::shared_ptr<const Tokenizer> Tokenizer::load(const fs::path& path) {
  std::error_code ignored;
  if (path == "bytes" && !fs::exists(path, ignored)) return byte_tokenizer();
  std::vector<TokenizerFile> files;
  const auto read = [&](const fs::path& file) {
    std::string content = read_named(file);
    files.push_back({file.filename().string(), fs::absolute(file), content.size(), hash_text(content), {}});
    return content;
  };
  if (!fs::is_directory(path, ignored)) {
    std::string content = read(path);
    const bool json = content.find_first_not_of(" \t\r\n") == content.find('{');
    auto result = make(read_tokenizer_file(std::move(content), path, json));
    files.back().name = json ? "tokenizer.json" : "tokenizer.model";
    result->pipeline_->files = std::move(files);
    return result;
  }
  auto result = from_source({(path / "").string(),
                             [&](const char* name) { return fs::is_regular_file(path / name, ignored); },
                             [&](const char* name) { return read(path / name); }});
  result->pipeline_->files = std::move(files);
  return result;
}

std::shared_ptr<const Tokenizer> Tokenizer::from_texts(
    const std::vector<std::pair<std::string, std::string>>& texts, const std::string& name) {
  std::vector<TokenizerFile> files;
  const auto find = [&](const char* file) {
    return std::find_if(texts.begin(), texts.end(), [&](const auto& one) { return one.first == file; });
  };
  auto result = from_source({name + ": ", [&](const char* file) { return find(file) != texts.end(); },
                             [&](const char* file) {
                               files.push_back(generated(file, find(file)->second));
                               return files.back().text;
                             }});
  result->pipeline_->files = std::move(files);
  return result;
}

std::shared_ptr<const Tokenizer> Tokenizer::from_source(const FileSource& source) {
  const auto& exists = source.exists;
  const auto& read = source.read;
  const auto read_if = [&](const char* name) { return exists(name) ? read(name) : std::string(); };
  const auto full = [&](const char* name) { return source.location + name; };
  LoadedSpec loaded;
  std::string config;
  const char* const kConfig = "tokenizer_config.json";
  if (exists("tokenizer.json")) {
    loaded = read_tokenizer_json(read("tokenizer.json"), full("tokenizer.json"));
    config = read_if(kConfig);
  } else if (exists("tokenizer.model")) {
    std::string model = read("tokenizer.model");
    config = read_if(kConfig);
    loaded = read_sentencepiece(std::move(model), full("tokenizer.model"), config, full(kConfig));
  } else if (exists("vocab.json") && exists("merges.txt")) {
    std::string vocab = read("vocab.json"), merges = read("merges.txt");
    loaded = read_vocab_and_merges(std::move(vocab), full("vocab.json"), std::move(merges),
                                   full("merges.txt"), read_if(kConfig), full(kConfig));
  } else if (exists("vocab.txt")) {
    std::string vocab = read("vocab.txt");
    loaded = read_vocab_lines(std::move(vocab), full("vocab.txt"), read_if(kConfig), full(kConfig));
  } else {
    fail(ErrorCode::not_found, "`" + source.location +
                                   "` has none of tokenizer.json, tokenizer.model, vocab.json with "
                                   "merges.txt, vocab.txt");
  }
  if (!config.empty()) read_special_names(JsonFile(config, full(kConfig)).root(), loaded.spec);
  if (const std::string map = read_if("special_tokens_map.json"); !map.empty()) {
    // tokenizer_config.json has precedence, so it is read first.
    TokenizerSpec names;
    read_special_names(JsonFile(map, full("special_tokens_map.json")).root(), names);
    TokenizerSpec& spec = loaded.spec;
    for (const auto member :
         {&TokenizerSpec::bos, &TokenizerSpec::eos, &TokenizerSpec::unk, &TokenizerSpec::pad})
      if (!(spec.*member)) spec.*member = names.*member;
  }
  if (exists("chat_template.jinja")) read("chat_template.jinja");
  return make(std::move(loaded));
}

std::shared_ptr<const Tokenizer> Tokenizer::load_pair(const fs::path& vocab, const fs::path& merges,
                                                      PreTokenizerChoice pre_tokenizer) {
  const LoadedSpec loaded = read_vocab_and_merges(read_named(vocab), vocab.string(), read_named(merges),
                                                  merges.string(), std::string(), std::string());
  // Builds the tokenizer once from these files, so that errors name the files and lines.
  Pipeline().build(loaded.spec);
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
  Pipeline& pipeline = *pipeline_;
  auto scratch = pipeline.take();
  if (options.add_special) out.insert(out.end(), pipeline.before.begin(), pipeline.before.end());
  if (pipeline.fast)
    pipeline.encode_fast(text, *scratch, out, options);
  else
    pipeline.encode_steps(text, *scratch, out, options);
  if (options.add_special) out.insert(out.end(), pipeline.after.begin(), pipeline.after.end());
  pipeline.put_back(std::move(scratch));
}

void Tokenizer::Pipeline::encode_fast(std::string_view text, Scratch& scratch, std::vector<int32_t>& out,
                                      const EncodeOptions& options) const {
  const auto sink = [&](const PieceBatch& batch) { model->encode(batch, *scratch.model, out); };
  const auto encode_text = [&](std::string_view part, int32_t id) {
    if (id >= 0)
      out.push_back(id);
    else
      pre_tokenizer.run(part, scratch.pieces, sink);
  };
  const auto encode_part = [&](std::string_view part, int32_t id) {
    if (id >= 0) {
      out.push_back(id);
      return;
    }
    part = normalizer.apply(part, scratch.normalized);
    if (normalized.empty())
      encode_text(part, -1);
    else
      normalized.split(part, added, options.specials_as_text, encode_text);
  };
  if (plain.empty())
    encode_part(text, -1);
  else
    plain.split(text, added, options.specials_as_text, encode_part);
}

// The text split and changed by all steps before the model.
TextPieces Tokenizer::Pipeline::prepare(std::string_view text, bool track,
                                        const EncodeOptions& options) const {
  TextPieces pieces(text, track || track_origin);
  const auto find = [&](const TokenFinder& finder) {
    if (finder.empty()) return;
    pieces.split([&](std::string_view part, TextPieceList& found) {
      finder.split(part, added, options.specials_as_text, [&](std::string_view token, int32_t id) {
        const auto begin = static_cast<size_t>(token.data() - part.data());
        found.push_back({begin, begin + token.size(), id});
      });
    });
  };
  find(plain);
  for (const auto& step : normalizers) step->apply(pieces);
  find(normalized);
  for (const auto& step : splits) step->apply(pieces);
  return pieces;
}

void Tokenizer::Pipeline::encode_steps(std::string_view text, Scratch& scratch, std::vector<int32_t>& out,
                                       const EncodeOptions& options) const {
  const TextPieces pieces = prepare(text, false, options);
  auto& batch = scratch.batch;
  batch.clear();
  const auto flush = [&] {
    if (!batch.empty()) model->encode({batch, pieces.end_of_text()}, *scratch.model, out);
    batch.clear();
  };
  for (const auto& piece : pieces.pieces()) {
    if (piece.id >= 0) {
      flush();
      out.push_back(piece.id);
      continue;
    }
    if (batch.size() == PreTokenizer::kBatch) flush();
    batch.push_back(pieces.text(piece));
  }
  flush();
}

namespace {

// Counts the spaces (also those of the byte alphabet) at both ends of a token's text.
struct Spaces {
  size_t leading = 0, trailing = 0;
};
Spaces spaces_of(std::string_view token) {
  constexpr char32_t kByteSpace = 0x120;
  Spaces result;
  size_t count = 0;
  for_each_character(token, [&](char32_t c, size_t) {
    const bool space = c == kByteSpace || is_space(c);
    if (space && result.leading == count) ++result.leading;
    result.trailing = space ? result.trailing + 1 : 0;
    ++count;
  });
  return result;
}

// Excludes the spaces at both ends from the range, character by character.
void trim_range(std::string_view text, const Spaces& spaces, bool keep_one, bool first, OffsetRange& range) {
  size_t leading = spaces.leading;
  if (keep_one && (first || range.begin == 0) && leading == 1) leading = 0;
  for (; leading > 0 && range.begin < range.end; --leading)
    range.begin += decode_character(text.data() + range.begin, text.data() + text.size()).bytes;
  range.begin = std::min(range.begin, range.end);
  for (size_t n = spaces.trailing; n > 0 && range.end > range.begin; --n)
    range.end -= character_before(text, range.end).bytes;
  range.end = std::max(range.end, range.begin);
}

}  // namespace

Encoding Tokenizer::encode_with_offsets(std::string_view text, const EncodeOptions& options) const {
  Pipeline& pipeline = *pipeline_;
  auto scratch = pipeline.take();
  const TextPieces pieces = pipeline.prepare(text, true, options);
  Encoding result;
  std::vector<Spaces> spaces;
  const bool trims = options.trim_offsets && std::any_of(pipeline.post.begin(), pipeline.post.end(),
                                                         [](const PostStep& s) { return s.trim; });
  const auto add = [&](int32_t id, OffsetRange range, std::string_view token) {
    result.ids.push_back(id);
    result.offsets.push_back(range);
    if (trims) spaces.push_back(spaces_of(token));
  };
  std::vector<ModelToken> tokens;
  for (const auto& piece : pieces.pieces()) {
    if (piece.id >= 0) {
      add(piece.id, pieces.original_range(piece.begin, piece.end), pieces.text(piece));
      continue;
    }
    tokens.clear();
    pipeline.model->encode_piece(pieces.text(piece), *scratch->model, tokens);
    for (const ModelToken& token : tokens) {
      const size_t begin = std::min(piece.begin + token.begin, piece.end);
      add(token.id, pieces.original_range(begin, std::clamp(piece.begin + token.end, begin, piece.end)),
          pipeline.vocabulary.text(token.id));
    }
  }
  pipeline.put_back(std::move(scratch));
  for (const PostStep& step : pipeline.post) {
    if (step.trim && options.trim_offsets)
      for (size_t i = 0; i < result.ids.size(); ++i)
        trim_range(text, spaces[i], step.add_prefix_space, i == 0, result.offsets[i]);
    if (!options.add_special) continue;
    result.ids.insert(result.ids.begin(), step.before.begin(), step.before.end());
    result.offsets.insert(result.offsets.begin(), step.before.size(), OffsetRange{});
    if (trims) spaces.insert(spaces.begin(), step.before.size(), Spaces{});
    result.ids.insert(result.ids.end(), step.after.begin(), step.after.end());
    result.offsets.resize(result.ids.size());
    if (trims) spaces.resize(result.ids.size());
  }
  return result;
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::vector<int32_t> result;
  encode(text, result, options);
  return result;
}

std::string_view Tokenizer::bytes_of(int32_t id) const {
  return id >= 0 && id < vocab_size() ? pipeline_->bytes[static_cast<size_t>(id)] : std::string_view();
}

std::string_view Tokenizer::Pipeline::text_to_decode(int32_t id) const {
  const auto normalized_text = normalized_texts.find(id);
  return normalized_text != normalized_texts.end() ? std::string_view(normalized_text->second)
                                                   : vocabulary.text(id);
}

std::string Tokenizer::Pipeline::run_decoder(std::span<const int32_t> ids, bool skip_special,
                                             bool raw) const {
  std::string result;
  DecoderRun run(decoder, raw);
  for (const int32_t id : ids)
    if (vocabulary.has(id) && !(skip_special && special[static_cast<size_t>(id)]))
      run.push(id, text_to_decode(id), result);
  run.finish(result);
  return result;
}

std::string Tokenizer::decode_bytes(std::span<const int32_t> ids, bool skip_special) const {
  if (!pipeline_->plain_decoder) return pipeline_->run_decoder(ids, skip_special, true);
  std::string result;
  for (const int32_t id : ids)
    if (!(skip_special && is_special(id))) result += bytes_of(id);
  return result;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  if (!pipeline_->plain_decoder) return pipeline_->run_decoder(ids, skip_special, false);
  const std::string raw = decode_bytes(ids, skip_special);
  std::string result;
  result.reserve(raw.size());
  append_lossy(result, raw, true);
  return result;
}

int64_t Tokenizer::vocab_size() const {
  return static_cast<int64_t>(pipeline_->bytes.size());
}
std::optional<int32_t> Tokenizer::id_of(std::string_view token) const {
  return pipeline_->vocabulary.find(token);
}
std::string_view Tokenizer::token_of(int32_t id) const {
  return pipeline_->vocabulary.text(id);
}
bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && pipeline_->special[static_cast<size_t>(id)];
}
std::optional<int32_t> Tokenizer::eod() const {
  return pipeline_->eod;
}
std::optional<int32_t> Tokenizer::bos() const {
  return pipeline_->bos;
}
std::optional<int32_t> Tokenizer::eos() const {
  return pipeline_->eos;
}
std::optional<int32_t> Tokenizer::unk() const {
  return pipeline_->unk;
}
std::optional<int32_t> Tokenizer::pad() const {
  return pipeline_->pad;
}
const std::vector<int32_t>& Tokenizer::before() const {
  return pipeline_->before;
}
const std::vector<TokenizerFile>& Tokenizer::files() const {
  return pipeline_->files;
}

std::string Tokenizer::content_hash() const {
  std::string all;
  for (const TokenizerFile& file : pipeline_->files) all += file.name + '\0' + file.hash + '\0';
  return hash_text(all);
}

void Tokenizer::write_to(const fs::path& directory) const {
  for (const TokenizerFile& file : pipeline_->files) {
    const std::string content = file.path.empty() ? file.text : read_file(file.path, JsonFile::kMaxBytes);
    if (hash_text(content) != file.hash)
      fail(ErrorCode::failed, "`" + file.path.string() + "` has changed since the tokenizer was read");
    write_file_durably(directory / file.name, content);
  }
}

IncrementalDecoder::IncrementalDecoder(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special)
    : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {
  if (!tokenizer_->pipeline_->plain_decoder)
    run_ = std::make_unique<DecoderRun>(tokenizer_->pipeline_->decoder);
}
IncrementalDecoder::~IncrementalDecoder() = default;
IncrementalDecoder::IncrementalDecoder(IncrementalDecoder&&) noexcept = default;
IncrementalDecoder& IncrementalDecoder::operator=(IncrementalDecoder&&) noexcept = default;

std::string IncrementalDecoder::push(int32_t id) {
  if (skip_special_ && tokenizer_->is_special(id)) return {};
  std::string result;
  if (run_) {
    if (tokenizer_->pipeline_->vocabulary.has(id))
      run_->push(id, tokenizer_->pipeline_->text_to_decode(id), result);
    return result;
  }
  pending_ += tokenizer_->bytes_of(id);
  pending_.erase(0, append_lossy(result, pending_, false));
  return result;
}

std::string IncrementalDecoder::finish() {
  std::string result;
  if (run_) {
    run_->finish(result);
    run_ = std::make_unique<DecoderRun>(tokenizer_->pipeline_->decoder);
    return result;
  }
  append_lossy(result, pending_, true);
  pending_.clear();
  return result;
}

std::shared_ptr<const Tokenizer> byte_tokenizer() {
  static const std::shared_ptr<const Tokenizer> tokenizer =
      Tokenizer::from_json(byte_tokenizer_json(), "the byte tokenizer");
  return tokenizer;
}

}  // namespace capstan::text
