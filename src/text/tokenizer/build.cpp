#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.hpp"
#include "base/text.hpp"
#include "text/tokenizer/bpe.hpp"
#include "text/tokenizer/byte_level.hpp"
#include "text/tokenizer/pipeline.hpp"
#include "text/tokenizer/sentencepiece.hpp"
#include "text/tokenizer/unigram.hpp"
#include "text/tokenizer/wordpiece.hpp"

namespace capstan::text {

void Tokenizer::Pipeline::add_vocabulary(const TokenizerSpec& spec) {
  const auto at = [&](std::string_view location, std::string_view token) {
    return std::string(location) + "[" + in_quotes(token) + "]";
  };
  // The ids of a vocabulary may have gaps (those of o200k do), but not so large that a file of a few bytes
  // takes gigabytes of memory. Added tokens that the vocabulary lacks get consecutive ids.
  const auto count = static_cast<int64_t>(spec.vocab.size());
  const int64_t limit = (1 << 16) + 4 * count;
  // 1 + the highest id of the vocabulary.
  int64_t listed = 0;
  for (const auto& [token, id] : spec.vocab) {
    if (id >= limit)
      fail(ErrorCode::format, at(spec.vocab_location, token) + ": the id " + std::to_string(id) +
                                  " leaves holes, too many of them: for " + std::to_string(count) +
                                  " tokens ids end at " + std::to_string(limit - 1));
    listed = std::max<int64_t>(listed, id + 1);
  }
  {
    int64_t size = listed;
    std::vector<int64_t> unlisted;
    for (const AddedToken& token : spec.added) {
      if (token.content.empty()) continue;
      size = std::max<int64_t>(size, token.id + 1);
      if (token.id >= listed) unlisted.push_back(token.id);
    }
    std::sort(unlisted.begin(), unlisted.end());
    for (int64_t next = listed; const int64_t id : unlisted) {
      if (id > next)
        fail(ErrorCode::format, spec.added_location + ": the id " + std::to_string(id) +
                                    " leaves holes: no token has the id " + std::to_string(next));
      next = id + 1;
    }
    vocabulary = Vocabulary(size);
  }
  const auto insert = [&](std::string_view token, int32_t id, std::string_view location, bool of_model) {
    if (token.empty())
      fail(ErrorCode::format,
           std::string(location) + ": the token of id " + std::to_string(id) + " is empty");
    if (token.size() > (1 << 20))
      fail(ErrorCode::format,
           std::string(location) + ": the token of id " + std::to_string(id) + " has more than 1 MiB");
    switch (vocabulary.add(token, id, of_model)) {
      case Vocabulary::Added::yes:
        break;
      case Vocabulary::Added::id_taken:
        fail(ErrorCode::format, at(location, token) + ": the id " + std::to_string(id) + " belongs to " +
                                    in_quotes(vocabulary.text(id)) + " already");
      case Vocabulary::Added::text_taken:
        fail(ErrorCode::format, at(location, token) + ": duplicate token");
    }
  };
  for (const auto& [token, id] : spec.vocab) {
    // Only ordinary, user-defined and unused pieces of SentencePiece are found in text.
    const auto index = static_cast<size_t>(id);
    const bool of_model = index >= spec.kinds.size() || spec.kinds[index] == PieceKind::ordinary ||
                          spec.kinds[index] == PieceKind::user_defined ||
                          spec.kinds[index] == PieceKind::unused;
    insert(token, id, spec.vocab_location, of_model);
  }

  std::vector<bool> is_added(static_cast<size_t>(vocabulary.size()));
  for (const AddedToken& token : spec.added) {
    if (token.content.empty()) continue;
    if (token.content.size() > TokenFinder::kMaxBytes)
      fail(ErrorCode::unsupported, at(spec.added_location, token.content.substr(0, 40) + "…") +
                                       ": has more than " + std::to_string(TokenFinder::kMaxBytes) +
                                       " bytes");
    const auto known = vocabulary.find(token.content);
    if (known && *known != token.id)
      fail(ErrorCode::format, at(spec.added_location, token.content) + ": the id " +
                                  std::to_string(token.id) + " is not that of the vocabulary, " +
                                  std::to_string(*known));
    if (!known) {
      insert(token.content, token.id, spec.added_location, false);
    } else if (is_added[static_cast<size_t>(token.id)]) {
      fail(ErrorCode::format, at(spec.added_location, token.content) + ": duplicate token");
    }
    is_added[static_cast<size_t>(token.id)] = true;
    const bool blank = std::all_of(token.content.begin(), token.content.end(),
                                   [](char c) { return c == ' ' || (c >= 9 && c <= 13); });
    if (blank && (token.lstrip || token.rstrip))
      fail(ErrorCode::unsupported,
           at(spec.added_location, token.content) + ": a token of white space cannot have lstrip or rstrip");
    added.push_back(token);
  }
  if (vocabulary.size() == 0) fail(ErrorCode::format, spec.vocab_location + ": there are no tokens");

  special.resize(static_cast<size_t>(vocabulary.size()));
  for (const AddedToken& token : added)
    if (token.special) special[static_cast<size_t>(token.id)] = true;
  for (size_t id = 0; id < spec.kinds.size(); ++id)
    if (spec.kinds[id] == PieceKind::control) special[id] = true;
}

void Tokenizer::Pipeline::add_texts() {
  const auto count = static_cast<size_t>(vocabulary.size());
  std::vector<size_t> ends(count);
  for (size_t id = 0; id < count; ++id) {
    const auto number = static_cast<int32_t>(id);
    const std::string_view token = text_to_decode(number);
    if (!vocabulary.has(number)) {
      // An id without a token has no bytes.
    } else if (plain_decoder) {
      if (!append_text_bytes(arena, token)) arena += token;
    } else {
      DecoderRun run(decoder, true, true);
      run.push(number, token, arena);
      run.finish(arena);
    }
    ends[id] = arena.size();
  }
  arena.shrink_to_fit();
  bytes.resize(count);
  for (size_t id = 0; id < count; ++id) {
    const size_t begin = id > 0 ? ends[id - 1] : 0;
    bytes[id] = std::string_view(arena).substr(begin, ends[id] - begin);
  }
}

std::array<int32_t, 256> Tokenizer::Pipeline::fallback_ids() const {
  std::array<int32_t, 256> result;
  for (size_t b = 0; b < 256; ++b) {
    constexpr std::string_view kDigits = "0123456789ABCDEF";
    const std::string token = {'<', '0', 'x', kDigits[b / 16], kDigits[b % 16], '>'};
    result[b] = vocabulary.find(token).value_or(-1);
  }
  return result;
}

void Tokenizer::Pipeline::add_bpe(const TokenizerSpec& spec) {
  auto bpe = std::make_unique<BpeModel>(vocabulary, static_cast<int64_t>(spec.merges.size()));
  bpe->ignore_merges = spec.ignore_merges;
  bpe->fuse_unknown = spec.fuse_unknown;
  bool complete = true;
  for (int b = 0; b < 256; ++b) {
    const auto id = vocabulary.find_of_model(byte_text(b));
    bpe->byte_ids[static_cast<size_t>(b)] = id.value_or(-1);
    complete = complete && id;
  }
  fast = spec.byte_level && spec.prefix.empty() && spec.suffix.empty() && (complete || !spec.byte_fallback);
  if (!fast) {
    bpe->characters = true;
    bpe->byte_fallback = spec.byte_fallback;
    bpe->byte_ids = fallback_ids();
    bpe->prefix = spec.prefix;
    bpe->suffix = spec.suffix;
  }
  if (spec.unknown && !spec.unknown->empty()) {
    const auto id = vocabulary.find_of_model(*spec.unknown);
    if (!id && !(fast && complete)) fail_unknown(spec);
    bpe->unknown = id.value_or(-1);
  }

  std::string joined;
  for (size_t i = 0; i < spec.merges.size(); ++i) {
    const auto& [left, right] = spec.merges[i];
    if (left.empty() && right.empty() && spec.merges_are_lines) continue;
    const bool marked = !spec.prefix.empty() && right.starts_with(spec.prefix);
    joined.assign(left).append(marked ? right.substr(spec.prefix.size()) : right);
    const auto left_id = vocabulary.find_of_model(left), right_id = vocabulary.find_of_model(right),
               id = vocabulary.find_of_model(joined);
    if (!left_id || !right_id || !id) {
      const std::string location = spec.merges_are_lines
                                       ? spec.merges_location + ":" + std::to_string(i + 1)
                                       : spec.merges_location + "[" + std::to_string(i) + "]";
      fail(ErrorCode::format, location + ": " +
                                  in_quotes(!left_id    ? left
                                            : !right_id ? right
                                                        : joined) +
                                  " is not in the vocabulary");
    }
    bpe->add_merge(*left_id, *right_id, static_cast<uint32_t>(i), *id);
  }
  if (!fast) bpe->finish_characters();
  model = std::move(bpe);
}

void Tokenizer::Pipeline::fail_unknown(const TokenizerSpec& spec) {
  fail(ErrorCode::format,
       spec.vocab_location + ": the unknown token " + in_quotes(*spec.unknown) + " is not in the vocabulary");
}

void Tokenizer::Pipeline::add_unigram(const TokenizerSpec& spec) {
  UnigramOptions options;
  options.byte_fallback = spec.byte_fallback;
  options.byte_ids = fallback_ids();
  options.single_precision = !spec.kinds.empty();
  std::vector<UnigramModel::Kind> kinds(spec.scores.size(), UnigramModel::Kind::ordinary);
  options.lowest = std::numeric_limits<double>::infinity();
  options.highest = -std::numeric_limits<double>::infinity();
  for (size_t id = 0; id < spec.scores.size(); ++id) {
    if (!std::isfinite(spec.scores[id]))
      fail(ErrorCode::format,
           spec.vocab_location + "[" + std::to_string(id) + "]: the score is not a number");
    PieceKind kind = PieceKind::ordinary;
    if (id < spec.kinds.size()) kind = spec.kinds[id];
    if (kind == PieceKind::user_defined) kinds[id] = UnigramModel::Kind::user_defined;
    if (kind == PieceKind::ordinary) {
      options.lowest = std::min(options.lowest, spec.scores[id]);
      options.highest = std::max(options.highest, spec.scores[id]);
    } else if (kind != PieceKind::user_defined) {
      kinds[id] = UnigramModel::Kind::none;
    }
  }
  // Without ordinary tokens the range is empty.
  if (!std::isfinite(options.lowest)) options.lowest = options.highest = 0;
  if (spec.unknown) options.unknown = vocabulary.find(*spec.unknown).value_or(-1);
  model = std::make_unique<UnigramModel>(vocabulary, spec.scores, kinds, options);
}

void Tokenizer::Pipeline::add_word_piece(const TokenizerSpec& spec) {
  WordPieceOptions options;
  options.unknown = vocabulary.find_of_model(*spec.unknown).value_or(-1);
  if (options.unknown < 0) fail_unknown(spec);
  options.prefix = spec.prefix;
  options.max_characters_per_word = static_cast<size_t>(spec.max_characters_per_word);
  model = std::make_unique<WordPieceModel>(vocabulary, options);
}

void Tokenizer::Pipeline::add_finders() {
  for (size_t i = 0; i < added.size(); ++i) {
    if (!added[i].normalized) {
      plain.add(added[i].content, static_cast<int32_t>(i));
      continue;
    }
    TextPieces pieces(added[i].content, false);
    for (const auto& step : normalizers) step->apply(pieces);
    std::string pattern;
    for (const auto& piece : pieces.pieces()) pattern += pieces.text(piece);
    normalized.add(pattern, static_cast<int32_t>(i));
    if (pattern != added[i].content) normalized_texts.emplace(added[i].id, std::move(pattern));
  }
}

void Tokenizer::Pipeline::add_post(const TokenizerSpec& spec) {
  post = spec.post;
  for (const PostStep& step : post)
    for (const auto* list : {&step.before, &step.after})
      for (const int32_t id : *list)
        if (!vocabulary.has(id))
          fail(ErrorCode::format, spec.added_location + ": the id " + std::to_string(id) +
                                      " of the template belongs to no token");
  if (spec.add_bos || spec.add_eos) {
    PostStep around;
    if (spec.add_bos.value_or(false) && bos) around.before.push_back(*bos);
    if (spec.add_eos.value_or(false) && eos) around.after.push_back(*eos);
    post.assign(1, std::move(around));
  }
  for (const PostStep& step : post) {
    before.insert(before.begin(), step.before.begin(), step.before.end());
    after.insert(after.end(), step.after.begin(), step.after.end());
  }
}

void Tokenizer::Pipeline::build(const TokenizerSpec& spec) {
  normalizer = spec.normalizer;
  pre_tokenizer = spec.pre_tokenizer;
  normalizers = spec.normalizers;
  add_vocabulary(spec);
  switch (spec.model) {
    case TokenizerSpec::ModelKind::bpe:
      add_bpe(spec);
      break;
    case TokenizerSpec::ModelKind::unigram:
      add_unigram(spec);
      break;
    case TokenizerSpec::ModelKind::word_piece:
      add_word_piece(spec);
      break;
    case TokenizerSpec::ModelKind::sentencepiece_bpe: {
      const auto ids = fallback_ids();
      model = std::make_unique<SentencePieceBpe>(
          vocabulary, spec.scores, spec.kinds, vocabulary.find(*spec.unknown).value_or(-1),
          spec.byte_fallback ? std::vector<int32_t>(ids.begin(), ids.end()) : std::vector<int32_t>());
      break;
    }
  }
  splits = fast ? spec.splits : spec.alphabet_splits;
  track_origin = spec.needs_origin && !normalizers.empty();
  if (spec.decoder) {
    decoder = *spec.decoder;
  } else {
    decoder.steps.emplace_back();
    decoder.steps[0].kind = fast ? DecoderStep::Kind::byte_level : DecoderStep::Kind::spaced;
  }
  plain_decoder = decoder.steps.size() == 1 && decoder.steps[0].kind == DecoderStep::Kind::byte_level;
  add_finders();
  add_texts();
  const auto named = [&](const std::optional<std::string>& name) {
    return name ? vocabulary.find(*name) : std::nullopt;
  };
  bos = named(spec.bos);
  eos = named(spec.eos);
  pad = named(spec.pad);
  unk = named(spec.unk ? spec.unk : spec.unknown);
  eod = vocabulary.find("<|endoftext|>");
  if (!eod) eod = eos;
  add_post(spec);
}

}  // namespace capstan::text
