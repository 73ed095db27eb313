#include "text/tokenizer/wordpiece.hpp"

#include "base/error.hpp"
#include "base/utf8.hpp"
#include "text/tokenizer/text_pieces.hpp"

namespace capstan::text {

WordPieceModel::WordPieceModel(const Vocabulary& vocabulary, const WordPieceOptions& options)
    : options_(options) {
  std::vector<std::pair<std::string_view, int32_t>> starts, insides;
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    if (!vocabulary.of_model(id)) continue;
    const std::string_view text = vocabulary.text(id);
    starts.emplace_back(text, id);
    if (text.starts_with(options_.prefix)) insides.emplace_back(text.substr(options_.prefix.size()), id);
  }
  starts_ = ByteTrie(std::move(starts));
  insides_ = ByteTrie(std::move(insides));
}

void WordPieceModel::encode_piece(std::string_view piece, Scratch&, std::vector<ModelToken>& out) const {
  const size_t before = out.size();
  const auto unknown = [&] {
    if (options_.unknown < 0)
      fail(ErrorCode::format, "the text has a word without tokens, and there is no unknown token");
    out.resize(before);
    out.push_back({options_.unknown, 0, piece.size()});
  };
  size_t characters = 0;
  if (piece.size() > options_.max_characters_per_word)
    for_each_character(piece, [&](char32_t, size_t) { ++characters; });
  if (characters > options_.max_characters_per_word) return unknown();
  for (size_t at = 0; at < piece.size();) {
    size_t length = 0;
    int32_t id = -1;
    const std::string_view rest = piece.substr(at);
    (at == 0 ? starts_ : insides_).prefixes(rest, [&](size_t bytes, int32_t value) {
      // A match that ends inside a character is rejected; only a vocabulary that is not UTF-8 can cause one.
      if (bytes < rest.size() && is_continuation(rest[bytes])) return;
      length = bytes;
      id = value;
    });
    if (id < 0) return unknown();
    out.push_back({id, at, at + length});
    at += length;
  }
}

}  // namespace capstan::text
