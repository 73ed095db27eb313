#include "text/tokenizer/unigram.hpp"

#include <algorithm>
#include <limits>

#include "base/error.hpp"
#include "text/tokenizer/text_pieces.hpp"

namespace capstan::text {

static constexpr double kUnknownPenalty = 10;

struct UnigramModel::Scratch final : Model::Scratch {
  // The best split of the text that ends at a position.
  struct End {
    double score;
    // Id and length of the last token; length 0: no split ends at this position.
    int32_t id, length;
  };
  std::vector<End> ends;
  std::vector<ModelToken> found;
  size_t bytes() const override { return ends.capacity() * sizeof(End); }
};

UnigramModel::UnigramModel(const Vocabulary& vocabulary, std::vector<double> scores,
                           std::span<const Kind> kinds, const UnigramOptions& options)
    : scores_(std::move(scores)), user_defined_(kinds.size()), options_(options) {
  std::vector<std::pair<std::string_view, int32_t>> entries;
  for (size_t id = 0; id < kinds.size(); ++id) {
    if (kinds[id] == Kind::none) continue;
    entries.emplace_back(vocabulary.text(static_cast<int32_t>(id)), static_cast<int32_t>(id));
    user_defined_[id] = kinds[id] == Kind::user_defined;
  }
  trie_ = ByteTrie(std::move(entries));
}

std::unique_ptr<Model::Scratch> UnigramModel::make_scratch() const {
  return std::make_unique<Scratch>();
}

template <class Score>
void UnigramModel::search(std::string_view piece, Scratch& scratch) const {
  auto& ends = scratch.ends;
  ends.assign(piece.size() + 1, {0, 0, 0});
  const auto unknown_score = static_cast<Score>(static_cast<Score>(options_.lowest) - kUnknownPenalty);
  size_t at = 0;
  for_each_character(piece, [&](char32_t, size_t bytes) {
    const auto here = static_cast<Score>(ends[at].score);
    bool single = false;
    const auto offer = [&](size_t length, int32_t id, auto score) {
      const auto sum = score + here;
      auto& end = ends[at + length];
      if (end.length == 0 || static_cast<double>(sum) > end.score)
        end = {static_cast<double>(static_cast<Score>(sum)), id, static_cast<int32_t>(length)};
    };
    trie_.prefixes(piece.substr(at), [&](size_t length, int32_t id) {
      const auto index = static_cast<size_t>(id);
      // Only the sum with a user-defined token is in double precision, as in SentencePiece.
      if (user_defined_[index])
        offer(length, id,
              static_cast<double>(static_cast<Score>(length) * static_cast<Score>(options_.highest)) - 0.1);
      else
        offer(length, id, static_cast<Score>(scores_[index]));
      single = single || length == bytes;
    });
    if (!single) offer(bytes, -1, unknown_score);
    at += bytes;
  });
}

void UnigramModel::encode_piece(std::string_view piece, Model::Scratch& scratch,
                                std::vector<ModelToken>& out) const {
  if (piece.empty()) return;
  if (piece.size() >= size_t{std::numeric_limits<int32_t>::max()})
    fail(ErrorCode::unsupported, "a piece of text of " + std::to_string(piece.size()) +
                                     " bytes cannot be split into words; the limit is 2 GiB");
  auto& own = static_cast<Scratch&>(scratch);
  if (options_.single_precision)
    search<float>(piece, own);
  else
    search<double>(piece, own);
  own.found.clear();
  for (size_t end = piece.size(); end > 0;) {
    const auto& last = own.ends[end];
    const size_t begin = end - static_cast<size_t>(last.length);
    const int32_t id = last.id < 0 ? options_.unknown : last.id;
    // Adjacent characters without a token become one unknown token.
    if (id == options_.unknown && !own.found.empty() && own.found.back().id == id)
      own.found.back().begin = begin;
    else
      own.found.push_back({id, begin, end});
    end = begin;
  }
  for (auto token = own.found.rbegin(); token != own.found.rend(); ++token) {
    if (token->id != options_.unknown) {
      out.push_back(*token);
      continue;
    }
    const std::string_view text = piece.substr(token->begin, token->end - token->begin);
    if (options_.byte_fallback && std::all_of(text.begin(), text.end(), [&](char c) {
          return options_.byte_ids[static_cast<unsigned char>(c)] >= 0;
        })) {
      for (const char c : text)
        out.push_back({options_.byte_ids[static_cast<unsigned char>(c)], token->begin, token->end});
    } else if (token->id >= 0) {
      out.push_back(*token);
    } else {
      fail(ErrorCode::format, "the text has characters that no token has, and there is no unknown token");
    }
  }
}

}  // namespace capstan::text
