// Decodes tokens to text: the decoder steps of a tokenizer.json, and SentencePiece's own rules. A DecoderRun
// receives one token at a time and emits text as soon as no later token can change it, so that decoding a
// list and streaming give the same text.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/pattern.hpp"
#include "text/tokenizer/unigram.hpp"

namespace capstan::text {

struct DecoderStep {
  enum class Kind : uint8_t {
    // Tokens are texts of the byte-level alphabet (byte_level.hpp).
    byte_level,
    // `content` (one character) becomes a space. If `prepended`, it is removed from the first token instead.
    metaspace,
    // Replaces `pattern` by `content` in each token.
    replace,
    // Tokens <0xHH> are bytes.
    byte_fallback,
    // Joins all tokens into one.
    fuse,
    // Removes the character `content` from the ends of each token, at most `start` and `stop` times.
    strip,
    // Inserts a space before each token, except where `content` marks the continuation of a word.
    word_piece,
    // `content` ends a word. It becomes a space, and is removed from the last token.
    bpe,
    // Inserts a space between tokens; used for files without a decoder.
    spaced,
    sentencepiece,
  };
  Kind kind = Kind::fuse;
  std::string content;
  std::shared_ptr<const Pattern> pattern;
  bool prepended = true;
  // word_piece: removes the space before punctuation and in contractions.
  bool cleanup = false;
  size_t start = 0, stop = 0;
};

// The kinds of ids that SentencePiece's decoder distinguishes.
enum class PieceKind : uint8_t { ordinary, unknown, control, user_defined, unused, byte };

struct Decoder {
  std::vector<DecoderStep> steps;
  // Kinds by id, used by Kind::sentencepiece. Higher ids are added tokens, which are emitted unchanged.
  std::vector<PieceKind> kinds;
  std::string unknown_surface;
  bool strip_first_space = false, strip_all_first_spaces = false;
};

class DecoderRun {
 public:
  // `raw`: emits invalid bytes unchanged instead of U+FFFD. `inside`: decodes as if other tokens preceded.
  explicit DecoderRun(const Decoder& decoder, bool raw = false, bool inside = false);
  // Appends to `out`.
  void push(int32_t id, std::string_view token, std::string& out);
  void finish(std::string& out);

 private:
  struct State {
    // An earlier step joins all tokens into one text, which this step receives in parts.
    bool joined = false;
    // No token has been decoded yet.
    bool first = true;
    // Kind::strip: the characters that may be stripped have passed.
    bool inside = false;
    size_t stripped = 0;
    std::string pending;
  };
  void token(size_t step, int32_t id, std::string_view text, std::string& out);
  void end(size_t step, std::string& out);
  void push_strip(size_t step, std::string_view text, std::string& out);
  void push_sentencepiece(size_t step, int32_t id, std::string_view text, std::string& out);
  void flush_fallback(size_t step, std::string& out);
  void flush_pieces(size_t step, bool last, std::string& out);

  const Decoder* decoder_;
  bool raw_;
  std::vector<State> states_;
  // State of Kind::sentencepiece.
  bool space_seen_ = false, text_seen_ = false;
};

// The byte that a token such as <0x0A> stands for, -1 for any other.
int byte_of_fallback(std::string_view token);

}  // namespace capstan::text
