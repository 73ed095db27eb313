// Text on its way to the model: split into pieces and changed step by step, with the offsets in the original
// text that every byte came from, if they are requested. Byte-level BPE without offsets uses the faster
// PreTokenizer (pre_tokenizer.hpp) instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/function_ref.hpp"
#include "text/tokenizer/offset_range.hpp"
#include "text/tokenizer/unicode.hpp"

namespace capstan::text {

// The character of a vocabulary that stands for a space (SentencePiece): U+2581.
inline constexpr std::string_view kMetaspace = "\xE2\x96\x81";

// First of 256 values above Unicode that stand for single bytes that are not valid UTF-8.
inline constexpr char32_t kRawByte = 0x110000;
// Calls f(character, bytes) for each character of the text.
template <class F>
void for_each_character(std::string_view text, F f) {
  const char* const end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    CodePoint c = decode_character(p, end);
    if (c.value == 0xFFFD && c.bytes == 1) c.value = kRawByte + static_cast<unsigned char>(*p);
    f(c.value, size_t{c.bytes});
    p += c.bytes;
  }
}
void append_character(std::string& out, char32_t c);

// One character of a changed text. `change` counts as in Hugging Face tokenizers: 0 replaces the next old
// character, 1 inserts a character, and -n replaces the next old character and removes the n after it.
struct Change {
  char32_t value;
  int32_t change;
};
struct Changes {
  std::vector<Change> list;
  // Number of old characters that are removed before the first entry of the list.
  size_t removed_first = 0;
  void add(char32_t value, int32_t change) { list.push_back({value, change}); }
};

struct TextPiece {
  // Bytes of the text after the steps so far.
  size_t begin, end;
  // Id of an added token; -1 for text.
  int32_t id;
};
using TextPieceList = std::vector<TextPiece>;

class TextPieces {
 public:
  // Begins with the text as one piece. Without `track` the offsets are not known.
  TextPieces(std::string_view text, bool track);

  const TextPieceList& pieces() const { return pieces_; }
  std::string_view text(const TextPiece& piece) const {
    return std::string_view(text_).substr(piece.begin, piece.end - piece.begin);
  }
  const char* end_of_text() const { return text_.data() + text_.size(); }
  // The range of the original text that bytes [begin, end) came from; for an empty range, the offset of
  // `begin`.
  OffsetRange original_range(size_t begin, size_t end) const;
  // The offset of the piece in the original text. Without tracking this is exact for the first piece only.
  size_t origin(const TextPiece& piece) const { return tracked_ ? offsets_[piece.begin].begin : piece.begin; }

  // Splits every piece of text: `parts_of` gives the parts that stay, in order, as ranges of the piece's
  // text. Empty parts are dropped.
  void split(FunctionRef<void(std::string_view text, TextPieceList& parts)> parts_of);
  // Changes every piece of text. `change` fills the list, or returns false when all stays as it is.
  void change(FunctionRef<bool(std::string_view text, const TextPiece& piece, Changes& changes)> change);
  // Replaces each range that `find` reports (of the piece's text, in order, not overlapping) by `content`.
  void replace(FunctionRef<void(std::string_view text, FunctionRef<void(size_t, size_t)> match)> find,
               std::string_view content);
  // Replaces every piece of text by `out`; `from` holds, for each byte of `out`, the range of the old piece
  // that it came from.
  void rewrite(
      FunctionRef<void(std::string_view text, std::string& out, std::vector<OffsetRange>& from)> make);
  // Puts `prefix` before each piece that `where` accepts, with the offsets of its first character.
  void prepend(std::string_view prefix,
               FunctionRef<bool(std::string_view text, const TextPiece& piece)> where);

 private:
  void begin_rewrite();
  void keep(size_t begin, size_t end);
  void put(char32_t c, OffsetRange range);
  void end_rewrite();
  void check_growth() const;
  void apply(const TextPiece& piece, const Changes& changes);

  std::string text_, new_text_;
  // Ranges of the original text, one for each byte of text_ and new_text_.
  std::vector<OffsetRange> offsets_, new_offsets_;
  TextPieceList pieces_, new_pieces_;
  bool tracked_;
  // Limits the growth of the text, because a tokenizer.json is untrusted.
  size_t most_bytes_;
};

// One step of a tokenizer.json: a normalizer, or a pre-tokenizer.
class TextStep {
 public:
  virtual ~TextStep() = default;
  virtual void apply(TextPieces& pieces) const = 0;
};
using TextStepPtr = std::shared_ptr<const TextStep>;
using TextSteps = std::vector<TextStepPtr>;
// A step that applies `steps` in order.
TextStepPtr step_list(TextSteps steps);

}  // namespace capstan::text
