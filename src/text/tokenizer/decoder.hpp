// From tokens back to text: the decoder steps of a tokenizer.json, and SentencePiece's own way. A DecoderRun
// takes token after token and gives text as soon as no later token can change it, so that decoding in one go
// and streaming are one.
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
    byte_level,     // tokens are texts of byte_level.hpp's alphabet
    metaspace,      // content (one character) is a space, in the first token nothing (if `prepended`)
    replace,        // pattern → content, in each token
    byte_fallback,  // <0xHH> are bytes
    fuse,           // all tokens are one
    strip,          // at most `start` and `stop` of the character `content` at the ends of each token
    word_piece,     // a space before each token, but not where `content` marks the inside of a word
    bpe,            // `content` ends words: a space, in the last token nothing
    spaced,         // no decoder: a space between tokens
    sentencepiece,
  };
  Kind kind = Kind::fuse;
  std::string content;
  std::shared_ptr<const Pattern> pattern;
  bool prepended = true;
  bool cleanup = false;  // word_piece: no space before punctuation and the like
  size_t start = 0, stop = 0;
};

// What SentencePiece's decoder asks of an id.
enum class PieceKind : uint8_t { ordinary, unknown, control, user_defined, unused, byte };

struct Decoder {
  std::vector<DecoderStep> steps;
  // For Kind::sentencepiece.
  std::vector<PieceKind> kinds;  // by id; an id beyond it is an added token, given as it is
  std::string unknown_surface;
  bool strip_first_space = false, strip_all_first_spaces = false;
};

class DecoderRun {
 public:
  // `raw`: bytes as they are, where text would have U+FFFD. `inside`: as if other tokens had gone before.
  explicit DecoderRun(const Decoder& decoder, bool raw = false, bool inside = false);
  // Appends to `out`.
  void push(int32_t id, std::string_view token, std::string& out);
  void finish(std::string& out);

 private:
  struct State {
    bool whole = false;   // all tokens are one for this step, which sees it in parts
    bool first = true;    // no token was there yet
    bool inside = false;  // strip: behind what may be stripped
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
  bool space_seen_ = false, text_seen_ = false;  // sentencepiece
};

// The byte that a token such as <0x0A> stands for, -1 for any other.
int byte_of_fallback(std::string_view token);

}  // namespace capstan::text
