#include "text/tokenizer/text_pieces.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/utf8.hpp"

namespace capstan::text {

void append_character(std::string& out, char32_t c) {
  if (c < 0x80)
    out += static_cast<char>(c);
  else if (c >= kRawByte)
    out += static_cast<char>(c - kRawByte);
  else
    append_utf8(out, c);
}

TextPieces::TextPieces(std::string_view text, bool track)
    : text_(text), tracked_(track), most_bytes_((size_t{1} << 20) + 256 * text.size()) {
  if (!text.empty()) pieces_.push_back({0, text.size(), -1});
  if (!track) return;
  offsets_.reserve(text.size());
  size_t at = 0;
  for_each_character(text, [&](char32_t, size_t bytes) {
    offsets_.insert(offsets_.end(), bytes, OffsetRange{at, at + bytes});
    at += bytes;
  });
}

OffsetRange TextPieces::original_range(size_t begin, size_t end) const {
  if (begin < end) return {offsets_[begin].begin, offsets_[end - 1].end};
  const size_t at = offsets_.empty()          ? 0
                    : begin < offsets_.size() ? offsets_[begin].begin
                                              : offsets_.back().end;
  return {at, at};
}

void TextPieces::split(FunctionRef<void(std::string_view, TextPieceList&)> parts_of) {
  new_pieces_.clear();
  TextPieceList parts;
  for (const TextPiece& piece : pieces_) {
    if (piece.id >= 0) {
      new_pieces_.push_back(piece);
      continue;
    }
    parts.clear();
    parts_of(text(piece), parts);
    for (const TextPiece& part : parts)
      if (part.begin < part.end || part.id >= 0)
        new_pieces_.push_back({piece.begin + part.begin, piece.begin + part.end, part.id});
  }
  pieces_.swap(new_pieces_);
}

void TextPieces::begin_rewrite() {
  new_text_.clear();
  new_offsets_.clear();
  new_pieces_.clear();
  new_text_.reserve(text_.size() + text_.size() / 8);
  if (tracked_) new_offsets_.reserve(offsets_.size() + offsets_.size() / 8);
}

void TextPieces::keep(size_t begin, size_t end) {
  new_text_.append(text_, begin, end - begin);
  if (tracked_)
    new_offsets_.insert(new_offsets_.end(), offsets_.begin() + static_cast<ptrdiff_t>(begin),
                        offsets_.begin() + static_cast<ptrdiff_t>(end));
}

void TextPieces::put(char32_t c, OffsetRange range) {
  append_character(new_text_, c);
  if (tracked_) new_offsets_.resize(new_text_.size(), range);
}

void TextPieces::check_growth() const {
  if (new_text_.size() > most_bytes_)
    fail(ErrorCode::format,
         "the tokenizer's steps expand a text to more than " + std::to_string(most_bytes_) + " bytes");
}

void TextPieces::end_rewrite() {
  check_growth();
  text_.swap(new_text_);
  offsets_.swap(new_offsets_);
  pieces_.swap(new_pieces_);
}

void TextPieces::apply(const TextPiece& piece, const Changes& changes) {
  if (!tracked_) {
    for (const Change& change : changes.list) append_character(new_text_, change.value);
    return;
  }
  size_t offset = piece.begin;
  const auto skip = [&](size_t characters) {
    for (; characters > 0 && offset < piece.end; --characters)
      offset += decode_character(text_.data() + offset, text_.data() + piece.end).bytes;
  };
  skip(changes.removed_first);
  for (const Change& change : changes.list) {
    OffsetRange range;
    if (change.change <= 0)
      range = offsets_[std::min(offset, piece.end - 1)];
    else if (offset > piece.begin)
      range = offsets_[offset - 1];
    else
      range = {offsets_[piece.begin].begin, offsets_[piece.begin].begin};
    put(change.value, range);
    if (change.change <= 0) skip(1 + static_cast<size_t>(-change.change));
  }
}

void TextPieces::change(FunctionRef<bool(std::string_view, const TextPiece&, Changes&)> change) {
  begin_rewrite();
  Changes changes;
  for (const TextPiece& piece : pieces_) {
    const size_t begin = new_text_.size();
    changes.list.clear();
    changes.removed_first = 0;
    if (piece.id < 0 && change(text(piece), piece, changes))
      apply(piece, changes);
    else
      keep(piece.begin, piece.end);
    if (new_text_.size() > begin || piece.id >= 0) new_pieces_.push_back({begin, new_text_.size(), piece.id});
  }
  end_rewrite();
}

void TextPieces::replace(FunctionRef<void(std::string_view, FunctionRef<void(size_t, size_t)>)> find,
                         std::string_view content) {
  begin_rewrite();
  for (const TextPiece& piece : pieces_) {
    const size_t begin = new_text_.size();
    size_t done = piece.begin;
    if (piece.id < 0)
      find(text(piece), [&](size_t from, size_t to) {
        if (piece.begin + from < done) return;
        keep(done, piece.begin + from);
        done = piece.begin + to;
        new_text_ += content;
        check_growth();
        if (!tracked_) return;
        const size_t start = offsets_[piece.begin].begin;
        new_offsets_.resize(new_text_.size(), to > 0 ? offsets_[done - 1] : OffsetRange{start, start});
      });
    keep(done, piece.end);
    if (new_text_.size() > begin || piece.id >= 0) new_pieces_.push_back({begin, new_text_.size(), piece.id});
  }
  end_rewrite();
}

void TextPieces::rewrite(FunctionRef<void(std::string_view, std::string&, std::vector<OffsetRange>&)> make) {
  begin_rewrite();
  std::string made;
  std::vector<OffsetRange> from;
  for (const TextPiece& piece : pieces_) {
    const size_t begin = new_text_.size();
    if (piece.id >= 0) {
      keep(piece.begin, piece.end);
    } else {
      made.clear();
      from.clear();
      make(text(piece), made, from);
      new_text_ += made;
      if (tracked_)
        for (const OffsetRange& range : from)
          new_offsets_.push_back(original_range(piece.begin + range.begin, piece.begin + range.end));
    }
    if (new_text_.size() > begin || piece.id >= 0) new_pieces_.push_back({begin, new_text_.size(), piece.id});
  }
  end_rewrite();
}

void TextPieces::prepend(std::string_view prefix,
                         FunctionRef<bool(std::string_view, const TextPiece&)> where) {
  bool any = false;
  for (const TextPiece& piece : pieces_) any = any || (piece.id < 0 && where(text(piece), piece));
  if (!any) return;
  begin_rewrite();
  for (const TextPiece& piece : pieces_) {
    const size_t begin = new_text_.size();
    if (piece.id < 0 && where(text(piece), piece)) {
      new_text_ += prefix;
      if (tracked_) new_offsets_.resize(new_text_.size(), offsets_[piece.begin]);
    }
    keep(piece.begin, piece.end);
    new_pieces_.push_back({begin, new_text_.size(), piece.id});
  }
  end_rewrite();
}

namespace {
class StepList : public TextStep {
 public:
  explicit StepList(TextSteps steps) : steps_(std::move(steps)) {}
  void apply(TextPieces& pieces) const override {
    for (const auto& step : steps_) step->apply(pieces);
  }

 private:
  TextSteps steps_;
};
}  // namespace

TextStepPtr step_list(TextSteps steps) {
  return std::make_shared<StepList>(std::move(steps));
}

}  // namespace capstan::text
