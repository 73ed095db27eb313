// Text on its way to the model: split into pieces and changed step by step, with the offsets in the original
// text that every byte came from where that is asked for. Byte-level BPE without offsets does not come here:
// it has a faster way (pre_tokenizer.hpp).
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

// A byte that is not UTF-8 travels as a character of its own, above all of Unicode.
inline constexpr char32_t kRawByte = 0x110000;
// Calls f(character, bytes) for each character of the text.
template <class F>
void for_each_character(std::string_view text, F f) {
  const char* const end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    Character c = decode_character(p, end);
    if (c.value == 0xFFFD && c.bytes == 1) c.value = kRawByte + static_cast<unsigned char>(*p);
    f(c.value, size_t{c.bytes});
    p += c.bytes;
  }
}
void append_character(std::string& out, char32_t c);

// One character of a changed text. `change` is as Hugging Face counts it: 0 stands for the next old
// character, 1 is put in behind what was there, -n stands for the next old character and n more that go.
struct Change {
  char32_t value;
  int32_t change;
};
struct Changes {
  std::vector<Change> list;
  size_t removed_first = 0;  // old characters that go before the first of the list
  void add(char32_t value, int32_t change) { list.push_back({value, change}); }
};

class TextPieces {
 public:
  struct Piece {
    size_t begin, end;  // bytes of the text of now
    int32_t id;         // an added token, -1: text
  };

  // All of the text is one piece. Without `track` offsets are not known.
  TextPieces(std::string_view text, bool track);

  const std::vector<Piece>& pieces() const { return pieces_; }
  std::string_view text(const Piece& piece) const {
    return std::string_view(text_).substr(piece.begin, piece.end - piece.begin);
  }
  const char* end_of_text() const { return text_.data() + text_.size(); }
  // From the first byte's beginning to the last byte's end; an empty range is at the piece's beginning.
  OffsetRange place(size_t begin, size_t end) const;
  // Where the piece begins in the original text (a guess that is right for the first piece when not tracked).
  size_t origin(const Piece& piece) const { return tracked_ ? offsets_[piece.begin].begin : piece.begin; }

  // Splits every piece of text: `parts_of` gives the parts that stay, in order, as ranges of the piece's
  // text. Empty ones are left out.
  using Parts = std::vector<Piece>;
  void split(FunctionRef<void(std::string_view text, Parts& parts)> parts_of);
  // Changes every piece of text. `change` fills the list, or returns false when all stays as it is.
  void change(FunctionRef<bool(std::string_view text, const Piece& piece, Changes& changes)> change);
  // Puts `content` in for each range that `find` gives (of the piece's text, in order, not overlapping).
  void replace(FunctionRef<void(std::string_view text, FunctionRef<void(size_t, size_t)> match)> find,
               std::string_view content);
  // Gives every piece of text a new one: `from` holds for each of its bytes the bytes of the piece that it
  // stands for.
  void rewrite(
      FunctionRef<void(std::string_view text, std::string& out, std::vector<OffsetRange>& from)> make);
  // For the pieces that `where` accepts: puts `prefix` before the first character, at that one's place.
  void prepend(std::string_view prefix, FunctionRef<bool(std::string_view text, const Piece& piece)> where);

 private:
  void begin_rewrite();
  void keep(size_t begin, size_t end);
  void put(char32_t c, OffsetRange place);
  void end_rewrite();
  void check_growth() const;
  void apply(const Piece& piece, const Changes& changes);

  std::string text_, new_text_;
  std::vector<OffsetRange> offsets_, new_places_;  // by byte
  std::vector<Piece> pieces_, new_pieces_;
  bool tracked_;
  size_t most_bytes_;  // of a hostile tokenizer's text
};

// One step of a tokenizer.json: a normalizer, or a pre-tokenizer.
class TextStep {
 public:
  virtual ~TextStep() = default;
  virtual void apply(TextPieces& pieces) const = 0;
};
using TextStepPtr = std::shared_ptr<const TextStep>;
using TextSteps = std::vector<TextStepPtr>;
TextStepPtr step_list(TextSteps steps);  // one after the other

}  // namespace capstan::text
