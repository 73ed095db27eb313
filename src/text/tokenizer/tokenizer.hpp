// Text ↔ token ids, as Hugging Face tokenizers does it from a tokenizer.json (byte-level BPE of GPT-2, Llama
// 3 and Qwen; BPE over characters of Llama 2, Mistral and Gemma; Unigram of T5; WordPiece of BERT), and
// SentencePiece from its .model.
//
// A Tokenizer is immutable; every member may be called from any number of threads at once. Ids are int32, 0 …
// vocab_size()-1, each with a token. Errors of files are ErrorCode::format (what is wrong, where) or
// ::unsupported (a component that this build does not know, by name and JSON path).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/tokenizer/offset_range.hpp"
#include "text/tokenizer/pre_tokenizer_choice.hpp"

namespace capstan::text {

class DecoderRun;

struct EncodeOptions {
  // Encodes special tokens inside the text as ordinary text. For untrusted text, which must not contain
  // <|im_end|>.
  bool specials_as_text = false;
  // Adds the special tokens that the files put around a text: <|begin_of_text|> … of Llama 3, [CLS] … [SEP]
  // of BERT.
  bool add_special = false;
  // Excludes white space around a token from its byte range where the files ask for it (trim_offsets). False:
  // includes it.
  bool trim_offsets = true;
};

// Ids with the byte range of the text that each id covers.
struct Encoding {
  std::vector<int32_t> ids;
  // {0, 0} for tokens put around the text.
  std::vector<OffsetRange> offsets;
};

// A file that a tokenizer was read from; checkpoints contain a copy.
struct TokenizerFile {
  // Plain file name: "tokenizer.json".
  std::string name;
  // Empty for content that has no file of its own; write_to() writes it as well.
  std::filesystem::path path;
  uint64_t bytes = 0;
  // XXH3-128 of the content, 32 hexadecimal digits.
  std::string hash;
  // The content, if `path` is empty.
  std::string text;
};

class Tokenizer {
 public:
  // A tokenizer.json, a SentencePiece .model, a directory with one of them (or with vocab.json and
  // merges.txt, or a vocab.txt; and tokenizer_config.json and special_tokens_map.json where they are), or the
  // word `bytes` for byte_tokenizer().
  static std::shared_ptr<const Tokenizer> load(const std::filesystem::path& path);
  // GPT-2's pair of files under any names. The files do not name their pre-tokenizer, so the caller does.
  // Checkpoints contain the pair as one tokenizer.json.
  static std::shared_ptr<const Tokenizer> load_pair(const std::filesystem::path& vocab,
                                                    const std::filesystem::path& merges,
                                                    PreTokenizerChoice pre_tokenizer);
  // Reads the text of a tokenizer.json; messages call it `name`.
  static std::shared_ptr<const Tokenizer> from_json(std::string text,
                                                    const std::string& name = "tokenizer.json");

  // Reads files of a directory by name and content, for files that another file contains (GGUF).
  static std::shared_ptr<const Tokenizer> from_texts(
      const std::vector<std::pair<std::string, std::string>>& texts, const std::string& name);

  // Reads the bytes of a SentencePiece .model.
  static std::shared_ptr<const Tokenizer> from_sentencepiece(std::string model,
                                                             const std::string& name = "tokenizer.model");

  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Appends the ids of the text to `out`. Without `add_special` no tokens are added around it; tokens inside
  // the text (<|endoftext|>) are recognized as Hugging Face does. Bytes that are not UTF-8 are encoded as
  // they are, where the vocabulary has bytes, else as unknown characters.
  void encode(std::string_view text, std::vector<int32_t>& out, const EncodeOptions& options = {}) const;
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;

  // The same ids with their byte ranges in `text`, tracked through every step that changes the text. Tokens
  // that share a character cover all of it. Slower than encode().
  Encoding encode_with_offsets(std::string_view text, const EncodeOptions& options = {}) const;

  // The text of the ids; ids without a token (padded rows of an embedding) give no text. decode() returns
  // valid UTF-8, with U+FFFD for invalid bytes. decode_bytes() returns the exact bytes, so that
  // decode_bytes(encode(x)) is x unless a normalizer changed it. As in Hugging Face tokenizers, an added
  // token passes through the decoder like any other: a byte-level decoder reads the é of the added token
  // `café` as the byte E9.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;
  std::string decode_bytes(std::span<const int32_t> ids, bool skip_special = false) const;
  // The bytes of one token.
  std::string_view bytes_of(int32_t id) const;

  // 1 + the highest id, added tokens included.
  int64_t vocab_size() const;
  // The id of a token by its text in the file: "Ġthe", "<|endoftext|>".
  std::optional<int32_t> id_of(std::string_view token) const;
  // The text of a token in the file; empty for an id without a token.
  std::string_view token_of(int32_t id) const;
  bool is_special(int32_t id) const;

  // End of document: <|endoftext|> where there is one, else the eos_token of tokenizer_config.json. bos: the
  // template's, or the bos_token of tokenizer_config.json or special_tokens_map.json; eos, unk and pad alike.
  std::optional<int32_t> eod() const;
  std::optional<int32_t> bos() const;
  std::optional<int32_t> eos() const;
  std::optional<int32_t> unk() const;
  std::optional<int32_t> pad() const;

  // The tokens that the files put before a text (EncodeOptions::add_special).
  const std::vector<int32_t>& before() const;

  // The files that it was read from, in a fixed order, and one hash over names and contents.
  const std::vector<TokenizerFile>& files() const;
  std::string content_hash() const;
  // A hash of the tokenizer's behavior, 32 hexadecimal digits: the text of every id, and the ids of a fixed
  // text and of the texts of its own tokens. It does not depend on the file format, so that tokenizer.json,
  // vocab.json with merges.txt, a directory and a checkpoint's copy of the same tokenizer agree. Takes up to
  // a second for large vocabularies.
  std::string identity() const;
  // Copies the files into a directory that exists, durably. Throws ErrorCode::failed when one has changed
  // since it was read.
  void write_to(const std::filesystem::path& directory) const;

 private:
  friend class IncrementalDecoder;
  struct Pipeline;
  struct FileSource;
  static std::shared_ptr<const Tokenizer> from_source(const FileSource& source);
  explicit Tokenizer(std::unique_ptr<Pipeline> pipeline);
  static std::shared_ptr<const Tokenizer> make(struct LoadedSpec loaded);
  std::unique_ptr<Pipeline> pipeline_;
};

// Decodes ids one at a time. Returns text as soon as it is complete UTF-8 and no later id can change it. All
// texts together equal decode().
class IncrementalDecoder {
 public:
  explicit IncrementalDecoder(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special = false);
  ~IncrementalDecoder();
  IncrementalDecoder(IncrementalDecoder&&) noexcept;
  IncrementalDecoder& operator=(IncrementalDecoder&&) noexcept;
  // The text that this id completes, possibly empty.
  std::string push(int32_t id);
  // The remaining text: U+FFFD for an incomplete character.
  std::string finish();

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  bool skip_special_;
  // Null if the bytes of a text are the concatenated bytes of its tokens.
  std::unique_ptr<DecoderRun> run_;
  std::string pending_;
};

// The tokenizer with 257 tokens: byte b has id b, and <|endoftext|> has id 256. write_to() writes it as a
// tokenizer.json.
std::shared_ptr<const Tokenizer> byte_tokenizer();

}  // namespace capstan::text
